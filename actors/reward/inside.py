"""Runs inside the grading sandbox, as `python3 -c`: calls the function under test and reports what it returned.

Holds the arguments of the cases and nothing that says what is wanted. Imports what it needs before the workspace is on
the path, so that a planted module can't take its place (the interpreter must be isolated, `-I`: with `-c` alone it
looks in the current directory first). Each report begins a line of its own, whatever the function printed before it.
argv: the path of the plan, which is JSON and gone before the agent's code begins; the workspace's path.
"""

import json
import sys
from importlib import import_module
from os import unlink

_write, _flush, _dump = sys.stdout.write, sys.stdout.flush, json.dumps
with open(sys.argv[1], encoding="utf-8") as _file:  # noqa: PTH123 pathlib is not worth its import time here
    _plan = json.load(_file)
unlink(sys.argv[1])  # noqa: PTH108
_write(_plan["started"] + "\n")
_flush()
sys.path.insert(0, sys.argv[2])


def _say(report: str) -> None:
    _write("\n" + _plan["mark"] + report + "\n")
    _flush()


def _plain(value: object) -> bool:
    """Whether JSON gives the value back as it is: exact types, so that no subclass or tuple passes for another."""
    if value is None or type(value) in (bool, int, float, str):
        return True
    if isinstance(value, dict) and type(value) is dict:
        return all(type(key) is str and _plain(item) for key, item in value.items())
    return isinstance(value, list) and type(value) is list and all(_plain(item) for item in value)


_function = None
try:
    _function = getattr(import_module(_plan["module"]), _plan["function"])
except BaseException as error:  # the agent's code may raise anything, SystemExit included
    _say(_dump(["", "import", type(error).__name__]))
if _function is not None:
    for _case, _args in _plan["cases"]:
        try:
            _value = _function(*_args)
            _report = _dump([_case, "value", _value] if _plain(_value) else [_case, "other", type(_value).__name__])
        except BaseException as error:  # an endless structure included
            _report = _dump([_case, "raised", type(error).__name__])
        _say(_report)
