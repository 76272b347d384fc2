"""A run as a fold of groups, rewards, batches, weights and replicas. Pure: the same log gives the same numbers.

Numbers say what they count: a rate has its trials beside it; nothing is smoothed here. Sessions are booked under the
oldest version that sampled any of their tokens. Order and windows follow the log (`clock.py`), never a sender's clock.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from odradek.infra.observe.clock import LogClock, Suspect
from odradek.streams.events.batches import BatchAssembled, StepCompleted
from odradek.streams.events.groups import GroupDiscarded, GroupOpened, GroupSealed, LaneConfigured
from odradek.streams.events.meta import Meta, RecordRef
from odradek.streams.events.rewards import RewardAssigned, RewardUngraded
from odradek.streams.events.weights import CurrentWeights, ReplicaReported, VersionPublished


@dataclass(slots=True)
class Conduct:
    """Sums over sessions; rates are quotients of these."""

    sessions: int = 0
    solved: int = 0
    reward: float = 0.0
    edited: int = 0
    read_before_edit: int = 0
    turns: int = 0
    parallel_turns: int = 0
    sampled_tokens: int = 0
    errors: float = 0.0

    def add(self, event: RewardAssigned) -> None:
        """Book one graded session."""
        self.sessions += 1
        self.solved += event.components.get("solved", 0.0) >= 1.0
        self.reward += event.total
        self.edited += event.reads_before_edit is not None
        self.read_before_edit += bool(event.reads_before_edit)
        self.turns += event.turns
        self.parallel_turns += event.parallel_turns
        self.sampled_tokens += event.sampled_tokens
        self.errors += event.components.get("errors", 0.0)

    @property
    def solve_rate(self) -> float:
        return self.solved / self.sessions if self.sessions else 0.0

    @property
    def mean_reward(self) -> float:
        return self.reward / self.sessions if self.sessions else 0.0

    @property
    def read_before_edit_rate(self) -> float:
        return self.read_before_edit / self.edited if self.edited else 0.0

    @property
    def parallel_rate(self) -> float:
        """Share of turns with calls side by side."""
        return self.parallel_turns / self.turns if self.turns else 0.0


@dataclass(frozen=True, slots=True)
class Step:
    """One committed training step."""

    step: int
    time_ms: int
    metrics: dict[str, float]
    batch_id: str
    lane: str = ""
    seconds: float = 0.0
    """From the later of its batch's assembly and the previous commit to its own: computing and uploading."""


@dataclass(frozen=True, slots=True)
class Grading:
    """One verdict of a grader, in time."""

    session_id: str
    at: int
    partition: int
    milliseconds: float


EVALUATION = re.compile(r"@v\d+t(?P<temperature>[0-9.]+)(?:/(?P<run>[^~]+)(?:~\d+)?)?$")
"""How `infra/demo/publish.py` ends the id of an evaluation's task (version and temperature), and what `odradek eval`
adds: its run, and the number of the try."""


def _set_of(group: GroupOpened) -> str:
    """Name of an evaluation: its task set, how it was sampled where that is not temperature 1, and the run of
    `odradek eval`. Counts of two of these are never added up: their tasks may be the same."""
    name = group.labels.get("set", "")
    found = EVALUATION.search(group.task_id)
    if found is None:
        return name
    temperature = float(found["temperature"])
    how = [] if temperature == 1.0 else ["greedy" if temperature == 0.0 else f"temperature {temperature:g}"]
    how += [f"run {found['run']}"] if found["run"] else []
    return f"{name} ({', '.join(how)})" if how else name


