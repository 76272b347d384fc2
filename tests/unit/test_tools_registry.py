"""run_call: one result for every call, whatever is wrong with it."""

import asyncio
from pathlib import Path

import jsonschema
import msgspec
import pytest
from support.local_workspace import LocalWorkspace

from odradek.actors.environment.errors import SandboxInfraError
from odradek.actors.tools import registry
from odradek.actors.tools.limits import Limits
from odradek.actors.tools.registry import TOOLS, run_call
from odradek.actors.tools.spec import Answer, Context, ToolOutcome


async def call(root: Path, name: str, /, **arguments: str) -> ToolOutcome:
    return await run_call(LocalWorkspace(root), name, arguments, Limits())


def test_the_ten_tools_declare_schema_and_effect() -> None:
    effects = {name: spec.effect for name, spec in TOOLS.items()}
    assert effects == {
        "read_file": "pure",
        "list_dir": "pure",
        "glob": "pure",
        "grep": "pure",
        "semantic_search": "pure",
        "read_lints": "pure",
        "edit_file": "workspace",
        "write_file": "workspace",
        "run_terminal": "workspace",
        "todo_write": "workspace",
    }
    assert {name for name, spec in TOOLS.items() if spec.leaves_delta} == {"edit_file", "write_file", "run_terminal"}
    for spec in TOOLS.values():
        schema = spec.schema()
        jsonschema.Draft202012Validator.check_schema(schema)
        assert schema["type"] == "object"


@pytest.mark.parametrize(
    ("tool", "arguments", "accepted"),
    [
        ("read_file", {"path": "a.py", "offset": 3}, True),
        ("read_file", {"path": "a.py", "offset": 0}, False),
        ("read_file", {"offset": 3}, False),
        ("read_file", {"path": "a.py", "ofset": 3}, False),
        ("todo_write", {"items": [{"content": "x", "id": ""}]}, True),
        ("todo_write", {"items": "x"}, False),
    ],
)
def test_a_schema_accepts_what_the_tool_accepts(tool: str, arguments: dict[str, object], accepted: bool) -> None:
    assert jsonschema.Draft202012Validator(TOOLS[tool].schema()).is_valid(arguments) is accepted


@pytest.mark.parametrize(
    ("name", "arguments", "says"),
    [
        ("no_such_tool", {}, "there is no tool 'no_such_tool'; there are read_file, "),
        ("read_file", {}, "read_file needs path; it takes path, offset, limit"),
        ("read_file", {"path": "a", "ofset": "1"}, "no argument 'ofset' (did you mean offset?); it takes path, "),
        ("read_file", {"path": "a", "offset": "two"}, "offset: Expected `int`, got `str`; got 'two'"),
        ("read_file", {"path": "a", "offset": "0"}, "Expected `int` >= 1 - at `$.offset`"),
        ("run_terminal", {"command": "true", "background": "perhaps"}, "background: Expected `bool`"),
        ("todo_write", {"items": '{"text": "say "hi""}'}, "items: "),
        ("todo_write", {"items": ""}, "items: "),
        ("todo_write", {"items": "null"}, "items: "),
        ("todo_write", {"items": "5"}, "items: "),
    ],
)
async def test_a_bad_call_is_answered_with_what_would_be_right(
    tmp_path: Path, name: str, arguments: dict[str, str], says: str
) -> None:
    outcome = await run_call(LocalWorkspace(tmp_path), name, arguments, Limits())
    assert outcome.is_error
    assert outcome.text.startswith("error: ")
    assert says in outcome.text


