"""Writes the committed schemas: `python -m odradek.streams.schemas.generate [--check | --golden DIR | --forget]`.

events/TYPE.json is today's schema, history/TYPE.jsonl every schema that was ever published (the last line is today's),
asyncapi.json the whole log. A change that breaks any line of the history is refused, and so is a type that is gone
without upcasters to one that is there: its records are on somebody's log. `--check` only compares; `--forget` starts
the history anew, for the time before a first release; `--golden` also renews golden bytes.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from odradek.streams import codec
from odradek.streams.errors import SchemaBreak
from odradek.streams.schemas import asyncapi, golden
from odradek.streams.schemas.catalog import event_schema
from odradek.streams.schemas.evolution import breaks

HERE = Path(__file__).resolve().parent


def _pretty(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def _line(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def history(tag: str, folder: Path = HERE) -> list[dict[str, Any]]:
    """Every published schema of a type, oldest first."""
    path = folder / "history" / f"{tag}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def broken(tag: str, schema: dict[str, Any], folder: Path = HERE) -> list[str]:
    """How today's schema breaks any published one (FULL_TRANSITIVE)."""
    return [found for published in history(tag, folder) for found in breaks(published, schema)]


def unread(folder: Path = HERE) -> list[str]:
    """Types that were published once and that today's code reads neither by themselves nor through upcasters."""
    published = sorted(path.stem for path in folder.glob("history/*.jsonl"))
    return [tag for tag in published if codec.newest(tag) not in codec.registry()]


def planned(folder: Path = HERE, *, forget: bool = False) -> dict[Path, str]:
    """What every generated file must hold today; raises `SchemaBreak` where a change is not allowed."""
    if lost := [] if forget else unread(folder):
        raise SchemaBreak(
            f"published types that nothing reads any more: {', '.join(lost)}. Register their upcasters "
            f"(odradek.streams.codec.UPCASTERS), beside the struct that replaced them",
            types=lost,
        )
    files = {folder / "asyncapi.json": _pretty(asyncapi.document())}
    for tag, kind in codec.registry().items():
        schema = event_schema(kind)
        published = [] if forget else history(tag, folder)
        if found := [] if forget else broken(tag, schema, folder):
            raise SchemaBreak(
                f"{tag} changed in a way that older readers or records would not survive: {'; '.join(found)}. Give new "
                f"fields a default, or make a new version with an upcaster",
                type=tag,
            )
        if not published or published[-1] != schema:
            published = [*published, schema]
        files[folder / "events" / f"{tag}.json"] = _pretty(schema)
        files[folder / "history" / f"{tag}.jsonl"] = "".join(f"{_line(one)}\n" for one in published)
    return files


def stale(folder: Path = HERE) -> list[str]:
    """Generated files that are not as today's code would write them, or that nothing writes any more."""
    files = planned(folder)
    wrong = [path for path, text in files.items() if not path.exists() or path.read_text() != text]
    left = [path for path in folder.glob("events/*.json") if path not in files]
    return sorted(str(path.relative_to(folder)) for path in (*wrong, *left))


def write(folder: Path = HERE, *, forget: bool = False) -> list[str]:
    """Writes what differs and returns the names of the files written or removed."""
    changed = []
    files = planned(folder, forget=forget)
    for path, text in files.items():
        if not path.exists() or path.read_text() != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            changed.append(str(path.relative_to(folder)))
    for path in [*folder.glob("events/*.json"), *(folder.glob("history/*.jsonl") if forget else ())]:
        if path not in files:
            path.unlink()
            changed.append(f"{path.relative_to(folder)} (removed)")
    return changed


def main(arguments: list[str] | None = None) -> int:
    """Exit code 1: stale under --check, or a refused change."""
    parser = argparse.ArgumentParser(prog="python -m odradek.streams.schemas.generate", description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare only")
    parser.add_argument("--forget", action="store_true", help="start the history anew (before a first release)")
    parser.add_argument("--golden", type=Path, metavar="DIR", help="also renew the golden bytes in DIR")
    options = parser.parse_args(arguments)
    try:
        changed = stale() if options.check else write(forget=options.forget)
    except SchemaBreak as error:
        print(error, file=sys.stderr)
        return 1
    print("\n".join(changed) or "schemas are as the code says")
    if options.golden is not None:
        if options.forget:
            for path in options.golden.glob("*.jsonl"):
                path.unlink()
        print("\n".join(golden.renew(options.golden)) or "golden bytes are as the code writes them")
    return 1 if options.check and changed else 0


if __name__ == "__main__":
    raise SystemExit(main())
