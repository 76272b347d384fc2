"""The plan of a tiled attention on CPU: which block of queries meets which tile of keys, in which order.

A *block* is up to 64 consecutive queries of one sequence; a *unit* is one block with one 64-key tile. Units are
processed in chunks that fit in cache; a chunk holds all units of its blocks, so nothing is carried between chunks.
Inside a chunk the units that need no mask come first, the others after; in both parts the tiles of a block ascend. As a
block's masked tiles are its last ones, its partial results are always added in ascending order of tiles: the order, and
thus the bits, are a function of the block alone.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from odradek.kernels.paths import require

TILE = 64
"""Keys in a tile and tokens in a page, which must be the same cut. It is in the bits, hence in `numerics_id`."""

ROW_TILE = 4
"""Query rows of a unit are padded to this: with fewer, BLAS sums in another order (seen: 1 and 2 rows differ)."""

BLOCK_SIZES = (1, 16, TILE)
"""Queries in a block: one for decode, 16 for a small chunk, 64 for prefill and training. No effect on the bits, only on
the share of padding."""

CHUNK_UNITS = {1: 192, 16: 64, TILE: 24}
"""Units in a chunk, by block size: 192 tiles of 16 KiB, or 24 units' scores, are 2 to 3 MiB (D=32). More leaves
the cache, fewer pays the fixed cost of some twenty torch calls more often. No effect on the bits."""

PLANS_KEPT = 2
"""Causal plans kept: all layers of a forward and its backward share one. None costs milliseconds a layer, many keep the
masks of batches that never come back."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Blocks [block0, block1) and their units, those that need a mask last."""

    block0: int
    block1: int
    block_U: torch.Tensor
    """Block of each unit, counted from `block0`."""
    tile_U: torch.Tensor
    """Row of the tile or page table that holds the unit's keys and values."""
    first_masked: int
    hidden_U_Q_K: torch.Tensor
    """True where the query of a masked unit does not see the key: for units from `first_masked`."""

    @property
    def queries(self) -> int:
        """Queries in each block."""
        return self.hidden_U_Q_K.shape[1]


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """All chunks, over blocks of `block_size` queries, with the flat query row that each row of a block copies."""

    block_size: int
    chunks: tuple[Chunk, ...]
    source_rows: torch.Tensor
    """int64 [blocks * block_size]; the rows of a ragged end repeat a real query, so that their scores stay finite."""
    real_rows: torch.Tensor
    """Places in `source_rows` that are real queries."""
    in_place: bool
    """Every query of the batch is real and stands in its own place: nothing to scatter."""


def block_size_for(queries: int) -> int:
    """The smallest block that holds `queries`, at most 64."""
    return next((size for size in BLOCK_SIZES if queries <= size), TILE)


def plan_units(first_Bk: torch.Tensor, tiles_Bk: torch.Tensor, positions_Bk_Q: torch.Tensor) -> tuple[Chunk, ...]:
    """Chunks for blocks whose tiles are `first_Bk[b] … first_Bk[b] + tiles_Bk[b] - 1` of a flat table of tiles.

    `positions_Bk_Q` is each query's position in its sequence. Every block has at least one tile.
    """
    counts = tiles_Bk.tolist()
    most_units = CHUNK_UNITS[positions_Bk_Q.shape[1]]
    chunks: list[Chunk] = []
    lowest_Bk = positions_Bk_Q.amin(1)
    key_K = torch.arange(TILE)
    block0 = 0
    while block0 < len(counts):
        block1, units = block0, 0
        while block1 < len(counts) and (block1 == block0 or units + counts[block1] <= most_units):
            units += counts[block1]
            block1 += 1
        here = slice(block0, block1)
        block_U = torch.repeat_interleave(torch.arange(block1 - block0), tiles_Bk[here], output_size=units)
        ends = tiles_Bk[here].cumsum(0)
        within_U = torch.arange(units) - (ends - tiles_Bk[here])[block_U]
        masked_U = (within_U + 1) * TILE - 1 > lowest_Bk[here][block_U]
        order_U = torch.argsort(masked_U, stable=True)
        block_U, within_U = block_U[order_U], within_U[order_U]
        first_masked = units - int(masked_U.sum())
        key_U_K = within_U[first_masked:, None] * TILE + key_K
        hidden = key_U_K[:, None, :] > positions_Bk_Q[here][block_U[first_masked:], :, None]
        chunks.append(Chunk(block0, block1, block_U, first_Bk[here][block_U] + within_U, first_masked, hidden))
        block0 = block1
    return tuple(chunks)


