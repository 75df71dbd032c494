"""Joining structures and batches end to end, refusing fields that only some of them carry."""

from collections.abc import Mapping, Sequence, Set
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nvalchemi.data.fields import LEVELS, Level
from nvalchemi.data.ragged import pointers

if TYPE_CHECKING:
    from nvalchemi.data.batch import Batch

# A structure without them is simply not periodic: writing that out invents nothing.
_NOT_PERIODIC = ("cell", "pbc")


def _absent(name: str, fields: Mapping[str, Tensor], like: Tensor, count: int) -> Tensor | None:
    """What stands for an absent cell or pbc: no periodicity. None where nothing can."""
    if name not in _NOT_PERIODIC:
        return None
    if name == "cell" and "pbc" in fields and bool(fields["pbc"].any()):
        raise ValueError("a periodic structure needs a cell: one has pbc and no cell")
    return like.new_zeros((count, *like.shape[1:]), device=fields["positions"].device)


def _refuse_missing(name: str, has: list[bool], what: str) -> None:
    without = [i for i, there in enumerate(has) if not there]
    few = ", ".join(map(str, without[:5])) + (", ..." if len(without) > 5 else "")
    raise ValueError(
        f"all {what} must carry the same fields: {name} is on {sum(has)} of {len(has)}, not on "
        f"{few}; leave it out of all, or give it to all (a MultiDataset with output_strict=False "
        "marks an absent label as NaN)"
    )


def _concatenate(name: str, pieces: Sequence[Tensor]) -> Tensor:
    """Join the pieces of a field, which must agree in dtype and in the axes after the first."""
    dtypes = {piece.dtype for piece in pieces}
    if len(dtypes) > 1:
        found = ", ".join(sorted(map(str, dtypes)))
        raise ValueError(
            f"{name} must have one dtype in a batch: got {found}; convert with .to(dtype=...)"
        )
    try:
        return torch.cat(list(pieces))
    except RuntimeError:
        shapes = sorted({tuple(piece.shape[1:]) for piece in pieces})
        if len(shapes) == 1:
            raise
        found = " and ".join(str(list(shape)) for shape in shapes[:2])
        raise ValueError(
            f"{name} must have the same axes after the first in all structures of a batch: got "
            f"{found}; pad them, or leave the field out with exclude_keys"
        ) from None


def merge_levels(parts: Sequence[Mapping[str, Level]]) -> dict[str, Level]:
    """Levels of all fields of structures or batches that are joined.

    Raises
    ------
    ValueError
        If a custom field is of the atoms in one and of the structure in another.
    """
    levels: dict[str, Level] = {}
    for part in parts:
        if part == levels:
            continue
        for name, level in part.items():
            if levels.setdefault(name, level) != level:
                raise ValueError(
                    f"{name} must have one level in a batch: got {levels[name]!r} and {level!r}"
                )
    return levels


def check_raw(dicts: Sequence[Mapping[str, Tensor]], names: Set[str]) -> None:
    """Refuse dicts that lack positions or atomic numbers, or whose fields are no tensors."""
    for i, raw in enumerate(dicts):
        if "positions" not in raw or "atomic_numbers" not in raw:
            raise ValueError(f"structure {i} must have positions and atomic_numbers")
        for name in raw.keys() & names:
            value = raw[name]
            if not isinstance(value, Tensor):
                raise TypeError(
                    f"{name} of structure {i} must be a torch.Tensor: got {type(value).__name__}"
                )
            if value.dim() == 0:
                raise ValueError(
                    f"{name} of structure {i} must have a leading axis (of one for a field of the "
                    "structure): got a scalar"
                )


