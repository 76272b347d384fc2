"""The sandbox contract on commands and jobs: results, time-outs, output, children, repeated calls."""

import asyncio

import pytest
from contract.sandbox_world import NEVER_S, OnOneSandbox, exists, no_process, sh
from support.waiting import eventually

from odradek.actors.environment.errors import SandboxNotFoundError, SandboxSpecError
from odradek.actors.environment.protocol import (
    ExecRequest,
    Limit,
    Limits,
    OutputChunk,
    Sandbox,
    SandboxDriver,
    SandboxSpec,
)


class CommandsContract(OnOneSandbox):
    """What a command's caller may rely on."""

    # --- a command's failure, time-out or kill is a result --------------------------------------------------------

    async def test_exit_code_and_both_streams(self, sandbox: Sandbox) -> None:
        result = await sh(sandbox, "echo out; echo err >&2; exit 3")
        assert (result.exit_code, result.stdout, result.stderr, result.signal) == (3, "out\n", "err\n", 0)

    async def test_death_by_signal_is_reported_as_a_shell_does(self, sandbox: Sandbox) -> None:
        result = await sandbox.exec(ExecRequest(argv=("sh", "-c", "kill -TERM $$")))
        assert (result.exit_code, result.signal) == (143, 15)

    async def test_a_missing_program_is_a_result(self, sandbox: Sandbox) -> None:
        result = await sandbox.exec(ExecRequest(argv=("no-such-program",)))
        assert result.exit_code == 127
        assert "no-such-program" in result.stderr

    async def test_merged_output_keeps_the_order_written(self, sandbox: Sandbox) -> None:
        result = await sandbox.exec(ExecRequest(shell="echo 1; echo 2 >&2; echo 3", merge_output=True))
        assert result.stdout == "1\n2\n3\n"

    async def test_working_directory_and_environment(self, sandbox: Sandbox) -> None:
        request = ExecRequest(shell="pwd; echo $COLOUR", cwd="src/deep", env={"COLOUR": "blue"})
        assert (await sandbox.exec(request)).stdout == "/workspace/src/deep\nblue\n"

    async def test_environment_starts_empty(self, sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("ODRADEK_TEST_SECRET", "not-for-agents")
        names = {line.partition("=")[0] for line in (await sh(sandbox, "env")).stdout.splitlines()}
        assert names <= {"PATH", "HOME", "LANG", "PWD", "PYTHONDONTWRITEBYTECODE", "_", "SHLVL", "OLDPWD"}

    async def test_malformed_commands_are_refused(self, sandbox: Sandbox) -> None:
        for request in (
            ExecRequest(),
            ExecRequest(argv=("a",), shell="b"),
            ExecRequest(shell="x\0y"),
            ExecRequest(shell="pwd", cwd="/etc"),
            ExecRequest(shell="true", timeout_s=0),
            ExecRequest(shell="#" * 400_000),
        ):
            with pytest.raises(SandboxSpecError):
                await sandbox.exec(request)

    # --- time-outs, background children, stdin, output: the rows 'environment' of cases/reports.md ----------------

    async def test_case_mini_swe_agent_826_time_out_kills_the_whole_tree(self, sandbox: Sandbox) -> None:
        """mini-swe-agent 826: on time-out only the shell died. The child detaches in every way it can."""
        script = "(setsid sh -c 'while true; do echo x >> count; sleep 0.05; done' & ) ; echo began; sleep 300"
        result = await sh(sandbox, script, timeout_s=2)
        assert result.timed_out
        assert result.stdout == "began\n"
        assert (await sandbox.metrics()).processes == 0
        size = (await sandbox.stat("count")).size
        assert size > 0
        await asyncio.sleep(0.5)
        assert (await sandbox.stat("count")).size == size

    async def test_time_out_ends_a_fork_bomb(self, driver: SandboxDriver, demo_spec: SandboxSpec) -> None:
        spec = SandboxSpec(demo_spec.image, demo_spec.layers, limits=Limits(pids=Limit(60)))
        sandbox = await driver.create(spec)
        result = await sh(sandbox, "b() { b | b & }; b; sleep 300", timeout_s=2)
        assert result.timed_out
        assert await eventually(lambda: no_process(sandbox), "no process")
        assert (await sh(sandbox, "echo alive")).stdout == "alive\n"

    async def test_case_evalscope_1718_stdin_is_empty(self, sandbox: Sandbox) -> None:
        """evalscope 1718: a command that reads stdin waited for the harness's."""
        for line in ("cat", "python3 -S", "read x"):
            result = await sh(sandbox, line, timeout_s=NEVER_S)
            assert not result.timed_out
        assert (await sh(sandbox, "printf hi | cat")).stdout == "hi"

    async def test_case_pim_agent_7_background_child_does_not_hold_the_call(
        self, sandbox: Sandbox, driver: SandboxDriver
    ) -> None:
        """pim-agent 7: a child that keeps the pipe open kept the call open."""
        async with asyncio.timeout(NEVER_S / 2):
            result = await sh(sandbox, f"sleep {NEVER_S} & echo up", timeout_s=NEVER_S * 2)
        assert (result.stdout, result.exit_code) == ("up\n", 0)
        assert (await sandbox.metrics()).processes == 1
        await sandbox.destroy()
        assert sandbox.sandbox_id not in {info.sandbox_id for info in await driver.list()}

    async def test_background_child_can_go_on_writing(self, sandbox: Sandbox) -> None:
        loop = "i=0; while [ $i -lt 9000 ]; do echo some output to nobody; i=$((i+1)); done"
        script = f"(while [ ! -e go ]; do sleep 0.02; done; {loop}; touch done) & echo up"
        assert (await sh(sandbox, script)).stdout == "up\n"
        await sandbox.write("go", b"")
        assert await eventually(lambda: exists(sandbox, "done"), "exists")

    async def test_output_just_before_the_end_is_complete(self, sandbox: Sandbox) -> None:
        for _ in range(10):
            result = await sandbox.exec(ExecRequest(shell="seq 1 9000", max_output_bytes=1 << 20))
            assert result.stdout.splitlines()[-1] == "9000"

    async def test_case_e2b_505_characters_split_over_reads_stay_whole(self, sandbox: Sandbox) -> None:
        """E2B 505: a multi-byte character split over two reads raised or was garbled."""
        script = (
            "import os\n"
            "data = 'ø→漢'.encode() * 40000\n"
            "step = 997\n"
            "for fd in (1, 2):\n"
            "    for i in range(0, len(data), step):\n"
            "        os.write(fd, data[i:i + step])\n"
        )
        request = ExecRequest(argv=("python3", "-S", "-c", script), max_output_bytes=1 << 20)
        streamed = {"stdout": "", "stderr": ""}
        result = None
        async for item in sandbox.exec_stream(request):
            if isinstance(item, OutputChunk):
                streamed[item.stream] += item.text
            else:
                result = item
        assert result is not None
        assert result.stdout == result.stderr == "ø→漢" * 40000
        assert streamed == {"stdout": result.stdout, "stderr": result.stderr}

    async def test_invalid_bytes_are_shown_as_such(self, sandbox: Sandbox) -> None:
        result = await sh(sandbox, r"printf 'a\377b\303'")
        assert result.stdout == "a\\xffb\\xc3"

    async def test_long_output_is_cut_in_the_middle_and_flagged(self, sandbox: Sandbox) -> None:
        result = await sandbox.exec(ExecRequest(shell="echo first; seq 1 200000; echo last", max_output_bytes=4096))
        assert result.truncated
        assert result.stdout.startswith("first\n")
        assert result.stdout.endswith("last\n")
        assert "bytes omitted" in result.stdout
        assert len(result.stdout) < 4096 + 100

    async def test_cancelling_a_call_kills_its_command(self, sandbox: Sandbox) -> None:
        call = asyncio.ensure_future(sh(sandbox, "touch began; sleep 300"))
        assert await eventually(lambda: exists(sandbox, "began"), "exists")
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert await eventually(lambda: no_process(sandbox), "no process")

    async def test_same_key_runs_once(self, sandbox: Sandbox) -> None:
        request = ExecRequest(shell="echo x >> ran; wc -l < ran", key="call-1")
        first, second = await asyncio.gather(sandbox.exec(request), sandbox.exec(request))
        third = await sandbox.exec(request)
        assert first == second == third
        assert await sandbox.read("ran") == b"x\n"

    async def test_take_over_kills_older_calls_and_refuses_later_ones(self, sandbox: Sandbox) -> None:
        old = asyncio.ensure_future(sandbox.exec(ExecRequest(shell="touch began; sleep 300", epoch=1)))
        assert await eventually(lambda: exists(sandbox, "began"), "exists")
        await sandbox.take_over(2)
        assert (await old).signal == 9
        with pytest.raises(SandboxSpecError, match="epoch"):
            await sandbox.exec(ExecRequest(shell="true", epoch=1))
        assert (await sandbox.exec(ExecRequest(shell="true", epoch=2))).exit_code == 0

    # --- jobs -----------------------------------------------------------------------------------------------------

    async def test_job_is_polled_and_stopped_by_its_id(self, sandbox: Sandbox) -> None:
        job = await sandbox.start_job(ExecRequest(shell="echo one; touch began; sleep 300 & wait", timeout_s=NEVER_S))
        assert await eventually(lambda: exists(sandbox, "began"), "exists")
        status = await sandbox.poll_job(job)
        assert (status.running, status.output) == (True, "one\n")
        assert (await sandbox.poll_job(job)).output == ""
        stopped = await sandbox.stop_job(job)
        assert (stopped.running, stopped.signal) == (False, 9)
        assert await eventually(lambda: no_process(sandbox), "no process")
        with pytest.raises(SandboxNotFoundError):
            await sandbox.poll_job("job-none")
