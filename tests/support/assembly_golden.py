"""Golden batches of the assembler: fixed records in, and the bytes that version 1 must give for ever.

`tests/golden/assembly/v1.json` holds for each case the stored bytes of every record, the configuration and consents,
and what they make: the batch event and a digest of each materialised array. Run in `tests/`:

    python -m support.assembly_golden              # adds cases that are new; refuses if an old one gives other bytes
    python -m support.assembly_golden --overwrite  # takes today's bytes, shows what changed: before a release only

A rule that must change goes into a new `streams/assembly/vN`; the old one stays, for the batches it made.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import random
import sys
from array import array
from pathlib import Path
from typing import Any

import msgspec

from odradek.streams import codec
from odradek.streams.assembly.v1.batch import Positions, build, materialise, reassemble, verify
from odradek.streams.assembly.v1.merkle import little_endian
from odradek.streams.assembly.v1.select import GroupRecords, choose
from odradek.streams.assembly.v1.sequence import MalformedSession, Sequence, sequence_of
from odradek.streams.codec import f32, i32
from odradek.streams.errors import DecodeError
from odradek.streams.events.groups import GroupSealed, LaneConfigured, SealedMember
from odradek.streams.events.meta import Meta, RecordRef
from odradek.streams.events.rewards import RewardAssigned
from odradek.streams.events.sessions import (
    ContextSummarized,
    EndReason,
    SessionCompleted,
    SessionOpened,
    SessionResumed,
    TurnSampled,
    Usage,
    WeightSpan,
)
from odradek.streams.ownership import SessionRecord
from support.assembly_world import turn

FILE = Path(__file__).parents[1] / "golden" / "assembly" / "v1.json"
VOCABULARY = 512

Case = dict[str, Any]


# -- what a case makes ----------------------------------------------------------------------------------------------


def _value(text: str, kind: str) -> tuple[Meta, Any]:
    return codec.decode(base64.b64decode(text), kind)


def sequence_from(session_id: str, rows: list[list[Any]]) -> Sequence | None:
    """As the log's reader does: a session with a record that can't be decoded has no sequence."""
    records: list[SessionRecord] = []
    try:
        for offset, identifier, kind, value in rows:
            meta, body = _value(value, kind)
            records.append((offset, identifier, meta, body))
        return sequence_of(session_id, records)
    except (DecodeError, MalformedSession):
        return None


def groups_of(case: Case) -> list[GroupRecords]:
    groups = []
    for row in case["groups"]:
        sequences = {session: sequence_from(session, rows) for session, rows in row["sessions"].items()}
        groups.append(
            GroupRecords(
                offset=row["offset"],
                sealed=_value(row["sealed"], "group.sealed.v1")[1],
                rewards={s: _value(v, "reward.assigned.v1")[1] for s, v in row["rewards"].items()},
                sequences={session: made for session, made in sequences.items() if made is not None},
            )
        )
    return groups


def outputs(case: Case) -> dict[str, Any]:
    """The batch event's bytes and the digests of the arrays that are trained from it."""
    groups, config = groups_of(case), msgspec.convert(case["config"], LaneConfigured)
    granted, keys = set(case["granted"]), {s: bytes.fromhex(k) for s, k in case["keys"].items()}
    chosen = choose(groups, config, granted.__contains__)
    positions = Positions(**case["positions"])
    batch = build(chosen.kept, chosen.dropped, config, case["ordinal"], positions, keys.get)
    again = reassemble(batch, groups, config, granted.__contains__, keys.get)
    sequences = {session: made for group in groups for session, made in group.sequences.items()}
    left_out = frozenset(case["left_out"])
    return {
        "batch": base64.b64encode(codec.encode(batch, Meta())).decode(),
        "kept": [group.group_id for group in chosen.kept],
        "dropped": {one.group_id: one.reason for one in chosen.dropped},
        "advantages": [member.advantage.hex() for member in batch.members],
        "merkle_root": batch.merkle_root,
        "reassembled": again == batch,
        "leaves": sorted(set(verify(batch, sequences, config.max_staleness, keys.get).values())),
        "arrays": [
            {name: _digest(getattr(micro, name)) for name in micro.__slots__}
            for micro in materialise(batch, sequences, config.max_staleness, left_out)
        ],
    }


