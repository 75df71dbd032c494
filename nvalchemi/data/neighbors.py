"""Neighbour lists: which atoms, and which of their periodic images, lie within a cutoff.

`PairSearch` finds the pairs of one structure at a time, on the CPU. An edge is a pair
(centre i, neighbour j) with the cell image S of j, so that the vector from i to j is
``positions[j] - positions[i] + S @ cell``. Lists are full: each pair appears in both directions.
"""

import math

import numpy as np
import torch
from torch import Tensor

from nvalchemi.data.batch import Batch
from nvalchemi.data.checks import NEIGHBOR_CUTOFF, neighbor_list_remedy
from nvalchemi.data.pairs import (
    COINCIDENT,
    MAX_CELLS,
    PairSearch,
    dependent_vectors,
    fractional_coordinates,
    is_compact,
)

# Edge fields that a new list replaces; any other edge field would lose its meaning.
_REPLACED = frozenset({"neighbor_list", "neighbor_list_shifts", "shifts"})


def add_neighbor_list(batch: Batch, cutoff: float) -> Batch:
    """A batch like this one, with the neighbour list of every structure.

    As a transform of whole batches: ``functools.partial(add_neighbor_list, cutoff=5.0)``.

    Parameters
    ----------
    batch : Batch
        Structures; an existing neighbour list is replaced. Structures that are periodic in some
        direction need a cell whose vectors along these directions are independent.
    cutoff : float
        Largest distance of a pair, in Angstrom.

    Returns
    -------
    Batch
        Shares the tensors of `batch` and adds ``neighbor_list`` int64 [E, 2] (numbers of atoms in
        the batch) and ``neighbor_list_shifts`` int64 [E, 3], sorted by the centre. The cutoff is
        remembered as ``metadata["neighbor_cutoff"]`` float64 [B], also by stores.

    Raises
    ------
    ValueError
        If the cutoff is not positive and finite, positions or cells are not finite, a periodic
        structure has no cell or a singular one, two atoms lie in one place (closer than 1e-6
        Angstrom), an atom lies more than 2^31 cells away, or the batch has other fields of edges.

    Notes
    -----
    A batch on an accelerator is copied to the CPU and its list back, which waits for the device:
    build lists before the batch is moved.
    """
    _check_cutoff(cutoff)
    stale = sorted(set(batch.fields("edge")) - _REPLACED)
    if stale:
        raise ValueError(
            f"a new neighbour list would not match the batch's edge fields {stale}: "
            "remove these fields first"
        )
    positions = _float_array(batch.positions)
    cell, pbc = _periodicity(batch)
    counts = np.array(batch.num_nodes_list)
    _check_geometry(positions, cell, pbc, counts)

    search = PairSearch(cutoff)
    compact = is_compact(positions, cell, pbc, counts, cutoff)
    ends = np.cumsum(counts)
    pairs, shifts = [], []
    for i, (start, end) in enumerate(zip(ends - counts, ends)):
        pair, shift, distance = search.find(positions[start:end], cell[i], pbc[i], compact[i])
        _refuse_coincident(pair, shift, distance, i)
        pairs.append(pair + start)
        shifts.append(shift)
    device = batch.positions.device
    new = batch.with_edges(
        torch.tensor([len(pair) for pair in pairs]),
        {
            "neighbor_list": torch.from_numpy(_concatenate(pairs, 2)).to(device),
            "neighbor_list_shifts": torch.from_numpy(_concatenate(shifts, 3)).to(device),
        },
    )
    new.metadata[NEIGHBOR_CUTOFF] = torch.full((batch.num_graphs,), cutoff, dtype=torch.float64)
    return new


