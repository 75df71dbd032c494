"""Pairs of atoms of one structure within a cutoff, by vesin, or by a tree where vesin can not.

vesin sorts atoms into a grid of at most 1e5 bins, numbered by 32 bits. Where atoms spread thinly
over more (one that flew away, a wide flat flake, a long wire) it can divide by zero, which ends the
whole process. Such structures are searched by scipy's k-d tree, with periodic images written out.
"""

import itertools
import math

import numpy as np
import vesin
from numpy.typing import NDArray

# Atoms closer than this (Angstrom) are one atom written twice; no energy is defined there.
COINCIDENT = 1e-6
# Farther away (in cells) an atom's place in its cell has lost its digits.
MAX_CELLS = 2.0**31
# What vesin is given: with 1e5 bins in a cell, numbers of bins stay below 2^31.
_MAX_BINS = 1e5
_NEAR_CELLS = 1e3
_NEAR_COORDINATE = 1e6  # Angstrom, along directions that are not periodic

Found = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]


class PairSearch:
    """Finds all pairs of a structure, each in both directions.

    Parameters
    ----------
    cutoff : float
        In Angstrom; pairs at exactly this distance are left out.
    """

    def __init__(self, cutoff: float) -> None:
        self.cutoff = float(cutoff)
        # One thread: structures are small, and ranks and loader workers share the cores.
        self._vesin = vesin.NeighborList(
            cutoff=self.cutoff, full_list=True, sorted=True, n_threads=1
        )

    def find(
        self, positions: np.ndarray, cell: np.ndarray, pbc: np.ndarray, compact: bool
    ) -> Found:
        """Pairs [E, 2] sorted by the first atom, cell images [E, 3] of the second, distances [E].

        Parameters
        ----------
        positions : array [V, 3]
            In Angstrom.
        cell : array [3, 3]
            Lattice vectors as rows; those along directions that are not periodic do not count.
        pbc : array of bool [3]
            Periodic directions.
        compact : bool
            Whether vesin can take the structure, see `is_compact`.
        """
        box = np.where(pbc[:, None], cell, 0.0)
        if not compact:
            return _tree_pairs(positions, box, pbc, self.cutoff)
        pair, shift, distance = self._vesin.compute(positions, box, pbc, "PSd", copy=False)
        # vesin reuses its memory in the next call: astype makes the copy.
        return pair.astype(np.int64), shift.astype(np.int64), distance.astype(np.float64)


def is_compact(
    positions: np.ndarray, cell: np.ndarray, pbc: np.ndarray, counts: np.ndarray, cutoff: float
) -> list[bool]:
    """Whether vesin's grid holds each structure, from bounds on its extent.

    Parameters
    ----------
    positions, cell, pbc, counts : arrays [V, 3], [B, 3, 3], [B, 3], [B]
        Of B structures, one after the other.
    cutoff : float
        In Angstrom.
    """
    rows, _, heights = _frame(cell, pbc)
    fractional = fractional_coordinates(positions, cell, pbc, counts)
    across = positions - np.einsum("vk,vki->vi", fractional, np.repeat(rows, counts, axis=0))
    low, high = _per_structure(across, counts)
    spread = high - low
    # Along the axes of a molecule; directions across a slab or wire are not known, their length is.
    lengths = np.where(pbc.any(1, keepdims=True), np.linalg.norm(spread, axis=1)[:, None], spread)
    bins = np.where(pbc, np.maximum(heights / cutoff, 1), lengths / cutoff + 3).prod(1)
    cells = _per_structure(np.abs(fractional), counts)[1].max(1)
    coordinates = np.maximum(np.abs(low), np.abs(high)).max(1)
    fits = (bins <= _MAX_BINS) & (cells <= _NEAR_CELLS) & (coordinates <= _NEAR_COORDINATE)
    return [bool(fit) for fit in fits]


def fractional_coordinates(
    positions: np.ndarray, cell: np.ndarray, pbc: np.ndarray, counts: np.ndarray
) -> NDArray[np.float64]:
    """Positions [V, 3] in lattice vectors of their structures; zero where it is not periodic."""
    to_fractional = np.repeat(_frame(cell, pbc)[1], counts, axis=0)
    return np.einsum("vi,vki->vk", positions, to_fractional)


