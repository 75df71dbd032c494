"""Neighbour lists: which atoms, and which of their periodic images, lie within a cutoff.

vesin finds the pairs; it works on one structure at a time and on the CPU. An edge is a pair
(centre i, neighbour j) with the cell image S of j, so that the vector from i to j is
``positions[j] - positions[i] + S @ cell``. Lists are full: each pair appears in both directions.
"""

import math

import numpy as np
import torch
import vesin
from torch import Tensor

from nvalchemi.data.batch import Batch
from nvalchemi.data.checks import NEIGHBOR_CUTOFF, neighbor_list_remedy

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
        structure has no cell or a singular one, or the batch has other fields of edges.

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

    calculator = _calculator(cutoff)
    ends = np.cumsum(counts)
    pairs, shifts = [], []
    for start, end, box, periodic in zip(ends - counts, ends, cell, pbc):
        pair, shift = _pairs(calculator, positions[start:end], box, periodic)
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
    _check_geometry(points, box[None], periodic[None], np.array([len(points)]))
    pair, shift = _pairs(_calculator(cutoff), points, box, periodic)
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
        If the batch has no neighbour list.
    """
    if "neighbor_list" not in batch:
        raise ValueError(f"the batch has no neighbor_list: {neighbor_list_remedy()}")
    positions = batch.positions if positions is None else positions
    cell = getattr(batch, "cell", None) if cell is None else cell
    centre, neighbor = batch.neighbor_list.unbind(1)
    vectors = positions.index_select(0, neighbor) - positions.index_select(0, centre)
    shifts = getattr(batch, "neighbor_list_shifts", None)
    if cell is None or shifts is None:
        return vectors
    structure = batch.batch_idx.index_select(0, centre)
    boxes = cell.index_select(0, structure)
    return vectors + torch.bmm(shifts.to(cell.dtype).unsqueeze(1), boxes).squeeze(1)


def _calculator(cutoff: float) -> vesin.NeighborList:
    # One thread: structures are small, and ranks and loader workers share the cores.
    return vesin.NeighborList(cutoff=float(cutoff), full_list=True, sorted=True, n_threads=1)


def _pairs(
    calculator: vesin.NeighborList, positions: np.ndarray, cell: np.ndarray, pbc: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    # Lattice vectors that are not periodic carry no meaning, whatever they hold.
    box = np.where(pbc[:, None], cell, 0.0)
    pair, shift = calculator.compute(positions, box, pbc, "PS", copy=False)
    # vesin reuses its memory in the next call: astype makes the copy.
    return pair.astype(np.int64), shift.astype(np.int64)


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
    rows = np.where(pbc[:, :, None], cell, np.eye(3))
    lengths = np.linalg.norm(rows, axis=2, keepdims=True)
    unit = rows / np.where(lengths > 0, lengths, 1.0)
    # Periodic vectors are compared with each other only: the others are taken as perpendicular.
    both = pbc[:, :, None] & pbc[:, None, :]
    gram = np.where(both, unit @ unit.transpose(0, 2, 1), np.eye(3))
    # 1e-12 is the squared volume of unit vectors that lie 1e-6 rad from a common plane; a vector
    # that is not finite counts as zero.
    singular = np.linalg.det(np.nan_to_num(gram)) < 1e-12
    if singular.any():
        first = int(np.flatnonzero(singular)[0])
        raise ValueError(
            "lattice vectors along periodic directions must be finite and independent: structure "
            f"{first} has pbc {pbc[first].tolist()} and cell {cell[first].tolist()}"
        )


def _array(values: Tensor | np.ndarray) -> np.ndarray:
    return values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)


def _float_array(values: Tensor | np.ndarray) -> np.ndarray:
    return _array(values).astype(np.float64)


def _concatenate(parts: list[np.ndarray], width: int) -> np.ndarray:
    return np.concatenate([np.empty((0, width), np.int64), *parts])
