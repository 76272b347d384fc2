"""The engine as one thread sees it: reuse, reload, pins, fences, priorities, deadlines, limits."""

from __future__ import annotations

import pickle
from collections.abc import Mapping

import msgspec
import numpy as np
import pytest
import torch
from support.small_model import CONFIG
from torch import Tensor

from odradek.actors.inference import errors
from odradek.actors.inference.engine import Engine
from odradek.actors.inference.settings import EngineSettings
from odradek.actors.inference.types import Priority, SampleRequest, SampleResult
from odradek.actors.inference.weights import build
from odradek.actors.policy.hf import to_hf_state
from odradek.actors.policy.model import Policy, Routing
from odradek.kernels.logprob.api import token_logprobs

STATES = {v: to_hf_state(Policy(CONFIG, seed=v)) for v in (1, 2, 3)}
PROMPT = [(i * 31 + 5) % 97 for i in range(150)]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


class Clock:
    """Time as the test says."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


def make(settings: EngineSettings | None = None, clock: Clock | None = None, version: int = 1) -> Engine:
    engine = Engine(CONFIG, "numerics", settings, clock or Clock())
    load(engine, version)
    return engine


def load(engine: Engine, version: int, state: Mapping[str, Tensor] | None = None, current: bool = True) -> None:
    engine.install(build(CONFIG, version, state or STATES[version]), current=current)


def req(name: str = "r", prompt: list[int] | None = None, n: int = 10, **changes: object) -> SampleRequest:
    request = SampleRequest(
        request_id=name,
        session_id=name,
        epoch=1,
        prompt_tokens=prompt or PROMPT,
        max_new_tokens=n,
        stop_ids=frozenset(),
        seed=11,
        deadline=2000.0,
    )
    return msgspec.structs.replace(request, **changes)


def run(engine: Engine, *requests: SampleRequest) -> dict[str, SampleResult]:
    """Add, then step until the engine is idle; a failed request fails the test."""
    for request in requests:
        engine.add(request)
    done: dict[str, SampleResult] = {}
    for _ in range(2_000):
        if engine.idle:
            return done
        out = engine.step()
        assert not out.failed
        done |= {r.request_id: r for r in out.finished}
    raise AssertionError("the engine does not finish")


def cold(prompt: list[int], version: int, n: int = 10) -> SampleResult:
    """The same request on a fresh engine with nobody else."""
    return run(make(version=version), req("r", prompt, n))["r"]


def test_logprobs_are_those_of_the_trainer_bit_for_bit() -> None:
    result = run(make(), req())["r"]
    context = torch.tensor(PROMPT + result.tokens)
    with torch.inference_mode():
        policy = build(CONFIG, 1, STATES[1]).policy
        hidden = policy.forward_packed(context, torch.arange(160), torch.tensor([0, 160], dtype=torch.int32))
        expected, _ = token_logprobs(hidden[149:-1], policy.head_weight, context[150:])
    assert result.logprobs == expected.tolist()
    assert result.weight_spans == [(0, 1)] and result.finish_reason == "length"


def test_logprob_is_of_temperature_one_whatever_the_temperature() -> None:
    hot = run(make(), req(n=1, temperature=3.0))["r"]
    with torch.inference_mode():
        policy = build(CONFIG, 1, STATES[1]).policy
        hidden = policy.forward_packed(
            torch.tensor(PROMPT), torch.arange(150), torch.tensor([0, 150], dtype=torch.int32)
        )
        expected, _ = token_logprobs(hidden[-1:], policy.head_weight, torch.tensor(hot.tokens))
    assert hot.logprobs == expected.tolist()


def test_a_token_depends_on_its_session_position_not_on_where_the_context_starts() -> None:
    """After the context was condensed the session goes on with fresh random numbers."""
    first = run(make(), req())["r"].tokens
    assert run(make(), req(position_base=0))["r"].tokens == first
    assert run(make(), req(position_base=500))["r"].tokens != first


def test_a_stop_token_ends_the_turn_and_is_part_of_it() -> None:
    free = run(make(), req(n=30))["r"].tokens
    stopped = run(make(), req(n=30, stop_ids=frozenset({free[7]})))["r"]
    assert stopped.tokens == free[: free.index(free[7]) + 1]
    assert stopped.finish_reason == "stop"


# -- reuse ----------------------------------------------------------------------------------------------------------


def test_the_next_turn_of_a_session_computes_only_what_is_new() -> None:
    """The partial last page too: tool results are short, and most turns would pay for half a page again."""
    engine = make()
    first = run(engine, req("s"))["s"]
    follow = [*PROMPT, *first.tokens, 3, 1, 4]
    second = run(engine, req("s", follow))["s"]
    # The last sampled token was never fed back, so its keys are not there.
    assert second.cached_tokens == len(PROMPT) + len(first.tokens) - 1
    again = cold(follow, 1)
    assert (second.tokens, second.logprobs) == (again.tokens, again.logprobs)


def test_sessions_with_one_prefix_share_its_full_pages() -> None:
    engine = make()
    run(engine, req("a"))
    other = run(engine, req("b"))["b"]
    assert other.cached_tokens == 128
    assert other.tokens == cold(PROMPT, 1).tokens


def test_a_context_that_diverges_reuses_up_to_the_difference() -> None:
    engine = make()
    run(engine, req("s"))
    changed = [*PROMPT[:140], 0, 0, 0, *PROMPT[143:]]
    result = run(engine, req("s", changed))["s"]
    assert result.cached_tokens == 140
    assert result.logprobs == cold(changed, 1).logprobs


def test_a_full_page_is_never_written_again_when_a_context_diverges_inside_it() -> None:
    """Else the next session with the old prefix would attend to the new one's keys."""
    engine = make()
    run(engine, req("s"))
    changed = [*PROMPT[:100], 0, 0, 0, *PROMPT[103:]]
    assert run(engine, req("s", changed))["s"].cached_tokens == 64
    old_prefix = run(engine, req("other"))["other"]
    assert old_prefix.cached_tokens == 128
    assert old_prefix.logprobs == cold(PROMPT, 1).logprobs


