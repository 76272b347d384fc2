"""Guarantee 12, the part that a table can hold: nothing in the code waits that the table does not name."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from odradek.infra.observe.waits import BY_NAME, NOT_WAITS, TABLE, Wait
from odradek.infra.telemetry.metrics import NAMES

ROOT = Path(__file__).resolve().parents[2]

TIMED = {("asyncio", "wait_for"), ("asyncio", "timeout"), ("asyncio", "timeout_at"), ("asyncio", "wait")}
TIMED |= {("asyncio", "sleep"), ("time", "sleep")}
ENDLESS = ("get", "join", "communicate")
"""Of a queue or a process: awaited without an argument they have no end of their own. So has `.remote`, an actor's
answer."""


def waits_in(source: str) -> Iterator[tuple[str, str]]:
    """(function, call) of everything in a module that waits, or reads as if it did."""

    tree = ast.parse(source)
    awaited = {node.value for node in ast.walk(tree) if isinstance(node, ast.Await)}

    def visit(node: ast.AST, names: tuple[str, ...]) -> Iterator[tuple[str, str]]:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names = (*names, node.name)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            call, base = node.func.attr, getattr(node.func.value, "id", "")
            named = (base, call) in TIMED
            method = base != "asyncio" and (call in ("wait", "acquire") or (call in ("result", "poll") and node.args))
            if named or method or call == "remote" or (call in ENDLESS and node in awaited and not node.args):
                yield ".".join(names), f".{call}"
        for child in ast.iter_child_nodes(node):
            yield from visit(child, names)

    return visit(tree, ())


def sites() -> dict[str, list[str]]:
    """By `room/file.py:function` the calls that wait there."""
    found: dict[str, list[str]] = {}
    for room in ("actors", "streams"):
        for path in sorted((ROOT / room).rglob("*.py")):
            for function, call in waits_in(path.read_text()):
                site = f"{path.relative_to(ROOT)}:{function}"
                if f"{site} {call}" not in NOT_WAITS:
                    found.setdefault(site, []).append(call)
    return found


def test_every_wait_of_the_code_is_in_the_table_and_the_table_names_no_other() -> None:
    listed = [site for wait in TABLE for site in wait.sites]
    assert len(listed) == len(set(listed)), "a place waits for one thing"
    there = sites()
    assert sorted(there.keys() - set(listed)) == [], "add these to TABLE in infra/observe/waits.py"
    assert sorted(set(listed) - there.keys()) == [], "these wait no more"


@pytest.mark.parametrize("wait", TABLE, ids=lambda wait: wait.name)
def test_each_wait_has_an_owner_an_end_and_a_metric_that_is_on_the_page(wait: Wait) -> None:
    assert wait.owner and wait.on and wait.then
    assert wait.metric in NAMES
    for number in wait.deadline:
        module, _, name = number.rpartition(".")
        assert module and name, f"{number!r} is neither module.CONSTANT nor Type.field"
    bound = wait.seconds()  # raises where a constant is not there any more
    assert bound is None or 0 < bound <= 3600
    if not wait.deadline:
        assert any(word in wait.then for word in ("nothing is owed", "of its own", "a person", "says so", "so many"))


def test_names_are_unique() -> None:
    assert len(BY_NAME) == len(TABLE)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("async def f():\n    await asyncio.wait_for(x, 1)", [("f", ".wait_for")]),
        ("async def f():\n    async with asyncio.timeout(D):\n        await x", [("f", ".timeout")]),
        ("class A:\n    def g(self):\n        self.event.wait()", [("A.g", ".wait")]),
        ("def f():\n    future.result(5)", [("f", ".result")]),
        ("def f():\n    return future.result()", []),
        ("def f():\n    time.sleep(1)", [("f", ".sleep")]),
        ("async def f():\n    await queue.get()", [("f", ".get")]),
        ("async def f():\n    await process.communicate()", [("f", ".communicate")]),
        ("async def f():\n    return await actor.method.remote(x)", [("f", ".remote")]),
        ("async def f():\n    return await store.get(key) or names.get()", []),
    ],
)
def test_what_the_walk_sees(source: str, found: list[tuple[str, str]]) -> None:
    """A new wait can't slip by: this is what the first test relies on."""
    assert list(waits_in(source)) == found
