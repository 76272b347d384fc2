"""Running a task's small functions in this process, safely and in bounded time.

Only a fixed subset of Python is accepted, checked on the syntax tree before anything runs: functions of assignments,
`if`, `return`, and `for` or comprehensions; calls only of the listed pure builtins and text methods, whose names
nothing may take; no `while`, no power or shift, no import, no other attribute. So no function of the module is ever
called by another. Proof of the bound: no statement grows a list in place (`+=` is only for a name that is never
assigned anything but constants), so every loop runs over an argument or a comprehension (a few items) or over a range
of at most `MAX_RANGE` items, a wider one being an error of the function; loops nest at most `MAX_LOOP_DEPTH` deep.
Time-outs by signal would not work here: library code may not own the process's alarm.
"""

import ast
from collections.abc import Callable, Sequence
from typing import Any

from odradek.infra.demo.family.errors import NotBounded

MAX_RANGE = 10_000
"""Items in a `range`. The templates need under 50; a mutated one may multiply its two ends."""

MAX_LOOP_DEPTH = 2
"""Nested loops and comprehensions; the templates use one, a drill-like edit could write two."""


def _bounded_range(*ends: int) -> range:
    made = range(*ends)
    if len(made) > MAX_RANGE:
        raise ValueError(f"range of {len(made)} items")
    return made


_BUILTINS: dict[str, object] = {
    "sum": sum,
    "len": len,
    "max": max,
    "min": min,
    "any": any,
    "all": all,
    "sorted": sorted,
    "abs": abs,
    "zip": zip,
    "range": _bounded_range,
}
_METHODS = frozenset(("upper", "lower", "startswith", "endswith"))
_ALLOWED: tuple[type[ast.AST], ...] = (
    ast.Module, ast.FunctionDef, ast.arguments, ast.arg, ast.Return, ast.Assign, ast.AugAssign, ast.If, ast.For,
    ast.Expr, ast.Constant, ast.Name, ast.Load, ast.Store, ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.Mod,
    ast.FloorDiv, ast.UnaryOp, ast.USub, ast.Not, ast.BoolOp, ast.And, ast.Or, ast.Compare, ast.cmpop, ast.Call,
    ast.keyword, ast.IfExp, ast.Subscript, ast.Slice, ast.ListComp, ast.GeneratorExp, ast.comprehension, ast.Tuple,
    ast.Attribute,
)  # fmt: skip

Outcome = tuple[str, Any]
"""(`repr` of the value or the exception's class name, the value or None)."""


def check_bounded(tree: ast.Module) -> None:
    """Raise `NotBounded` unless the whole module is in the subset."""
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef) or node.decorator_list:
            raise NotBounded("a module may hold plain function definitions only")
        if _loop_depth(node) > MAX_LOOP_DEPTH:
            raise NotBounded(f"loops nested deeper than {MAX_LOOP_DEPTH} in {node.name!r}")
        _check_no_list_grows(node)
    for part in ast.walk(tree):
        _check(part)


def _check(node: ast.AST) -> None:
    """One node's rules. Only the listed builtins are ever called, since nothing can take one of their names or be
    handed to them as a function: so nothing recurses."""
    where = f"at line {getattr(node, 'lineno', '?')}"
    if not isinstance(node, _ALLOWED):
        raise NotBounded(f"{type(node).__name__} {where} is outside the bounded subset")
    if isinstance(node, ast.Call):
        name = node.func.id if isinstance(node.func, ast.Name) else None
        if name not in _BUILTINS and not isinstance(node.func, ast.Attribute):
            raise NotBounded(f"call of {ast.unparse(node.func)} {where}")
    elif isinstance(node, ast.keyword) and node.arg != "reverse":
        raise NotBounded(f"keyword argument {node.arg!r} {where}")
    elif isinstance(node, ast.Attribute) and node.attr not in _METHODS:
        raise NotBounded(f"attribute {node.attr!r} {where}")
    elif _bound_name(node) in _BUILTINS:
        raise NotBounded(f"{_bound_name(node)!r} is given another meaning {where}")


def _bound_name(node: ast.AST) -> str | None:
    """The name that a node binds, if it binds one."""
    if isinstance(node, ast.FunctionDef):
        return node.name
    if isinstance(node, ast.arg):
        return node.arg
    return node.id if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) else None


def _check_no_list_grows(function: ast.FunctionDef) -> None:
    grown = {ast.unparse(node.target) for node in ast.walk(function) if isinstance(node, ast.AugAssign)}
    stored = {arg.arg for arg in function.args.args}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and not _is_number(node.value):
            stored |= {ast.unparse(target) for target in node.targets}
        elif isinstance(node, ast.For | ast.comprehension):
            stored |= {name.id for name in ast.walk(node.target) if isinstance(name, ast.Name)}
    if grown & stored:
        raise NotBounded(f"'+=' on {sorted(grown & stored)} in {function.name!r} could grow a list that is looped over")


def _is_number(node: ast.expr) -> bool:
    inner = node.operand if isinstance(node, ast.UnaryOp) else node
    return isinstance(inner, ast.Constant) and isinstance(inner.value, int)


def _loop_depth(node: ast.AST) -> int:
    inner = max((_loop_depth(child) for child in ast.iter_child_nodes(node)), default=0)
    generators = len(node.generators) if isinstance(node, ast.ListComp | ast.GeneratorExp) else 0
    return inner + generators + isinstance(node, ast.For)


def load_functions(source: str) -> dict[str, Callable[..., Any]]:
    """The functions of a module in the subset. Raises `SyntaxError` or `NotBounded`."""
    tree = ast.parse(source)
    check_bounded(tree)
    scope: dict[str, Any] = {"__builtins__": _BUILTINS}
    exec(compile(tree, "<task>", "exec"), scope)
    return {name: value for name, value in scope.items() if name != "__builtins__"}


def outcome(function: Callable[..., Any], args: Sequence[Any]) -> Outcome:
    """What a call gives, the way `test.py` reports it."""
    try:
        value = function(*[list(arg) if isinstance(arg, list) else arg for arg in args])
    except Exception as error:  # the function under test may raise anything: that is its outcome
        return type(error).__name__, None
    return repr(value), value