@pytest.mark.parametrize("length", [64, 150])
def test_case_nemo_rl_4018_prefix_cache_does_not_survive_a_reload(length: int) -> None:
    """NeMo-RL 4018, lmdeploy 4917: after other weights came, keys of the old ones were served."""
    engine = make()
    prompt = PROMPT[:length]
    run(engine, req("s", prompt))
    load(engine, 2)
    after = run(engine, req("s", prompt))["s"]
    fresh = cold(prompt, 2)
    assert after.cached_tokens == 0
    assert (after.tokens, after.logprobs, after.weight_spans) == (fresh.tokens, fresh.logprobs, [(0, 2)])


def test_forget_lets_a_finished_session_go() -> None:
    engine = make()
    run(engine, req("s"))
    assert engine.stats().parked_sessions == 1
    engine.forget("s")
    assert engine.stats().parked_sessions == 0


# -- reload and pins ------------------------------------------------------------------------------------------------


def test_a_reload_between_steps_moves_running_requests_to_the_new_weights() -> None:
    """Known policy: the spans say which version sampled what, and the later tokens are those of a cold engine."""
    engine = make()
    engine.add(req("s", n=20))
    for _ in range(6):
        engine.step()
    load(engine, 2)
    result = run(engine)["s"]
    (start_1, v1), (start_2, v2) = result.weight_spans
    assert (start_1, v1, v2) == (0, 1, 2) and 0 < start_2 < 20
    before, after = result.tokens[:start_2], result.tokens[start_2:]
    assert before == cold(PROMPT, 1, n=start_2).tokens
    rest = cold(PROMPT + before, 2, n=20 - start_2)
    assert (after, result.logprobs[start_2:]) == (rest.tokens, rest.logprobs)
    assert result.numerics_id == "numerics" and result.kv_spans == []


