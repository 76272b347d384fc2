"""Task files and sources: strict about what a person wrote, one rule of what can run, all or none."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from odradek.actors.tasks.directory import write_task_dir
from odradek.actors.tasks.errors import BrokenTasks, TaskError, TaskFileError, TaskNotPublishable
from odradek.actors.tasks.file import load_task_file
from odradek.actors.tasks.refusal import refusal
from odradek.actors.tasks.sources import Options, load_sources
from odradek.infra.demo.family.sets import make_task
from odradek.infra.demo.publish import as_spec
from odradek.streams.events.tasks import HiddenScript, TaskPublished

BODY: dict[str, Any] = {
    "task_id": "add",
    "instruction": "mend add",
    "files": {"calc.py": "def add(a, b):\n    return a - b\n"},
    "tests": {
        "module": "calc",
        "function": "add",
        "cases": [{"id": "add[1]", "args": [1, 2], "want": 3}],
        "fail_to_pass": ["add[1]"],
    },
}


def saved(tmp_path: Path, value: object, name: str = "task.json") -> Path:
    path = tmp_path / name
    path.write_text(value if isinstance(value, str) else json.dumps(value, indent=1))
    return path


def test_json_toml_and_a_whole_record_value_are_the_same_task(tmp_path: Path) -> None:
    toml = """
