"""Which path a call takes, what it refuses, and what never happens: a silent change of path."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from odradek.kernels.attention.api import attend_causal, attend_paged
from odradek.kernels.errors import KernelError, KernelInputError, KernelUnavailableError
from odradek.kernels.logprob.api import row_logits, token_logprobs
from odradek.kernels.moe.api import expert_layer
from odradek.kernels.norm.api import rms_norm
from odradek.kernels.paths import path_of
from odradek.kernels.rows.api import linear

KERNELS = Path(__file__).resolve().parents[2] / "kernels"


class Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Remembers the most elements that any operation's result had."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, tuple | list) else (out,):
            if isinstance(t, torch.Tensor):
                self.elements = max(self.elements, t.numel())
        return out


def test_logprobs_never_hold_all_logits_forward_or_backward() -> None:
    n, h, v = 1500, 16, 1024
    hidden, weight = torch.randn(n, h, requires_grad=True), torch.randn(v, h, requires_grad=True)
    targets = torch.randint(0, v, (n,))
    with Largest() as seen:
        logprob, entropy = token_logprobs(hidden, weight, targets)
        torch.autograd.backward(logprob.sum() + entropy.sum())
    assert hidden.grad is not None and hidden.grad.abs().sum() > 0
    assert n * h < seen.elements <= 1 << 18 < n * v


def test_path_follows_the_device_and_mixed_devices_are_refused() -> None:
    cpu, meta = torch.zeros(1), torch.zeros(1, device="meta")
    assert path_of("k", cpu, None, cpu) == "cpu"
    with pytest.raises(KernelInputError, match=r"one device, found \['cpu', 'meta'\]"):
        path_of("k", cpu, meta)
    with pytest.raises(KernelUnavailableError, match="no path for device type 'meta'"):
        path_of("k", meta)


@pytest.mark.parametrize("name", ["attention", "logprob", "moe", "norm", "rows"])
def test_cuda_never_falls_back_to_the_cpu_path(name: str) -> None:
    """No GPU module imports a CPU module, and no API catches an exception."""
    assert "import cpu" not in (KERNELS / name / "gpu.py").read_text()
    assert ".cpu import" not in (KERNELS / name / "gpu.py").read_text()
    api = (KERNELS / name / "api.py").read_text()
    assert "except" not in api
    assert "import gpu" in api and "import cpu" in api


def _attend(q: tuple[int, ...], k: tuple[int, ...], starts: list[int]) -> Callable[[], object]:
    return lambda: attend_causal(torch.zeros(q), torch.zeros(k), torch.zeros(k), torch.tensor(starts).int())


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "inner sizes": (lambda: linear(torch.zeros(2, 3), torch.zeros(4, 5)), r"x=\(2, 3\), w=\(4, 5\)"),
    "dtypes": (lambda: linear(torch.zeros(2, 3), torch.zeros(4, 3).bfloat16()), "w_dtype=torch.bfloat16"),
    "norm width": (lambda: rms_norm(torch.zeros(2, 3), torch.zeros(4), 1e-6), r"w=\(4,\)"),
    "targets": (
        lambda: token_logprobs(torch.zeros(2, 3), torch.zeros(5, 3), torch.zeros(2)),
        "integer targets",
    ),
    "temperature": (lambda: row_logits(torch.zeros(2, 3), torch.zeros(5, 3), 0.0), "temperature > 0"),
    "starts past the end": (_attend((4, 2, 8), (4, 2, 8), [0, 5]), r"ascending from 0 to T=4"),
    "starts that descend": (_attend((4, 2, 8), (4, 2, 8), [0, 3, 2, 4]), "ascending"),
    "heads": (_attend((4, 3, 8), (4, 2, 8), [0, 4]), "Hk dividing Hq"),
    "page size": (
        lambda: attend_paged(
            torch.zeros(1, 1, 2, 8),
            torch.zeros(1, 32, 2, 8),
            torch.zeros(1, 32, 2, 8),
            torch.zeros(1, 1).int(),
            torch.zeros(1, 1).int(),
            torch.ones(1).int(),
        ),
        r"pages \[P, 64, Hk, D\]",
    ),
    "position past the table": (
        lambda: attend_paged(
            torch.zeros(1, 1, 2, 8),
            torch.zeros(1, 64, 2, 8),
            torch.zeros(1, 64, 2, 8),
            torch.zeros(1, 1).int(),
            torch.full((1, 1), 64).int(),
            torch.ones(1).int(),
        ),
        "need=2",
    ),
    "top_k": (
        lambda: expert_layer(torch.zeros(2, 4), torch.zeros(3, 4), torch.zeros(3, 4, 4), torch.zeros(3, 4, 2), 4, True),
        "top_k=4",
    ),
    "replay": (
        lambda: expert_layer(
            torch.zeros(2, 4), torch.zeros(3, 4), torch.zeros(3, 4, 4), torch.zeros(3, 4, 2), 2, True, torch.zeros(2, 2)
        ),
        "replayed expert_ids as integers",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_with_what_was_found(name: str) -> None:
    call, message = REFUSED[name]
    with pytest.raises(KernelInputError, match=message):
        call()


def test_every_error_of_the_room_has_one_base() -> None:
    assert issubclass(KernelInputError, KernelError) and issubclass(KernelUnavailableError, KernelError)


def test_nothing_in_nothing_out() -> None:
    """A step with no rows is a step: no kernel may fail on it."""
    empty = torch.zeros(0, 8)
    assert linear(empty, torch.zeros(3, 8)).shape == (0, 3)
    assert rms_norm(empty, torch.ones(8), 1e-6).shape == (0, 8)
    assert token_logprobs(empty, torch.zeros(5, 8), torch.zeros(0).long())[0].shape == (0,)
    assert _attend((0, 2, 8), (0, 2, 8), [0])() is not None
    y, ids = expert_layer(empty, torch.zeros(3, 8), torch.zeros(3, 4, 8), torch.zeros(3, 8, 2), 2, True)
    assert (y.shape, ids.shape) == ((0, 8), (0, 2))


def test_buffers_made_by_the_engine_serve_the_trainer() -> None:
    """Scratch and plans made inside inference mode are used again outside it, with gradients."""
    q = torch.randn(70, 2, 8)
    starts = torch.tensor([0, 70]).int()
    with torch.inference_mode():
        first = attend_causal(q, q, q, starts)
    leaf = q.clone().requires_grad_()
    second = attend_causal(leaf, leaf, leaf, starts)
    torch.autograd.backward(second.sum())
    assert torch.equal(first, second) and leaf.grad is not None
