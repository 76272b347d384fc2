"""A sandbox that holds what the log says: image + starting files + set-up + deltas, in that order.

The same for the agent and for the grader, so that both see the same tree. A set-up command that fails is the task's
fault and is refused by name; a fault of the host is `SandboxInfraError`.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath

import msgspec

from odradek.actors.environment.archive import unpack
from odradek.actors.environment.delta import Delta, DeltaEntry, compose
from odradek.actors.environment.errors import SandboxInfraError, SandboxSpecError
from odradek.actors.environment.logged import from_logged
from odradek.actors.environment.ns import NsDriver
from odradek.actors.environment.ns.admission import NsConfig
from odradek.actors.environment.protocol import ExecRequest, Limit, Limits, Sandbox, SandboxSpec
from odradek.actors.environment.setup import setup_runner
from odradek.actors.runtime.deployment import Deployment
from odradek.actors.session.ports import WorkspaceStart
from odradek.sandbox_images.builder import SetupRunner, build
from odradek.sandbox_images.errors import ImageError
from odradek.sandbox_images.recipe import RECIPES, load_recipe
from odradek.sandbox_images.store import ImageStore
from odradek.streams.blobs import BlobStore
from odradek.streams.errors import BlobCorrupt, BlobMissing
from odradek.streams.events.sessions import WorkspaceDelta

log = logging.getLogger(__name__)

MEMORY_BYTES = 512 * 1024 * 1024
PIDS = 128
CPUS = 1.0
FILE_BYTES = 1024 * 1024 * 1024
"""Bytes of one file; the whole tree is bounded by the driver (`NsConfig.max_disk_bytes`)."""
SETUP_SECONDS = 120.0
"""Seconds one set-up command may take."""
LIFETIME_S = 1800.0
"""Seconds after which the host ends a sandbox whatever its client does. Must exceed a session's wall clock."""
IMAGE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
"""What an image may be called. Anybody may publish a task, so a name is never taken for a path."""
SHOWN = 200
"""Characters of a command that an error quotes."""
LIMITS = Limits(memory_bytes=Limit(MEMORY_BYTES), pids=Limit(PIDS), cpus=Limit(CPUS), disk_bytes=Limit(FILE_BYTES))


def ns_driver(deployment: Deployment, name: str, images: ImageStore) -> NsDriver:
    """The driver of one process, with the deployment's limits; its state lies under the actor's name."""
    config = msgspec.convert(deployment.sandboxes, NsConfig)
    return NsDriver(Path(deployment.data_dir) / "sandboxes" / name, images, config)


def _as_delta(files: Mapping[str, bytes]) -> Delta:
    """Starting files as changes to an empty workspace, with the folders they need."""
    folders = {str(parent) for path in files for parent in PurePosixPath(path).parents} - {"."}
    entries = [DeltaEntry(path=path, kind="dir", mode=0o755) for path in folders]
    entries += [
        DeltaEntry(path=path, kind="file", mode=0o644, size=len(content), content=content)
        for path, content in files.items()
    ]
    return Delta(entries=tuple(sorted(entries, key=lambda entry: entry.path)))


async def end_with(driver: NsDriver) -> None:
    """An actor's main task: raises when its driver is lost, so that the actor is restarted and has a fresh one."""
    await driver.lost()
    raise SandboxInfraError("the sandbox driver's zygote has ended: its sandboxes are gone and it can make no more")


class SandboxFactory:
    """Opens sandboxes for one process, over one driver and one image store."""

    def __init__(self, driver: NsDriver, images: ImageStore, blobs: BlobStore) -> None:
        self.driver = driver
        self._images = images
        self._blobs = blobs
        self._digests: dict[str, str] = {}
        self._building = asyncio.Lock()
        self._trees: dict[str, str] = {}

    async def image_digest(self, name: str) -> str:
        """The digest of an image by name (a shipped recipe, built on first use) or by digest. Raises `SandboxSpecError`
        for an image that is not to be had here: asking again would not bring it."""
        if name not in self._digests:
            if not IMAGE_NAME.fullmatch(name):
                raise SandboxSpecError(f"image {name[:SHOWN]!r} is no name and no digest of an image")
            run_setup = setup_runner(self.driver, asyncio.get_running_loop())
            async with self._building:
                try:
                    if name not in self._digests:
                        self._digests[name] = await asyncio.to_thread(self._found, name, run_setup)
                except ImageError as error:
                    raise SandboxSpecError(f"image {name!r}: {error}") from error
        return self._digests[name]

    def _found(self, name: str, run_setup: SetupRunner) -> str:
        recipe = RECIPES / f"{name}.toml"
        if recipe.is_file():
            return build(load_recipe(recipe), self._images, run_setup)
        self._images.image(name)
        return name

    async def _layer(self, start: WorkspaceStart) -> str:
        """Digest of the layer with the starting files. Those of a reference are fetched and unpacked once a process,
        and whatever is wrong with them is the task's fault."""
        if start.files_ref is None:
            return self._images.layer_from_files(start.files)
        ref = start.files_ref
        if ref.sha256 not in self._trees or not self._images.has_layer(self._trees[ref.sha256]):
            try:
                data = await self._blobs.get(ref)
            except (BlobMissing, BlobCorrupt) as error:
                raise SandboxSpecError(f"files_ref: {error}") from error
            files = await asyncio.to_thread(unpack, data)
            self._trees[ref.sha256] = await asyncio.to_thread(self._images.layer_from_files, files)
        return self._trees[ref.sha256]

    async def open(self, start: WorkspaceStart, deltas: Sequence[WorkspaceDelta], label: str) -> Sandbox:
        """A fresh sandbox in the logged state. `label` names its owner in `list` and after a crash. Files that are
        somebody's are put into the sandbox alone: a layer would stay on the host when the session is over."""
        alone = start.files if start.subject else {}
        layers = (await self._layer(start),) if (start.files and not alone) or start.files_ref is not None else ()
        sandbox = await self.driver.create(
            SandboxSpec(
                image=await self.image_digest(start.image),
                layers=layers,
                limits=LIMITS,
                lifetime_s=LIFETIME_S,
                labels={"owner": label},
                production=start.production,
            )
        )
        try:
            if alone:
                await sandbox.apply(_as_delta(alone))
            for command in start.setup:
                result = await sandbox.exec(ExecRequest(shell=command, timeout_s=SETUP_SECONDS))
                if result.exit_code != 0:
                    raise SandboxSpecError(f"set-up command failed with {result.exit_code}: {command[:SHOWN]!r}")
            if deltas:
                await sandbox.apply(compose(await from_logged(deltas, self._blobs)))
            await sandbox.diff(incremental=True)
        except BaseException:
            await sandbox.destroy()
            raise
        return sandbox
