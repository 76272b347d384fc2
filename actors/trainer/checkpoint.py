"""Checkpoints in an object store: publish a version once, read it back whole, find the last complete one.

Order of a publish: content-addressed shards, each verified, then the manifest with If-None-Match. So
- a kill at any point leaves either the whole version or none (stray shards are harmless and shared by content);
- of several trainers one wins a version; the others read the winner's manifest and load it;
- reading verifies every object against the manifest: missing, shortened and flipped are refused by name.
Everything that a later step depends on is inside: weights, Adam's moments and count, the generator, the version (the
schedule's step), and in `origin` the position in the log. Store time-outs come through as `StoreUnreachable`: retry.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from odradek.actors.inference.weights import state_digest
from odradek.actors.policy.config import ModelConfig
from odradek.actors.policy.hf import load_hf_state, to_hf_state
from odradek.actors.policy.model import Policy
from odradek.actors.trainer import delta as deltas
from odradek.actors.trainer.delta import DeltaInfo
from odradek.actors.trainer.errors import (
    CheckpointError,
    DeltaBaseError,
    IncompleteCheckpointError,
    PrunedVersionError,
)
from odradek.actors.trainer.manifest import (
    TRAINER,
    WEIGHTS,
    WEIGHTS_DELTA,
    ConsentRead,
    Manifest,
    Origin,
    Place,
    Shard,
    decode,
    digest,
)
from odradek.actors.trainer.optim import AdamW
from odradek.streams.blobs import BlobStore, ObjectStore
from odradek.streams.errors import BlobCorrupt, BlobMissing
from odradek.streams.events.meta import BlobRef

FULL_EVERY: Final = 10
"""Every such version is stored whole. Higher: a cold reader fetches more deltas, and one lost object costs more
versions. Lower: more bytes a version."""

WORTHWHILE: Final = 0.9
"""A delta larger than this share of the whole is not stored: float32 weights after an Adam step differ nearly
everywhere, and a chain would then cost reads without saving bytes."""

_GENERATOR: Final = "rng"


@dataclass
class TrainerState:
    """Everything a training step reads and writes."""

    policy: Policy
    optimiser: AdamW
    rng: torch.Generator
    version: int
    """The version of the weights; the next step trains version + 1."""

    @classmethod
    def begin(cls, policy: Policy, seed: int) -> TrainerState:
        """Version 0: the warm start, with fresh moments."""
        return cls(policy, AdamW(policy), torch.Generator().manual_seed(seed), 0)


@dataclass(frozen=True)
class Weights:
    """One version's weights as published, under Hugging Face names, with their digest."""

    version: int
    state: Mapping[str, Tensor]
    digest: str


@dataclass(frozen=True)
class Published:
    """A version that exists. `won` is False when another trainer's manifest stood there first: then this is theirs,
    and the caller's own result must be thrown away."""

    manifest: Manifest
    key: str
    sha256: str
    won: bool
    weights: Weights | None
    """What was stored, when `won`; the parent of the next version's delta."""


