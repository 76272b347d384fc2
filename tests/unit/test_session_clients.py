"""The session's ports over Ray: an error arrives in its actor's own words, and as what may be done about it."""

from __future__ import annotations

from typing import Any

import pytest
import ray.exceptions

from odradek.actors.environment.errors import SandboxInfraError, SandboxSpecError
from odradek.actors.session.clients import RayEnvironment
from odradek.actors.session.errors import EnvironmentLost, SessionError, SessionInfraFailure
from odradek.actors.session.ports import Call
from odradek.streams.errors import BlobMissing, StoreUnreachable


class Failing:
    """A handle whose every call fails as Ray reports an actor's error: a long traceback with the cause inside."""

    def __init__(self, cause: Exception) -> None:
        self._cause = cause

    @property
    def run_calls(self) -> Failing:
        return self

    async def remote(self, *_: Any) -> None:
        raise ray.exceptions.RayTaskError("run_calls", "Traceback\n  deep\n" * 500, self._cause).as_instanceof_cause()


@pytest.mark.parametrize(
    ("cause", "becomes"),
    [
        (SandboxSpecError("no image 'x'"), SessionInfraFailure),
        (SandboxInfraError("host full"), EnvironmentLost),
        (StoreUnreachable("no answer"), EnvironmentLost),
        (BlobMissing("gone"), SessionInfraFailure),
        (OSError("File name too long"), SessionInfraFailure),
    ],
    ids=lambda value: getattr(value, "__name__", type(value).__name__),
)
async def test_an_actors_error_is_told_in_its_own_words_and_says_whether_to_try_again(
    cause: Exception, becomes: type[SessionError]
) -> None:
    environment = RayEnvironment(Failing(cause))
    with pytest.raises(becomes) as caught:
        await environment.run_calls("s", 0, [Call("0.0", "read_file", {})], 5.0)
    told = str(caught.value)
    assert f"{type(cause).__name__}: {cause}" in told and "Traceback" not in told and len(told) < 200
