"""The notary: chains what every kept topic holds, and signs it, round by round.

Consumes the visible (read_committed) records of every kept topic; produces audit.anchored on audit.anchors.v1 and one
object a round in the vault. Guarantees:
- never a gap: a partition's next anchor begins with the first visible record after the last anchored one, whoever made
  that anchor and however it ended; the chain's head goes on from it;
- a round is one transaction: all of its anchors or none; a fenced predecessor cannot write;
- it anchors what waits as soon as it starts, and once more when it is told to end: however often it is restarted, no
  record waits longer for that, and a deployment that was stopped in order leaves none unanchored;
- a round is committed to the log first and put into the vault then; what a killed notary had not put, the next one
  puts, the same bytes; so a store that is down holds up no anchor;
- it builds only on anchors that its keys signed, and only on a log that still reaches as far: a partition that ends
  before its anchor, or a vault that knows more rounds than the log, stops it (`odradek audit verify` names the place,
  `odradek restore` begins another chain).
Waits: for records (nothing is owed), for broker and store (their deadlines). Unblocked by any append.

Guarantee 10 (tests/GUARANTEES.md): test_audit_tamper.py, test_audit_proofs.py, test_audit_notary.py,
test_audit_segments.py, test_cli_audit.py, test_restore_audit.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace

from odradek.streams.audit.anchors import (
    NOTHING,
    Cursor,
    Place,
    Round,
    read_signed,
    round_bytes,
    round_digest,
)
from odradek.streams.audit.chain import leaf_of
from odradek.streams.audit.chains import OUTPUT, chains_begun, in_force, lacking, stage_of
from odradek.streams.audit.keys import SigningKey
from odradek.streams.audit.scope import Due, audited_topics
from odradek.streams.audit.settings import AuditSettings
from odradek.streams.audit.vault import Vault
from odradek.streams.envelope import Event, event_id
from odradek.streams.errors import DeadlineExceeded, StoreUnreachable, Terminal
from odradek.streams.events.audit import AnchorWritten
from odradek.streams.events.meta import Meta
from odradek.streams.faults import reach
from odradek.streams.log import EventLog

log = logging.getLogger(__name__)

LOOK_S = 2.0
"""Seconds between looks at the ends of all partitions. Too low: requests for nothing. Too high: a round that is due
waits."""

ROUND_RECORDS = 100_000
"""Most records of one round; what is left follows in the next one at once. Too low: many rounds to catch up with a long
log. Too high: memory (44 bytes a record), and a transaction that outlives its time-out."""

SETTLE_S = 30.0
"""Seconds that a partition may end before its anchor, while a new leader finds out how far it goes. After that it has
been truncated."""


class Notary:
    """One deployment's notary. `run` returns after `end` only, or by exception or cancellation."""

    def __init__(self, event_log: EventLog, vault: Vault, key: SigningKey, settings: AuditSettings) -> None:
        self._log = event_log
        self._vault = vault
        self._key = key
        self._chain = settings.name
        self._settings = settings
        self._topics: list[str] = []
        self._ends: dict[Place, int] = {}
        self._cursors: dict[Place, Cursor] = {}
        self._seen: dict[Place, int] = {}
        """By partition how far it was read: markers and aborted records may lie behind the last anchored one."""
        self._before = NOTHING
        self._unkept: deque[tuple[int, bytes]] = deque()
        self._keeping: asyncio.Task[None] | None = None
        self._ending = asyncio.Event()
        self.round = 0
        """Number of the next round."""
        self.records = 0
        """Records that this notary anchored."""

    @property
    def waiting(self) -> int:
        """Offsets not anchored yet, at the last look."""
        return sum(self._waiting().values())

    @property
    def not_kept(self) -> int:
        """Rounds on the log that the vault does not have yet."""
        return len(self._unkept)

    @property
    def locked(self) -> bool:
        """Whether rounds are kept under object lock."""
        return self._vault.locked

    async def run(self) -> None:
        """Resume, anchor what waits, then go on until `end`."""
        due = Due(self._settings)
        async with self._stage():
            await self._anchor_now()
            while not self._ending.is_set():
                await self._look()
                if due(time.monotonic(), self._waiting()):
                    await self._anchor_all()
                self._keep_aside()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._ending.wait(), min(LOOK_S, self._settings.interval_s))
            await self._anchor_now()
            if self._keeping is not None:
                await self._keeping
            await self._keep_if_there()

    def end(self) -> None:
        """Let `run` anchor what is visible by then, and return. To be called on its loop."""
        self._ending.set()

    async def once(self) -> int:
        """Resume and anchor everything that is visible now; returns how many records that were. Takes over from a
        notary that runs."""
        async with self._stage():
            await self._anchor_now()
            await self._keep()
        return self.records

    # -- start-up ----------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _stage(self) -> AsyncIterator[None]:
        """Open and resumed: predecessors are fenced, and all that they committed is known."""
        async with stage_of(self._log, self._settings.name) as self._output:
            try:
                await self._resume()
                yield
            finally:
                if self._keeping is not None:
                    self._keeping.cancel()

    async def _resume(self) -> None:
        await self._vault.open(create=True)
        trusted, name = {self._key.public, *await self._vault.keys()}, self._settings.name
        self._chain = self._vault.chain = in_force(await chains_begun(self._log, name, trusted), name)
        await self._vault.keep_key(self._key.public)
        kept = await self._vault.rounds()
        signed = await read_signed(self._log, self._chain, trusted, kept)
        for ref, reason in signed.foreign:
            log.warning("%s %s: passed over", ref, reason)
        if lacks := lacking(signed.rounds, kept):
            raise Terminal(
                f"{lacks}: it has been changed or cut off, and nothing can be built on it. `odradek audit verify` "
                f"names what is missing; if Kafka was restored to an earlier moment, `odradek restore` begins a new "
                f"chain"
            )
        # What the vault lacks is put there; the newest it has too, which compares it.
        self._unkept.extend((number, round_bytes(signed.held[number])) for number in sorted(signed.held))
        self._cursors, self._before, self.round = signed.cursors, signed.before, len(signed.rounds)
        self._topics = await audited_topics(self._log)
        log.info("the notary goes on with round %d", self.round)

    # -- rounds ------------------------------------------------------------------------------------------------

    async def _anchor_now(self) -> None:
        await self._look()
        await self._anchor_all()

    async def _look(self) -> None:
        """The stable end of every audited partition. Raises Terminal where one ends before its anchor."""
        for topic in self._topics:
            for partition, end in (await self._log.stable_ends(topic)).items():
                self._ends[topic, partition] = end
                cursor = self._cursors.get((topic, partition))
                if cursor is not None and end < cursor.next:
                    await self._must_return((topic, partition), cursor.next)

    async def _must_return(self, place: Place, end: int) -> None:
        try:
            await self._log.wait_stable(*place, end, SETTLE_S)
        except DeadlineExceeded:
            raise Terminal(
                f"{place[0]}/{place[1]} ends before offset {end}, up to which it was anchored: it has been truncated. "
                f"`odradek audit verify` names the place; if Kafka was restored to an earlier moment, "
                f"`odradek restore` begins a new chain",
                topic=place[0],
                partition=place[1],
                offset=end,
            ) from None
        self._ends[place] = await self._log.stable_end(*place)

    def _waiting(self) -> dict[Place, int]:
        return {place: end - self._position(place) for place, end in self._ends.items()}

    def _position(self, place: Place) -> int:
        cursor = self._cursors.get(place)
        return max(self._seen.get(place, 0), cursor.next if cursor is not None else 0)

    async def _anchor_all(self) -> None:
        """Rounds until everything of the last look is anchored."""
        while any(waiting > 0 for waiting in self._waiting().values()):
            await self._round()
        self._topics = await audited_topics(self._log)

    async def _round(self) -> None:
        """One round over what waits, of at most about ROUND_RECORDS records."""
        now = int(time.time() * 1000)
        this = Round(self._chain, self.round, self._before, self._vault.locked, now, self._key)
        anchors: list[AnchorWritten] = []
        moved: dict[Place, Cursor] = {}
        seen: dict[Place, int] = {}
        left = ROUND_RECORDS
        for place, end in self._ends.items():
            if end > self._position(place) and left > 0:
                made, moved[place], seen[place] = await self._intervals(this, place, end, left)
                anchors += made
                left -= sum(anchor.count for anchor in made)
        if anchors:
            await self._commit(anchors)
            self._cursors |= {place: cursor for place, cursor in moved.items() if cursor.next}
            self._before = round_digest(anchors)
            self._unkept.append((self.round, round_bytes(anchors)))
            self.round += 1
            self.records += ROUND_RECORDS - left
        self._seen |= seen

    async def _intervals(
        self, this: Round, place: Place, end: int, limit: int
    ) -> tuple[list[AnchorWritten], Cursor, int]:
        """Anchors of a partition's next records; where its cursor then stands; and how far it was read."""
        known = self._cursors.get(place)
        cursor = replace(known) if known is not None else Cursor.start(place)
        start = self._position(place) if known is not None else await self._log.beginning(*place)
        anchors: list[AnchorWritten] = []
        offsets: list[int] = []
        leaves: list[bytes] = []
        async with aclosing(self._log.read(*place, start, end)) as records:
            async for record in records:
                offsets.append(record.ref.offset)
                leaves.append(leaf_of(record))
                if len(offsets) >= self._settings.interval_records:
                    anchors.append(this.anchor(place, cursor, offsets, leaves))
                    offsets, leaves = [], []
                    limit -= anchors[-1].count
                    if limit <= 0:
                        return anchors, cursor, cursor.next
        if offsets:
            anchors.append(this.anchor(place, cursor, offsets, leaves))
        return anchors, cursor, end

    async def _commit(self, anchors: list[AnchorWritten]) -> None:
        events = []
        for anchor in anchors:
            identifier = event_id("anchor", anchor.deployment, anchor.topic, anchor.partition, anchor.first)
            event = Event.of(anchor, id=identifier, source="notary", meta=Meta(time_ms=anchor.time_ms))
            events.append((OUTPUT[0], f"{anchor.topic}/{anchor.partition}", event))
        async with self._output.transaction() as transaction:
            await transaction.append_many(events)
            await reach("notary.before_commit")
        await reach("notary.after_commit")
        # What the vault is to hold, everybody must be able to read on the log first.
        await self._log.wait_stable(*OUTPUT, await self._log.high_water(*OUTPUT))
        log.info("round %d: %d records in %d anchors", self.round, sum(one.count for one in anchors), len(anchors))

    # -- the vault ---------------------------------------------------------------------------------------------

    def _keep_aside(self) -> None:
        """Puts rounds beside the loop: a slow store must not hold up the anchors."""
        if self._keeping is not None and self._keeping.done():
            self._keeping.result()
            self._keeping = None
        if self._unkept and self._keeping is None:
            self._keeping = asyncio.create_task(self._keep_if_there())

    async def _keep_if_there(self) -> None:
        try:
            await self._keep()
        except StoreUnreachable as error:
            log.warning("%d rounds are not in the vault yet: %s", len(self._unkept), error)

    async def _keep(self) -> None:
        while self._unkept:
            await self._vault.keep_round(*self._unkept[0])
            self._unkept.popleft()
