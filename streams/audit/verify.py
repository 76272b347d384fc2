"""`odradek audit verify`: the log against its anchors, and the anchors against the vault.

Reads audit.anchors.v1, the vault's rounds, and every audited partition from its first offset; writes nothing. What it
finds is first what is wrong with the anchors themselves (forged, missing, cut off: the vault knows), then, partition by
partition, the first offset that is not as anchored. The chain in force is verified; those that a restore gave up are
named, with who signed that. Where the log's anchors and the vault's differ, the vault's count.
The newest round in the vault vouches for all before it: each names the digest of its predecessor. So the others are
fetched only where the log lacks one, or differs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, field

import msgspec

from odradek.streams import topics
from odradek.streams.audit.anchors import (
    NOTHING,
    AnchorLog,
    Place,
    genuine,
    read_anchors,
    read_round,
    round_bytes,
    round_digest,
)
from odradek.streams.audit.chains import chains_begun, in_force
from odradek.streams.audit.check import Finding, Kind, PartitionCheck
from odradek.streams.audit.scope import audited_topics
from odradek.streams.audit.vault import Vault
from odradek.streams.errors import BrokerUnreachable, DeadlineExceeded, OffsetGap, UndecodableRecord
from odradek.streams.events.audit import AnchorWritten, ChainBegun
from odradek.streams.log import EventLog

Say = Callable[[str], None]
ANCHORS = topics.AUDIT_ANCHORS.name

SAY_RECORDS = 5000
"""Records between two words of progress."""


class PartitionVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """One partition."""

    topic: str
    partition: int
    verified: int
    not_anchored: int
    finding: Finding | None = None


class AuditReport(msgspec.Struct, frozen=True, kw_only=True):
    """The whole log."""

    deployment: str
    """The chain in force: the deployment's own, or one that a restore began."""
    rounds: int
    """Rounds of anchors, wherever they were found."""
    not_kept: int
    """The newest rounds that the vault does not have yet."""
    locked: bool
    """Whether all rounds were put under object lock."""
    keys: list[str]
    """Public keys that signed."""
    findings: list[Finding]
    partitions: list[PartitionVerdict]
    given_up: list[ChainBegun] = []
    """Each chain that a restore gave up, as the one that followed it says."""

    @property
    def verified(self) -> int:
        return sum(one.verified for one in self.partitions)

    @property
    def not_anchored(self) -> int:
        return sum(one.not_anchored for one in self.partitions)

    @property
    def ok(self) -> bool:
        """Something is anchored, and everything that is is as it was."""
        return not self.findings and self.rounds > 0


@dataclass(slots=True)
class Anchored:
    """All genuine anchors, from log and vault."""

    rounds: dict[int, list[AnchorWritten]] = field(default_factory=dict)
    not_kept: int = 0
    findings: list[Finding] = field(default_factory=list)
    chain: str = ""
    begun: list[ChainBegun] = field(default_factory=list)

    def by_place(self) -> dict[Place, list[AnchorWritten]]:
        """Each partition's anchors, in order."""
        found: dict[Place, list[AnchorWritten]] = {}
        for number in sorted(self.rounds):
            for anchor in self.rounds[number]:
                found.setdefault((anchor.topic, anchor.partition), []).append(anchor)
        return found

    def found(self, kind: Kind, detail: str, offset: int) -> None:
        self.findings.append(Finding(topic=ANCHORS, partition=0, offset=offset, kind=kind, detail=detail))


async def verify(
    event_log: EventLog,
    vault: Vault | None,
    deployment: str,
    trusted: Iterable[str],
    *,
    only: str | None = None,
    say: Say = lambda _text: None,
) -> AuditReport:
    """Verifies the deployment's log, or one topic of it. `trusted` are the public keys that may sign; `vault` None
    leaves the vault out: then a log and its anchors that were cut off together go unseen."""
    say("reading anchors")
    anchored = await gather_anchors(event_log, vault, deployment, trusted)
    present = await audited_topics(event_log)
    by_place = anchored.by_place()
    places = {(topic, number) for topic in present for number in await event_log.partitions(topic)} | set(by_place)
    verdicts: list[PartitionVerdict] = []
    for place in sorted(place for place in places if only in (None, place[0])):
        done = sum(one.verified + one.not_anchored for one in verdicts)
        anchors = by_place.get(place, [])
        verdicts.append(await _partition(event_log, place, anchors, place[0] in present, done, say))
    every = [anchor for anchors in anchored.rounds.values() for anchor in anchors]
    return AuditReport(
        deployment=anchored.chain,
        given_up=anchored.begun,
        rounds=len(anchored.rounds),
        not_kept=anchored.not_kept,
        locked=bool(every) and all(anchor.locked for anchor in every),
        keys=sorted({anchor.key for anchor in every}),
        findings=[*anchored.findings, *(one.finding for one in verdicts if one.finding is not None)],
        partitions=verdicts,
    )