def test_no_request_fails_through_a_reload() -> None:
    engine = make(EngineSettings(max_running=3, chunk_tokens=32, prefill_budget=64))
    for i in range(8):
        engine.add(req(f"s{i}", PROMPT[: 20 + 15 * i], pinned_version=1 if i == 7 else None))
    for version in (2, 3):
        engine.step()
        load(engine, version)
    done = run(engine)
    assert len(done) == 8 and all(len(r.tokens) == 10 for r in done.values())
    assert done["s7"].weight_spans == [(0, 1)]


def test_a_pinned_session_samples_wholly_under_its_own_version() -> None:
    engine = make()
    engine.add(req("s", n=20, pinned_version=1))
    engine.step()
    load(engine, 2)
    load(engine, 3)
    result = run(engine)["s"]
    assert result.weight_spans == [(0, 1)]
    assert (result.tokens, result.logprobs) == (lambda c: (c.tokens, c.logprobs))(cold(PROMPT, 1, n=20))


def test_versions_loaded_for_pinned_sessions_stay_until_unpinned() -> None:
    engine = make()
    load(engine, 3, current=False)
    assert engine.stats().version == 1
    load(engine, 2)
    assert engine.stats().versions == [1, 2, 3]
    assert run(engine, req("s", pinned_version=3))["s"].weight_spans == [(0, 3)]
    engine.unpin(3)
    load(engine, 1)  # a roll-back
    assert engine.stats().version == 1
    assert engine.stats().versions == [1, 2]


def test_at_least_two_versions_are_held() -> None:
    engine = make()
    for version in (2, 3):
        load(engine, version)
    assert engine.stats().versions == [2, 3]
    assert run(engine, req("s", pinned_version=2))["s"].weight_spans == [(0, 2)]
    with pytest.raises(errors.VersionNotHeldError, match=r"weights 1 are not held here \(held: \[2, 3\]\)"):
        engine.add(req("t", pinned_version=1))


def test_kept_keys_are_logged_by_prefix_range_and_claim_no_equality() -> None:
    engine = make(EngineSettings(kv_on_reload="keep"))
    engine.add(req("s", n=20))
    for _ in range(6):
        engine.step()
    load(engine, 2)
    result = run(engine)["s"]
    start = result.weight_spans[1][0]
    assert result.numerics_id == "mixed"
    assert result.kv_spans == [(0, 1), (len(PROMPT) + start - 1, 2)]
    following = run(engine, req("s", PROMPT + result.tokens))["s"]
    assert following.cached_tokens == len(PROMPT) + 19 and following.numerics_id == "mixed"
    pinned = run(engine, req("s", PROMPT + result.tokens, pinned_version=2))["s"]
    assert pinned.cached_tokens == 0 and pinned.numerics_id == "numerics"


def test_no_weights_yet_is_retryable() -> None:
    with pytest.raises(errors.NoWeightsError):
        Engine(CONFIG, "numerics").add(req())


# -- fences, cancellation, deadlines --------------------------------------------------------------------------------


def test_a_newer_owner_cancels_the_older_ones_requests_and_fences_it() -> None:
    engine = make()
    engine.add(req("old", session_id="s", epoch=5))
    engine.step()
    engine.add(req("new", session_id="s", epoch=6))
    with pytest.raises(errors.StaleEpochError, match="epoch 5 is over, 6 owns it"):
        engine.add(req("zombie", session_id="s", epoch=5))
    with pytest.raises(errors.StaleEpochError):
        engine.cancel("s", 5)
    done = run(engine)
    assert done["old"].finish_reason == "cancelled" and done["old"].epoch == 5
    assert len(done["new"].tokens) == 10


