"""The image side of a sandbox: which layers a spec means, the workspace they make, and their files."""

import os
from collections import OrderedDict
from collections.abc import Callable, Sequence

from odradek.actors.environment.errors import SandboxSpecError
from odradek.actors.environment.ns.overlay import BaseTree
from odradek.actors.environment.ns.workspace import base_reader, base_tree
from odradek.actors.environment.protocol import SandboxSpec
from odradek.sandbox_images.errors import ImageNotFoundError
from odradek.sandbox_images.store import ImageStore

KEPT_BASES = 256
"""Base trees kept in memory. Too low: each sandbox reads its own; too high: memory, if repositories are large."""

MAX_LAYERS = 8
"""Layers of image and spec together: with `MAX_FROZEN` uppers their paths still fit the kernel's 4 KiB of options."""


class Layers:
    """Layers of one store; holds its directory open, because the file threads may not be able to walk to it."""

    def __init__(self, images: ImageStore) -> None:
        self._images = images
        self._fd = os.open(images.layers_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._bases: OrderedDict[tuple[str, ...], BaseTree] = OrderedDict()

    def close(self) -> None:
        os.close(self._fd)

    def of(self, spec: SandboxSpec) -> tuple[str, ...]:
        """The spec's layers, lowest first; refused if one is not here."""
        try:
            layers = (*self._images.image(spec.image).layers, *spec.layers)
            for layer in layers:
                self._images.layer_path(layer)
        except ImageNotFoundError as error:
            raise SandboxSpecError(str(error)) from error
        if len(layers) > MAX_LAYERS:
            raise SandboxSpecError(f"{len(layers)} layers of image and spec: at most {MAX_LAYERS}")
        return layers

    def base(self, layers: tuple[str, ...]) -> BaseTree:
        base = self._bases.get(layers)
        if base is None:
            base = self._bases[layers] = base_tree(self._images.manifest(layer) for layer in layers)
            while len(self._bases) > KEPT_BASES:
                self._bases.popitem(last=False)
        return base

    def reader(self, layers: Sequence[str]) -> Callable[[str], bytes]:
        """Reads a workspace file of these layers by its path."""
        return base_reader(self._fd, layers)
