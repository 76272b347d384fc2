# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Tiled attention in Triton: one kernel for packed training sequences and for the paged cache.

A program is (block of queries, key head). It always holds 64 rows, decode included, because an instruction chosen for
fewer rows may sum in another order; and it walks the 64-key tiles in ascending order with the online softmax:
m' = max(m, max s), l' = l·exp(m − m') + Σ exp(s − m'), acc' = acc·exp(m − m') + exp(s − m')·v.
A tile wholly hidden from a row leaves that row exactly as it was. Causal and paged differ only in the table that says
where a tile's keys lie.
Backward: `attention.backward`, plain torch.
"""

import math
from itertools import pairwise
from typing import Any, cast

import torch
import triton
import triton.language as tl

from odradek.kernels.attention.backward import causal_backward
from odradek.kernels.attention.units import TILE
from odradek.kernels.paths import require

ROWS = 64
"""Rows of a program: queries times query heads per key head. In the bits; 64 is the least that Hopper's warp-group
matmul takes."""

OPTIONS = {"num_warps": 4, "num_stages": 2, "enable_fp_fusion": True}
"""As in `rows.gpu`. Without spills in bfloat16, and in float32 with heads of 32; wider float32 heads spill heavily
(`aot_table.json`): right, and slow."""

MAX_WIDTH = 256
"""The widest head: beyond it one tile of keys and values no longer fits in shared memory."""


@triton.jit
def attend_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    positions_ptr,
    block_row_ptr,
    block_count_ptr,
    block_table_ptr,
    tile_rows_ptr,
    scale,
    Hq,
    Hk,
    D,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    block = tl.program_id(0)
    kv_head = tl.program_id(1)
    count = tl.load(block_count_ptr + block)
    if count > 0:
        first_row = tl.load(block_row_ptr + block).to(tl.int64)
        table = tl.load(block_table_ptr + block).to(tl.int64)
        r = tl.arange(0, ROWS)
        d = tl.arange(0, BLOCK_D)
        live_d = (d < D)[None, :]
        # Padding rows repeat the last query, so that no row is without a visible key.
        row = first_row + tl.minimum(r // GROUP, count - 1)
        place = (row * Hq + kv_head * GROUP + r % GROUP)[:, None] * D + d[None, :]
        position = tl.load(positions_ptr + row)
        tiles = tl.max(position, 0) // TILE + 1
        q = tl.load(q_ptr + place, mask=live_d, other=0.0)
        top = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        acc = tl.zeros((ROWS, BLOCK_D), tl.float32)
        for tile in range(tiles):
            key = tile * TILE + tl.arange(0, TILE)
            key_row = tl.load(tile_rows_ptr + table + tile).to(tl.int64) + tl.arange(0, TILE)
            key_place = (key_row * Hk + kv_head)[:, None] * D + d[None, :]
            # Keys past the last query are not even read: there may be no memory behind them.
            live = (key <= tl.max(position, 0))[:, None] & live_d
            k = tl.load(k_ptr + key_place, mask=live, other=0.0)
            s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
            s = tl.where(key[None, :] <= position[:, None], s, float("-inf"))
            new_top = tl.maximum(top, tl.max(s, 1))
            keep = tl.exp(top - new_top)
            p = tl.exp(s - new_top[:, None])
            v = tl.load(v_ptr + key_place, mask=live, other=0.0)
            acc = tl.dot(p.to(v.dtype), v, acc * keep[:, None], input_precision="ieee")
            total = total * keep + tl.sum(p, 1)
            top = new_top
        real = r < tl.minimum(count, ROWS // GROUP) * GROUP
        out = acc / total[:, None]
        tl.store(out_ptr + place, out.to(out_ptr.dtype.element_ty), mask=real[:, None] & live_d)
        tl.store(lse_ptr + row * Hq + kv_head * GROUP + r % GROUP, top + tl.log(total), mask=real)


def constants(group: int, width: int) -> dict[str, int]:
    """The kernel's compile-time arguments for `group` query heads a key head and heads of `width`."""
    require("attention", group <= ROWS and width <= MAX_WIDTH, "a group <= 64 and heads <= 256", group=group, D=width)
    return {"GROUP": group, "ROWS": ROWS, "TILE": TILE, "BLOCK_D": max(16, triton.next_power_of_2(width))}


def _launch(
    q_N_Hq_D: torch.Tensor,
    k_R_Hk_D: torch.Tensor,
    v_R_Hk_D: torch.Tensor,
    positions_N: torch.Tensor,
    blocks: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    tile_rows: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`(out, lse)`; rows that no block covers stay zero. `blocks`, int32: first query, count, start in `tile_rows`."""
    q_heads, width = q_N_Hq_D.shape[1:]
    kv_heads = k_R_Hk_D.shape[1]
    out = torch.zeros_like(q_N_Hq_D)
    lse = q_N_Hq_D.new_zeros(q_N_Hq_D.shape[:2], dtype=torch.float32)
    if len(blocks[0]):
        attend_kernel[(len(blocks[0]), kv_heads)](
            q_N_Hq_D,
            k_R_Hk_D,
            v_R_Hk_D,
            out,
            lse,
            positions_N,
            *blocks,
            tile_rows,
            1.0 / math.sqrt(width),
            q_heads,
            kv_heads,
            width,
            **constants(q_heads // kv_heads, width),
            **OPTIONS,
        )
    return out, lse


def attend_paged(
    q_B_Q_Hq_D: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    block_table_B_M: torch.Tensor,
    q_positions_B_Q: torch.Tensor,
    q_len_B: torch.Tensor,
) -> torch.Tensor:
    """See `attention.api`. Blocks are laid out without asking the device: those past `q_len` are empty and return."""
    requests, queries, q_heads, width = q_B_Q_Hq_D.shape
    per_block = ROWS // (q_heads // k_pages.shape[2])
    first_I = torch.arange(0, queries, per_block, dtype=torch.int32, device=q_B_Q_Hq_D.device)
    request_B = torch.arange(requests, dtype=torch.int32, device=q_B_Q_Hq_D.device)
    counts = (q_len_B.int()[:, None] - first_I).clamp(0, per_block).flatten()
    rows = (request_B[:, None] * queries + first_I).flatten()
    tables = (request_B[:, None] * block_table_B_M.shape[1]).expand(-1, len(first_I)).flatten()
    out, _ = _launch(
        q_B_Q_Hq_D.detach().flatten(0, 1).contiguous(),
        k_pages.flatten(0, 1),
        v_pages.flatten(0, 1),
        q_positions_B_Q.int().flatten().contiguous(),
        (rows, counts, tables),
        (block_table_B_M.int() * TILE).flatten(),
    )
    return out.view(requests, queries, q_heads, width)


def causal_blocks(
    bounds: tuple[int, ...], per_block: int
) -> tuple[list[int], list[int], list[int], list[int], list[int]]:
    """`(first query, count, table start)` of each block, then the table of tile rows and each token's position."""
    first: list[int] = []
    counts: list[int] = []
    tables: list[int] = []
    tile_rows: list[int] = []
    positions: list[int] = []
    for start, end in pairwise(bounds):
        for row in range(start, end, per_block):
            first.append(row)
            counts.append(min(per_block, end - row))
            tables.append(len(tile_rows))
        tile_rows.extend(range(start, end, TILE))
        positions.extend(range(end - start))
    return first, counts, tables, tile_rows, positions


class _Causal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: tuple[int, ...]) -> torch.Tensor:
        lists = causal_blocks(bounds, ROWS // (q.shape[1] // k.shape[1]))
        first, counts, tables, tile_rows, positions = (
            torch.tensor(values, dtype=torch.int32).to(q.device, non_blocking=True) for values in lists
        )
        out, lse = _launch(q, k, v, positions, (first, counts, tables), tile_rows)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.bounds = bounds
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        return (*causal_backward(q, k, v, out, lse, grads[0], ctx.bounds), None)


def attend_causal(
    q_T_Hq_D: torch.Tensor, k_T_Hk_D: torch.Tensor, v_T_Hk_D: torch.Tensor, bounds: tuple[int, ...]
) -> torch.Tensor:
    """See `attention.api`; `bounds` is `seq_starts` as a tuple."""
    tensors = (q_T_Hq_D.contiguous(), k_T_Hk_D.contiguous(), v_T_Hk_D.contiguous())
    return cast(torch.Tensor, _Causal.apply(*tensors, bounds))