task_id = "add"
instruction = "mend add"
[files]
"calc.py" = "def add(a, b):\\n    return a - b\\n"
[tests]
module = "calc"
function = "add"
fail_to_pass = ["add[1]"]
cases = [{id = "add[1]", args = [1, 2], want = 3}]
"""
    wanted = msgspec.convert(BODY, TaskPublished)
    assert load_task_file(saved(tmp_path, BODY)) == wanted
    assert load_task_file(saved(tmp_path, {"body": BODY | {"type": "task.published.v1"}}, "wire.json")) == wanted
    assert load_task_file(saved(tmp_path, toml, "task.toml")) == wanted


def test_a_verifiers_files_are_base64_in_json(tmp_path: Path) -> None:
    body = {key: value for key, value in BODY.items() if key != "tests"} | {
        "script": {"files": {"test.sh": "ZWNobw=="}}
    }
    assert load_task_file(saved(tmp_path, body)).script == HiddenScript(files={"test.sh": b"echo"})


@pytest.mark.parametrize(
    ("value", "line", "reason"),
    [
        (BODY | {"atempts": 3}, "atempts", "unknown field `atempts`"),
        (BODY | {"attempts": "3"}, "attempts", "Expected `int`, got `str`"),
        (BODY | {"tests": BODY["tests"] | {"wants": 1}}, "wants", "unknown field `wants` - at `$.tests`"),
        (BODY | {"type": "task.cancelled.v1"}, "type", "Invalid value 'task.cancelled.v1'"),
        ("{\n\n!", 3, "Expecting property name"),
        ("[1]", None, "Expected `object`, got `array`"),
    ],
)
def test_a_fault_in_a_task_file_is_one_line_that_names_its_place(
    value: object, line: str | int | None, reason: str, tmp_path: Path
) -> None:
    path = saved(tmp_path, value)
    if isinstance(line, str):
        line = next(at for at, text in enumerate(path.read_text().splitlines(), 1) if f'"{line}"' in text)
    with pytest.raises(TaskFileError) as caught:
        load_task_file(path)
    assert str(caught.value).startswith(f"{path}:{line}: " if line else f"{path}: ")
    assert reason in str(caught.value) and "\n" not in str(caught.value)


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskFileError, match="neither a directory nor"):
        load_task_file(saved(tmp_path, BODY, "task.yaml"))
    with pytest.raises(TaskFileError, match="is missing"):
        load_sources([tmp_path / "nothing.json"])


def nested(depth: int) -> list[Any]:
    """A list in a list in a list."""
    found: list[Any] = []
    for _ in range(depth):
        found = [found]
    return found


def deep_case(args: list[Any], want: Any) -> list[dict[str, Any]]:
    return [{"id": "add[1]", "args": args, "want": want}]


SHA = "0" * 64
SHARED_REF = {"key": f"blobs/shared/{SHA}", "sha256": SHA, "size": 1}


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"task_id": ""}, "task_id: "),
        ({"task_id": "a\nb"}, "task_id: "),
        ({"instruction": " \n"}, "instruction: is empty"),
        ({"attempts": 0}, "attempts: 0"),
        ({"attempts": -3}, "attempts: -3"),
        ({"attempts": 10**9}, "attempts: 1000000000"),
        ({"attempts": 1}, "no baseline"),
        ({"deadline_seconds": 0.0}, "deadline_seconds: 0"),
        ({"temperature": -1.0}, "temperature: -1"),
        ({"policy_version": -1}, "policy_version: -1"),
        ({"files": {"../x": ""}}, "'../x' is no relative path"),
        ({"files": {"/etc/passwd": ""}}, "no relative path"),
        ({"files": {"a/.git/HEAD": ""}}, "history"),
        ({"files": {"a": "", "a/b": ""}}, "'a' is a file and, in 'a/b', a folder"),
        ({"budget": {"max_turns": 0}}, "budget.max_turns: 0"),
        ({"deadline_seconds": 1e300}, "deadline_seconds: 1e+300"),
        ({"attempts": 2**70}, "attempts: an integer of 71 bits"),
        ({"policy_version": 2**70}, "policy_version: an integer of 71 bits"),
        ({"budget": {"max_turns": 10**30}}, "budget.max_turns: an integer of 100 bits"),
        ({"budget": {"wall_seconds": 1e300}}, "budget.wall_seconds: 1e+300"),
        ({"policy": "p" * 7_000_000}, "policy: 7000000 characters"),
        ({"image": "p" * 300}, "image: 300 characters"),
        ({"idempotency_key": "k" * 300}, "idempotency_key: 300 characters"),
        ({"labels": {"a": "b" * 20_000}}, "labels: 20001 characters"),
        ({"files": {"n" * 300: ""}}, "longer than a path can be"),
        ({"files": {"d/" * 3000 + "f": ""}}, "longer than a path can be"),
        ({"tests": BODY["tests"] | {"cases": deep_case(nested(100), 1)}}, "nests its values deeper"),
        ({"tests": BODY["tests"] | {"cases": deep_case([], {"a": nested(99)})}}, "nests its values"),
        ({"image": "no-such-image"}, "image: 'no-such-image' is neither a shipped image (demo) nor"),
        ({"setup": ["true", "x" * 131_072]}, "setup: command 1 has 131072 bytes, and a command can have 131071"),
        ({"setup": ["a\0b"]}, "setup: command 0 has a null character"),
        ({"setup": [" "]}, "setup: command 0 is empty"),
        ({"setup": ["x" * 131_000] * 5}, "setup: 655000 bytes together, expected at most 524288"),
        ({"tests": BODY["tests"] | {"module": "my-module"}}, "module 'my-module' is no name that Python imports"),
        ({"tests": BODY["tests"] | {"function": "a.b"}}, "function 'a.b' is no name"),
        ({"tests": BODY["tests"] | {"cases": deep_case([2**64], 1)}}, "holds an integer of 65 bits"),
        ({"tests": None, "script": {"files": {}}}, "script.files: has no test.sh"),
        ({"tests": None, "script": {"files": {"a": "", "a/b": ""}, "command": "x"}}, "script.files: 'a' is a file"),
        ({"tests": None, "script": {"files": {}, "command": "x" * 131_072}}, "script.command: has 131072 bytes"),
        (
            {"files": {}, "files_ref": {"key": "k", "sha256": SHA, "size": 1}},
            "files_ref: 'k' is not blobs/shared/SHA256",
        ),
        ({"files": {}, "files_ref": SHARED_REF | {"subject": "ann"}}, "is not blobs/shared"),
        ({"files": {}, "files_ref": SHARED_REF | {"size": 2**40}}, "files_ref: 1099511627776 bytes, expected 1 to"),
        ({"files_ref": SHARED_REF, "files": {"a": ""}}, "files, files_ref: a workspace has one of the two"),
        ({"tests": None}, "exactly one of the two"),
        ({"script": {"files": {}}}, "exactly one of the two"),
        ({"tests": BODY["tests"] | {"fail_to_pass": []}}, "FAIL_TO_PASS is empty"),
        ({"tests": BODY["tests"] | {"fail_to_pass": ["add"]}}, "'add', which is no case"),
    ],
)
def test_a_task_that_cannot_run_is_refused_by_the_field(change: dict[str, Any], fault: str) -> None:
    assert refusal(msgspec.convert(BODY, TaskPublished)) is None
    assert fault in (refusal(msgspec.convert(BODY | change, TaskPublished)) or "")


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (msgspec.msgpack.Ext(5, b"x"), "an Ext"),
        (datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC), "a datetime"),
        (b"bytes", "a bytes"),
        (float("nan"), "nan"),
        (float("inf"), "inf"),
        ({1: 2}, "keys that are not text"),
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("place", ["args", "want"])
def test_a_hidden_case_with_a_value_that_no_json_has_is_refused(value: Any, what: str, place: str) -> None:
    """Foreign clients write msgpack, which holds more than the function can be given or its answer compared with."""
    case = {"id": "add[1]", "args": [], "want": 1} | {place: [value]}
    wire = msgspec.msgpack.encode(BODY | {"tests": BODY["tests"] | {"cases": [case]}})
    fault = refusal(msgspec.msgpack.decode(wire, type=TaskPublished)) or ""
    assert "case id 'add[1]' holds" in fault and what.removeprefix("an ").removeprefix("a ") in fault


def test_a_workspace_by_reference_can_run() -> None:
    body = {name: value for name, value in BODY.items() if name != "files"}
    assert refusal(msgspec.convert(body | {"files_ref": SHARED_REF}, TaskPublished)) is None


def test_a_verifier_that_asks_for_more_time_than_a_grader_has_is_published_with_a_note(tmp_path: Path) -> None:
    script = {"files": {"test.sh": "ZWNobw=="}, "timeout_seconds": 900.0}
    body = {name: value for name, value in BODY.items() if name != "tests"}
    loaded = load_sources([saved(tmp_path, body | {"script": script})])
    assert len(loaded.tasks) == 1
    assert loaded.notes == [f"{BODY['task_id']}: its verifier may take 900 s; it gets 150, and is ungraded past them"]


def test_the_reason_of_a_refusal_is_short_however_large_the_task() -> None:
    cases = [{"id": "\0" * 2_000_000, "args": [], "want": 1}] * 2
    changes: list[dict[str, Any]] = [
        {"files": {"\0" * 3_000_000: ""}},
        {"files": {"a" * 3_000_000: ""}},
        {"tests": BODY["tests"] | {"cases": cases}},
        {"attempts": 10**4000},
    ]
    for change in changes:
        assert len(refusal(msgspec.convert(BODY | change, TaskPublished)) or "") in range(1, 500)


def test_more_attempts_than_a_deployment_can_hold_are_refused_there() -> None:
    task = msgspec.convert(BODY | {"attempts": 9}, TaskPublished)
    assert refusal(task) is None
    assert refusal(task, max_attempts=8) == "attempts: 9, expected 1 to 8"


def test_options_win_over_the_files_and_a_key_for_several_tasks_stays_apart(tmp_path: Path) -> None:
    first = saved(tmp_path, BODY)
    second = saved(tmp_path, BODY | {"task_id": "other"}, "other.json")
    options = Options(
        attempts=3, deadline_seconds=5.0, priority=-2, policy_version=4, purpose="eval", idempotency_key="k"
    )
    (alone,) = load_sources([first], options).tasks
    assert (alone.attempts, alone.deadline_seconds, alone.priority) == (3, 5.0, -2)
    assert (alone.policy_version, alone.purpose, alone.idempotency_key) == (4, "eval", "k")
    both = load_sources([first, second], options).tasks
    assert [task.idempotency_key for task in both] == ["k/add", "k/other"]
    with pytest.raises(TaskNotPublishable, match="'add' is given 2 times"):
        load_sources([first, first])


def test_a_task_that_names_no_policy_is_for_the_one_that_is_trained(tmp_path: Path) -> None:
    unnamed, named = saved(tmp_path, BODY), saved(tmp_path, BODY | {"task_id": "b", "policy": "theirs"}, "b.json")
    spec = as_spec(make_task("train", 0, 0))
    write_task_dir(spec, tmp_path / spec.name)
    made = load_sources([unnamed, named, tmp_path / spec.name], Options(policy="mine")).tasks
    assert [task.policy for task in made] == ["mine", "theirs", "mine"]


def test_one_broken_source_refuses_them_all(tmp_path: Path) -> None:
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    for index in range(2):
        spec = as_spec(make_task("train", 3, index))
        write_task_dir(spec, tasks / spec.name)
    good = load_sources([tasks, saved(tmp_path, BODY)]).tasks
    assert len(good) == 3
    with pytest.raises(BrokenTasks, match="1 of 3"):
        load_sources([tasks, saved(tmp_path, "{", "broken.json")])
    (tasks / spec.name / "instruction.md").unlink()
    with pytest.raises(BrokenTasks, match="1 of 3"):
        load_sources([tasks, saved(tmp_path, BODY)])


def test_an_empty_instruction_by_option_is_found_before_anything_is_published(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="no baseline"):
        load_sources([saved(tmp_path, BODY)], Options(attempts=1))
