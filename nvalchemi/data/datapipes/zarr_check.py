"""Findings about the contents of a store that its array lengths do not tell."""

import numpy as np

from nvalchemi.data.datapipes.zarr_holes import count_lost
from nvalchemi.data.datapipes.zarr_layout import (
    StoreIndex,
    StoreLike,
    open_root,
    read_index,
)


def check_neighbors(
    neighbors: np.ndarray, num_nodes: np.ndarray, num_edges: np.ndarray, samples: np.ndarray
) -> None:
    """Refuse neighbour lists that point outside their structures.

    Other tools number the atoms of appended or defragmented structures wrongly, and a batch made
    of such a list would join atoms of different structures.

    Parameters
    ----------
    neighbors : ndarray
        Atom numbers within each structure, int [E, 2].
    num_nodes, num_edges : ndarray
        Atoms and edges of each structure, int64 [B].
    samples : ndarray
        What to call the structures, int64 [B].

    Raises
    ------
    ValueError
        Naming the first structure and what its list holds.
    """
    limit = np.repeat(num_nodes, num_edges)[:, None]
    wrong = (neighbors < 0) | (neighbors >= limit)
    if not wrong.any():
        return
    ends = np.cumsum(num_edges)
    first = int(np.searchsorted(ends, np.flatnonzero(wrong.any(1))[0], side="right"))
    own = neighbors[ends[first] - num_edges[first] : ends[first]]
    raise ValueError(
        f"neighbor_list of structure {samples[first]} points to atoms {own.min()}..{own.max()} of "
        f"its {num_nodes[first]}: the store is corrupt; make it again from its source"
    )


def check_chunks(store: StoreLike) -> None:
    """Refuse a store in which the file of a chunk is missing.

    Rows that an unfinished append has left, or is writing now, do not count.

    Raises
    ------
    ValueError
        Naming the array.
    """
    for _ in range(5):
        index = read_index(store)
        try:
            _refuse_lost(index)
            return
        except ValueError:
            # a writer may have replaced the store meanwhile
            if dict(open_root(store).attrs) == index.attributes:
                raise
    raise ValueError(f"{store} changes faster than it can be checked: is a writer at work on it?")


def _refuse_lost(index: StoreIndex) -> None:
    for name, array in index.arrays.items():
        lost, all_files = count_lost(array, index.rows(index.levels[name]))
        if lost:
            raise ValueError(
                f"{lost} of {all_files} chunks of {index.groups[name]}/{name} are missing: they "
                "can not be read; restore the store or make it again"
            )