def test_a_new_owner_may_ask_under_the_id_it_supersedes() -> None:
    engine = make()
    engine.add(req("s", epoch=5))
    engine.add(req("s", epoch=6))
    assert [r.epoch for r in engine.take_left().finished] == [5]
    assert run(engine)["s"].epoch == 6


def test_cancel_stops_waiting_and_running_requests_and_returns_what_was_sampled() -> None:
    engine = make(EngineSettings(max_running=1))
    engine.add(req("running", session_id="s"))
    engine.add(req("waiting", session_id="s"))
    engine.step()
    engine.step()
    engine.cancel("s", 1)
    done = {r.request_id: r for r in engine.step().finished}
    assert done["running"].tokens == cold(PROMPT, 1, n=2).tokens
    assert done["waiting"].tokens == [] and done["waiting"].weight_spans == []
    assert engine.idle and engine.stats().pages_used == 0


def test_a_request_past_its_deadline_fails_and_leaves() -> None:
    clock = Clock()
    engine = make(EngineSettings(max_running=1), clock)
    engine.add(req("running", n=100, deadline=1010.0))
    engine.add(req("waiting", deadline=1010.0))
    engine.step()
    clock.now = 1011.0
    failed = engine.step().failed
    assert {r.request_id: type(e) for r, e in failed} == dict.fromkeys(
        ("running", "waiting"), errors.DeadlineExceededError
    )
    assert "1 tokens sampled" in str(failed[0][1]) and "still waiting" in str(failed[1][1])
    assert engine.idle and engine.stats().pages_used == 0


def test_the_same_request_twice_is_refused_while_it_runs() -> None:
    engine = make()
    engine.add(req())
    with pytest.raises(errors.DuplicateRequestError):
        engine.add(req())


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"prompt_tokens": []}, errors.InvalidRequestError),
        ({"prompt_tokens": [97]}, errors.InvalidRequestError),
        ({"prompt_tokens": [-1]}, errors.InvalidRequestError),
        ({"max_new_tokens": 0}, errors.InvalidRequestError),
        ({"temperature": -0.1}, errors.InvalidRequestError),
        ({"temperature": float("nan")}, errors.InvalidRequestError),
        ({"seed": 2**64}, errors.InvalidRequestError),
        ({"prompt_tokens": [1] * 320}, errors.ContextTooLongError),
    ],
)
def test_impossible_requests_are_refused_before_they_are_queued(
    changes: dict[str, object], error: type[Exception]
) -> None:
    engine = make()
    with pytest.raises(error):
        engine.add(msgspec.structs.replace(req(), **changes))
    assert engine.idle


def test_the_end_of_the_context_ends_the_turn() -> None:
    result = run(make(), req(prompt=[1] * 310, n=50))["r"]
    assert len(result.tokens) == 10 and result.finish_reason == "length"


# -- priorities and preemption --------------------------------------------------------------------------------------


def test_production_takes_the_seat_of_the_youngest_rl_request_and_both_end_right() -> None:
    engine = make(EngineSettings(max_running=2))
    engine.add(req("old", PROMPT[:100], n=30))
    engine.add(req("young", PROMPT[:120], n=30))
    engine.step()
    engine.add(req("person", PROMPT[:90], n=5, priority=Priority.PRODUCTION))
    order = []
    while not engine.idle:
        order += [r.request_id for r in engine.step().finished]
    assert order[0] == "person" and engine.stats().preemptions == 1
    undisturbed = cold(PROMPT[:120], 1, n=30)
    engine.forget("young")
    again = run(engine, req("young", PROMPT[:120], n=30))["young"]
    assert again.tokens == undisturbed.tokens


