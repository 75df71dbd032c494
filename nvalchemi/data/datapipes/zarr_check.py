"""Findings about the contents of a store that its array lengths do not tell."""

import numpy as np

from nvalchemi.data.datapipes.zarr_layout import GENERATION, StoreIndex


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


def check_chunks(index: StoreIndex) -> None:
    """Refuse a store in which the file of a chunk is missing: it would read as zeros.

    Only stores of our writer can be judged: others may leave out chunks of zeros on purpose.
    """
    if GENERATION not in index.attributes:
        return
    for name, array in index.arrays.items():
        if not array.size or array.attrs.get("write_empty_chunks") is False:
            continue
        want, got = array.nchunks, array.nchunks_initialized
        if got < want and array.shards is None:
            raise ValueError(
                f"{want - got} of {want} chunks of {index.groups[name]}/{name} are missing: they "
                "would read as zeros; restore the store or make it again"
            )
