"""Errors of the trainer. All are terminal: they stop the lane until somebody decides. What may be retried comes from
the object store and the broker, as the types of `odradek.streams.errors`."""

from __future__ import annotations


class TrainerError(Exception):
    """Base of every error of `odradek.actors.trainer`."""


class BatchError(TrainerError):
    """A batch whose arrays do not fit together: the assembler and this trainer disagree; training it would be wrong."""


class DivergedError(TrainerError):
    """Loss or gradient is not finite. The step's weights must be thrown away: reload the parent's checkpoint."""


class CheckpointError(TrainerError):
    """A checkpoint that cannot be used; the message names version and object."""


class IncompleteCheckpointError(CheckpointError):
    """An object of the checkpoint is missing, shorter than recorded or of another digest."""


class PrunedVersionError(CheckpointError):
    """The weights of a version are no longer kept (trainer.keep_versions, trainer.keep_every). What was trained on them
    is still on the log and can be rebuilt; another version has to be asked for."""


class AdoptionError(CheckpointError):
    """A manifest stands where the next one belongs, but it is not of the next uncommitted batch. Never adopt and never
    overwrite it: find out who wrote it, or begin a new incarnation with `odradek restore`."""


class RestoreError(TrainerError):
    """A new incarnation can't begin; nothing was changed."""


class DeltaBaseError(CheckpointError):
    """A delta was offered for other weights than those held. `wanted` is the digest that it applies to."""

    def __init__(self, message: str, wanted: str) -> None:
        super().__init__(message)
        self.wanted = wanted

    def __reduce__(self) -> tuple[type[DeltaBaseError], tuple[str, str]]:
        return type(self), (str(self), self.wanted)
