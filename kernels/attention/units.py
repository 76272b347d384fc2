"""The plan of a tiled attention on CPU: which block of queries meets which tile of keys, in which order.

A *block* is up to 64 consecutive queries of one sequence; a *unit* is one tile of keys with the block that reads it, or
with several decode blocks that share the page (the attempts of a group share their prompt's). Units are processed in
chunks that fit in cache; a chunk holds all units of its blocks, so nothing is carried between chunks. Inside a chunk
shared units come first, then those that need no mask, then the masked ones; in each part the tiles of a block ascend. A
block's shared tiles are its first and its masked tiles its last, so its partial results are always added in ascending
order of tiles: the order, and thus the bits, are a function of the block alone.
"""

from dataclasses import dataclass
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

CHUNK_UNITS = {1: 256, 16: 64, TILE: 24}
"""Units in a chunk, by block size: 256 tiles of 16 KiB are 4 MiB, 24 units' scores 2 MiB (D=32). More leaves the cache,
fewer pays the fixed cost of some twenty torch calls more often, and a page is shared within a chunk only. No effect on
the bits."""

SHARERS = 8
"""Blocks in a shared unit, a multiple of `ROW_TILE`. More of them spare more reads of a page, and leave more empty
places, which cost as much as full ones."""

LEAST_SHARERS = 3
"""Blocks that must share a page before it becomes a shared unit: two cost about the same by themselves."""

PLANS_KEPT = 2
"""Causal plans kept: all layers of a forward and its backward share one. None costs milliseconds a layer, many keep the
masks of batches that never come back."""


@dataclass(frozen=True, slots=True)
class Units:
    """Units of one kind, those that need a mask last."""

    sharers: int
    """Blocks in each unit: 1, or `SHARERS`, and then none is masked."""
    block_E: torch.Tensor
    """The blocks of each unit, flat [U * sharers]; an empty place names the spare block after the last."""
    tile_U: torch.Tensor
    """Row of the tiles or pages that holds the unit's keys and values."""
    first_masked: int
    hidden_U_Q_K: torch.Tensor
    """True where the query of a masked unit does not see the key: for units from `first_masked`."""


Chunk = tuple[Units, ...]
"""All units of some blocks, in the order in which their results are added."""


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """All chunks, over blocks of `block_size` queries, with the flat query row that each row of a block copies."""

    block_size: int
    blocks: int
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


def plan_units(table_Bk_M: torch.Tensor, tiles_Bk: torch.Tensor, positions_Bk_Q: torch.Tensor) -> tuple[Chunk, ...]:
    """Chunks for blocks whose tiles are `table_Bk_M[b, : tiles_Bk[b]]`; each block has at least one.

    `positions_Bk_Q` is each query's position in its sequence.
    """
    counts = tiles_Bk.tolist()
    blocks, size = positions_Bk_Q.shape
    chunks: list[Chunk] = []
    block0 = 0
    while block0 < blocks:
        block1, units = block0, 0
        while block1 < blocks and (block1 == block0 or units + counts[block1] <= CHUNK_UNITS[size]):
            units += counts[block1]
            block1 += 1
        shared, first_own = (None, None) if size > 1 else _shared_units(table_Bk_M, positions_Bk_Q, block0, block1)
        own = _own_units(table_Bk_M, tiles_Bk, positions_Bk_Q, first_own, block0, block1)
        chunks.append((own,) if shared is None else (shared, own))
        block0 = block1
    return tuple(chunks)


def _own_units(
    table_Bk_M: torch.Tensor,
    tiles_Bk: torch.Tensor,
    positions_Bk_Q: torch.Tensor,
    first_own: list[int] | None,
    block0: int,
    block1: int,
) -> Units:
    """One unit for each block and tile from the block's `first_own` (0 if None) on."""
    here = slice(block0, block1)
    first = torch.zeros(block1 - block0, dtype=torch.int64) if first_own is None else torch.tensor(first_own)
    counts = tiles_Bk[here] - first
    block_U = torch.repeat_interleave(torch.arange(block0, block1), counts)
    offset = first - (counts.cumsum(0) - counts)
    within_U = torch.arange(len(block_U)) + offset[block_U - block0]
    masked_U = (within_U + 1) * TILE - 1 > positions_Bk_Q.amin(1)[block_U]
    order_U = torch.argsort(masked_U, stable=True)
    block_U, within_U = block_U[order_U], within_U[order_U]
    first_masked = len(block_U) - int(masked_U.sum())
    key_U_K = within_U[first_masked:, None] * TILE + torch.arange(TILE)
    hidden = key_U_K[:, None, :] > positions_Bk_Q[block_U[first_masked:], :, None]
    return Units(1, block_U, table_Bk_M[block_U, within_U], first_masked, hidden)


def _shared_units(
    table_Bk_M: torch.Tensor, positions_Bk_1: torch.Tensor, block0: int, block1: int
) -> tuple[Units | None, list[int]]:
    """`(shared units or None, first tile of each block that is not in one)` for decode blocks.

    A tile is shared only if all earlier tiles of its block are, and if its block sees it whole.
    """
    table = table_Bk_M[block0:block1].tolist()
    whole = ((positions_Bk_1[block0:block1, 0] + 1) // TILE).tolist()
    first_own = [0] * len(whole)
    members: list[int] = []
    pages: list[int] = []
    running, tile = list(range(len(whole))), 0
    while running:
        by_page: dict[int, list[int]] = {}
        for block in running:
            if tile < whole[block]:
                by_page.setdefault(table[block][tile], []).append(block)
        tile += 1
        running = []
        for page, blocks in by_page.items():
            if len(blocks) < LEAST_SHARERS:
                continue
            running.extend(blocks)
            for block in blocks:
                first_own[block] = tile
            for start in range(0, len(blocks), SHARERS):
                some = [block0 + block for block in blocks[start : start + SHARERS]]
                members += some + [len(table_Bk_M)] * (SHARERS - len(some))
                pages.append(page)
    if not pages:
        return None, first_own
    no_mask = torch.zeros(0, 1, TILE, dtype=torch.bool)
    return Units(SHARERS, torch.tensor(members), torch.tensor(pages), len(pages), no_mask), first_own


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
    chunks = plan_units(block_table_B_M.long()[rows[:, 0] // max(queries, 1)], tiles_Bk, positions_Bk_S)
    real_rows = real.reshape(-1).nonzero()[:, 0]
    in_place = size == queries == 1 and len(rows) == requests
    return BlockPlan(size, len(rows), chunks, rows.reshape(-1), real_rows, in_place)


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
    table_Bk_M = first_S[sequence_Bk][:, None] + torch.arange(int(tiles_S.max()))
    chunks = plan_units(table_Bk_M, within_Bk + 1, positions)
    return BlockPlan(TILE, len(sequence_Bk), chunks, source, real.reshape(-1).nonzero()[:, 0], False)
