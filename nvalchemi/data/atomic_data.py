"""AtomicData: one structure as tensors, checked when it is made."""

import hashlib
import warnings
from collections.abc import Iterator, Mapping
from copy import copy
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from nvalchemi.data.checks import (
    check_atomic_numbers,
    check_device,
    check_name,
    check_neighbors,
    check_tensor,
)
from nvalchemi.data.fields import FIELDS, Level
from nvalchemi.data.tensor_fields import TensorFields, same_fields

_REQUIRED = ("atomic_numbers", "positions")
_warned_casts: set[tuple[str, torch.dtype, torch.dtype]] = set()


class AtomicData(TensorFields):
    """One structure: V atoms, E edges.

    Parameters
    ----------
    atomic_numbers : Tensor
        Integers [V], 1 to 118.
    positions : Tensor
        Floating point [V, 3], Angstrom.
    info : mapping of str to Tensor, optional
        Whatever belongs to the structure and to no field; dropped when structures are batched.
    **fields : Tensor
        Fields of `nvalchemi.data.fields.FIELDS` in the shapes given there. Fields of the structure
        as a whole have a leading axis of one: energy [1, 1], stress [1, 3, 3], cell [1, 3, 3],
        pbc [1, 3]. A name that the table lacks is taken as a field of the structure and must have
        that leading one; for others use `add_node_property` and `add_edge_property`.

    Raises
    ------
    TypeError
        If a required field is missing or a value is no tensor.
    ValueError
        If kind, shape or count of a field is wrong, there are no atoms, fields lie on several
        devices, or the name of a custom field is one that the class uses itself.

    Notes
    -----
    A field that was not given reads as None; nothing is filled in. Floating-point fields are cast
    to the dtype of the positions, with one warning for each kind of cast; names in
    `precision_preserving_keys` keep theirs. Positions of another dtype, when they are set, bring
    the other fields to it.
    """

    precision_preserving_keys: ClassVar[frozenset[str]] = frozenset()

    info: dict[str, Any]

    def __init__(self, *, info: Mapping[str, Any] | None = None, **fields: Tensor | None) -> None:
        set_ = object.__setattr__
        set_(self, "_values", {})
        set_(self, "_levels", {})
        set_(self, "info", dict(info) if info is not None else {})
        missing = [name for name in _REQUIRED if fields.get(name) is None]
        if missing:
            raise TypeError(f"AtomicData needs {' and '.join(missing)}")
        # the required ones first: all counts and dtypes are judged by them
        for name in (*_REQUIRED, *(key for key in fields if key not in _REQUIRED)):
            value = fields[name]
            if value is not None:
                self._set(name, value, self._level(name))

    @classmethod
    def from_atoms(
        cls,
        atoms: Any,
        energy_key: str = "energy",
        forces_key: str = "forces",
        stress_key: str = "stress",
        virials_key: str = "virials",
        dipole_key: str = "dipole",
        charges_key: str = "charges",
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> Self:
        """Make one from an `ase.Atoms`; see `nvalchemi.data.convert.from_ase`.

        Parameters
        ----------
        atoms : ase.Atoms
            The structure; it is not changed.
        energy_key, forces_key, stress_key, virials_key, dipole_key, charges_key : str
            Names of the labels in ``atoms.info``, ``atoms.arrays`` or the results of the
            calculator. A label that is nowhere stays absent.
        device, dtype
            Where the tensors go, and the dtype of floating-point fields.
        """
        from nvalchemi.data.convert import LabelKeys, from_ase

        keys = LabelKeys(
            energy=energy_key,
            forces=forces_key,
            stress=stress_key,
            virial=virials_key,
            dipole=dipole_key,
            charges=charges_key,
        )
        data: Self = from_ase(atoms, label_keys=keys, dtype=dtype, cls=cls)
        return data if torch.device(device).type == "cpu" else data.to(device)

    def _level(self, name: str) -> Level:
        return FIELDS[name].level if name in FIELDS else self._levels.get(name, "system")

    def _set(self, name: str, value: Tensor, level: Level) -> None:
        check_name(name, type(self))
        if level == "system" and name not in FIELDS and isinstance(value, Tensor):
            self._refuse_unplaced(name, value)
        check_tensor(name, value, level, self._count(name, level))
        check_device(name, value, self._values)
        if name == "atomic_numbers":
            check_atomic_numbers(value)
            if not len(value):
                raise ValueError("a structure must have at least one atom: got none; leave it out")
        if name == "neighbor_list":
            check_neighbors(value, self.num_nodes)
        self._values[name] = value if name == "positions" else self._cast(name, value)
        self._levels[name] = level
        if name == "positions":
            for other, there in self._values.items():
                self._values[other] = self._cast(other, there)

    def _count(self, name: str, level: Level) -> int | None:
        """Leading count of a level, as its other fields fix it."""
        if level == "system":
            return 1
        for other, other_level in self._levels.items():
            if other != name and other_level == level:
                return self._values[other].shape[0]
        return None

    @staticmethod
    def _refuse_unplaced(name: str, value: Tensor) -> None:
        if value.dim() == 0 or value.shape[0] != 1:
            raise ValueError(
                f"unknown field {name!r} of shape {list(value.shape)}: a field that the table "
                "lacks must have a leading axis of one (the structure), or be added by "
                "add_node_property or add_edge_property"
            )

    def _cast(self, name: str, value: Tensor) -> Tensor:
        positions = self._values.get("positions")
        if positions is None:
            return value
        keep = name in self.precision_preserving_keys or not value.dtype.is_floating_point
        if keep or value.dtype == positions.dtype:
            return value
        cast = (name, value.dtype, positions.dtype)
        if cast not in _warned_casts:
            _warned_casts.add(cast)
            warnings.warn(
                f"{name} is cast from {value.dtype} to {positions.dtype}, the dtype of positions",
                UserWarning,
                stacklevel=4,
            )
        return value.to(positions.dtype)

    # Reading and writing fields as attributes.

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name in self._values:
            return self._values[name]
        if name in FIELDS:
            return None
        raise AttributeError(
            f"AtomicData has no field {name!r}: it holds {', '.join(sorted(self._values))}"
        )

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "info":
            object.__setattr__(self, "info", dict(value))
            return
        if isinstance(getattr(type(self), name, None), property):
            raise AttributeError(f"{name} follows from the fields and can not be set")
        if value is not None:
            self._set(name, value, self._level(name))
            return
        if name in _REQUIRED:
            raise ValueError(f"{name} can not be removed from a structure")
        self._remove(name)

    def _remove(self, name: str) -> None:
        self._values.pop(name, None)
        self._levels.pop(name, None)

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self._values.items())

    def add_node_property(self, key: str, value: Tensor) -> None:
        """Add a field of the atoms, leading axis V."""
        self._set(key, value, "atom")

    def add_edge_property(self, key: str, value: Tensor) -> None:
        """Add a field of the edges, leading axis E."""
        self._set(key, value, "edge")

    def add_system_property(self, key: str, value: Tensor) -> None:
        """Add a field of the structure, leading axis one."""
        self._set(key, value, "system")

    # What it is.

    @property
    def num_nodes(self) -> int:
        """Number of atoms."""
        numbers = self._values.get("atomic_numbers")
        return 0 if numbers is None else numbers.shape[0]

    @property
    def num_edges(self) -> int:
        """Number of edges, zero without a neighbour list."""
        for name, level in self._levels.items():
            if level == "edge":
                return self._values[name].shape[0]
        return 0

    @property
    def node_properties(self) -> dict[str, Tensor]:
        """Fields of the atoms."""
        return self.fields("atom")

    @property
    def edge_properties(self) -> dict[str, Tensor]:
        """Fields of the edges."""
        return self.fields("edge")

    @property
    def system_properties(self) -> dict[str, Tensor]:
        """Fields of the structure."""
        return self.fields("system")

    # Copies.

    @classmethod
    def _trusted(
        cls,
        values: dict[str, Tensor],
        levels: dict[str, Level],
        info: Mapping[str, Any] | None = None,
    ) -> Self:
        """Structure from fields that were checked before."""
        new = cls.__new__(cls)
        object.__setattr__(new, "_values", values)
        object.__setattr__(new, "_levels", levels)
        object.__setattr__(new, "info", dict(info or {}))
        return new

    def _with_values(self, values: dict[str, Tensor]) -> Self:
        return self._trusted(values, dict(self._levels), self.info)

    def replace(self, **fields: Tensor | None) -> Self:
        """Copy in which some fields are others (None removes one); the rest is shared.

        Fields that are replaced together may have other numbers of atoms or edges than before.
        """
        new = copy(self)
        for name in fields:
            new._remove(name)
        for name in sorted(fields, key=lambda name: name not in _REQUIRED):
            value = fields[name]
            if value is not None:
                new._set(name, value, self._level(name))
            elif name in _REQUIRED:
                raise ValueError(f"{name} can not be removed from a structure")
        if "neighbor_list" in new:
            check_neighbors(new.neighbor_list, new.num_nodes)
        return new

    def to_dict(self) -> dict[str, Tensor]:
        """All fields that are present, by name."""
        return dict(self._values)

    # Equality.

    @property
    def chemical_hash(self) -> str:
        """Hash of elements, positions, pbc and cell: equal for the same atoms in the same order.

        Labels do not enter it.
        """
        digest = hashlib.blake2s()
        for name in ("atomic_numbers", "positions", "pbc", "cell"):
            value = self._values.get(name)
            digest.update(name.encode())
            if value is not None:
                wide = torch.float64 if value.dtype.is_floating_point else torch.int64
                # adding zero makes -0.0 hash as the 0.0 that it equals
                digest.update((value.detach().cpu().to(wide) + 0).contiguous().numpy().tobytes())
        return digest.hexdigest()

    def __eq__(self, other: object) -> bool:
        """Compare every field exactly, labels too (NaN equals NaN); dtypes must agree."""
        if not isinstance(other, AtomicData):
            return NotImplemented
        return same_fields(self._values, other._values)

    def __hash__(self) -> int:
        return hash(self.chemical_hash)

    def __repr__(self) -> str:
        names = ", ".join(f"{name}{list(v.shape)}" for name, v in self._values.items())
        return f"AtomicData({self.num_nodes} atoms, {self.num_edges} edges: {names})"
