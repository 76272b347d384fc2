"""Guarantee 10, any event has an inclusion proof; and what is hashed and signed is fixed for ever."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from support.audit_world import KEY, PLACE, anchored

from odradek.streams.audit import chain
from odradek.streams.audit.anchors import genuine, read_marks, read_round, round_bytes, statement
from odradek.streams.audit.keys import SigningKey, load_key, load_or_make_key
from odradek.streams.audit.proof import NotProvable, Proof, proof_of
from odradek.streams.audit.scope import Due
from odradek.streams.audit.settings import AuditSettings
from odradek.streams.envelope import Record
from odradek.streams.errors import Terminal
from odradek.streams.events.audit import AnchorWritten
from odradek.streams.events.meta import RecordRef

SCRIPT = Path(chain.__file__).with_name("check_proof.py")
RECORDS = [
    Record(
        RecordRef(*PLACE, 10 + 2 * n),
        f"key-{n}".encode(),
        None if n == 3 else bytes([n, 255]),
        (("ce_id", f"id-{n}".encode()), ("é", None), ("empty", b"")),
        1_700_000_000_000 + n,
    )
    for n in range(7)
]
VECTORS = {
    1: "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
    2: "fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125",
    3: "aeb6bcfe274b70a14fb067a5e5578264db0fa9b51af5e0ba159158f329e06e77",
    4: "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
    5: "4e3bbb1f7b478dcfe71fb631631519a3bca12c9aefca1612bfce4c13a86264d4",
    6: "76e67dadbcdf1e10e1b74ddc608abd2f98dfb16fbce75277b5232a127f2087ef",
    7: "ddb89be403809e325750d3d263cd78929c2942b7942a34b77e122c9594a74c8c",
    8: "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328",
}
"""Tree hashes of the first n of these leaves, from Certificate Transparency's own tests."""
LEAVES = ["", "00", "10", "2021", "3031", "40414243", "5051525354555657", "606162636465666768696a6b6c6d6e6f"]


