"""Which chain is in force, and how a restore begins another one. Guarantees:

- without a restore there is one chain, called as the deployment is; `odradek restore` begins NAME/r1, NAME/r2, …, and
  only where no notary could go on: the log lacks rounds that were signed, has others, or ends before what they cover;
- what says so (`audit.chain_begun` on audit.anchors.v1) is signed by the notary's key, names the chain that it gives
  up and how many of its rounds the log still had: nobody else can begin a chain, an old record that is written again
  changes nothing, and `audit verify` shows every chain that was ever given up;
- nothing is deleted: rounds of a chain that was given up stay in the vault as they are.

Guarantee 10 (tests/GUARANTEES.md): test_restore_audit.py.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sequence
from contextlib import aclosing

import msgspec

from odradek.streams import topics
from odradek.streams.audit.anchors import Signed, genuine, read_signed, round_bytes, statement
from odradek.streams.audit.keys import SigningKey
from odradek.streams.audit.vault import Vault
from odradek.streams.envelope import Event, event_id
from odradek.streams.errors import UndecodableRecord
from odradek.streams.events.audit import ChainBegun
from odradek.streams.events.meta import Meta
from odradek.streams.log import EventLog
from odradek.streams.transactions import Stage

OUTPUT = (topics.AUDIT_ANCHORS.name, 0)
TYPE = str(ChainBegun.__struct_config__.tag).encode()


def stage_of(event_log: EventLog, deployment: str) -> Stage:
    """What writes audit.anchors.v1: of several at once, notaries or restores, only the last can."""
    return Stage(event_log, f"notary.{deployment}", [OUTPUT])


async def chains_begun(event_log: EventLog, deployment: str, trusted: Iterable[str]) -> list[ChainBegun]:
    """Every chain after the first, in order; the last one is in force. A record counts only if a trusted key signed
    it and it follows the chain before."""
    trusted, found = frozenset(trusted), list[ChainBegun]()
    async with aclosing(event_log.read(*OUTPUT, await event_log.beginning(*OUTPUT))) as records:
        async for record in records:
            if not any(name == "ce_type" and raw == TYPE for name, raw in record.headers):
                continue
            try:
                body = record.event.body
            except UndecodableRecord:
                continue  # `read_anchors` names it
            if body.deployment == deployment and body.before == in_force(found, deployment) and genuine(body, trusted):
                found.append(body)
    return found


def in_force(begun: Sequence[ChainBegun], deployment: str) -> str:
    """The name of the chain that goes on."""
    return begun[-1].chain if begun else deployment


def lacking(rounds: Collection[int], kept: Collection[int]) -> str:
    """What the log lacks: it must know every round from 0 on, and at least those in the vault. Empty: nothing."""
    total = max([*rounds, *kept], default=-1) + 1
    missing = next((number for number in range(total) if number not in rounds), None)
    return "" if missing is None else f"{OUTPUT[0]} lacks round {missing} of {total}"


async def broken(event_log: EventLog, vault: Vault, signed: Signed) -> str:
    """Why no notary can go on with the log, which must be at rest; empty where one can."""
    kept = await vault.rounds()
    if lacks := lacking(signed.rounds, kept):
        return lacks
    if kept and await vault.round(kept[-1]) != round_bytes(signed.held[kept[-1]]):
        return f"the vault has another round {kept[-1]} than {OUTPUT[0]}"
    for (topic, partition), cursor in sorted(signed.cursors.items(), key=lambda item: item[0]):
        if (end := await event_log.stable_end(topic, partition)) < cursor.next:
            return f"{topic}/{partition} ends at offset {end}, it was anchored up to {cursor.next - 1}"
    return ""


class Rechained(msgspec.Struct, frozen=True, kw_only=True):
    """What a restore found of the audit, and did."""

    chain: str
    """In force, after what was done (or would be)."""
    before: str = ""
    """The chain that is given up; empty where it goes on."""
    why: str = ""
    """Why."""
    signed: bool = True
    """False: nothing was done, because this host has not the notary's key."""
    rounds_lost: int = 0
    """Rounds in the vault that the log no longer had."""


async def rechain(
    event_log: EventLog,
    vault: Vault,
    deployment: str,
    key: SigningKey | None,
    *,
    reason: str = "",
    dry_run: bool = False,
) -> Rechained:
    """Begins another chain if no notary could go on with the one in force. Without the key (None), or with `dry_run`,
    it only says what it found. The vault must be open."""
    trusted = {*await vault.keys(), *([key.public] if key is not None else [])}
    begun = await chains_begun(event_log, deployment, trusted)
    vault.chain = before = in_force(begun, deployment)
    kept = await vault.rounds()
    signed = await read_signed(event_log, before, trusted, kept)
    if not (why := await broken(event_log, vault, signed)):
        return Rechained(chain=before, signed=key is not None)
    numbers = [0, *await vault.chain_numbers(), *(int(one.chain.rpartition("/r")[2]) for one in begun)]
    chain = f"{deployment}/r{max(numbers) + 1}"
    lost = len(set(kept) - signed.rounds)
    found = Rechained(chain=chain, before=before, why=why, signed=key is not None, rounds_lost=lost)
    if dry_run or key is None:
        return found
    unsigned = ChainBegun(
        deployment=deployment,
        chain=chain,
        before=before,
        on_log=len(signed.rounds),
        kept=len(kept),
        why=why,
        reason=reason,
        time_ms=int(time.time() * 1000),
        key=key.public,
        signature=b"",
    )
    body = msgspec.structs.replace(unsigned, signature=key.sign(statement(unsigned)))
    event = Event.of(body, id=event_id("chain", chain), source="odradek-restore", meta=Meta(time_ms=body.time_ms))
    async with stage_of(event_log, deployment) as stage, stage.transaction() as transaction:
        await transaction.append(OUTPUT[0], deployment, event)
    await event_log.wait_stable(*OUTPUT, await event_log.high_water(*OUTPUT))
    return found