# -- anchors -------------------------------------------------------------------------------------------------------


async def gather_anchors(event_log: EventLog, vault: Vault | None, deployment: str, trusted: Iterable[str]) -> Anchored:
    """The genuine anchors of log and vault, and everything that is wrong with them."""
    trusted, anchored = frozenset(trusted), Anchored(chain=deployment)
    with suppress(OffsetGap):  # what can't be read is found below
        anchored.begun = await chains_begun(event_log, deployment, trusted)
        anchored.chain = in_force(anchored.begun, deployment)
    if vault is not None:
        vault.chain = anchored.chain
    kept = await vault.rounds() if vault is not None else []  # before the log, which has every round first
    on_log = await _on_log(event_log, trusted, anchored)
    rounds = anchored.rounds = dict(on_log.rounds)

    def offset(number: int) -> int:
        places = [on_log.refs[one.topic, one.partition, one.first].offset for one in on_log.rounds.get(number, ())]
        return min(places, default=len(on_log.refs))

    if vault is not None:
        suspect = bool(_broken(rounds)) or any(number not in rounds for number in kept)
        for number in reversed(kept):
            theirs = await _from_vault(vault, number, trusted)
            ours = round_bytes(on_log.rounds.get(number, []))
            if theirs is None:
                anchored.found("round", f"round {number} in the vault is signed by no known key", offset(number))
            elif round_bytes(theirs) != ours:
                what = "are others" if number in on_log.rounds else "are missing"
                anchored.found(
                    "round", f"the {len(theirs)} anchors of round {number} {what} on the log", offset(number)
                )
                rounds[number] = theirs
            elif not suspect:
                break  # the newest is as kept, and vouches for all before it
        for number in sorted(set(range(max(kept, default=-1))) - set(kept)):
            anchored.found("round", f"round {number} is missing in the vault", offset(number))
        anchored.not_kept = sum(number > max(kept, default=-1) for number in rounds)
    for number, why in _broken(rounds).items():
        anchored.found("round", why, offset(number))
    anchored.findings.sort(key=lambda finding: finding.offset)
    return anchored


def _broken(rounds: Mapping[int, list[AnchorWritten]]) -> dict[int, str]:
    """Rounds that are not there, or do not follow the one before them."""
    found: dict[int, str] = {}
    before = NOTHING
    for number in range(max(rounds, default=-1) + 1):
        anchors = rounds.get(number)
        if anchors is None:
            found[number] = f"round {number} is missing"
        elif any(anchor.before != before for anchor in anchors) and number - 1 not in found:
            found[number] = f"round {number} does not follow round {number - 1} as it is now"
        before = round_digest(anchors) if anchors is not None else before
    return found


async def _on_log(event_log: EventLog, trusted: frozenset[str], anchored: Anchored) -> AnchorLog:
    try:
        found = await read_anchors(event_log, anchored.chain, trusted)
    except (UndecodableRecord, OffsetGap) as error:
        anchored.found("unreadable", str(error), int(error.coordinates.get("offset", 0)))
        return AnchorLog()
    for ref, reason in found.foreign:
        anchored.found("anchor", reason, ref.offset)
    return found


async def _from_vault(vault: Vault, number: int, trusted: frozenset[str]) -> list[AnchorWritten] | None:
    """A round's anchors in the vault, if they are genuine."""
    try:
        anchors = read_round(await vault.round(number))
    except msgspec.MsgspecError:
        return None
    good = anchors and all(genuine(anchor, trusted) and anchor.round == number for anchor in anchors)
    return anchors if good else None


# -- records -------------------------------------------------------------------------------------------------------


async def _partition(
    event_log: EventLog, place: Place, anchors: list[AnchorWritten], present: bool, done: int, say: Say
) -> PartitionVerdict:
    check = PartitionCheck(place, anchors)
    finding = await _first_finding(event_log, place, check, present, done, say)
    return PartitionVerdict(
        topic=place[0],
        partition=place[1],
        verified=check.verified,
        not_anchored=check.not_anchored,
        finding=finding,
    )


async def _first_finding(
    event_log: EventLog, place: Place, check: PartitionCheck, present: bool, done: int, say: Say
) -> Finding | None:
    if not present:
        return check.finish(0)
    end, seen = await event_log.stable_end(*place), 0
    try:
        async with aclosing(event_log.read(*place, await event_log.beginning(*place), end)) as records:
            async for record in records:
                if (finding := check.feed(record)) is not None:
                    return finding
                seen += 1
                if seen % SAY_RECORDS == 0:
                    say(f"{place[0]}/{place[1]}, {done + seen} records")
    except BrokerUnreachable:
        raise
    except (UndecodableRecord, OffsetGap, DeadlineExceeded) as error:
        return Finding(topic=place[0], partition=place[1], offset=check.next, kind="unreadable", detail=str(error))
    return check.finish(end)
