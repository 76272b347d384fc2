"""Up, down and status on real processes: nothing half-started, nothing left behind, nothing else touched."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from support.waiting import eventually_blocking

from odradek.infra.errors import ComponentFailed, DiskFull
from odradek.infra.stack import processes
from odradek.infra.stack.kafka import Kafka
from odradek.infra.stack.ray_head import RayHead, connect
from odradek.infra.stack.seaweed import Seaweed
from odradek.infra.stack.stack import Stack
from odradek.infra.stack.state import ComponentState, StackState, stack_id, write_state
from odradek.infra.stack.testing import running, scratch

pytestmark = pytest.mark.contract

APPEARS_S = 60.0
"""Seconds for a launcher's first process to appear."""


@pytest.fixture
def data() -> Iterator[Path]:
    """A data folder; whatever a failing test leaves running in it is ended."""
    with scratch() as folder:
        try:
            yield folder
        finally:
            Stack(folder, [Kafka(folder), Seaweed(folder)]).down()


def _mark(data: Path) -> str:
    return f"{stack_id(data)}/"


def _cli(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "odradek.infra.cli.main", *arguments]


def _wait_for_process(data: Path) -> list[processes.ProcessName]:
    return eventually_blocking(lambda: processes.marked(_mark(data)), "the launcher to start something", APPEARS_S)


