"""Runs inside the grading sandbox, as `python3 -c`: calls the function under test and reports what it returned.

Holds the arguments of the cases and nothing that says what is wanted. Imports what it needs before the workspace is on
the path, so that a planted module can't take its place. argv: the plan as JSON, the workspace's path.
"""

import json
import sys

_write, _flush, _dump = sys.stdout.write, sys.stdout.flush, json.dumps
_plan = json.loads(sys.argv[1])
_write(_plan["started"] + "\n")
_flush()
sys.path.insert(0, sys.argv[2])


def _say(case: str, kind: str, value: object) -> None:
    _write(_plan["mark"] + _dump([case, kind, value]) + "\n")
    _flush()


def _plain(value: object) -> bool:
    if value is None or type(value) in (bool, int, float, str):
        return True
    return isinstance(value, list) and type(value) is list and all(_plain(item) for item in value)


_function = None
try:
    _function = getattr(__import__(_plan["module"]), _plan["function"])
except BaseException as error:  # the agent's code may raise anything, SystemExit included
    _say("", "import", type(error).__name__)
if _function is not None:
    for _case, _args in _plan["cases"]:
        try:
            _value = _function(*_args)
        except BaseException as error:
            _say(_case, "raised", type(error).__name__)
        else:
            _say(_case, "value" if _plain(_value) else "other", _value if _plain(_value) else type(_value).__name__)