def neighbor_list(
    positions: Tensor | np.ndarray,
    cell: Tensor | np.ndarray | None,
    pbc: Tensor | np.ndarray | None,
    cutoff: float,
) -> tuple[Tensor, Tensor]:
    """Neighbour list of one structure.

    Parameters
    ----------
    positions : array [V, 3]
        In Angstrom.
    cell : array [3, 3] or [1, 3, 3], optional
        Lattice vectors as rows, in Angstrom.
    pbc : array of bool [3] or [1, 3], optional
        Periodic along each lattice vector; None is not periodic at all.
    cutoff : float
        Largest distance of a pair, in Angstrom.

    Returns
    -------
    neighbor_list : Tensor int64 [E, 2]
        Pairs (i, j), sorted by i.
    neighbor_list_shifts : Tensor int64 [E, 3]
        Cell image of j.

    Raises
    ------
    ValueError
        As `add_neighbor_list`.
    """
    _check_cutoff(cutoff)
    points = _float_array(positions).reshape(-1, 3)
    periodic = np.zeros(3, bool) if pbc is None else _array(pbc).astype(bool).reshape(3)
    if cell is None and periodic.any():
        raise ValueError(f"a periodic structure needs a cell: pbc is {periodic.tolist()}, no cell")
    box = np.zeros((3, 3)) if cell is None else _float_array(cell).reshape(3, 3)
    counts = np.array([len(points)])
    _check_geometry(points, box[None], periodic[None], counts)
    compact = is_compact(points, box[None], periodic[None], counts, cutoff)[0]
    pair, shift, distance = PairSearch(cutoff).find(points, box, periodic, compact)
    _refuse_coincident(pair, shift, distance, 0)
    return torch.from_numpy(pair), torch.from_numpy(shift)


def edge_vectors(
    batch: Batch, positions: Tensor | None = None, cell: Tensor | None = None
) -> Tensor:
    """Vectors from each centre to its neighbour, differentiable in positions and cells.

    Parameters
    ----------
    batch : Batch
        Structures with a neighbour list.
    positions : Tensor [V, 3], optional
        Take these in place of the batch's, in Angstrom.
    cell : Tensor [B, 3, 3], optional
        Take these in place of the batch's, in Angstrom.

    Returns
    -------
    Tensor [E, 3]
        ``positions[j] - positions[i] + S @ cell``, in Angstrom.

    Raises
    ------
    ValueError
        If the batch has no neighbour list, or one of periodic structures without cell images.

    Notes
    -----
    S is ``neighbor_list_shifts``. A batch that lacks it may carry ``shifts`` [E, 3], which are
    ``S @ cell`` already (Angstrom) and follow the cell, so that a stress comes out right.
    """
    if "neighbor_list" not in batch:
        raise ValueError(f"the batch has no neighbor_list: {neighbor_list_remedy()}")
    positions = batch.positions if positions is None else positions
    cell = getattr(batch, "cell", None) if cell is None else cell
    centre, neighbor = batch.neighbor_list.unbind(1)
    vectors = positions.index_select(0, neighbor) - positions.index_select(0, centre)
    structure = batch.batch_idx.index_select(0, centre)
    images = getattr(batch, "neighbor_list_shifts", None)
    if images is not None and cell is not None:
        boxes = cell.index_select(0, structure)
        return vectors + torch.bmm(images.to(cell.dtype).unsqueeze(1), boxes).squeeze(1)
    if "shifts" in batch:
        return vectors + _cartesian_shifts(batch, cell, structure)
    if images is None:
        _refuse_unknown_images(
            batch,
            "neither neighbor_list_shifts (cell images) nor shifts (Angstrom) of its edges",
            "build the list anew with add_neighbor_list of nvalchemi.data.neighbors, or give one "
            "of these fields",
        )
    else:
        _refuse_unknown_images(batch, "no cell", "give cell [B, 3, 3], or set pbc to False")
    return vectors


def _cartesian_shifts(batch: Batch, cell: Tensor | None, structure: Tensor) -> Tensor:
    """``batch.shifts`` [E, 3], moved along with `cell` where that is not the batch's own."""
    shifts: Tensor = batch.shifts
    own = getattr(batch, "cell", None)
    if cell is None or own is None or cell is own:
        return shifts
    # In lattice vectors of the batch's cell, zero vectors left out; the change alone is added, so
    # that the same cell gives the same shift and its derivative.
    inverse = torch.linalg.pinv(own.detach()).index_select(0, structure)
    images = torch.bmm(shifts.detach().to(own.dtype).unsqueeze(1), inverse)
    change = (cell - own).index_select(0, structure)
    return shifts + torch.bmm(images, change).squeeze(1)


