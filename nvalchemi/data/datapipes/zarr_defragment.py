"""The structures of a store that are not deleted, block by block."""

from collections.abc import Iterator

import numpy as np

from nvalchemi.data.datapipes.zarr_gather import BlockCache, RowPlan, offsets
from nvalchemi.data.datapipes.zarr_layout import StoreIndex
from nvalchemi.data.datapipes.zarr_payload import Payload
from nvalchemi.data.fields import Level

# Atoms and edges in one block: some 100 MB with the usual fields.
ROWS_PER_BLOCK = 2**20


def kept_blocks(
    index: StoreIndex, rows_per_block: int | None = ROWS_PER_BLOCK
) -> Iterator[Payload]:
    """Read what is kept, in order, about so many atoms and edges at a time (None: all at once)."""
    kept = np.flatnonzero(index.mask)
    sizes = sum(np.diff(pointer)[kept] for pointer in index.pointers.values())
    block = np.zeros(len(kept), np.int64)
    if rows_per_block is not None:
        block = np.cumsum(sizes) // rows_per_block
    for rows in np.split(kept, np.flatnonzero(np.diff(block)) + 1):
        yield read_payload(index, rows)


def read_payload(index: StoreIndex, rows: np.ndarray) -> Payload:
    """All fields of the stored structures with these numbers."""
    cache = BlockCache(2**25)
    plans = row_plans(index, rows)
    values = {
        name: plans[index.levels[name]].read(name, array, cache)
        for name, array in index.arrays.items()
    }
    counts = plans["atom"].counts
    if "neighbor_list" in values:
        shift = offsets(counts) - index.pointers["atom"][rows]
        per_edge = np.repeat(shift, plans["edge"].counts)[:, None]
        neighbors = values["neighbor_list"]
        values["neighbor_list"] = (neighbors + per_edge).astype(neighbors.dtype, copy=False)
    return Payload(counts, plans["edge"].counts, values, dict(index.levels), dict(index.groups))


def row_plans(index: StoreIndex, rows: np.ndarray) -> dict[Level, RowPlan]:
    """Rows of stored structures at each level."""
    plans: dict[Level, RowPlan] = {
        "system": RowPlan(rows, np.ones(len(rows), np.int64), index.num_stored)
    }
    for level, pointer in index.pointers.items():
        counts = pointer[rows + 1] - pointer[rows]
        plans[level] = RowPlan(pointer[rows], counts, index.rows(level))
    return plans
