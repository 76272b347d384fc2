"""A Ray head node on loopback: where the actors of one machine run.

Only GCS, raylet and what they need: no dashboard, no log monitor, no autoscaler, no usage statistics, nothing
prestarted. Actors ask for logical CPUs only; how many run is the controller's decision, so the count is generous.

The odd part is loopback. Ray replaces 127.0.0.1 by the machine's outer address and then listens on all interfaces,
unless `RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0` is set, in the head *and* in each driver: without it a driver looks for the
head at the outer address and waits for nothing. Hence `connect`, the one way for our drivers to join.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from odradek.infra.errors import ComponentFailed, StackError, Unreachable
from odradek.infra.stack.component import Progress
from odradek.infra.stack.ports import LOOPBACK, answers
from odradek.infra.stack.processes import marked, spawn
from odradek.infra.stack.state import stack_id

log = logging.getLogger(__name__)

LOOPBACK_ENV = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""What keeps Ray on loopback (see above)."""

LOGICAL_CPUS = 16
"""Actors placed at most one to a logical CPU. Too few and actors wait for a place for ever; it costs nothing."""

OBJECT_STORE_BYTES = 200_000_000
"""Shared memory for objects. Events and weights go through the log and S3, so little is needed; Ray wants >= 75 MB."""

MAX_TEMP_PATH = 40
"""Longest folder that still leaves room for Ray's socket names within the kernel's 107 characters."""

CLIENT_START_S = 40.0
"""Seconds for the health check's program to import Ray: 2 on an idle core, 15 to 20 beside a demo. Too low calls a busy
machine's Ray unhealthy; too high delays that verdict where it is true."""

NO_PORT = "-1"
LOOK_S = 0.5
"""Seconds between two looks for the raylet. More than ten, and it has given up waiting."""

ALIVE = 0
"""`GcsNodeInfo.ALIVE` of Ray's protocol."""
HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))

KEPT_SESSIONS = 3
"""How many old sessions' logs stay for reading after the fact."""

_ENVIRONMENT = {
    **LOOPBACK_ENV,
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_enable_worker_prestart": "0",
    "RAY_worker_niceness": "0",
    "RAY_agent_register_timeout_ms": "150000",
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "PYTHONUNBUFFERED": "1",
}


