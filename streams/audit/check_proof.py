"""Checks a proof of `odradek audit prove` with nothing of ours: python check_proof.py PROOF.json PUBLIC_KEY_HEX

Exit code 0 and one line if the record in the proof was anchored under that key; an error and 1 if not."""

import base64
import hashlib
import json
import struct
import sys
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey


def chunk(data: bytes | None) -> bytes:
    return struct.pack(">q", -1) if data is None else struct.pack(">q", len(data)) + data


def raw(text: str | None) -> bytes | None:
    return None if text is None else base64.b64decode(text)


def need(fact: bool, what: str) -> None:
    if not fact:
        sys.exit(f"not proved: {what}")


proof = json.loads(Path(sys.argv[1]).read_text())
record, key = proof["record"], bytes.fromhex(sys.argv[2])
stated = dict(line.split(": ", 1) for line in proof["statement"].splitlines())
Ed25519PublicKey.from_public_bytes(key).verify(bytes.fromhex(proof["signature"]), proof["statement"].encode())
need(stated["odradek audit anchor"] == "v1" and stated["key"] == key.hex(), "the statement is of another form or key")
need([stated["topic"], stated["partition"]] == [record["topic"], str(record["partition"])], "another partition")
fields = [b"\x00", chunk(b"odradek.record.v1"), chunk(record["topic"].encode())]
fields += [struct.pack(">iqq", record["partition"], record["offset"], record["timestamp"])]
fields += [chunk(raw(record["key"])), chunk(raw(record["value"])), struct.pack(">i", len(record["headers"]))]
fields += [chunk(raw(part)) for header in record["headers"] for part in header]
node, index, size, path = hashlib.sha256(b"".join(fields)).digest(), proof["index"], int(stated["count"]), proof["path"]
need(0 <= index < size, "no such place in the interval")
while size > 1:
    if index ^ 1 < size:
        sibling, path = bytes.fromhex(path[0]), path[1:]
        node = hashlib.sha256(b"\x01" + (sibling + node if index & 1 else node + sibling)).digest()
    index, size = index // 2, (size + 1) // 2
need(not path and node.hex() == stated["root"], "the path does not lead to the signed root")
print(f"{record['topic']}/{record['partition']}@{record['offset']} was anchored in round {stated['round']}")