async def test_numbers_and_flags_are_read_from_text(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("1\n2\n3\n")
    assert (await call(tmp_path, "read_file", path="a", offset=" 3\n")).text == "3\n"
    started = await call(tmp_path, "run_terminal", command="true", background="True")
    assert started.text.startswith("[job 1 started")


async def test_argument_text_arrives_byte_for_byte(tmp_path: Path) -> None:
    content = "\tif ready:\n\t\tgo()\n  \n"
    assert (await call(tmp_path, "write_file", path="a", content=content)).text == "ok"
    assert (tmp_path / "a").read_bytes() == content.encode()


async def test_case_opencode_44852_a_tool_that_raises_gives_one_result_marked_error_and_its_neighbour_is_unharmed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """opencode #44852: of two parallel calls one fails and gets no result; every later request is refused."""
    (tmp_path / "a").write_text("hello\n")

    async def broken(_context: Context, _arguments: object) -> Answer:
        raise ZeroDivisionError("inside")

    monkeypatch.setitem(registry.TOOLS, "list_dir", msgspec.structs.replace(TOOLS["list_dir"], run=broken))
    for _turn in range(3):
        first, second = await asyncio.gather(call(tmp_path, "read_file", path="a"), call(tmp_path, "list_dir"))
        assert (first.text, first.is_error) == ("hello\n", False)
        assert second.is_error
        assert second.text == "error: list_dir failed inside (ZeroDivisionError); try another way"


SECRET = "AKIA" + "IOSFODNN7EXAMPLE"


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("read_file", {"path": "secret.txt"}),
        ("read_file", {"path": f"no-such/{SECRET}"}),
        ("write_file", {"path": "new.txt", "content": f"key = {SECRET}\n"}),
        ("edit_file", {"path": "other.txt", "old": "nothing", "new": SECRET}),
        ("run_terminal", {"command": f"echo {SECRET} >&2"}),
        ("run_terminal", {"command": f"true {SECRET}"}),
        ("list_dir", {}),
        ("todo_write", {"items": f'[{{"content": "use {SECRET}"}}]'}),
    ],
)
async def test_a_secret_leaves_a_call_neither_as_text_nor_as_error_nor_on_a_persons_screen(
    tmp_path: Path, name: str, arguments: dict[str, str]
) -> None:
    (tmp_path / "secret.txt").write_text(f"key = {SECRET}\n")
    (tmp_path / "other.txt").write_text("nothing\n")
    (tmp_path / f"of {SECRET}").touch()
    streamed: list[str] = []
    outcome = await run_call(LocalWorkspace(tmp_path), name, arguments, Limits(), on_output=streamed.append)
    shown = [outcome.text, *streamed]
    shown += [outcome.display.title, outcome.display.body] if outcome.display is not None else []
    assert not any(SECRET in text for text in shown)
    assert any("[redacted" in text for text in shown), "and that something is hidden is seen"


async def test_a_failure_of_the_environment_is_no_result(tmp_path: Path) -> None:
    """A fault of ours that reaches the model would be scored as if it were the model's."""

    class Broken(LocalWorkspace):
        async def read(self, path: str, max_bytes: int) -> bytes:
            raise SandboxInfraError("host lost")

    with pytest.raises(SandboxInfraError):
        await run_call(Broken(tmp_path), "read_file", {"path": "a"}, Limits())


async def test_a_vanished_host_directory_is_the_environments_failure(tmp_path: Path) -> None:
    workspace = LocalWorkspace(tmp_path / "gone")
    for name, arguments in [("list_dir", {}), ("read_file", {"path": "a"}), ("run_terminal", {"command": "true"})]:
        with pytest.raises(SandboxInfraError):
            await run_call(workspace, name, arguments, Limits())


async def test_case_hermes_89574_todo_items_without_ids_get_distinct_ones(tmp_path: Path) -> None:
    """hermes-agent PR 89574: items without an id collapse to the last one."""
    items = '[{"id": "", "content": "a"}, {"id": "  ", "content": "b"}, {"content": "c", "status": "completed"}]'
    outcome = await call(tmp_path, "todo_write", items=items)
    stored = msgspec.json.decode(outcome.text)
    assert [item["content"] for item in stored] == ["a", "b", "c"]
    assert len({item["id"] for item in stored}) == 3
    assert [item["status"] for item in stored] == ["pending", "pending", "completed"]


async def test_given_ids_are_kept_and_a_repeated_one_is_replaced(tmp_path: Path) -> None:
    items = '[{"content": "a"}, {"id": "1", "content": "b"}, {"id": 2, "content": "c"}, {"id": "1", "content": "d"}]'
    stored = msgspec.json.decode((await call(tmp_path, "todo_write", items=items)).text)
    assert [item["id"] for item in stored] == ["3", "1", "2", "4"]


async def test_an_unknown_todo_status_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    outcome = await call(tmp_path, "todo_write", items='[{"content": "a", "status": "done"}]')
    assert outcome.text == ("error: todo_write: status 'done' is none of pending, in_progress, completed, cancelled")