def check(tmp_path: Path, proof: Proof | dict[str, object], key: str = KEY.public) -> subprocess.CompletedProcess[str]:
    """The independent script, as a process of its own."""
    path = tmp_path / "proof.json"
    path.write_bytes(msgspec.json.encode(proof))
    return subprocess.run(
        [sys.executable, "-I", str(SCRIPT), str(path), key], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize("size", VECTORS)
def test_the_tree_is_that_of_rfc_6962(size: int) -> None:
    leaves = [hashlib.sha256(b"\x00" + bytes.fromhex(leaf)).digest() for leaf in LEAVES[:size]]
    assert chain.root(leaves).hex() == VECTORS[size]


@pytest.mark.parametrize("index", range(len(RECORDS)))
def test_any_record_has_a_proof_that_an_independent_script_checks(tmp_path: Path, index: int) -> None:
    (anchor,) = anchored(RECORDS, len(RECORDS))
    proof = proof_of(anchor, RECORDS, RECORDS[index])
    assert (proof.index, proof.count) == (index, 7)
    answer = check(tmp_path, proof)
    assert (answer.returncode, answer.stderr) == (0, "")
    assert answer.stdout == f"sessions.v1/3@{10 + 2 * index} was anchored in round 0\n"


def test_a_proof_of_one_record_alone(tmp_path: Path) -> None:
    (anchor,) = anchored(RECORDS[:1], 1)
    proof = proof_of(anchor, RECORDS[:1], RECORDS[0])
    assert proof.path == [] and check(tmp_path, proof).returncode == 0


def test_the_script_needs_nothing_of_ours_and_has_40_lines() -> None:
    source = SCRIPT.read_text()
    assert "odradek." not in source.replace('b"odradek.record.v1"', "")
    assert len([line for line in source.splitlines() if line.strip()]) <= 40


def forged(proof: dict[str, object], name: str) -> dict[str, object]:
    record = dict(proof["record"])  # type: ignore[call-overload]
    signed = str(proof["statement"])
    match name:
        case "offset" | "timestamp" | "partition":
            return {**proof, "record": {**record, name: record[name] + 1}}
        case "topic":
            return {**proof, "record": {**record, "topic": "tasks.v1"}}
        case "value":
            return {**proof, "record": {**record, "value": "AAAA"}}
        case "header":
            return {**proof, "record": {**record, "headers": record["headers"][::-1]}}
        case "index":
            return {**proof, "index": 3}
        case "path":
            return {**proof, "path": list(proof["path"])[:-1]}  # type: ignore[call-overload]
        case "root":
            start = signed.index("root: ") + 6
            return {**proof, "statement": signed[:start] + "0" * 64 + signed[start + 64 :]}
        case _:
            return {**proof, "signature": "00" * 64}


NAMES = ["offset", "timestamp", "partition", "topic", "value", "header", "index", "path", "root", "signature"]


@pytest.mark.parametrize("name", NAMES)
def test_a_forged_proof_is_refused(tmp_path: Path, name: str) -> None:
    (anchor,) = anchored(RECORDS, len(RECORDS))
    proof = msgspec.to_builtins(proof_of(anchor, RECORDS, RECORDS[2]))
    answer = check(tmp_path, forged(proof, name))
    assert answer.returncode == 1 and answer.stdout == ""


def test_a_proof_under_another_key_is_refused(tmp_path: Path) -> None:
    (anchor,) = anchored(RECORDS, len(RECORDS))
    other = SigningKey(Ed25519PrivateKey.from_private_bytes(bytes(32))).public
    assert check(tmp_path, proof_of(anchor, RECORDS, RECORDS[2]), other).returncode == 1


def test_a_record_that_is_not_as_anchored_has_no_proof() -> None:
    (anchor,) = anchored(RECORDS, len(RECORDS))
    changed = [*RECORDS[:4], replace(RECORDS[4], value=b"other"), *RECORDS[5:]]
    with pytest.raises(NotProvable, match=r"records 10\.\.22 are not those that round 0 anchored"):
        proof_of(anchor, changed, changed[0])


def test_statement_and_leaf_are_those_of_every_version_before() -> None:
    """Golden: what was signed once must check for ever."""
    (anchor,) = anchored(RECORDS, len(RECORDS))
    assert statement(anchor).decode() == GOLDEN
    assert chain.leaf_of(RECORDS[3]).hex() == "50c42b338503da9ff07c9b82e39fe45e8d7315db662e960fca27b2257344173b"
    assert anchor.signature.hex().startswith("d148f0b96135feb811132c85cb0427fb")


GOLDEN = """\
odradek audit anchor: v1
deployment: default
round: 0
before: 0000000000000000000000000000000000000000000000000000000000000000
topic: sessions.v1
partition: 3
first: 10
last: 22
count: 7
chain: 797a34ce80e45c0fd87289ee0bb3eb4de4f7253ca6bed332b7e53b0206d3b200
root: d4e1109ea0d5a0e26272ae69c10aef0ab0e518ba4f7c95573617183c769963cf
marks: 04c654fbaec5a868ddcc11ec84744c74e0128afafc392db7e9f16b7b0f0a6f84
previous: 0000000000000000000000000000000000000000000000000000000000000000
locked: true
time_ms: 1700000000000
key: 03a107bff3ce10be1d70dd18e74bc09967e4d6309ba50d5f1ddc8664125531b8
"""


@pytest.mark.parametrize("field", [name for name in AnchorWritten.__struct_fields__ if name != "signature"])
def test_every_field_of_an_anchor_is_signed(field: str) -> None:
    (anchor,) = anchored(RECORDS, len(RECORDS))
    assert genuine(anchor, {KEY.public})
    was = getattr(anchor, field)
    changes: dict[type, Callable[[], object]] = {
        str: lambda: "0" * 63 + "1",
        int: lambda: was + 1,
        bool: lambda: not was,
        bytes: lambda: was + b"\x00",
    }
    other = msgspec.structs.replace(anchor, **{field: changes[type(was)]()})
    assert not genuine(other, {KEY.public, other.key})


def test_an_anchor_survives_the_vault_whole() -> None:
    anchors = anchored(RECORDS, 3, rounds=3)
    assert read_round(round_bytes(anchors)) == anchors
    assert [offset for one in anchors for offset, _ in read_marks(one)] == [one.ref.offset for one in RECORDS]


# -- the key -------------------------------------------------------------------------------------------------------


def test_the_key_is_made_once_and_only_its_owner_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "audit" / "notary.key"
    key = load_or_make_key(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert load_or_make_key(path).public == key.public == load_key(path).public
    assert [one.name for one in path.parent.iterdir()] == ["notary.key"]
    assert key.public not in repr(key) and "private" not in repr(key)


@pytest.mark.parametrize("content", [b"", b"no key", b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n"])
def test_a_file_that_holds_no_key_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "notary.key"
    path.touch(0o600)
    path.write_bytes(content)
    with pytest.raises(Terminal, match=r"notary\.key"):
        load_or_make_key(path)


def test_a_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "notary.key"
    load_or_make_key(path)
    path.chmod(0o640)
    with pytest.raises(Terminal, match="chmod 600"):
        load_or_make_key(path)


# -- when a round is due -------------------------------------------------------------------------------------------


def test_a_round_is_due_after_n_records_or_t_seconds() -> None:
    due = Due(AuditSettings(interval_records=10, interval_s=60))
    place, other = ("sessions.v1", 0), ("sessions.v1", 1)
    assert not due(0.0, {})
    assert not due(100.0, {place: 0})
    assert not due(100.0, {place: 9, other: 9})
    assert not due(159.0, {place: 9, other: 9})
    assert due(160.0, {place: 1})
    assert not due(161.0, {place: 1}), "the clock begins anew"
    assert due(162.0, {place: 1, other: 10})
    assert not due(162.0, {place: 0})
    assert not due(300.0, {place: 3}), "a record that just came has not waited"
