# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""The expert layer in Triton: routing in torch, then three kernels that permute as they load and store.

`gate_up` reads each expert's rows by their token index and writes silu(gate)·up in expert order; `down` writes each
slot back to its (token, k) place; `combine` adds a token's K slots in order. A block holds rows of one expert only; the
number of blocks is bounded without asking the device (⌈slots/64⌉ + E), and spare ones store nothing. No atomics: no sum
has an open order. Backward: the plain torch layer, computed again and differentiated.
"""

from typing import Any, cast

import torch
import triton
import triton.language as tl

from odradek.kernels.moe.plain import mix_experts
from odradek.kernels.moe.routing import by_expert, route
from odradek.kernels.rows.gpu import linear, tile_product

BLOCKS = {"BLOCK_S": 64, "BLOCK_O": 64, "BLOCK_K": 32}
"""Slots, outputs and depth of a tile; as in `rows.gpu`."""

OPTIONS = {"num_warps": 4, "num_stages": 2, "enable_fp_fusion": True}
"""As in `rows.gpu`."""

COMBINE_BLOCK = {"BLOCK_H": 256}
"""Hidden units a program of `combine_kernel` adds up; no effect on the bits."""

COMBINE_OPTIONS = {"num_warps": 4, "enable_fp_fusion": True}
"""As in `rows.gpu`; it has no tiles to keep in flight."""


@triton.jit
def gate_up_kernel(
    x_ptr,
    w13_ptr,
    act_ptr,
    order_ptr,
    block_expert_ptr,
    block_start_ptr,
    block_end_ptr,
    H,
    F,
    TOP_K: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    block = tl.program_id(0)
    end = tl.load(block_end_ptr + block)
    s = tl.load(block_start_ptr + block) + tl.arange(0, BLOCK_S)
    f = (tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)).to(tl.int64)
    expert = tl.load(block_expert_ptr + block).to(tl.int64)
    live = s < end
    token = tl.load(order_ptr + s, mask=live, other=0) // TOP_K
    gate_ptrs = w13_ptr + (expert * 2 * F + f) * H
    zero = tl.zeros((BLOCK_S, BLOCK_O), tl.float32)
    gate = tile_product(x_ptr + token * H, live, gate_ptrs, f < F, H, zero, BLOCK_K)
    up = tile_product(x_ptr + token * H, live, gate_ptrs + F * H, f < F, H, zero, BLOCK_K)
    # Rounded to the layer's dtype where plain torch would store them.
    kind = act_ptr.dtype.element_ty
    gate, up = gate.to(kind).to(tl.float32), up.to(kind).to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32)
    act_ptrs = act_ptr + s.to(tl.int64)[:, None] * F + f[None, :]
    tl.store(act_ptrs, (silu * up).to(kind), mask=live[:, None] & (f < F)[None, :])


@triton.jit
def down_kernel(
    act_ptr,
    w2_ptr,
    slots_ptr,
    order_ptr,
    block_expert_ptr,
    block_start_ptr,
    block_end_ptr,
    H,
    F,
    BLOCK_S: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    block = tl.program_id(0)
    end = tl.load(block_end_ptr + block)
    s = tl.load(block_start_ptr + block) + tl.arange(0, BLOCK_S)
    h = (tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)).to(tl.int64)
    expert = tl.load(block_expert_ptr + block).to(tl.int64)
    live = s < end
    acc = tl.zeros((BLOCK_S, BLOCK_O), tl.float32)
    acc = tile_product(act_ptr + s.to(tl.int64) * F, live, w2_ptr + (expert * H + h) * F, h < H, F, acc, BLOCK_K)
    slot = tl.load(order_ptr + s, mask=live, other=0)
    slot_ptrs = slots_ptr + slot[:, None] * H + h[None, :]
    tl.store(slot_ptrs, acc.to(slots_ptr.dtype.element_ty), mask=live[:, None] & (h < H)[None, :])


@triton.jit
def combine_kernel(slots_ptr, weights_ptr, y_ptr, H, TOP_K: tl.constexpr, BLOCK_H: tl.constexpr):
    n = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    y = tl.zeros((BLOCK_H,), tl.float32)
    for k in range(TOP_K):
        slot = tl.load(slots_ptr + (n * TOP_K + k) * H + h, mask=h < H, other=0.0).to(tl.float32)
        y += tl.load(weights_ptr + n * TOP_K + k) * slot
    tl.store(y_ptr + n * H + h, y.to(y_ptr.dtype.element_ty), mask=h < H)


def _blocks(counts_E: torch.Tensor, slots: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`(expert, first slot, end of the expert's slots)` of each block; spare blocks have their end at 0."""
    size, experts = BLOCKS["BLOCK_S"], len(counts_E)
    blocks_E = (counts_E + size - 1) // size
    last_E, end_E = blocks_E.cumsum(0), counts_E.cumsum(0)
    block = torch.arange(triton.cdiv(slots, size) + experts, device=counts_E.device)
    expert = torch.searchsorted(last_E, block, right=True)
    spare = expert >= experts
    expert = expert.clamp(max=experts - 1)
    start = (end_E - counts_E)[expert] + (block - (last_E - blocks_E)[expert]) * size
    return expert.int(), start.masked_fill(spare, 0).int(), end_E[expert].masked_fill(spare, 0).int()