class RayHead:
    """The head node of one data folder."""

    name = "ray"
    port_names = ("gcs", "metrics_agent", "metrics_export", "runtime_env_agent")
    start_deadline_s = 180.0
    stop_grace_s = 5.0
    detaches = True

    def __init__(self, data: Path, cpus: int = LOGICAL_CPUS) -> None:
        self._folder = data / "ray"
        self._cpus = cpus
        path = str(self._folder.resolve())
        fits = len(path) <= MAX_TEMP_PATH and path.isascii()  # Ray encodes it as ASCII
        self._outside = not fits
        self._kept = self._folder / "logs"
        self.temp = self._folder.resolve() if fits else Path(tempfile.gettempdir()) / f"odr-ray-{stack_id(data)}"

    def address(self, ports: Mapping[str, int]) -> str:
        """The address for `connect`."""
        return f"{LOOPBACK}:{ports['gcs']}"

    def prepare(self, ports: Mapping[str, int], progress: Progress) -> None:
        """Folders; the oldest sessions' logs go."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self.temp.mkdir(mode=0o700, parents=True, exist_ok=True)
        sessions = sorted(path for path in self.temp.glob("session_2*") if path.is_dir() and not path.is_symlink())
        for old in sessions[:-KEPT_SESSIONS]:
            shutil.rmtree(old, ignore_errors=True)

    def start(self, ports: Mapping[str, int], mark: str, log: Path) -> subprocess.Popen[bytes]:
        """`ray start`, which returns when head and raylet run. The agents' ports are given: for one that it has to ask
        for, the raylet waits 15 s and dies (ray-project/ray #65983), and a busy host takes longer to start an agent."""
        command = [
            *_ray_command(),
            "start",
            "--head",
            f"--node-ip-address={LOOPBACK}",
            f"--port={ports['gcs']}",
            f"--dashboard-agent-grpc-port={ports['metrics_agent']}",
            f"--metrics-export-port={ports['metrics_export']}",
            f"--runtime-env-agent-port={ports['runtime_env_agent']}",
            f"--num-cpus={self._cpus}",
            f"--object-store-memory={OBJECT_STORE_BYTES}",
            f"--temp-dir={self.temp}",
            "--include-dashboard=false",
            "--include-log-monitor=false",
            "--disable-usage-stats",
            "--no-monitor",
            "--log-color=false",
        ]
        starter = spawn(command, mark=mark, log=log, cwd=self._folder, env=_ENVIRONMENT)
        threading.Thread(target=_answer_for_the_agent, args=(mark, starter), daemon=True).start()
        return starter

    def check(self, ports: Mapping[str, int], timeout_s: float) -> None:
        """Ray's own health check, which asks the GCS only, and whether the raylet is there: a head without one looks
        healthy and takes nobody in."""
        check_ray(self.address(ports), timeout_s)
        check_raylet(self._raylet, timeout_s)

    def listens(self, ports: Mapping[str, int]) -> tuple[int | Path, ...]:
        """The head and its raylet."""
        return (ports["gcs"], self._raylet)

    @property
    def error_logs(self) -> Mapping[Path, Path]:
        """Of raylet and head: `ray start` itself does not quote them."""
        names = [f"{program}.err" for program in ("raylet", "gcs_server")]
        kept = self._kept if self._outside else self._logs
        return {self._logs / name: kept / name for name in names}

    @property
    def _logs(self) -> Path:
        return self.temp / "session_latest" / "logs"

    @property
    def _raylet(self) -> Path:
        return self.temp / "session_latest" / "sockets" / "raylet"

    def finish(self, ports: Mapping[str, int]) -> None:
        """Nothing: actors are placed by the controller."""

    def clean(self, ports: Mapping[str, int]) -> None:
        """The folder outside the data folder, if the path was too long or not plain enough to be inside; its logs are
        kept inside."""
        if not self._outside:
            return
        if self._logs.is_dir():
            shutil.rmtree(self._kept, ignore_errors=True)
            with suppress(OSError, shutil.Error):  # a disk without room, or a log that vanishes: what can be kept is
                shutil.copytree(self._logs, self._kept)
        shutil.rmtree(self.temp, ignore_errors=True)


def _answer_for_the_agent(mark: str, starter: subprocess.Popen[bytes]) -> None:
    """Of the agent's third port `ray start` tells the raylet nothing, which waits for the agent to say it in a file.
    Said here, as the agent says it where Ray has no dashboard: there is none."""
    while starter.poll() is None:
        for name in marked(mark):
            with suppress(OSError, KeyError):
                words = os.fsdecode(Path(f"/proc/{name.pid}/cmdline").read_bytes()).split("\0")
                if words[0].endswith("/raylet"):
                    given = dict(word.removeprefix("--").split("=", 1) for word in words[1:] if "=" in word)
                    file = Path(given["session_dir"]) / f"dashboard_agent_listen_port_{given['node_id']}"
                    half = file.with_name(f".{file.name}")
                    half.write_text(NO_PORT)
                    half.replace(file)
                    return
        time.sleep(LOOK_S)


def _ray_command() -> list[str]:
    program = Path(sys.executable).with_name("ray")
    if not program.exists():
        raise ComponentFailed(f"ray: {program} is missing: pip install ray")
    return [str(program)]


def check_ray(address: str, timeout_s: float) -> None:
    """Ask the GCS of a Ray cluster; raises `Unreachable` when it does not answer within the time."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise StackError(f"ray: address {address!r} is not host:port")
    if host == LOOPBACK and not answers(int(port), timeout_s):
        raise Unreachable(f"ray: nothing listens on {address}")
    environment = {**os.environ, **(LOOPBACK_ENV if host == LOOPBACK else {})}
    command = [*_ray_command(), "health-check", "--address", address]
    limit_s = timeout_s + CLIENT_START_S
    try:
        done = subprocess.run(command, capture_output=True, env=environment, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired as error:
        raise Unreachable(f"ray: no answer from {address} within {limit_s:g} s") from error
    if done.returncode != 0:
        raise Unreachable(f"ray: the health check of {address} failed (exit {done.returncode})")


def check_raylet(path: Path, timeout_s: float) -> None:
    """Raises `Unreachable` if no raylet listens on its socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(timeout_s)
        try:
            client.connect(str(path))
        except OSError as error:
            raise Unreachable(f"ray: its raylet is gone ({error.strerror or error}): nothing can run there") from error


def connect(address: str, timeout_s: float = 30.0, namespace: str = "odradek") -> Any:
    """Join the cluster as a driver; returns the `ray` module. Call `ray.shutdown()` when done."""
    check_listening(address, timeout_s)
    if address.startswith(f"{LOOPBACK}:"):
        os.environ.update(LOOPBACK_ENV)
    import ray
    from ray._private import ray_constants

    if address.startswith(f"{LOOPBACK}:"):
        ray_constants.ENABLE_RAY_CLUSTER = False  # for a process that imported ray before the variable was set
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "ignore_reinit_error": True}
    meant = signal.getsignal(signal.SIGTERM)
    _quieten()
    _check_raylets_answer(address, timeout_s)
    try:
        ray.init(address=address, namespace=namespace, **quiet)
    except ConnectionError as error:
        raise Unreachable(f"ray: {address} takes no driver in ({error}); odradek status says more") from error
    finally:
        if callable(meant) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, meant)  # Ray takes it for itself, and exits with 15
    return ray


