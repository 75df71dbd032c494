"""Rows to be stored: structures turned into arrays, and checked against what a store keeps."""

import warnings
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nvalchemi.data.atomic_data import AtomicData
from nvalchemi.data.batch import Batch
from nvalchemi.data.checks import NEIGHBOR_CUTOFF
from nvalchemi.data.datapipes.zarr_layout import StoreIndex
from nvalchemi.data.fields import FIELDS, LEVELS, Level

# A structure that names neither is not periodic: zero cell and pbc False say just that.
_PERIODICITY = frozenset({"cell", "pbc"})


@dataclass
class Payload:
    """Rows of B structures, neighbor_list in atom numbers counted from the first of them.

    Parameters
    ----------
    num_nodes, num_edges : ndarray
        Atoms and edges of each structure, int64 [B].
    values : dict
        Rows by field name.
    levels, groups : dict
        Level of each field, and "core" or "custom".
    neighbor_cutoff : float, optional
        Of all neighbour lists, in Angstrom, where it is known.
    """

    num_nodes: np.ndarray
    num_edges: np.ndarray
    values: dict[str, np.ndarray]
    levels: dict[str, Level]
    groups: dict[str, str]
    neighbor_cutoff: float | None = None

    def __len__(self) -> int:
        return len(self.num_nodes)


def structures_of(data: AtomicData | Batch | Iterable[AtomicData]) -> Batch | list[AtomicData]:
    """What a writer was given, as a batch or a list.

    Raises
    ------
    TypeError
        If it is something else.
    """
    if isinstance(data, Batch):
        return data
    given = [data] if isinstance(data, AtomicData) else data
    if not isinstance(given, Iterable):
        raise TypeError(
            f"a store takes AtomicData, a list of them or a Batch: got {type(data).__name__}"
        )
    structures = list(given)
    for i, structure in enumerate(structures):
        if not isinstance(structure, AtomicData):
            raise TypeError(f"structure {i} must be AtomicData: got {type(structure).__name__}")
    return structures


def make_payload(structures: Batch | list[AtomicData], index: StoreIndex | None = None) -> Payload:
    """Arrays of structures for a new store, or for one that exists.

    Parameters
    ----------
    structures : Batch or list of AtomicData
        At least one.
    index : StoreIndex, optional
        The store that they shall be appended to: they must carry exactly its fields.

    Raises
    ------
    ValueError
        Naming field, structure and remedy, if fields, dtypes or shapes do not fit.
    """
    _check_names(_names(structures), index)
    if isinstance(structures, list):
        _check_dtypes(structures)
        _warn_info(structures)
        structures = Batch.from_data_list(structures)
    values: dict[str, np.ndarray] = {}
    levels: dict[str, Level] = {}
    for level in LEVELS:
        for name, value in structures.fields(level).items():
            values[name], levels[name] = to_numpy(name, value), level
    payload = Payload(
        num_nodes=structures.num_nodes_per_graph.cpu().numpy(),
        num_edges=structures.num_edges_per_graph.cpu().numpy(),
        values=values,
        levels=levels,
        groups={name: "core" if name in FIELDS else "custom" for name in values},
        neighbor_cutoff=_one_cutoff(structures, index),
    )
    if index is not None:
        _fit(payload, index)
    return payload


def _one_cutoff(batch: Batch, index: StoreIndex | None) -> float | None:
    """Cutoff of the neighbour lists, which is one for a store; None where it is not known.

    A store that does not know the cutoff of what it holds takes any list, and goes on not knowing.
    """
    kept = None if index is None else index.neighbor_cutoff
    if "neighbor_list" not in batch or (index is not None and kept is None):
        return None
    values = batch.metadata.get(NEIGHBOR_CUTOFF)
    found = [] if values is None else sorted(set(values.tolist()))
    if kept is None and len(found) > 1:
        raise ValueError(
            f"a store keeps neighbour lists of one cutoff: got {found[0]:g} to {found[-1]:g} "
            "Angstrom; build them anew with add_neighbor_list(batch, cutoff) of "
            "nvalchemi.data.neighbors, or write a store for each"
        )
    if kept is not None and found != [kept]:
        got = " and ".join(f"{value:g} Angstrom" for value in found) or "an unknown cutoff"
        raise ValueError(
            f"the store keeps neighbour lists with cutoff {kept:g} Angstrom, these structures have "
            f"lists with {got}: append add_neighbor_list(batch, cutoff={kept:g}) (of "
            "nvalchemi.data.neighbors), or write them to a store of their own"
        )
    return found[0] if found else None