class Checkpoints:
    """The versions of one lane in one store."""

    def __init__(self, store: ObjectStore, place: Place, full_every: int = FULL_EVERY) -> None:
        self.place = place
        self.store = self._store = store
        self._blobs = BlobStore(store, prefix=place.prefix, cache_bytes=0)  # shared within the place, and no further
        self._full_every = full_every

    def at(self, place: Place) -> Checkpoints:
        """The versions at another place of the same store."""
        return Checkpoints(self._store, place, self._full_every)

    async def publish(
        self,
        state: TrainerState,
        origin: Origin,
        numerics_id: str,
        parent: Weights | None = None,
        consent: ConsentRead | None = None,
    ) -> Published:
        """Store `state` as its version; `parent` are the previous version's weights, to store only what changed."""
        weights = Weights(state.version, hf := to_hf_state(state.policy), state_digest(hf))
        name, data, info = self._weights_shard(weights, parent)
        shards = [
            await self._put(name, data),
            await self._put(TRAINER, _trainer_shard(state)),
        ]
        manifest = Manifest(
            incarnation=self.place.incarnation,
            policy=self.place.policy,
            lane=self.place.lane,
            version=state.version,
            origin=origin,
            model=state.policy.config.to_hf(),
            weights_digest=weights.digest,
            numerics_id=numerics_id,
            optimiser_updates=state.optimiser.updates,
            shards=shards,
            delta=info,
            consent=consent or ConsentRead(),
        )
        key, body = self.place.key(state.version), manifest.encode()
        if await self._store.put_if_absent(key, body):
            return Published(manifest, key, digest(body), True, weights)
        body = await self._store.get(key)
        return Published(decode(body, key), key, digest(body), False, None)

    def _weights_shard(self, weights: Weights, parent: Weights | None) -> tuple[str, bytes, DeltaInfo | None]:
        whole = save_tensors(dict(weights.state), metadata={"format": "pt"})
        if parent is None or weights.version % self._full_every == 0:
            return WEIGHTS, whole, None
        change = deltas.make(parent.state, weights.state)
        if len(change) > WORTHWHILE * len(whole):
            return WEIGHTS, whole, None
        return WEIGHTS_DELTA, change, DeltaInfo(parent.version, parent.digest, weights.digest)

    async def _put(self, name: str, data: bytes) -> Shard:
        ref = await self._blobs.put(data)
        return Shard(name=name, key=ref.key, sha256=ref.sha256, bytes=ref.size)

    async def manifest(self, version: int, sha256: str | None = None) -> Manifest:
        """The manifest of `version`, verified against `sha256` when the log names one."""
        key = self.place.key(version)
        try:
            body = await self._store.get(key)
        except BlobMissing:
            raise IncompleteCheckpointError(f"no manifest {key}: version {version} was never published") from None
        if sha256 is not None and digest(body) != sha256:
            raise CheckpointError(f"manifest {key} has sha256 {digest(body)}, the log says {sha256}; restore it")
        return decode(body, key)

    async def weights(self, manifest: Manifest, held: Mapping[int, Mapping[str, Tensor]] | None = None) -> Weights:
        """The weights of `manifest`: whole, or by its deltas on a held state or on the last whole version.

        Each delta is applied to its own parent only, never to another base. Raises naming what is missing.
        """
        chain: list[Manifest] = []
        base: Weights | None = None
        at = manifest
        while at.delta is not None:
            chain.append(at)
            held_state = (held or {}).get(at.delta.base_version)
            if held_state is not None and state_digest(held_state) == at.delta.base_digest:
                base = Weights(at.delta.base_version, held_state, at.delta.base_digest)
                break
            at = await self._parent_of(at, at.delta)
        if base is None:
            base = await self._whole(at)
        for link in reversed(chain):
            assert link.delta is not None
            data = await self._read(link, WEIGHTS_DELTA)
            state = deltas.apply(base.state, data, link.delta, base.version)
            base = Weights(link.version, state, link.delta.result_digest)
        return base

    async def _parent_of(self, child: Manifest, info: DeltaInfo) -> Manifest:
        try:
            parent = await self.manifest(info.base_version)
        except IncompleteCheckpointError as e:
            raise DeltaBaseError(
                f"{child.name} is a delta on version {info.base_version} with digest {info.base_digest}, "
                f"which is neither held nor in the store: {e}",
                wanted=info.base_digest,
            ) from e
        if parent.weights_digest != info.base_digest:
            raise DeltaBaseError(
                f"{child.name} is a delta on digest {info.base_digest}, but {parent.name} has {parent.weights_digest}",
                wanted=info.base_digest,
            )
        return parent

    async def _whole(self, manifest: Manifest) -> Weights:
        state = _tensors(await self._read(manifest, WEIGHTS), manifest.name)
        found = state_digest(state)
        if found != manifest.weights_digest:
            raise CheckpointError(f"{manifest.name}: weights have digest {found}, expected {manifest.weights_digest}")
        return Weights(manifest.version, state, found)

    async def restore(self, manifest: Manifest) -> tuple[TrainerState, Weights]:
        """The trainer as it was when `manifest` was published; the next step gives the bits it would have given."""
        weights = await self.weights(manifest)
        policy = Policy(ModelConfig.from_hf(manifest.model), seed=None)
        load_hf_state(policy, weights.state, manifest.name)
        tensors = _tensors(await self._read(manifest, TRAINER), manifest.name)
        state = TrainerState(policy, AdamW(policy), torch.Generator(), manifest.version)
        state.rng.set_state(tensors.pop(_GENERATOR))
        state.optimiser.load_state_tensors(tensors, manifest.optimiser_updates)
        return state, weights

    async def complete(self, version: int, sha256: str | None = None) -> Manifest:
        """The manifest of a version whose every object is there and whole; raises naming the first that is not."""
        manifest = await self.manifest(version, sha256)
        await self.weights(manifest)
        await self._read(manifest, TRAINER)
        return manifest

    async def versions(self) -> list[int]:
        """Every version that has a manifest here, complete or not, ascending."""
        keys = await self._store.list(self.place.prefix)
        return sorted(version for key in keys if (version := self.place.version_of(key)) is not None)

    async def mark_pruned(self, version: int) -> None:
        """Say, before anything of it is removed, that this version's shards are not kept any more."""
        await self._store.put_if_absent(self.place.pruned_key(version), b"pruned")

    async def pruned(self) -> list[int]:
        """The versions marked so, ascending."""
        marks = await self._store.list(self.place.pruned_prefix)
        return sorted(int(tail) for key in marks if (tail := key.removeprefix(self.place.pruned_prefix)).isdigit())

    async def _read(self, manifest: Manifest, name: str) -> bytes:
        shard = manifest.shard(name)
        try:
            return await self._blobs.get(BlobRef(key=shard.key, sha256=shard.sha256, size=shard.bytes))
        except (BlobMissing, BlobCorrupt) as e:
            place = Place(manifest.incarnation, manifest.policy, manifest.lane)
            if isinstance(e, BlobMissing) and await self._store.exists(place.pruned_key(manifest.version)):
                raise PrunedVersionError(
                    f"version {manifest.version} ({manifest.name}) was pruned: its weights are no longer kept; "
                    f"trainer.keep_versions and trainer.keep_every say which are"
                ) from e
            raise IncompleteCheckpointError(
                f"{manifest.name}: shard {name!r} cannot be used: {e}, or see with `odradek restore --dry-run` "
                f"from which version the lane can go on"
            ) from e


def _trainer_shard(state: TrainerState) -> bytes:
    return save_tensors({**state.optimiser.state_tensors(), _GENERATOR: state.rng.get_state()})


def _tensors(data: bytes, name: str) -> dict[str, Tensor]:
    try:
        return load_tensors(data)
    except SafetensorError as e:
        raise IncompleteCheckpointError(f"{name}: a shard of {len(data)} bytes is no safetensors file: {e}") from e


async def fetch_weights(
    store: ObjectStore,
    manifest_key: str,
    manifest_sha256: str,
    held: Mapping[int, Mapping[str, Tensor]] | None = None,
) -> tuple[Manifest, Weights]:
    """What a reader of `version.published` needs: the weights at a manifest's key, verified by the log's digest."""
    place, version = Place.of_key(manifest_key)
    checkpoints = Checkpoints(store, place)
    manifest = await checkpoints.manifest(version, manifest_sha256)
    return manifest, await checkpoints.weights(manifest, held)
