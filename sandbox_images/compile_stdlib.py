"""Compile a library so that its bytes repeat and starting needs no time stamps. Run as a script by the image builder:

    python -S -s -B compile_stdlib.py DIRECTORY PATH_IN_IMAGE

Each module gets an unchecked hash-based `.pyc`, written in marshal format 2, which has no back references: in later
formats these depend on reference counts, so that two builds differ. Files that do not compile are left as they are
(the standard library ships some on purpose).
"""

import importlib.util
import marshal
import sys
from pathlib import Path

UNCHECKED_HASH = (1).to_bytes(4, "little")
MARSHAL_FORMAT = 2


def compile_tree(directory: Path, path_in_image: str) -> None:
    """Write `__pycache__/NAME.TAG.pyc` beside each module below `directory`."""
    for source in sorted(directory.rglob("*.py")):
        name = f"{path_in_image}/{source.relative_to(directory)}"
        raw = source.read_bytes()
        try:
            code = compile(raw, name, "exec", dont_inherit=True, optimize=0)
        except (SyntaxError, ValueError):
            continue
        target = source.parent / "__pycache__" / f"{source.stem}.{sys.implementation.cache_tag}.pyc"
        target.parent.mkdir(exist_ok=True)
        header = importlib.util.MAGIC_NUMBER + UNCHECKED_HASH + importlib.util.source_hash(raw)
        target.write_bytes(header + marshal.dumps(code, MARSHAL_FORMAT))


if __name__ == "__main__":
    compile_tree(Path(sys.argv[1]), sys.argv[2])
