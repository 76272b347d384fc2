"""The tools over any workspace: what the model is told, and what happens to the files.

A subclass gives `workspace` (empty, open) and `outside` (the path, as the workspace's processes see it, of a file
beyond the workspace that they can reach). Everything is set up through the workspace itself, so the same rows hold over
a directory of this host and in a real sandbox.
"""

import asyncio

import pytest
from support.waiting import eventually

from odradek.actors.tools.limits import Limits
from odradek.actors.tools.registry import run_call
from odradek.actors.tools.spec import ToolOutcome
from odradek.actors.tools.workspace import Workspace

OUTSIDE_TEXT = b"beyond the workspace\n"


class ToolsContract:
    """Every row runs through `run_call`, as a session does."""

    async def call(self, workspace: Workspace, name: str, /, **arguments: str) -> ToolOutcome:
        return await run_call(workspace, name, arguments, Limits())

    async def text(self, workspace: Workspace, name: str, /, **arguments: str) -> str:
        return (await self.call(workspace, name, **arguments)).text

    async def sh(self, workspace: Workspace, command: str) -> str:
        pieces: list[str] = []
        ended = await workspace.exec(command, 60.0, pieces.append)
        assert ended.code == 0, "".join(pieces)
        return "".join(pieces)

    # -- the file tools as the model meets them --------------------------------------------------------------------

    async def test_read_list_glob_grep_edit_run(self, workspace: Workspace) -> None:
        await workspace.write("pkg/sums.py", b"def total(a, b):\n    return a - b\n")
        await workspace.write("test.py", b"from pkg.sums import total\nassert total(1, 2) == 3\n")
        assert await self.text(workspace, "list_dir") == "pkg/\ntest.py"
        assert await self.text(workspace, "glob", pattern="*.py") == "pkg/sums.py\ntest.py"
        assert await self.text(workspace, "grep", pattern="a - b") == "pkg/sums.py:2:    return a - b"
        assert await self.text(workspace, "read_file", path="pkg/sums.py") == "def total(a, b):\n    return a - b\n"
        edited = await self.call(workspace, "edit_file", path="pkg/sums.py", old="a - b", new="a + b")
        assert (edited.text, edited.is_error) == ("ok", False)
        assert await workspace.read("pkg/sums.py", 100) == b"def total(a, b):\n    return a + b\n"
        assert await self.text(workspace, "read_lints") == "no findings"
        assert (await self.text(workspace, "semantic_search", query="define total")).endswith(
            "pkg/sums.py:1:def total(a, b):"
        )

    async def test_an_absolute_path_below_the_mount_is_the_same_file(self, workspace: Workspace) -> None:
        written = await self.text(workspace, "write_file", path=f"{workspace.mount}/a/b.txt", content="x\n")
        assert written == "ok"
        assert await self.text(workspace, "read_file", path="./a//b.txt") == "x\n"
        assert await self.text(workspace, "grep", pattern="x", path=f"{workspace.mount}/a") == "a/b.txt:1:x"

    @pytest.mark.parametrize("tool", ["read_file", "edit_file"])
    async def test_a_missing_file_is_named(self, workspace: Workspace, tool: str) -> None:
        extra = {"old": "a", "new": "b"} if tool == "edit_file" else {}
        assert await self.text(workspace, tool, path="no/such.py", **extra) == "error: no such file no/such.py"

    async def test_a_directory_is_not_a_file(self, workspace: Workspace) -> None:
        await workspace.write("d/f", b"x")
        for name, extra in [
            ("read_file", {}),
            ("write_file", {"content": "x"}),
            ("edit_file", {"old": "a", "new": "b"}),
        ]:
            outcome = await self.call(workspace, name, path="d", **extra)
            assert outcome.is_error
            assert "directory" in outcome.text
        assert (await self.call(workspace, "list_dir", path="d/f")).is_error
        assert (await self.call(workspace, "write_file", path=".", content="x")).is_error

    async def test_a_write_keeps_the_mode(self, workspace: Workspace) -> None:
        await workspace.write("run.sh", b"#!/bin/sh\necho one\n", mode=0o755)
        assert await self.text(workspace, "edit_file", path="run.sh", old="one", new="two") == "ok"
        assert await self.text(workspace, "write_file", path="new.sh", content="echo\n") == "ok"
        assert await self.sh(workspace, "./run.sh; test -x new.sh || echo plain") == "two\nplain\n"

    async def test_reading_a_pipe_does_not_wait(self, workspace: Workspace) -> None:
        await self.sh(workspace, "mkfifo pipe || python3 -c 'import os; os.mkfifo(\"pipe\")'")
        outcome = await asyncio.wait_for(self.call(workspace, "read_file", path="pipe"), 60)
        assert outcome.is_error
        assert "not a regular file" in outcome.text

    # -- paths never leave -----------------------------------------------------------------------------------------

    async def test_case_openbot_73_a_write_through_a_link_out_is_refused_and_through_a_link_inside_works(
        self, workspace: Workspace, outside: str
    ) -> None:
        """OpenBot #73: a write through a link at the last path part leaves the workspace, though reads are refused."""
        await workspace.write("inside.md", b"inside\n")
        await self.sh(workspace, f"ln -s {outside} notes.md; ln -s gone.md dangling.md; ln -s inside.md linked.md")
        await self.sh(workspace, f"ln -s {outside}.new outside-dangling.md")
        for path in ("notes.md", "dangling.md", "outside-dangling.md"):
            refused = await self.call(workspace, "write_file", path=path, content="overwritten\n")
            assert refused.is_error, path
        edit = await self.call(workspace, "edit_file", path="notes.md", old="beyond", new="here")
        assert edit.is_error
        assert await self.sh(workspace, f"cat {outside}; test -e gone.md || test -e {outside}.new || echo none") == (
            OUTSIDE_TEXT.decode() + "none\n"
        )
        assert await self.text(workspace, "write_file", path="linked.md", content="through\n") == "ok"
        assert await self.sh(workspace, "cat inside.md; test -L linked.md && echo link") == "through\nlink\n"

    @pytest.mark.parametrize("form", ["{outside}", "../../../../../../../..{outside}", "out", "dir/name", "a/../../x"])
    async def test_no_tool_reaches_beyond(self, workspace: Workspace, outside: str, form: str) -> None:
        directory, _, name = outside.rpartition("/")
        await self.sh(workspace, f"mkdir a; ln -s {outside} out; ln -s {directory} dir")
        path = form.format(outside=outside).replace("name", name)
        for tool, extra in [
            ("read_file", {}),
            ("edit_file", {"old": "beyond", "new": "x"}),
            ("write_file", {"content": "x"}),
            ("grep", {"pattern": "beyond"}),
            ("list_dir", {}),
            ("glob", {"pattern": "*"}),
            ("read_lints", {}),
        ]:
            outcome = await self.call(workspace, tool, path=path, **extra)
            assert outcome.is_error, tool
            assert "beyond the workspace" not in outcome.text
        assert await self.sh(workspace, f"cat {outside}") == OUTSIDE_TEXT.decode()

    async def test_searches_do_not_follow_links(self, workspace: Workspace, outside: str) -> None:
        await workspace.write("a/f.txt", b"needle\n")
        await self.sh(workspace, f"ln -s {outside.rpartition('/')[0]} away; ln -s .. a/loop; ln -s f.txt a/again")
        assert await self.text(workspace, "grep", pattern="beyond|needle") == "a/f.txt:1:needle"
        assert await self.text(workspace, "glob", pattern="**/f.txt") == "a/f.txt"

    async def test_a_name_that_is_no_text_is_shown_escaped(self, workspace: Workspace) -> None:
        await self.sh(workspace, "printf needle > \"$(printf 'bad\\377.txt')\"")
        assert await self.text(workspace, "list_dir") == "bad\\udcff.txt"
        assert await self.text(workspace, "grep", pattern="needle") == "bad\\udcff.txt:1:needle"
        assert (await self.call(workspace, "read_file", path="\ud800")).is_error
        assert (await self.call(workspace, "read_file", path="a\0b")).is_error

    async def test_a_path_through_an_inside_link_to_a_directory_works(self, workspace: Workspace) -> None:
        await workspace.write("real/f", b"x\n")
        await self.sh(workspace, f"ln -s real short; ln -s {workspace.mount}/real long")
        for link in ("short", "long"):
            assert await self.text(workspace, "read_file", path=f"{link}/f") == "x\n"
            assert await self.text(workspace, "write_file", path=f"{link}/{link}", content=link) == "ok"
        assert await self.text(workspace, "list_dir", path="real") == "f\nlong\nshort"

    # -- run_terminal ----------------------------------------------------------------------------------------------

    @pytest.mark.parametrize(
        ("command", "text"),
        [
            ("echo hi", "hi"),
            ("true", "[exit 0]"),
            ("echo hi; exit 3", "hi\n[exit 3]"),
            ("exit 3", "[exit 3]"),
            ("echo out; echo err >&2; echo out", "out\nerr\nout"),
            ("printf 'a\\n\\n'", "a\n"),
            ("printf 'ø→\\351\\n'", "ø→\\xe9"),
            ("", "[exit 0]"),
            ("# only a comment", "[exit 0]"),
            ("cat <<EOF\nhere\nEOF", "here"),
            ("kill -9 $$", "[exit 137]"),
            ("cat; read x; echo $?", "1"),
            ("printf hi | cat", "hi"),
        ],
    )
    async def test_output_then_exit_code(self, workspace: Workspace, command: str, text: str) -> None:
        outcome = await self.call(workspace, "run_terminal", command=command)
        assert (outcome.text, outcome.is_error) == (text, False)

    async def test_time_out_keeps_the_output_and_leaves_no_process(self, workspace: Workspace) -> None:
        command = "echo before; (while true; do echo x >> counter; sleep 0.05; done) & wait"
        assert (
            await self.text(workspace, "run_terminal", command=command, timeout="1") == "before\n[timed out after 1s]"
        )
        assert await self.sh(workspace, "wc -l < counter; sleep 0.5; wc -l < counter | sort -u") is not None
        sizes = (await self.sh(workspace, "wc -c < counter; sleep 0.5; wc -c < counter")).split()
        assert sizes[0] == sizes[1]

    async def test_a_background_child_does_not_hold_the_call(self, workspace: Workspace) -> None:
        outcome = await asyncio.wait_for(self.call(workspace, "run_terminal", command="sleep 300 & echo up"), 60)
        assert outcome.text == "up"

    async def test_a_job_is_polled_and_stopped_by_its_id(self, workspace: Workspace) -> None:
        command = "echo one; while ! test -e go; do sleep 0.05; done; echo two; sleep 300"
        started = await self.text(workspace, "run_terminal", command=command, background="true")
        job = started.split()[1]
        await self.until(workspace, job, "one")
        assert await self.text(workspace, "run_terminal", job=job) == f"[job {job} is running]"
        await self.sh(workspace, "touch go")
        await self.until(workspace, job, "two")
        stopped = await self.text(workspace, "run_terminal", job=job, stop="true")
        assert "is running" not in stopped
        assert "is running" not in await self.text(workspace, "run_terminal", job=job)

    async def test_a_finished_job_tells_its_exit_code(self, workspace: Workspace) -> None:
        started = await self.text(workspace, "run_terminal", command="echo done; exit 4", background="true")
        seen = await self.until(workspace, started.split()[1], "ended")
        assert seen.endswith("[job " + started.split()[1] + " ended: exit 4]")
        assert "done\n" in seen

    async def until(self, workspace: Workspace, job: str, word: str) -> str:
        seen: list[str] = []

        async def said() -> bool:
            seen.append(await self.text(workspace, "run_terminal", job=job))
            return word in "".join(seen)

        await eventually(said, f"the job to say {word!r}")
        return "".join(seen)

    async def test_an_unknown_job_is_an_error_that_says_why(self, workspace: Workspace) -> None:
        outcome = await self.call(workspace, "run_terminal", job="77")
        assert outcome.is_error
        assert "no job '77'" in outcome.text

    async def test_output_streams_while_the_command_runs(self, workspace: Workspace) -> None:
        pieces: list[str] = []
        seen = asyncio.Event()

        def on_output(text: str) -> None:
            pieces.append(text)
            seen.set()

        command = {"command": "echo first; while ! test -e go; do sleep 0.05; done; echo second"}
        running = asyncio.create_task(run_call(workspace, "run_terminal", command, Limits(), on_output=on_output))
        await asyncio.wait_for(seen.wait(), 60)
        assert pieces == ["first\n"]
        await workspace.write("go", b"")
        assert (await running).text == "first\nsecond"
        assert "".join(pieces) == "first\nsecond\n"

    async def test_case_benchflow_537_run_terminal_env_shows_no_secret_and_keeps_look_alikes(
        self, workspace: Workspace
    ) -> None:
        """benchflow #537: secrets outside two known shapes reach trajectories."""
        command = "export " + " ".join([*SECRETS, *LOOK_ALIKES]) + "; env"
        streamed: list[str] = []
        outcome = await run_call(workspace, "run_terminal", {"command": command}, Limits(), on_output=streamed.append)
        assert outcome.display is not None
        for shown in (outcome.text, "".join(streamed), outcome.display.body):
            for secret in SECRETS:
                name, _, value = secret.partition("=")
                assert value not in shown
                assert f"{name}=[redacted:" in shown
            for kept in LOOK_ALIKES:
                assert kept in shown
        assert outcome.redactions == len(SECRETS)


SECRETS = [
    "ACME_API_KEY=zq_live_9f8a7s6d5f4g3h2j1k",
    "ACME=xq-Lk92jdKx83JsPq02Lm4nVb",
    "DB_PASSWORD=hunter2",
    "PLAIN_AWS=AKIAIOSFODNN7EXAMPLE",
    "SERVICE_TOKEN=tok-abc-def-ghi",
]
"""Made up: by name, by look alone, by a word, by a known shape, by name again."""

LOOK_ALIKES = [
    "COMMIT=9f86d081884c7d659a2feaa0c55ad015a3bf4f1b",
    "RUN_ID=123e4567-e89b-12d3-a456-426614174000",
    "PYTHON_SHA256=3126f59592c9b0d798584755f2bf7b081fa1ca35ce7a6fea980108d752a05bb1",
    "FACTORY=HTTPServerConnectionFactoryBuilderV2Impl",
    "TOKENIZERS_PARALLELISM=false",
    "MESSAGE=aGVsbG8gd29ybGQgdGhpcyBpcyBhIHRlc3Q=",
    "MODULE=my_package.some_module_name.another2",
]