def to_numpy(name: str, value: Tensor) -> np.ndarray:
    """Array with the values of a tensor.

    Raises
    ------
    ValueError
        If NumPy has no such dtype, or Zarr takes no such name.
    """
    if "/" in name or name in ("", ".", "..", "zarr.json"):
        raise ValueError(f"a field can not be stored under the name {name!r}: rename it")
    if value.dtype == torch.bfloat16:
        raise ValueError(
            f"{name} is bfloat16, which can not be stored: convert it before, for instance with "
            ".to(torch.float32)"
        )
    return value.detach().cpu().contiguous().numpy()


def _names(structures: Batch | Sequence[AtomicData]) -> list[Collection[str]]:
    if isinstance(structures, Batch):
        return [structures.model_dump()]
    return [structure.to_dict() for structure in structures]


def _check_names(names: list[Collection[str]], index: StoreIndex | None) -> None:
    """Every structure carries the fields of the store, for a new one those of the first."""
    expected = set(names[0]) if index is None else set(index.arrays)
    holder = "structure 0 carries" if index is None else "the store keeps"
    for i, given in enumerate(names):
        free = _PERIODICITY if not _PERIODICITY & set(given) or index is None else frozenset()
        for name in sorted(expected - set(given) - free):
            raise ValueError(
                f"structure {i} lacks {name!r}, which {holder}: give it one, or write structures "
                f"without {name!r} to a store of their own (a missing value is never filled in)"
            )
        extra = set(given) - expected - (_PERIODICITY if index is None else frozenset())
        for name in sorted(extra):
            have = "structure 0 lacks" if index is None else "the store does not keep"
            raise ValueError(
                f"structure {i} carries {name!r}, which {have}: remove it from the structure, or "
                f"write structures with {name!r} to a store of their own"
            )


def _check_dtypes(structures: Sequence[AtomicData]) -> None:
    first = {name: value.dtype for name, value in structures[0]}
    for i, structure in enumerate(structures):
        for name, value in structure:
            if value.dtype != first.setdefault(name, value.dtype):
                raise ValueError(
                    f"{name} of structure {i} is {value.dtype}, of earlier ones {first[name]}: "
                    "convert them to one dtype before"
                )


def _warn_info(structures: Sequence[AtomicData]) -> None:
    keys = sorted({str(key) for structure in structures for key in structure.info})
    if keys:
        warnings.warn(
            f"AtomicData.info is not stored: {', '.join(keys)}. Add what you want to keep with "
            "add_system_property, add_node_property or add_edge_property",
            UserWarning,
            stacklevel=4,
        )


def _fit(payload: Payload, index: StoreIndex) -> None:
    """Check dtypes, shapes and levels against a store; where it asks for periodicity, say none."""
    for name, schema in index.schema().items():
        shape = (len(payload), *schema.row_shape)
        if name in _PERIODICITY and name not in payload.values:
            payload.values[name] = np.zeros(shape, schema.dtype)
        payload.levels.setdefault(name, schema.level)
        payload.groups[name] = index.groups[name]
        value = payload.values[name]
        if payload.levels[name] != schema.level:
            raise ValueError(
                f"{name} is a field of the level {payload.levels[name]!r}, in the store of the "
                f"level {schema.level!r}: rename one of them"
            )
        if value.dtype != schema.dtype:
            raise ValueError(
                f"{name} is {value.dtype}, the store keeps {schema.dtype}: convert it before"
            )
        if value.shape[1:] != schema.row_shape:
            raise ValueError(
                f"{name} has rows of shape {list(value.shape[1:])}, the store keeps "
                f"{list(schema.row_shape)}: write it to a store of its own"
            )


def shift_neighbors(values: np.ndarray, shift: int | np.ndarray, last_atom: int) -> np.ndarray:
    """Add to atom numbers, keeping their dtype.

    Raises
    ------
    ValueError
        If the dtype can not hold the number of the last atom.
    """
    if last_atom > np.iinfo(values.dtype).max:
        raise ValueError(
            f"neighbor_list is {values.dtype}, which can not number {last_atom + 1} atoms: store "
            "it as int64"
        )
    return (values + np.asarray(shift)).astype(values.dtype, copy=False)


def as_row_numbers(indices: Any, size: int) -> np.ndarray:
    """Numbers of stored structures without repeats; see `resolve_indices`."""
    from nvalchemi.data.datapipes.reader import resolve_indices

    return np.unique(resolve_indices(indices, size, f"a store of {size} structures"))