def plan_pages(block_table_B_M: torch.Tensor, q_positions_B_Q: torch.Tensor, q_len_B: torch.Tensor) -> BlockPlan:
    """The plan of one engine step: `source_rows` are flat (request, query) rows, tiles are pages."""
    requests, queries = q_positions_B_Q.shape
    pages = block_table_B_M.shape[1]
    size = block_size_for(queries)
    in_request = -(-queries // size)
    positions_B_Q = q_positions_B_Q.long()
    query_B_S = torch.arange(in_request * size).expand(requests, -1)
    real_B_S = query_B_S < q_len_B.long()[:, None]
    # Rows past the end repeat the request's last query: their scores stay finite and they are never read.
    query_B_S = torch.minimum(query_B_S, (q_len_B.long()[:, None] - 1).clamp(min=0))
    rows = (torch.arange(requests)[:, None] * queries + query_B_S).reshape(-1, size)
    kept = real_B_S.reshape(-1, size)[:, 0]
    rows, real = rows[kept], real_B_S.reshape(-1, size)[kept]
    positions_Bk_S = positions_B_Q.reshape(-1)[rows]
    tiles_Bk = positions_Bk_S.amax(1) // TILE + 1 if len(rows) else torch.zeros(0, dtype=torch.int64)
    most = int(tiles_Bk.max()) if len(rows) else 0
    require("attention.attend_paged", most <= pages, "a block_table that covers every query", pages=pages, need=most)
    first_Bk = rows[:, 0] // max(queries, 1) * pages
    table = block_table_B_M.reshape(-1).long()
    chunks = tuple(
        replace(chunk, tile_U=table[chunk.tile_U]) for chunk in plan_units(first_Bk, tiles_Bk, positions_Bk_S)
    )
    real_rows = real.reshape(-1).nonzero()[:, 0]
    in_place = size == queries == 1 and len(rows) == requests
    return BlockPlan(size, chunks, rows.reshape(-1), real_rows, in_place)


@lru_cache(maxsize=PLANS_KEPT)
@torch.inference_mode(False)
def plan_causal(bounds: tuple[int, ...]) -> BlockPlan:
    """The plan of packed sequences: each is cut into 64-token tiles that are its blocks of queries and of keys alike.

    `source_rows` serves both: row i of tile t of padded queries, keys and values is token `source_rows[t * 64 + i]`.
    """
    starts_S = torch.tensor(bounds[:-1], dtype=torch.int64)
    lengths_S = torch.tensor(bounds[1:], dtype=torch.int64) - starts_S
    starts_S, lengths_S = starts_S[lengths_S > 0], lengths_S[lengths_S > 0]
    tiles_S = (lengths_S + TILE - 1) // TILE
    sequence_Bk = torch.repeat_interleave(torch.arange(len(starts_S)), tiles_S)
    first_S = tiles_S.cumsum(0) - tiles_S
    within_Bk = torch.arange(len(sequence_Bk)) - first_S[sequence_Bk]
    positions = within_Bk[:, None] * TILE + torch.arange(TILE)
    last = lengths_S[sequence_Bk][:, None] - 1
    real = positions <= last
    positions = torch.minimum(positions, last)
    source = (starts_S[sequence_Bk][:, None] + positions).reshape(-1)
    chunks = plan_units(first_S[sequence_Bk], within_Bk + 1, positions)
    return BlockPlan(TILE, chunks, source, real.reshape(-1).nonzero()[:, 0], False)