@dataclass(slots=True)
class RunFold:
    """See the module. `apply` takes records of any of the topics, each partition in order."""

    events: Counter[str] = field(default_factory=Counter)
    verdicts: dict[str, RewardAssigned] = field(default_factory=dict)
    """By session its first reward."""
    by_version: dict[int, Conduct] = field(default_factory=dict)
    """RL sessions by oldest version."""
    evaluations: dict[tuple[int, str], Conduct] = field(default_factory=dict)
    """Evaluation sessions by (version, task set)."""
    groups: dict[str, GroupOpened] = field(default_factory=dict)
    open_groups: set[str] = field(default_factory=set)
    opened_ms: dict[str, int] = field(default_factory=dict)
    """When each open group was opened (ms)."""
    sealed: int = 0
    discarded: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    lost_lengths: dict[str, list[int]] = field(default_factory=dict)
    """Sampled tokens of each finished member of groups that were not trained on, by reason."""
    staleness: Counter[int] = field(default_factory=Counter)
    """Members of batches by versions between their oldest token and the version that was trained."""
    masked_tokens: int = 0
    """Tokens left out of the objective because they were staler than the bound."""
    lanes: dict[str, LaneConfigured] = field(default_factory=dict)
    seals: dict[str, dict[int, int]] = field(default_factory=dict)
    """By lane the offsets of its sealed RL groups, and when each was sealed (ms)."""
    gradings: list[Grading] = field(default_factory=list)
    clocks: dict[tuple[str, int], LogClock] = field(default_factory=dict)
    """By (topic, partition)."""
    ungraded: Counter[str] = field(default_factory=Counter)
    ungraded_sessions: set[str] = field(default_factory=set)
    batches: dict[str, BatchAssembled] = field(default_factory=dict)
    batch_refs: dict[str, RecordRef] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    published: dict[int, int] = field(default_factory=dict)
    """Version to the record time (ms) of its publication."""
    current: int | None = None
    loaded: dict[str, set[int]] = field(default_factory=dict)
    """Replica to every version it reported as loaded."""
    replicas: dict[str, ReplicaReported] = field(default_factory=dict)
    """The newest report of each replica."""
    batch_times: dict[str, int] = field(default_factory=dict)
    """When each batch was assembled (ms)."""
    step_events: list[StepCompleted] = field(default_factory=list)
    """Of `steps`, in the same order."""
    _seen: set[str] = field(default_factory=set)

    def apply(self, ref: RecordRef, event_id: str, meta: Meta, body: Any, time_ms: int) -> None:
        """Fold one record; a repeated event id counts once."""
        if event_id in self._seen:
            return
        self._seen.add(event_id)
        self.events[body.__struct_config__.tag] += 1
        clock = self.clocks.setdefault((ref.topic, ref.partition), LogClock(ref.topic, ref.partition))
        at = clock.add(ref.offset, time_ms)
        match body:
            case LaneConfigured():
                self.lanes[body.lane] = body
            case GroupOpened() | GroupSealed() | GroupDiscarded():
                self._group(ref, body, time_ms)
            case RewardAssigned():
                self.gradings.append(Grading(body.session_id, at, ref.partition, body.grading_ms))
                self._reward(meta, body)
            case RewardUngraded():
                self.ungraded[body.cause[:80]] += 1
                self.ungraded_sessions.add(body.session_id)
            case BatchAssembled():
                self._batch(ref, body, time_ms)
            case StepCompleted():
                self._step(body, time_ms)
            case VersionPublished():
                self.published[body.version] = time_ms
            case CurrentWeights():
                self.current = body.version
            case ReplicaReported():
                self.replicas[body.replica] = body
                if body.healthy:
                    self.loaded.setdefault(body.replica, set()).add(body.version)
            case _:
                pass

    def _group(self, ref: RecordRef, body: GroupOpened | GroupSealed | GroupDiscarded, time_ms: int) -> None:
        known = body.group_id in self.groups
        if known and (isinstance(body, GroupOpened) or body.group_id not in self.open_groups):
            return  # opened once, ended once: what comes again counts for nobody (`streams/sealing.py`)
        match body:
            case GroupOpened():
                self.groups[body.group_id] = body
                self.open_groups.add(body.group_id)
                self.opened_ms[body.group_id] = time_ms
            case GroupSealed():
                self.open_groups.discard(body.group_id)
                self.opened_ms.pop(body.group_id, None)
                self.sealed += 1
                group = self.groups.get(body.group_id)
                if group is None or group.purpose == "rl":
                    self.seals.setdefault(body.lane, {})[ref.offset] = time_ms
            case GroupDiscarded():
                self.open_groups.discard(body.group_id)
                self.opened_ms.pop(body.group_id, None)
                self.discarded[body.reason] += 1
                self.lost_lengths.setdefault(body.reason, []).extend(body.member_tokens)

    def _batch(self, ref: RecordRef, body: BatchAssembled, time_ms: int) -> None:
        self.batches[body.batch_id] = body
        self.batch_refs[body.batch_id] = ref
        self.batch_times[body.batch_id] = time_ms
        self.dropped.update(group.reason for group in body.dropped)
        for group in body.dropped:
            self.lost_lengths.setdefault(group.reason, []).extend(group.sampled_tokens)
        for member in body.members:
            self.staleness[body.ordinal - member.oldest_version] += 1
            self.masked_tokens += member.masked_stale_tokens

    def _step(self, body: StepCompleted, time_ms: int) -> None:
        previous = next((s.time_ms for s in reversed(self.steps) if s.lane == body.lane), 0)
        began = max(previous, self.batch_times.get(body.batch_id, time_ms))
        seconds = max(0, time_ms - began) / 1000
        self.step_events.append(body)
        self.steps.append(Step(body.step, time_ms, body.metrics, body.batch_id, body.lane, seconds))

    def _reward(self, meta: Meta, body: RewardAssigned) -> None:
        self.verdicts.setdefault(body.session_id, body)
        group = self.groups.get(body.group_id)
        if meta.origin == "eval":
            label = _set_of(group) if group is not None else ""
            version = body.oldest_version
            self.evaluations.setdefault((version, label), Conduct()).add(body)
        elif meta.origin == "rl":
            self.by_version.setdefault(body.oldest_version, Conduct()).add(body)

    # -- questions ---------------------------------------------------------------------------------------------

    def suspects(self) -> list[Suspect]:
        """Records whose stamps are not believed, by partition, in log order."""
        return [suspect for _, clock in sorted(self.clocks.items()) for suspect in clock.suspects()]

    def read_at(self, now_ms: int) -> None:
        """Tell the clocks when the log was read: no record is from after that."""
        for clock in self.clocks.values():
            clock.reader_ms = now_ms

    def unbatched(self, lane: str) -> int:
        """Sealed RL groups of a lane that no batch has consumed yet: the assembler's lag."""
        last = max((b.input_offset for b in self.batches.values() if b.lane == lane), default=-1)
        return sum(offset > last for offset in self.seals.get(lane, {}))

    def unbatched_since(self, lane: str) -> int | None:
        """When the oldest of those was sealed (ms)."""
        last = max((b.input_offset for b in self.batches.values() if b.lane == lane), default=-1)
        return min((time for offset, time in self.seals.get(lane, {}).items() if offset > last), default=None)

    def assembling_since(self, batch: BatchAssembled) -> int:
        """When the first group that the batch consumed was sealed (ms)."""
        seals = self.seals.get(batch.lane, {})
        offsets = [*batch.groups, *(group.offset for group in batch.dropped)]
        return min((seals[at] for at in offsets if at in seals), default=self.batch_times[batch.batch_id])

    @property
    def untrained(self) -> int:
        """Batches without a step: the trainer's lag."""
        return len(self.batches.keys() - {step.batch_id for step in self.steps})

    def behind(self, replica: str) -> int:
        """Versions that a replica's newest report lies behind the current one."""
        report = self.replicas.get(replica)
        return 0 if report is None or self.current is None else max(0, self.current - report.version)