def _refuse_unknown_images(batch: Batch, reason: str, remedy: str) -> None:
    # Only a batch from elsewhere comes here, and only then does a device have to answer.
    if "pbc" in batch and bool(batch.pbc.any()):
        raise ValueError(
            f"the batch has periodic structures and a neighbor_list, but {reason}: {remedy}"
        )


def _refuse_coincident(
    pair: np.ndarray, shift: np.ndarray, distance: np.ndarray, structure: int
) -> None:
    if len(distance) and distance.min() < COINCIDENT:
        edge = int(distance.argmin())
        first, second = pair[edge].tolist()
        raise ValueError(
            f"atoms {first} and {second} of structure {structure} lie in one place, "
            f"{distance[edge]:.2g} Angstrom apart (cell image {shift[edge].tolist()}): no energy "
            "is defined there; remove one of them, or leave the structure out"
        )


def _periodicity(batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """Cells [B, 3, 3] (zero where absent) and pbc [B, 3] (False where absent) of a batch."""
    cell, pbc = getattr(batch, "cell", None), getattr(batch, "pbc", None)
    boxes = np.zeros((batch.num_graphs, 3, 3)) if cell is None else _float_array(cell)
    periodic = np.zeros((batch.num_graphs, 3), bool) if pbc is None else _array(pbc).astype(bool)
    if cell is None and periodic.any():
        first = int(np.flatnonzero(periodic.any(1))[0])
        raise ValueError(
            f"a periodic structure needs a cell: structure {first} has pbc "
            f"{periodic[first].tolist()} and the batch has no cell"
        )
    return boxes, periodic


def _check_cutoff(cutoff: float) -> None:
    if not (math.isfinite(cutoff) and cutoff > 0):
        raise ValueError(f"cutoff must be positive and finite, in Angstrom: got {cutoff}")


def _check_geometry(
    positions: np.ndarray, cell: np.ndarray, pbc: np.ndarray, counts: np.ndarray
) -> None:
    finite = np.isfinite(positions).all(1)
    if not finite.all():
        atom = int(np.flatnonzero(~finite)[0])
        structure = int(np.searchsorted(np.cumsum(counts), atom, side="right"))
        raise ValueError(
            f"positions must be finite: atom {atom} (structure {structure}) is at "
            f"{positions[atom].tolist()}"
        )
    singular = dependent_vectors(cell, pbc)
    if singular.any():
        first = int(np.flatnonzero(singular)[0])
        raise ValueError(
            "lattice vectors along periodic directions must be finite and independent: structure "
            f"{first} has pbc {pbc[first].tolist()} and cell {cell[first].tolist()}"
        )
    _refuse_far_images(positions, cell, pbc, counts)


def _refuse_far_images(
    positions: np.ndarray, cell: np.ndarray, pbc: np.ndarray, counts: np.ndarray
) -> None:
    """Refuse atoms so many cells away that their place in the cell has lost its digits."""
    cells = np.abs(fractional_coordinates(positions, cell, pbc, counts))
    if (cells > MAX_CELLS).any():
        atom = int(np.flatnonzero((cells > MAX_CELLS).any(1))[0])
        structure = int(np.searchsorted(np.cumsum(counts), atom, side="right"))
        raise ValueError(
            f"atom {atom} (structure {structure}) at {positions[atom].tolist()} lies "
            f"{cells[atom].max():.2g} cells away, at most 2^31 are allowed: the trajectory has "
            "exploded; leave the structure out, or wrap its atoms into the cell"
        )


def _array(values: Tensor | np.ndarray) -> np.ndarray:
    return values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)


def _float_array(values: Tensor | np.ndarray) -> np.ndarray:
    return _array(values).astype(np.float64)


def _concatenate(parts: list[np.ndarray], width: int) -> np.ndarray:
    return np.concatenate([np.empty((0, width), np.int64), *parts])
