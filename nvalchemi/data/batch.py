"""Batch: many structures as concatenated fields and the counts that tell them apart."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from typing import Any, Self

import torch
from torch import Tensor

from nvalchemi.data.atomic_data import AtomicData
from nvalchemi.data.checks import (
    NEIGHBOR_CUTOFF,
    check_atomic_numbers,
    check_counts,
    check_device,
    check_edges_inside,
    check_metadata,
    check_name,
    check_tensor,
)
from nvalchemi.data.fields import FIELDS, LEVELS, Level, resolve_level
from nvalchemi.data.join import check_raw, join, join_structures, merge_levels
from nvalchemi.data.ragged import owners
from nvalchemi.data.selection import number, select, split, structures
from nvalchemi.data.sizes import StructureSizes
from nvalchemi.data.tensor_fields import same_fields


class Batch(StructureSizes):
    """B structures with V atoms and E edges in all.

    Make one with `from_data_list`, `from_raw_dicts` or `from_arrays`. Every field is an attribute:
    ``batch.positions`` [V, 3], ``batch.neighbor_list`` [E, 2] (atom indices of the batch),
    ``batch.energy`` [B, 1]. An absent one raises AttributeError.

    Attributes
    ----------
    metadata : dict of str to Tensor
        Bookkeeping of each structure, [B] on CPU: "index" in its data set, "dataset_index" of a
        MultiDataset, "neighbor_cutoff" of a list. It follows selections and is no field.
    """

    metadata: dict[str, Tensor]

    def __init__(
        self,
        values: dict[str, Tensor],
        levels: dict[str, Level],
        num_nodes: Tensor,
        num_edges: Tensor,
        metadata: Mapping[str, Tensor] | None = None,
    ) -> None:
        # counts stay on the CPU: reading them must not wait for a GPU
        set_ = object.__setattr__
        set_(self, "_values", values)
        set_(self, "_levels", levels)
        set_(self, "_counts", {"atom": num_nodes, "edge": num_edges})
        set_(self, "_cache", {})
        set_(self, "metadata", dict(metadata or {}))

    # Construction.

    @classmethod
    def from_arrays(
        cls,
        atom: Mapping[str, Tensor],
        edge: Mapping[str, Tensor],
        system: Mapping[str, Tensor],
        num_nodes: Tensor,
        num_edges: Tensor | None = None,
        metadata: Mapping[str, Tensor] | None = None,
        *,
        local_neighbors: bool = False,
    ) -> Self:
        """Make one from concatenated fields, without a Python object per structure.

        Parameters
        ----------
        atom, edge, system : mapping of str to Tensor
            Fields by level, leading axes V, E and B.
        num_nodes, num_edges : Tensor
            Atoms and edges of each structure, [B] int64; no edges if not given.
        metadata : mapping of str to Tensor, optional
            See the class.
        local_neighbors : bool
            Whether neighbor_list counts from the first atom of each structure.

        Raises
        ------
        ValueError
            If a field does not fit its level, kind, shape or count, can not be named so, fields
            lie on several devices, a structure has no atoms, or positions or atomic_numbers lack.
        """
        num_nodes = num_nodes.to("cpu", torch.int64)
        if num_edges is None:
            num_edges = torch.zeros_like(num_nodes)
        num_edges = num_edges.to("cpu", torch.int64)
        if num_nodes.shape != num_edges.shape or num_nodes.dim() != 1 or not len(num_nodes):
            raise ValueError(
                "num_nodes and num_edges must be [B] with B >= 1: got "
                f"{list(num_nodes.shape)} and {list(num_edges.shape)}"
            )
        check_counts({"num_nodes": num_nodes, "num_edges": num_edges})
        for name in ("positions", "atomic_numbers"):
            if name not in atom:
                held = ", ".join(sorted(atom)) or "nothing"
                raise ValueError(f"a batch needs {name}: got {held}")
        totals = {
            "atom": int(num_nodes.sum()),
            "edge": int(num_edges.sum()),
            "system": len(num_nodes),
        }
        values: dict[str, Tensor] = {}
        levels: dict[str, Level] = {}
        for level, fields in zip(LEVELS, (atom, edge, system), strict=True):
            for name, value in fields.items():
                check_name(name, cls)
                check_tensor(name, value, level, totals[level])
                check_device(name, value, values)
                values[name], levels[name] = value, level
        check_metadata(metadata or {}, len(num_nodes))
        batch = cls(values, levels, num_nodes, num_edges, metadata)
        if local_neighbors and "neighbor_list" in values:
            values["neighbor_list"] = values["neighbor_list"] + batch._edge_offsets()
        return batch

    @classmethod
    def from_data_list(
        cls,
        data_list: Iterable[AtomicData],
        device: str | torch.device | None = None,
        skip_validation: bool = False,
        exclude_keys: Sequence[str] | None = None,
    ) -> Self:
        """Join structures.

        Parameters
        ----------
        data_list : iterable of AtomicData
            At least one. All must carry the same fields in the same dtypes; a structure without
            cell and pbc beside periodic ones gets a zero cell and pbc False.
        device : optional
            Where the batch goes.
        skip_validation : bool
            Accepted for scripts of the peer; each structure was checked when it was made.
        exclude_keys : sequence of str, optional
            Fields to leave out.

        Raises
        ------
        TypeError
            If it holds something else.
        ValueError
            If it is empty, or a field is on some structures and not on others.
        """
        data_list = list(data_list)
        for i, data in enumerate(data_list):
            if not isinstance(data, AtomicData):
                raise TypeError(
                    f"data_list[{i}] must be AtomicData: got {type(data).__name__}; for dicts of "
                    "tensors use from_raw_dicts"
                )
        levels = merge_levels([data._levels for data in data_list])
        return cls._from_dicts([data._values for data in data_list], levels, device, exclude_keys)

    @classmethod
    def from_raw_dicts(
        cls,
        data_list: Sequence[Mapping[str, Tensor]],
        device: str | torch.device | None = None,
        exclude_keys: Sequence[str] | None = None,
        field_levels: Mapping[str, str] | None = None,
    ) -> Self:
        """Join structures that are dicts of tensors, as `from_data_list`.

        A name that the table of fields lacks is of the level that `field_levels` says, else of the
        structure ("system"). A value None is an absent field.
        """
        dicts = [{k: v for k, v in raw.items() if v is not None} for raw in data_list]
        given = {name: resolve_level(level) for name, level in (field_levels or {}).items()}
        levels: dict[str, Level] = {}
        for name in {key: None for raw in dicts for key in raw}:
            levels[name] = given.get(name, FIELDS[name].level if name in FIELDS else "system")
        check_raw(dicts, levels.keys() - set(exclude_keys or ()))
        return cls._from_dicts(dicts, levels, device, exclude_keys)

    @classmethod
    def _from_dicts(
        cls,
        dicts: Sequence[Mapping[str, Tensor]],
        levels: Mapping[str, Level],
        device: str | torch.device | None,
        exclude_keys: Sequence[str] | None,
    ) -> Self:
        if not dicts:
            raise ValueError("a batch needs at least one structure: got an empty list")
        excluded = set(exclude_keys or ())
        levels = {name: level for name, level in levels.items() if name not in excluded}
        by_level, counts = join_structures(dicts, levels)
        batch = cls.from_arrays(
            by_level["atom"],
            by_level["edge"],
            by_level["system"],
            counts["atom"],
            counts["edge"],
            local_neighbors=True,
        )
        return batch if device is None else batch.to(device)

    # Fields.

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and name in self._values:
            return self._values[name]
        held = "" if name.startswith("_") else f": it holds {', '.join(sorted(self._values))}"
        raise AttributeError(f"Batch has no field {name!r}{held}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "metadata":
            check_metadata(value, self.num_graphs)
            object.__setattr__(self, name, dict(value))
            return
        if isinstance(getattr(type(self), name, None), property):
            raise AttributeError(f"{name} follows from the structures and can not be set")
        level = self._levels.get(name, FIELDS[name].level if name in FIELDS else None)
        if level is None:
            raise AttributeError(
                f"unknown field {name!r}: add it with add_key(name, values, level=...)"
            )
        self._put(name, value, level)

    def _put(self, name: str, value: Tensor, level: Level) -> None:
        counts = {"atom": self.num_nodes, "edge": self.num_edges, "system": self.num_graphs}
        count = counts[level]
        if level == "edge" and not self.fields("edge"):
            raise ValueError(
                f"{name} is a field of edges and the batch has none: use with_edges(...) to say "
                "how many edges each structure has"
            )
        check_name(name, type(self))
        check_tensor(name, value, level, count)
        check_device(name, value, self._values)
        self._values[name], self._levels[name] = value, level
        if name == "neighbor_list":
            self.metadata.pop(NEIGHBOR_CUTOFF, None)
        self._cache.pop("edge_ptr", None)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, str):
            return self._values[index] if index in self._values else getattr(self, index)
        one = number(index)
        return self.index_select(index) if one is None else self.get_data(one)

    def __iter__(self) -> Iterator[AtomicData]:
        return iter(self.to_data_list())

    @property
    def keys(self) -> dict[str, set[str]]:
        """Names of the fields at the levels "node", "edge" and "system"."""
        names = {"node": "atom", "edge": "edge", "system": "system"}
        return {key: set(self.fields(level)) for key, level in names.items()}

    def with_fields(self, level: str, fields: Mapping[str, Tensor]) -> Self:
        """Batch with some fields of a level replaced or added; the others are shared."""
        new = copy(self)
        for name, value in fields.items():
            new._put(name, value, resolve_level(level))
        return new

    def with_edges(self, num_edges: Tensor, fields: Mapping[str, Tensor]) -> Self:
        """Batch with other edges: all fields of edges are replaced by these.

        Parameters
        ----------
        num_edges : Tensor
            Edges of each structure, [B].
        fields : mapping of str to Tensor
            Leading axis E = num_edges.sum(); neighbor_list in atom indices of the batch.
        """
        return type(self).from_arrays(
            self.fields("atom"),
            fields,
            self.fields("system"),
            self._counts["atom"],
            num_edges,
            {name: value for name, value in self.metadata.items() if name != NEIGHBOR_CUTOFF},
        )

    def add_key(
        self, key: str, values: Sequence[Tensor], level: str = "node", overwrite: bool = False
    ) -> None:
        """Add a field from one tensor per structure.

        Raises
        ------
        ValueError
            If there is one of that name and not `overwrite`, or the counts do not fit.
        """
        if key in self._values and not overwrite:
            raise ValueError(f"the batch has a field {key!r}: pass overwrite=True to replace it")
        if len(values) != self.num_graphs:
            raise ValueError(f"values must hold {self.num_graphs} tensors: got {len(values)}")
        place = resolve_level(level)
        sizes = [1] * len(values) if place == "system" else self._counts[place].tolist()
        for i, (value, size) in enumerate(zip(values, sizes, strict=True)):
            check_tensor(f"{key} of structure {i}", value, place, size)
        self._put(key, torch.cat(list(values)), place)

    # Structures.

    def get_data(self, index: int) -> AtomicData:
        """One structure; its tensors are views of the batch, its neighbour list a copy."""
        size = self.num_graphs
        if not -size <= index < size:
            raise IndexError(f"index must lie in {-size}..{size - 1}: got {index}")
        return next(structures(self, index % size, index % size + 1))

    def to_data_list(self) -> list[AtomicData]:
        """All structures, as `get_data`."""
        return list(structures(self, 0, self.num_graphs))

    def index_select(self, index: Any) -> "Batch":
        """Batch of the chosen structures in the chosen order; repeats are fine.

        Parameters
        ----------
        index : slice, sequence of int, integer Tensor, or bool Tensor [B]
            Which.

        Raises
        ------
        IndexError
            If it is empty, floating, or outside the batch.
        """
        return select(self, index)

    def split(self, sizes: Sequence[int]) -> list["Batch"]:
        """Cut into consecutive batches of so many structures; tensors are views where possible."""
        return split(self, sizes)

    @classmethod
    def concat(cls, batches: Sequence["Batch"], *, fill_missing: bool = False) -> "Batch":
        """Join batches, in order.

        Parameters
        ----------
        batches : sequence of Batch
            At least one.
        fill_missing : bool
            If a floating-point field is on some and not on others: NaN where it is absent, which
            losses with ``ignore_nonfinite=True`` leave out, instead of an error. Never zero.

        Raises
        ------
        ValueError
            If fields or dtypes differ and can not be filled.
        """
        return join(cls, batches, fill_missing)

    def append(self, other: "Batch") -> None:
        """Add the structures of another batch with the same fields, in place."""
        joined = join(type(self), [self, other], fill_missing=False)
        for slot in ("_values", "_levels", "_counts", "_cache", "metadata"):
            object.__setattr__(self, slot, getattr(joined, slot))

    # Checks.

    def validate(self) -> None:
        """Check values that shapes do not tell: elements, and neighbours inside their structure.

        Raises
        ------
        ValueError
            Naming the first value outside.
        """
        check_atomic_numbers(self.atomic_numbers)
        if "neighbor_list" in self._values:
            owner = owners(self._counts["edge"], self.num_edges).to(self.device)
            check_edges_inside(self.neighbor_list, self.batch_idx, owner)

    def _with_values(self, values: dict[str, Tensor]) -> Self:
        return type(self)(
            values, dict(self._levels), self._counts["atom"], self._counts["edge"], self.metadata
        )

    def __eq__(self, other: object) -> bool:
        """Compare structures and every field exactly (NaN equals NaN); metadata does not count."""
        if not isinstance(other, Batch):
            return NotImplemented
        same = all(torch.equal(self._counts[key], other._counts[key]) for key in self._counts)
        return same and same_fields(self._values, other._values)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        names = ", ".join(f"{name}{list(v.shape)}" for name, v in self._values.items())
        return (
            f"Batch({self.num_graphs} structures, {self.num_nodes} atoms, "
            f"{self.num_edges} edges: {names})"
        )