def join_structures(
    dicts: Sequence[Mapping[str, Tensor]], levels: Mapping[str, Level]
) -> tuple[dict[Level, dict[str, Tensor]], dict[str, Tensor]]:
    """Concatenate the fields of structures.

    Returns
    -------
    fields : dict
        By level, then by name.
    counts : dict
        Atoms and edges of each structure, [B] int64, under "atom" and "edge".
    """
    by_level: dict[Level, dict[str, Tensor]] = {level: {} for level in LEVELS}
    nodes = [raw["positions"].shape[0] for raw in dicts]
    edges = [0] * len(dicts)
    for name, level in levels.items():
        has = [name in raw for raw in dicts]
        if not any(has):
            continue
        like = next(raw[name] for raw in dicts if name in raw)
        pieces = [raw[name] if name in raw else _absent(name, raw, like, 1) for raw in dicts]
        present = [piece for piece in pieces if piece is not None]
        if len(present) < len(dicts):
            _refuse_missing(name, has, "structures of a batch")
        sizes = [piece.shape[0] for piece in present]
        if level == "edge" and not by_level["edge"]:
            edges = sizes
        expected = {"atom": nodes, "edge": edges, "system": [1] * len(dicts)}[level]
        if sizes != expected:
            bad = next(i for i, size in enumerate(sizes) if size != expected[i])
            raise ValueError(
                f"{name} of structure {bad} has {sizes[bad]} rows: expected {expected[bad]}"
            )
        by_level[level][name] = _concatenate(name, present)
    counts = {"atom": torch.tensor(nodes), "edge": torch.tensor(edges)}
    return by_level, counts


class Template:
    """The fields that every batch of several sources must carry.

    Parameters
    ----------
    fields : mapping
        By name: a tensor with dtype and axes after the first as the field, and its level.
    fill_labels : bool
        Whether a floating-point field that a source lacks is NaN for its structures. cell and pbc
        are completed in any case: a structure without them is not periodic.
    """

    def __init__(self, fields: Mapping[str, tuple[Tensor, Level]], fill_labels: bool) -> None:
        self._like = dict(fields)
        self._fill_labels = fill_labels

    def complete(self, batch: "Batch") -> "Batch":
        """Batch with all fields that can stand for absent ones; others are left to `join`."""
        for name, (like, level) in self._like.items():
            if name not in batch:
                stand_in = _stand_in(batch, name, like, level, self._fill_labels)
                if stand_in is not None:
                    batch = batch.with_fields(level, {name: stand_in.to(batch.device)})
        return batch


def join(cls: type["Batch"], batches: Sequence["Batch"], fill_missing: bool) -> "Batch":
    """Concatenate batches; see `Batch.concat`."""
    if not batches:
        raise ValueError("nothing to join: got no batches")
    levels = merge_levels([batch._levels for batch in batches])
    fields: dict[str, tuple[Tensor, Level]] = {}
    for batch in batches:
        for name, value in batch.model_dump().items():
            fields.setdefault(name, (value, batch._levels[name]))
    template = Template(fields, fill_missing)
    batches = [template.complete(batch) for batch in batches]
    counts = {key: torch.cat([batch._counts[key] for batch in batches]) for key in ("atom", "edge")}
    first_atoms = pointers(torch.tensor([batch.num_nodes for batch in batches])).tolist()
    values: dict[str, Tensor] = {}
    for name in levels:
        has = [name in batch for batch in batches]
        if not all(has):
            _refuse_missing(name, has, "batches")
        pieces = [batch[name] for batch in batches]
        if name == "neighbor_list":
            pieces = [p + first for p, first in zip(pieces, first_atoms, strict=False)]
        values[name] = _concatenate(name, pieces)
    names = [key for key in batches[0].metadata if all(key in b.metadata for b in batches)]
    metadata = {name: torch.cat([batch.metadata[name] for batch in batches]) for name in names}
    return cls(values, levels, counts["atom"], counts["edge"], metadata)


def _stand_in(
    batch: "Batch", name: str, like: Tensor, level: Level, fill_labels: bool
) -> Tensor | None:
    """What stands for a field that a batch lacks, or None where nothing can."""
    count = batch.num_nodes if level == "atom" else batch.num_graphs
    if level == "edge":
        return None
    if name in _NOT_PERIODIC:
        return _absent(name, batch.model_dump(), like, count)
    if not (fill_labels and like.dtype.is_floating_point):
        return None
    shape = (count, *like.shape[1:])
    return torch.full(shape, torch.nan, dtype=like.dtype, device=batch.device)