def _digest(values: array[Any]) -> str:
    return f"{len(values)} {values.typecode} {hashlib.sha256(little_endian(values)).hexdigest()}"


# -- the cases ------------------------------------------------------------------------------------------------------


def _b64(body: Any, meta: Meta | None = None) -> str:
    return base64.b64encode(codec.encode(body, meta or Meta())).decode()


class Writer:
    """Makes up records from a seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.offset = 0

    def said(self, number: int, position: int, version: int, segment: int = 0) -> TurnSampled:
        prompt = [self.random.randrange(VOCABULARY) for _ in range(self.random.randint(1, 9))]
        completion = [self.random.randrange(VOCABULARY) for _ in range(self.random.randint(2, 12))]
        one = turn(number, position, prompt, completion)
        spans = [WeightSpan(0, version)]
        if len(completion) > 4:
            spans.append(WeightSpan(len(completion) // 2, version + 1))
        logprobs = f32([-self.random.randrange(1, 800) / 96 for _ in completion])
        return msgspec.structs.replace(one, spans=spans, logprobs=logprobs, segment=segment)

    def session(self, name: str, meta: dict[str, Any], *, odd: str, version: int) -> list[list[Any]]:
        """Rows (offset, id, type, bytes). `odd` is what is special about it."""
        epoch = self.offset
        bodies: list[Any] = []
        position = 0
        for number in range(self.random.randint(1, 3)):
            bodies.append(self.said(number, position, version))
            position += (len(bodies[-1].prompt) + len(bodies[-1].completion)) // 4
        if odd == "summary":
            bodies.append(ContextSummarized(segment=1, prompt=i32(range(7)), cut_after_turn=0))
            bodies.append(self.said(9, 7, version, segment=1))
        reason: EndReason = "context" if odd == "truncated" else "done"
        bodies.append(SessionCompleted(reason=reason, first_offset=epoch, usage=Usage(turns=2)))
        opened = SessionOpened(session_id=name, policy="demo")
        rows = [[epoch, f"{name}/open", "session.opened.v1", _b64(opened, Meta(**meta))]]
        if odd == "takeover":
            stray = self.said(0, 0, version)
            rows.append([epoch + 1, f"{name}/old", "turn.sampled.v1", _b64(stray, Meta(**meta, epoch=-9, seq=0))])
            epoch += 2
            rows.append([epoch, f"{name}/new", "session.resumed.v1", _b64(SessionResumed(session_id=name))])
        for seq, body in enumerate(bodies):
            value = _b64(body, Meta(**meta, epoch=epoch, seq=seq))
            if odd == "poison" and seq == 0:
                value = base64.b64encode(b"\xc1").decode()
            rows.append([epoch + 1 + seq, f"{name}/{seq}", codec.type_of(body), value])
        self.offset = epoch + len(bodies) + 3
        return rows

    def group(self, name: str, totals: list[float], *, odd: str = "", version: int = 0, **meta: Any) -> dict[str, Any]:
        ids = [f"{name}.{i}" for i in range(len(totals))]
        sessions = {
            one: self.session(one, meta, odd=odd if i == 1 else "", version=version) for i, one in enumerate(ids)
        }
        members, rewards = [], {}
        for i, (one, total) in enumerate(zip(ids, totals, strict=True)):
            span: dict[str, Any] = {
                "partition": i % 16, "first_offset": sessions[one][0][0], "last_offset": sessions[one][-1][0],
            }  # fmt: skip
            reward = RewardAssigned(
                session_id=one, group_id=name, grader="g", grader_version="1", total=total, sampled_tokens=7,
                components={"solved": float(total > 0.5)}, **span,
            )  # fmt: skip
            rewards[one] = _b64(reward)
            ref = RecordRef("rewards.v1", i % 16, self.offset + i)
            members.append(SealedMember(session_id=one, status="rewarded", reward=ref, **span))
        members.append(SealedMember(session_id=f"{name}.lost", status="missing"))
        sealed = GroupSealed(group_id=name, lane="main-0", reason="complete", members=members)
        self.offset += 3
        return {"offset": self.offset, "sealed": _b64(sealed), "rewards": rewards, "sessions": sessions}


def _case(name: str, groups: list[dict[str, Any]], config: dict[str, Any], **more: Any) -> Case:
    last = groups[-1]["offset"]
    full = LaneConfigured(lane="main-0", policy="demo", groups_per_batch=2, attempts=4, max_staleness=2, **config)
    return {
        "name": name,
        "config": msgspec.to_builtins(full),
        "groups": groups,
        "ordinal": 3,
        "positions": {
            "config_offset": 2,
            "input_offset": last,
            "subjects_offset": 5,
            "weights_offset": 4,
        },
        "granted": [],
        "keys": {},
        "left_out": [],
    } | more


def cases() -> list[Case]:
    """Every case from its seed. The order and the seeds of old cases never change; new ones go to the end."""
    one, two, three, four = (Writer(seed) for seed in range(1, 5))
    thirds = [1.0, 0.0, 1 / 3, 0.97, 0.0, 1.0, 0.1]
    return [
        _case("plain", [one.group("a", [1.0, 0.0, 0.0, 1.0], version=2), one.group("b", [0.0, 0.94], version=3)], {}),
        _case(
            "every reason and every kind of session",
            [
                two.group("flat", [1.0, 1.0, 1.0]),
                two.group("summary", [1.0, 0.0, 0.0], odd="summary", version=2),
                two.group("poison", [1.0, 0.0], odd="poison"),
                two.group("takeover", [0.0, 1.0], odd="takeover", version=3),
                two.group("eval", [1.0, 0.0], origin="eval"),
                two.group("ada", [1.0, 0.0], origin="production", subject="ada", version=2),
                two.group("ben", [1.0, 0.0], origin="production", subject="ben", version=2),
                two.group("lonely", [1.0]),
                two.group("stale", [1.0, 0.0], odd="truncated", version=0),
            ],
            {"token_budget": 40},
            granted=["ada"],
            keys={"ada": "00ff" * 8},
            left_out=["ada.1"],
        ),
        _case("grpo, thirds", [three.group("t", thirds, version=2)], {"advantage": "grpo", "token_budget": 90}),
        _case("rloo, thirds", [four.group("t", thirds, version=2)], {"advantage": "rloo", "token_budget": 64}),
    ]


# -- the file -------------------------------------------------------------------------------------------------------


def stored() -> list[Case]:
    found: list[Case] = json.loads(FILE.read_text()) if FILE.exists() else []
    return found


def differences(case: Case) -> list[str]:
    """What today's code makes of a stored case otherwise than was stored, by name."""
    today, was = outputs(case), case["outputs"]
    return [
        f"{case['name']}: {name} was {was.get(name)!r}, is {today[name]!r}"
        for name in today
        if today[name] != was.get(name)
    ]


def main(arguments: list[str] | None = None) -> int:
    """Exit code 1 when an old case gives other bytes and `--overwrite` was not given."""
    parser = argparse.ArgumentParser(prog="python -m support.assembly_golden", description=__doc__)
    parser.add_argument("--overwrite", action="store_true", help="take today's bytes (before a release only)")
    options = parser.parse_args(arguments)
    old = {case["name"]: case for case in stored()}
    changed = [line for case in old.values() for line in differences(case)]
    print("\n".join(line[:300] for line in changed) or f"{len(old)} cases are as stored")
    if changed and not options.overwrite:
        print("assembly v1 gives other bytes than it gave: make a v2, or --overwrite before a release", file=sys.stderr)
        return 1
    kept = [case for case in cases() if options.overwrite or case["name"] not in old]
    rows = [*([] if options.overwrite else old.values()), *({**case, "outputs": outputs(case)} for case in kept)]
    FILE.parent.mkdir(parents=True, exist_ok=True)
    FILE.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
