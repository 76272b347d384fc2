"""Errors of the inference room.

`RetryableInferenceError`: the same request may succeed later or on another replica; it says nothing about the policy,
so it is never scored. `TerminalInferenceError`: the same request fails again everywhere. Every error is built from one
message, so that it survives pickle (Ray) whole; messages hold ids, versions and sizes, never tokens or text.
"""

from __future__ import annotations

from typing import ClassVar


class InferenceError(Exception):
    """Base of every error of `odradek.actors.inference`."""

    code: ClassVar[str] = "inference"


class RetryableInferenceError(InferenceError):
    """An infrastructure fault: retry, here or on another replica."""

    code = "inference_retryable"


class DeadlineExceededError(RetryableInferenceError):
    """The request's deadline passed before it finished."""

    code = "deadline_exceeded"


class VersionNotHeldError(RetryableInferenceError):
    """The request is pinned to a weight version that this engine does not hold."""

    code = "version_not_held"


class NoWeightsError(RetryableInferenceError):
    """No weight version has been loaded yet."""

    code = "no_weights"


class EngineCrashedError(RetryableInferenceError):
    """The engine loop died; every request it held fails with this error and none hangs."""

    code = "engine_crashed"


class EngineStoppedError(RetryableInferenceError):
    """The engine is shutting down."""

    code = "engine_stopped"


class NonFiniteLogitsError(RetryableInferenceError):
    """A row of logits holds NaN or infinity where a token had to be sampled: nothing is sampled from it."""

    code = "non_finite_logits"


class TerminalInferenceError(InferenceError):
    """The request (or the weights) can never be accepted as it is."""

    code = "inference_terminal"


class InvalidRequestError(TerminalInferenceError):
    """A field is out of range: empty prompt, unknown token id, negative temperature."""

    code = "invalid_request"


class ContextTooLongError(TerminalInferenceError):
    """The prompt leaves no room for one token in the model's context or in the page pool."""

    code = "context_too_long"


class StaleEpochError(TerminalInferenceError):
    """A newer owner of the session has called; the caller must stop acting for it."""

    code = "stale_epoch"


class DuplicateRequestError(TerminalInferenceError):
    """A request of this id is already being sampled."""

    code = "duplicate_request"


class WeightsRefusedError(TerminalInferenceError):
    """Weights that do not fit, are damaged, or build on a version that is not held; the served version is unchanged."""

    code = "weights_refused"