def _quieten() -> None:
    """Ray tells its drivers of every worker that died, on standard output, in the middle of what a command prints there
    (its JSON, too). Whoever places actors starts them again and says so; what Ray says is for the log."""
    from ray._private import worker

    def to_the_log(data: Any, ignore_prefix: bool = False) -> None:
        log.info("ray: %s", " ".join(map(str, data["lines"])))

    worker.print_to_stdstream = to_the_log


def _check_raylets_answer(address: str, timeout_s: float) -> None:
    """Where this host's raylet is there and gives no answer, `ray.init` ends the process from within C++, with exit
    code 1. One that answers says gRPC's settings first (RFC 9113, section 3.4)."""
    import ray
    from ray._raylet import GcsClient  # type: ignore[attr-defined]

    try:
        nodes = GcsClient(address=address).get_all_node_info(timeout=timeout_s).values()
    except (ray.exceptions.RayError, TimeoutError):
        return  # of a slow head `ray.init` itself speaks
    here: set[str] = {LOOPBACK, ray.util.get_node_ip_address()}  # type: ignore[no-untyped-call]
    for node in nodes:
        place = (node.node_manager_address, node.node_manager_port)
        if node.state == ALIVE and node.node_manager_address in here:
            try:
                with socket.create_connection(place, timeout=timeout_s) as client:
                    client.sendall(HTTP2_PREFACE)
                    if not client.recv(1):
                        raise ConnectionError("it hung up")
            except OSError as error:
                what = f"its raylet at {place[0]}:{place[1]} gives no answer within {timeout_s:g} s ({error})"
                raise Unreachable(f"ray: {what}; odradek status says more") from error


def check_listening(address: str, timeout_s: float) -> None:
    """A cheap first look, because `ray.init` waits most of a minute for a head that is not there."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=timeout_s).close()
    except (OSError, ValueError) as error:
        raise Unreachable(f"ray: nothing answers at {address} ({error}); odradek status says more") from error