def _start_launcher(data: Path) -> subprocess.Popen[str]:
    script = (
        "import sys; from pathlib import Path; from odradek.infra.stack.stack import Stack; "
        "from odradek.infra.stack.kafka import Kafka; d = Path(sys.argv[1]); Stack(d, [Kafka(d)]).up()"
    )
    command = [sys.executable, "-c", script, str(data)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_records_survive_down_and_up(data: Path) -> None:
    """`odradek down` must not cost a single acknowledged event."""

    async def write(bootstrap: str) -> None:
        admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
        await admin.start()
        await admin.create_topics([NewTopic("kept", 1, 1)])
        await admin.close()
        async with AIOKafkaProducer(bootstrap_servers=bootstrap, acks="all") as producer:
            for number in range(100):
                await producer.send_and_wait("kept", b"%d" % number)

    async def read(bootstrap: str) -> list[bytes]:
        async with AIOKafkaConsumer(bootstrap_servers=bootstrap, enable_auto_commit=False) as consumer:
            consumer.assign([TopicPartition("kept", 0)])
            await consumer.seek_to_beginning()
            return [(await asyncio.wait_for(consumer.getone(), 30)).value for _ in range(100)]

    with running(data, Kafka(data)) as stack:
        asyncio.run(write(stack.address("kafka")))
    assert processes.marked(_mark(data)) == []
    with running(data, Kafka(data)) as stack:
        records = asyncio.run(read(stack.address("kafka")))
    assert records == [b"%d" % number for number in range(100)]


def test_a_second_up_starts_nothing_and_a_killed_broker_is_started_again(data: Path) -> None:
    """`up` is safe to repeat; after a kill -9 of the broker it repairs exactly that."""
    with running(data, Kafka(data), Seaweed(data)) as stack:
        before = {status.name: status.pids for status in stack.status()}
        again = stack.up()
        assert again.started == ()
        assert {status.name: status.pids for status in again.components} == before
        os.kill(before["kafka"][0], signal.SIGKILL)
        assert {status.health for status in stack.status() if status.name == "kafka"} <= {"stopped", "unhealthy"}
        repaired = stack.up()
        assert repaired.started == ("kafka",)
        after = {status.name: status.pids for status in repaired.components}
        assert after["s3"] == before["s3"]
        assert after["kafka"] != before["kafka"]


def test_a_killed_launcher_leaves_nothing_after_the_next_down(data: Path) -> None:
    """kill -9 in the middle of `up`: no state was written for the child, its mark finds it all the same."""
    launcher = _start_launcher(data)
    _wait_for_process(data)
    launcher.kill()
    launcher.communicate(timeout=30)
    assert processes.marked(_mark(data)), "the broker must have outlived its launcher for this test to mean anything"
    Stack(data, [Kafka(data)]).down()
    assert processes.marked(_mark(data)) == []


def test_an_interrupt_during_up_stops_what_it_started(data: Path) -> None:
    """Ctrl-C is an orderly end: exit code 130, one line, no process left."""
    command = _cli("up", "--data", str(data))
    launcher = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    _wait_for_process(data)
    launcher.send_signal(signal.SIGINT)
    _, errors = launcher.communicate(timeout=60)
    assert launcher.returncode == 130
    assert errors.splitlines()[-1] == "odradek: interrupted"
    assert processes.marked(_mark(data)) == []


def test_a_failing_component_takes_the_others_down_with_it(data: Path) -> None:
    """Nothing half-started: a broker that can't run must not leave a store behind."""
    (data / "kafka" / "logs").mkdir(parents=True)
    (data / "kafka" / "logs" / "meta.properties").write_text("version=1\nnode.id=7\ncluster.id=other\n")
    stack = Stack(data, [Kafka(data), Seaweed(data)])
    with pytest.raises(ComponentFailed, match=r"^kafka ended with exit code 1: ") as failed:
        stack.up()
    assert "\n" not in str(failed.value)
    assert "node id" in str(failed.value)  # the cause, not a stack frame
    assert processes.marked(_mark(data)) == []


def test_a_pid_that_was_given_to_another_process_is_never_signalled(data: Path) -> None:
    """After a crash the state file may name a pid that is now somebody else's."""
    with subprocess.Popen(["sleep", "600"]) as innocent:
        try:
            real = processes.name_of(innocent.pid)
            assert real is not None
            stale = processes.ProcessName(real.pid, real.start_ticks - 1, real.boot)
            other_boot = processes.ProcessName(real.pid, real.start_ticks, "another-boot")
            old = ComponentState("127.0.0.1:1", {"broker": 1, "controller": 2}, (stale, other_boot))
            write_state(data, StackState(components={"kafka": old}))
            assert Stack(data, [Kafka(data)]).down() == ()
            assert not processes.send(stale, signal.SIGKILL)
            assert processes.alive(real)
        finally:
            innocent.kill()


def test_what_the_stack_started_in_turn_ends_too(data: Path) -> None:
    """Ray forks workers, workers fork commands: children and orphans in sessions of their own carry the mark."""
    script = "import subprocess, sys; subprocess.Popen(['sleep', '600'], start_new_session=True)"
    starter = processes.spawn(
        [sys.executable, "-c", script], mark=f"{_mark(data)}ray", log=data / "log", cwd=data, env={}
    )
    starter.wait(30)
    (orphan,) = processes.marked(_mark(data))
    assert Stack(data, []).down() == ("other",)
    assert not processes.alive(orphan)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small tmpfs needs root")
def test_a_full_disk_is_one_line_and_starts_nothing(tmp_path: Path) -> None:
    """The broker would die minutes later with a message that nobody understands."""
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(small)], check=True)
    try:
        done = subprocess.run(_cli("up", "--data", str(small)), capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 3
        assert (
            done.stderr == f"odradek: {small} has 8 MB free, the stack needs 512 MB: free some space, or name "
            "another folder with --data\n"
        )
        assert list(small.iterdir()) == []
        with pytest.raises(DiskFull):
            Stack(small, [Kafka(small)]).up()
    finally:
        subprocess.run(["umount", str(small)], check=True)


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("kafka.bootstrap=127.0.0.1:9", "kafka: no metadata from 127.0.0.1:9 within 10 s"),
        ("s3.endpoint=http://127.0.0.1:9", "s3: bucket odradek at http://127.0.0.1:9 gave no answer within 10 s"),
        ("ray.address=127.0.0.1:9", "ray: nothing listens on 127.0.0.1:9"),
    ],
)
def test_an_unreachable_configured_service_is_one_line_and_starts_nothing(
    data: Path, setting: str, expected: str
) -> None:
    """What is configured is checked before anything embedded is started."""
    folder = data / "untouched"
    credentials = data / "keys.json"
    credentials.write_text(json.dumps({"access_key": "a", "secret_key": "b"}))
    command = _cli("up", "--data", str(folder), "--set", setting, "--set", f"s3.credentials_file={credentials}")
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 3
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"odradek: {expected}")
    assert len([line for line in done.stderr.splitlines() if not line.startswith("[")]) == 1
    assert not folder.exists()