def _mix(
    x: torch.Tensor, weights_N_K: torch.Tensor, ids_N_K: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor
) -> torch.Tensor:
    (n, hidden), top_k = x.shape, ids_N_K.shape[1]
    experts, _, width = w2.shape
    y = torch.empty_like(x)
    if not n:
        return y
    order, counts = by_expert(ids_N_K, experts)
    blocks = _blocks(counts, n * top_k)
    act = x.new_empty(n * top_k, width)
    slots = x.new_empty(n * top_k, hidden)
    across = (len(blocks[0]), triton.cdiv(width, BLOCKS["BLOCK_O"]))
    gate_up_kernel[across](x, w13, act, order, *blocks, hidden, width, TOP_K=top_k, **BLOCKS, **OPTIONS)
    across = (len(blocks[0]), triton.cdiv(hidden, BLOCKS["BLOCK_O"]))
    down_kernel[across](act, w2, slots, order, *blocks, hidden, width, **BLOCKS, **OPTIONS)
    across = (n, triton.cdiv(hidden, COMBINE_BLOCK["BLOCK_H"]))
    combine_kernel[across](slots, weights_N_K, y, hidden, TOP_K=top_k, **COMBINE_BLOCK, **COMBINE_OPTIONS)
    return y


class _Mix(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weights_N_K: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        ids_N_K, w13, w2 = rest
        ctx.save_for_backward(x, weights_N_K, ids_N_K, w13, w2)
        return _mix(x, weights_N_K, ids_N_K, w13, w2)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weights, ids, w13, w2 = ctx.saved_tensors
        leaves = [t.detach().requires_grad_() for t in (x, weights, w13, w2)]
        with torch.enable_grad():
            y = mix_experts(leaves[0], leaves[1], ids, leaves[2], leaves[3], torch.nn.functional.linear)
        found = torch.autograd.grad(y, leaves, grads[0], allow_unused=True)
        return found[0], found[1], None, found[2], found[3]


def expert_layer(
    x_N_H: torch.Tensor,
    router_w_E_H: torch.Tensor,
    w13_E_2F_H: torch.Tensor,
    w2_E_H_F: torch.Tensor,
    top_k: int,
    norm_topk: bool,
    expert_ids: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `moe.api`."""
    weights_N_K, ids_N_K = route(linear(x_N_H, router_w_E_H), top_k, norm_topk, expert_ids)
    tensors = (x_N_H.contiguous(), weights_N_K.contiguous(), ids_N_K, w13_E_2F_H.contiguous(), w2_E_H_F.contiguous())
    return cast(torch.Tensor, _Mix.apply(*tensors)), ids_N_K.int()
