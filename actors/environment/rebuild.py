"""A workspace from what the log says of it: image, layers, and the deltas of the calls so far.

Any driver on any host gives the same tree (tested by `tests/contract/test_sandbox_delta.py`). Processes are not part of
it: what ran in the background is gone, and the model must be told so.
"""

from collections.abc import Iterable, Sequence

import msgspec

from odradek.actors.environment.delta import Delta, compose
from odradek.actors.environment.protocol import DEFAULT_DEADLINE_S, FetchContent, Sandbox, SandboxDriver, SandboxSpec


async def workspace_rebuild(
    driver: SandboxDriver,
    image: str,
    layers: Sequence[str],
    deltas: Iterable[Delta],
    *,
    fetch: FetchContent | None = None,
    terms: SandboxSpec | None = None,
    deadline_s: float = DEFAULT_DEADLINE_S,
) -> Sandbox:
    """A fresh sandbox in that state; its next incremental diff starts there. `terms`: limits, lifetime, labels."""
    spec = msgspec.structs.replace(terms or SandboxSpec(image), image=image, layers=tuple(layers))
    sandbox = await driver.create(spec, deadline_s=deadline_s)
    try:
        await sandbox.apply(compose(deltas), fetch)
    except BaseException:
        await sandbox.destroy()
        raise
    return sandbox