def test_configured_services_are_used_and_nothing_is_embedded_for_them(
    data: Path, kafka_bootstrap: str, s3_config: dict[str, str]
) -> None:
    """An address in the configuration means: somebody else runs it."""
    from odradek.infra.config.load import load
    from odradek.infra.config.services import stack_of

    credentials = data / "keys.json"
    credentials.write_text(json.dumps({key: s3_config[key] for key in ("access_key", "secret_key")}))
    environment = {
        "ODRADEK_KAFKA__BOOTSTRAP": kafka_bootstrap,
        "ODRADEK_S3__ENDPOINT": s3_config["endpoint"],
        "ODRADEK_S3__BUCKET": s3_config["bucket"],
        "ODRADEK_S3__CREDENTIALS_FILE": str(credentials),
    }
    stack = stack_of(load(environment=environment, data=data).config)
    assert [part.name for part in stack.components] == ["ray"]
    assert stack.addresses(("kafka", "s3")) == {"kafka": kafka_bootstrap, "s3": s3_config["endpoint"]}
    assert processes.marked(_mark(data)) == []


def test_ray_stays_on_loopback_and_runs_actors(ray_address: str) -> None:
    """Ray would listen on every interface by itself; anyone who reaches it can run code."""
    meant = signal.getsignal(signal.SIGTERM)
    ray = connect(ray_address)
    assert signal.getsignal(signal.SIGTERM) is meant, "what a polite end does is this process's affair"
    try:

        @ray.remote
        class Echo:
            def environment(self) -> str:
                return os.environ.get("OMP_WAIT_POLICY", "")

        assert ray.get(Echo.remote().environment.remote(), timeout=120) == "PASSIVE"
        assert _listening({name.pid for name in processes.marked("")}) <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}
    finally:
        ray.shutdown()


def _listening(pids: set[int]) -> set[str]:
    """Local addresses on which any of the processes listens."""
    import psutil

    found = set()
    for pid in pids:
        try:
            connections = psutil.Process(pid).net_connections(kind="tcp")
        except psutil.Error:
            continue
        found |= {connection.laddr.ip for connection in connections if connection.status == psutil.CONN_LISTEN}
    assert found, "nothing listens at all"
    return found


SLOW_AGENT = """
import time
if "/dashboard/agent.py" in open("/proc/self/cmdline").read():
    time.sleep(25)
"""


def test_a_ray_whose_agent_takes_long_to_start_comes_up_all_the_same(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A busy host: its raylet waits 15 s for what the agent writes, and dies (ray-project/ray #65983)."""
    (tmp_path / "sitecustomize.py").write_text(SLOW_AGENT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with running(data, RayHead(data)) as stack:
        (status,) = stack.status()
        assert status.health == "running"


JOIN = """
import sys
from odradek.infra.errors import Unreachable
from odradek.infra.stack.ray_head import connect
try:
    connect(sys.argv[1], timeout_s=3)
except Unreachable as error:
    print(error)
    sys.exit(7)
"""


def test_a_raylet_that_stands_still_is_an_error_and_not_the_end_of_the_process(data: Path) -> None:
    """Of `ray.init` it is, with exit code 1 and a line from C++ (hence a process of its own)."""
    with running(data, RayHead(data)) as stack:
        raylets = [one.pid for one in processes.marked(f"{stack_id(data)}/ray") if _is_raylet(one.pid)]
        assert raylets
        for pid in raylets:
            os.kill(pid, signal.SIGSTOP)
        try:
            command = [sys.executable, "-c", JOIN, stack.address("ray")]
            done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        finally:
            for pid in raylets:
                os.kill(pid, signal.SIGCONT)
    assert done.returncode == 7, done.stderr
    assert done.stdout.startswith("ray: its raylet at 127.0.0.1:") and "gives no answer within 3 s" in done.stdout


def _is_raylet(pid: int) -> bool:
    return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].endswith(b"/raylet")
