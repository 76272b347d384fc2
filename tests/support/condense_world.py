"""A session whose context fills, and a model that sums it up when asked."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import msgspec

from odradek.actors.session import condense
from odradek.actors.session.ports import Completion
from odradek.actors.session.runner import SessionSpec
from odradek.streams.events.sessions import CondenseSettings, SummarySource
from support.session_world import ScriptedModel, spec, template

T = template()
SUMMARY = T.turn(text="a to c are sums; nothing is changed yet")
CALLS = {T.call(name, {})[0] for name in ("read_file", "edit_file", "grep")}
RESULT = T.results([""])[0]


def asks(tokens: list[int]) -> bool:
    """Whether the model is asked for its summary."""
    question = T.user(condense.ASK)
    return tokens[-len(question) :] == question


def no_orphan(tokens: list[int]) -> bool:
    """Whether every call has its result before the context goes on, and no result stands without a call."""
    calls = results = 0
    for token in tokens:
        calls += token in CALLS
        results += token == RESULT
        if results > calls:
            return False
    return calls == results


@dataclass
class Condenser(ScriptedModel):
    """Acts by the script, whatever turn numbers summaries take; asked to sum up, says `summary`."""

    summary: list[int] = field(default_factory=lambda: SUMMARY)
    spans: list[tuple[int, int]] = field(default_factory=list)
    """Session positions [first, end) of what each request sampled."""

    async def sample(  # type: ignore[override]
        self, *, turn: int, tokens: list[int], position_base: int, max_new_tokens: int, **_: object
    ) -> Completion:
        acted = len({number for number, asked in self.asked if number < turn and not asks(asked)})
        said = self.summary if asks(tokens) else self.turns[min(acted, len(self.turns) - 1)]
        self.asked.append((turn, tokens))
        made = await ScriptedModel([said[:max_new_tokens]]).sample(turn=0, tokens=tokens)
        self.spans.append((position_base + len(tokens), position_base + len(tokens) + len(made.tokens)))
        return replace(made, finish_reason="stop" if made.tokens == said else "length")


def condensing(
    files: dict[str, str], source: SummarySource = "model", *, at: float = 0.6, floor: int | None = None, **budget: int
) -> SessionSpec:
    """A session that condenses its context."""
    made = spec(files, floor=floor, **({"max_turns": 9, "max_context_tokens": 400} | budget))
    settings = CondenseSettings(source=source, at=at)
    return replace(made, opened=msgspec.structs.replace(made.opened, condense=settings))