def test_preemption_when_pages_run_out_changes_no_result() -> None:
    """Four requests that each grow to five pages in a pool of nine."""
    engine = make(EngineSettings(num_pages=10, max_running=4))
    requests = [req(f"s{i}", PROMPT[i : 100 + i], n=200, seed=i) for i in range(4)]
    done = run(engine, *requests)
    assert engine.stats().preemptions > 0
    for i, request in enumerate(requests):
        alone = run(make(), request)[f"s{i}"]
        assert (done[f"s{i}"].tokens, done[f"s{i}"].logprobs) == (alone.tokens, alone.logprobs)


def test_the_first_waiting_request_is_not_overtaken_by_smaller_ones() -> None:
    engine = make(EngineSettings(num_pages=6, max_running=4))
    engine.add(req("holder", PROMPT[:130], n=60))
    engine.step()
    engine.add(req("long", PROMPT + PROMPT, n=1))
    engine.add(req("short", PROMPT[:5], n=1))
    order = []
    while not engine.idle:
        order += [r.request_id for r in engine.step().finished]
    assert order.index("long") <= order.index("short")


# -- numbers that must not spread -----------------------------------------------------------------------------------


def test_logits_that_are_not_finite_fail_their_request_and_poison_no_page() -> None:
    # Finite weights whose products are not: the second layer's keys and values become NaN.
    state = dict(STATES[2]) | {"model.layers.1.input_layernorm.weight": torch.full((32,), 3e38)}
    engine = make(EngineSettings(num_pages=4))
    load(engine, 2, state, current=False)
    engine.add(req("bad", pinned_version=2))
    failed = []
    while not engine.idle:
        failed += engine.step().failed
    assert [type(e) for _, e in failed] == [errors.NonFiniteLogitsError]
    # All pages were the bad request's. Their unwritten ends weigh 0 now, and 0 * NaN is NaN.
    for name in ("a", "b", "c"):
        good = run(engine, req(name, PROMPT[:5], n=10))[name]
        assert good.logprobs == cold(PROMPT[:5], 1, n=10).logprobs


def test_routed_experts_are_returned_for_prompt_and_completion() -> None:
    config = msgspec.structs.replace(CONFIG, num_experts=4, moe_intermediate_size=24)
    policy = Policy(config, seed=1)
    engine = Engine(config, "numerics", EngineSettings(chunk_tokens=40), Clock())
    engine.install(build(config, 1, to_hf_state(policy)))
    run(engine, req("other"))
    result = run(engine, req("s"))["s"]
    assert result.cached_tokens == 128
    tokens = torch.tensor([*PROMPT, *result.tokens[:-1]])
    routing = Routing()
    with torch.inference_mode():
        starts = torch.tensor([0, len(tokens)], dtype=torch.int32)
        policy.forward_packed(tokens, torch.arange(len(tokens)), starts, routing)
    found = np.frombuffer(result.experts, "<i2").reshape(len(tokens), 2, 2)
    assert (found == torch.stack(routing.chosen, 1).numpy()).all()


def test_statistics_add_up() -> None:
    engine = make()
    engine.add(req("a"))
    engine.step()
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.pages_used, stats.sampled_tokens) == (1, 0, 3, 1)
    run(engine, req("b"))
    stats = engine.stats()
    assert (stats.finished, stats.sampled_tokens, stats.prompt_tokens, stats.cached_tokens) == (2, 20, 300, 128)
    assert stats.prefill_tokens == 150 + 22
    assert stats.pages_used == 0 and stats.busy_seconds > 0


def test_every_error_survives_pickle_and_is_retryable_or_terminal() -> None:
    def subclasses(cls: type[errors.InferenceError]) -> list[type[errors.InferenceError]]:
        return [s for c in cls.__subclasses__() for s in (c, *subclasses(c))]

    all_errors = subclasses(errors.InferenceError)
    assert len({cls.code for cls in all_errors}) == len(all_errors)
    for cls in all_errors:
        error = pickle.loads(pickle.dumps(cls("message")))
        assert (type(error), str(error)) == (cls, "message")
        assert issubclass(cls, errors.RetryableInferenceError) != issubclass(cls, errors.TerminalInferenceError)