def dependent_vectors(cell: np.ndarray, pbc: np.ndarray) -> NDArray[np.bool_]:
    """Whether lattice vectors along periodic directions are dependent, zero or not finite, [B]."""
    rows = np.where(pbc[:, :, None], cell, np.eye(3))
    lengths = np.linalg.norm(rows, axis=2, keepdims=True)
    unit = rows / np.where(lengths > 0, lengths, 1.0)
    # Periodic vectors are compared with each other only: the others are taken as perpendicular.
    both = pbc[:, :, None] & pbc[:, None, :]
    gram = np.where(both, unit @ unit.transpose(0, 2, 1), np.eye(3))
    # 1e-12 is the squared volume of unit vectors that lie 1e-6 rad from a common plane; a vector
    # that is not finite counts as zero.
    singular: NDArray[np.bool_] = np.linalg.det(np.nan_to_num(gram)) < 1e-12
    return singular


def first_coincident(
    positions: np.ndarray, cell: np.ndarray, pbc: np.ndarray
) -> tuple[int, int] | None:
    """Two atoms of a structure, of finite positions, in one place; an atom may meet its image."""
    box = np.where(pbc[:, None], cell, 0.0)
    pair = _tree_pairs(positions, box, pbc, COINCIDENT)[0]
    return (int(pair[0, 0]), int(pair[0, 1])) if len(pair) else None


def _frame(cell: np.ndarray, pbc: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Periodic vectors (others zero), rows that give fractional coordinates, and heights."""
    rows = np.where(pbc[:, :, None], cell, 0.0)
    both = pbc[:, :, None] & pbc[:, None, :]
    inverse = np.linalg.inv(np.where(both, rows @ rows.transpose(0, 2, 1), np.eye(3)))
    return rows, inverse @ rows, 1 / np.sqrt(np.diagonal(inverse, axis1=1, axis2=2))


def _per_structure(values: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Smallest and largest values [B, 3]; zero for structures without atoms."""
    low, high = np.zeros((len(counts), 3)), np.zeros((len(counts), 3))
    there = counts > 0
    if there.any():
        starts = (np.cumsum(counts) - counts)[there]
        low[there] = np.minimum.reduceat(values, starts)
        high[there] = np.maximum.reduceat(values, starts)
    return low, high


def _tree_pairs(positions: np.ndarray, box: np.ndarray, pbc: np.ndarray, cutoff: float) -> Found:
    from scipy.spatial import cKDTree

    _, to_fractional, heights = _frame(box[None], pbc[None])
    cells = np.floor(positions @ to_fractional[0].T)
    inside = positions - cells @ box
    reach = [math.ceil(cutoff / h) if p else 0 for h, p in zip(heights[0], pbc, strict=True)]
    low, high = _per_structure(inside, np.array([len(inside)]))
    ghosts, atoms, images = [], [], []
    for numbers in itertools.product(*(range(-n, n + 1) for n in reach)):
        image = np.array(numbers, np.int64)
        offset = image @ box
        if ((low + offset > high + cutoff) | (high + offset < low - cutoff)).any():
            continue
        moved = inside + offset
        near = np.flatnonzero(((moved > low - cutoff) & (moved < high + cutoff)).all(1))
        ghosts.append(moved[near])
        atoms.append(near)
        images.append(np.tile(image, (len(near), 1)))
    atom, of_cells = np.concatenate(atoms), np.concatenate(images)
    close = cKDTree(inside).sparse_distance_matrix(
        cKDTree(np.concatenate(ghosts)), cutoff, output_type="ndarray"
    )
    first, ghost, distance = close["i"].astype(np.int64), close["j"], close["v"]
    second, moved_by = atom[ghost], of_cells[ghost]
    kept = (distance < cutoff) & ((first != second) | moved_by.any(1))
    first, second, distance = first[kept], second[kept], distance[kept]
    whole = cells.astype(np.int64)
    shift = moved_by[kept] + whole[first] - whole[second]
    order = np.lexsort((*shift.T[::-1], second, first))
    return np.stack([first, second], 1)[order], shift[order], distance[order]
