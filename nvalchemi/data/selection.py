"""Taking structures out of a batch: one, some in any order, or consecutive parts."""

import operator
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nvalchemi.data.atomic_data import AtomicData
from nvalchemi.data.checks import kind_of
from nvalchemi.data.ragged import gather_rows, pointers

if TYPE_CHECKING:
    from nvalchemi.data.batch import Batch


def number(index: Any) -> int | None:
    """The integer that an index is (Python's, numpy's, a 0-d tensor), or None for all others."""
    if getattr(index, "ndim", 0) or isinstance(index, bool):
        return None
    if isinstance(index, Tensor) and kind_of(index.dtype) != "int":
        return None
    try:
        return operator.index(index)
    except TypeError:
        return None


def chosen_structures(index: Any, size: int) -> Tensor:
    """Turn a slice, list, index tensor or mask into structure numbers, [b] int64.

    Raises
    ------
    IndexError
        If the selection is empty, not of integers, or outside the `size` structures.
    """
    rows = _rows(index, size)
    if rows.dtype == torch.bool:
        if rows.shape != (size,):
            raise IndexError(f"a mask must have shape [{size}]: got {list(rows.shape)}")
        rows = rows.nonzero().squeeze(1)
    if not rows.numel():
        raise IndexError("the selection is empty: a batch holds at least one structure")
    if kind_of(rows.dtype) != "int" or rows.dim() != 1:
        raise IndexError(f"an index must be an integer or a list of integers: got {index!r}")
    rows = rows.to("cpu", torch.int64)
    outside = (rows < -size) | (rows >= size)
    if bool(outside.any()):
        raise IndexError(f"indices must lie in {-size}..{size - 1}: got {int(rows[outside][0])}")
    return rows % size


def _rows(index: Any, size: int) -> Tensor:
    if isinstance(index, slice):
        chosen = range(size)[index]
        # torch.arange refuses the bounds of an empty range
        return torch.arange(chosen.start, chosen.stop, chosen.step) if chosen else torch.empty(0)
    try:
        return torch.as_tensor(index)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise IndexError(
            f"an index must be an integer, a slice, a mask or a list of integers: got {index!r}"
        ) from error


def select(batch: "Batch", index: Any) -> "Batch":
    """Batch of the chosen structures in the chosen order; see `Batch.index_select`."""
    chosen = chosen_structures(index, batch.num_graphs)
    counts = {level: count[chosen] for level, count in batch._counts.items()}
    rows: dict[str, Tensor] = {"system": chosen}
    for level, count in batch._counts.items():
        rows[level] = gather_rows(pointers(count)[:-1][chosen], counts[level])
    rows = {level: row.to(batch.device) for level, row in rows.items()}
    values = {name: v[rows[batch._levels[name]]] for name, v in batch._values.items()}
    metadata = {name: value[chosen] for name, value in batch.metadata.items()}
    new = type(batch)(values, dict(batch._levels), counts["atom"], counts["edge"], metadata)
    if "neighbor_list" in values:
        local = batch._values["neighbor_list"] - batch._edge_offsets()
        values["neighbor_list"] = local[rows["edge"]] + new._edge_offsets()
    return new


def split(batch: "Batch", sizes: Sequence[int]) -> list["Batch"]:
    """Consecutive batches of so many structures; see `Batch.split`."""
    sizes = list(sizes)
    if sum(sizes) != batch.num_graphs or min(sizes, default=0) < 1:
        raise ValueError(f"sizes must be positive and sum to {batch.num_graphs}: got {sizes}")
    counts = {level: count.split(sizes) for level, count in batch._counts.items()}
    lengths = {level: [int(part.sum()) for part in cut] for level, cut in counts.items()}
    lengths["system"] = sizes
    cuts = {name: v.split(lengths[batch._levels[name]]) for name, v in batch._values.items()}
    metadata = {name: value.split(sizes) for name, value in batch.metadata.items()}
    first = 0
    batches = []
    for k in range(len(sizes)):
        values = {name: cut[k] for name, cut in cuts.items()}
        if "neighbor_list" in values:
            values["neighbor_list"] = values["neighbor_list"] - first
        own = {name: value[k] for name, value in metadata.items()}
        atoms, edges = counts["atom"][k], counts["edge"][k]
        batches.append(type(batch)(values, dict(batch._levels), atoms, edges, own))
        first += lengths["atom"][k]
    return batches


def structures(batch: "Batch", start: int, stop: int) -> Iterator[AtomicData]:
    """Structures start..stop-1 as views of the batch; they were checked when it was made."""
    atom_ptr = pointers(batch._counts["atom"]).tolist()
    edge_ptr = pointers(batch._counts["edge"]).tolist()
    for i in range(start, stop):
        rows = {
            "atom": slice(atom_ptr[i], atom_ptr[i + 1]),
            "edge": slice(edge_ptr[i], edge_ptr[i + 1]),
            "system": slice(i, i + 1),
        }
        values = {name: v[rows[batch._levels[name]]] for name, v in batch._values.items()}
        if "neighbor_list" in values:
            values["neighbor_list"] = values["neighbor_list"] - atom_ptr[i]
        yield AtomicData._trusted(values, dict(batch._levels))
