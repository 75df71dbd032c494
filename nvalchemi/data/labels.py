"""Labels of an `ase.Atoms`: under which key, in which shape and unit, found or reported as absent.

A label is looked up in ``atoms.info`` or ``atoms.arrays`` and in the results of the attached
calculator, where ASE >= 3.23 moves the reserved names (energy, forces, stress, ...) of an extended
XYZ file. Results are read raw: ``atoms.get_forces()`` would zero the forces of constrained atoms,
and would start a calculation where there is none.
"""

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from ase import Atoms
from ase.units import Bohr, Hartree, kcal, mol

from nvalchemi.data.fields import FIELDS

# name of the unit of the forces -> (energy in eV, length in Angstrom)
UNITS: dict[str, tuple[float, float]] = {
    "eV/Angstrom": (1.0, 1.0),
    "kcal/mol/Angstrom": (kcal / mol, 1.0),
    "Hartree/Angstrom": (Hartree, 1.0),
    "Hartree/Bohr": (Hartree, Bohr),
}

# Arrays that ASE keeps for itself, and such that it fills with zeros: neither are labels.
_ASE_ARRAYS = frozenset({"positions", "numbers", "tags", "spacegroup_kinds"})
_ASE_ZEROS = frozenset({"initial_magmoms", "initial_charges", "momenta"})

# Positions in ASE's Voigt order xx, yy, zz, yz, xz, xy of the elements of a 3 x 3 tensor.
_VOIGT = np.array([[0, 5, 4], [5, 1, 3], [4, 3, 2]])


@dataclass(frozen=True, slots=True)
class LabelKeys:
    """Which labels are wanted, and the key under which the data hold each of them.

    None means that the label is not wanted. Energy and forces are wanted by default.

    Parameters
    ----------
    energy, forces, stress, virial, dipole, charges : str or None
        Keys of the fields of the same name: total energy, forces [V, 3], stress (tension positive;
        6 numbers in the order xx, yy, zz, yz, xz, xy, or 9, or 3 x 3), virial (the same shapes),
        dipole [3] and charges [V].
    stress_from_virial : str or None
        Key of a virial from which the stress is computed, ``stress = -virial / volume``. This is
        the sign of QUIP, MACE and most extended XYZ files (virial = -dE/dstrain): a compressed
        cell has a positive virial and a negative stress. It needs a cell that is periodic in all
        three directions.

    Raises
    ------
    ValueError
        If stress and stress_from_virial are both given, or nothing is wanted.
    """

    energy: str | None = "energy"
    forces: str | None = "forces"
    stress: str | None = None
    virial: str | None = None
    dipole: str | None = None
    charges: str | None = None
    stress_from_virial: str | None = None

    def __post_init__(self) -> None:
        if self.stress is not None and self.stress_from_virial is not None:
            raise ValueError(
                "stress is read or computed from a virial, not both: got "
                f"stress={self.stress!r} and stress_from_virial={self.stress_from_virial!r}"
            )
        for name, key in self.wanted():
            if not isinstance(key, str) or not key:
                raise TypeError(f"the key of {name} must be a name or None: got {key!r}")
        if not any(self.wanted()):
            names = ", ".join(entry.name for entry in fields(self))
            raise ValueError(f"LabelKeys must want at least one label of {names}: all are None")

    @classmethod
    def of(cls, keys: "LabelKeys | Mapping[str, str | None]") -> "LabelKeys":
        """Keys as they are, or of a mapping: ``{"energy": "E"}`` is ``LabelKeys(energy="E")``.

        Raises
        ------
        TypeError
            If it is something else, or a name is none of a label.
        """
        if isinstance(keys, LabelKeys):
            return keys
        names = [entry.name for entry in fields(cls)]
        if not isinstance(keys, Mapping):
            raise TypeError(
                "label_keys must be LabelKeys or a mapping of labels to keys, such as "
                f"LabelKeys(energy='REF_energy'): got {keys!r}"
            )
        unknown = [name for name in keys if name not in names]
        if unknown:
            raise TypeError(
                f"label_keys maps labels ({', '.join(names)}) to the keys of the data: got the "
                f"label {unknown[0]!r}"
            )
        return cls(**keys)

    def wanted(self) -> Iterator[tuple[str, str]]:
        """Pairs of a name of this class and its key, for all that is not None."""
        for entry in fields(self):
            key = getattr(self, entry.name)
            if key is not None:
                yield entry.name, key


# What `from_ase` takes where it is there, when nothing is said: the names that ASE reserves.
STANDARD_KEYS = LabelKeys("energy", "forces", "stress", "virial", "dipole", "charges")


@dataclass(slots=True)
class FoundLabels:
    """Labels of one structure in eV and Angstrom (float64), and why others are not there.

    Attributes
    ----------
    values : dict of str to ndarray
        By field: energy [], forces [V, 3], stress [3, 3], virial [3, 3], dipole [3], charges [V].
    absent : dict of str to str
        Wanted, but nowhere: the reason by name in `LabelKeys`.
    broken : dict of str to str
        There, but no label: wrong shape, not finite, of other positions, or contradictory.
    energy_resolution : float
        Half a step (eV) between neighbouring numbers of the type that the energy came in.
    """

    values: dict[str, np.ndarray] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    broken: dict[str, str] = field(default_factory=dict)
    energy_resolution: float = 0.0


def check_units(units: str) -> None:
    """Refuse a unit that is not in `UNITS`."""
    if units not in UNITS:
        raise ValueError(f"units must be one of {', '.join(map(repr, UNITS))}: got {units!r}")


def find_labels(atoms: Atoms, keys: LabelKeys, units: str = "eV/Angstrom") -> FoundLabels:
    """Read the wanted labels of a structure, which is not changed.

    Parameters
    ----------
    atoms : ase.Atoms
        The structure.
    keys : LabelKeys
        What is wanted, and where it is.
    units : str
        Unit of the labels, a key of `UNITS`, named by the forces: energies and virials are in its
        energy, stresses in its energy per cubed length. Dipoles and charges are not converted.
    """
    found = FoundLabels()
    energy_unit, length_unit = UNITS[units]
    factors = {"energy": energy_unit, "forces": energy_unit / length_unit, "virial": energy_unit}
    factors |= {"stress": energy_unit / length_unit**3, "stress_from_virial": energy_unit}
    periodic = bool(atoms.pbc.any())
    for name, key in keys.wanted():
        if name in ("stress", "stress_from_virial") and not periodic:
            found.absent[name] = "the structure is not periodic"
            continue
        try:
            raw = _look_up(atoms, name, key)
            if raw is None:
                found.absent[name] = _why_absent(atoms, name, key)
                continue
            value = _shaped(raw, name, len(atoms)) * factors.get(name, 1.0)
            if name == "stress_from_virial":
                value = -value / _volume(atoms)
        except ValueError as error:
            found.broken[name] = f"{key!r} {error}"
            continue
        found.values["stress" if name == "stress_from_virial" else name] = value
        if name == "energy":
            found.energy_resolution = _resolution(raw) * energy_unit
    return found


def level_of_label(name: str) -> str:
    """Return "atom" or "system"."""
    return FIELDS["virial" if name == "stress_from_virial" else name].level


def _look_up(atoms: Atoms, name: str, key: str) -> Any:
    """Value of a key, None if it is nowhere; ValueError if two places contradict each other."""
    at_atoms = level_of_label(name) == "atom"
    value = (atoms.arrays if at_atoms else atoms.info).get(key)
    results: Mapping[str, Any] = getattr(atoms.calc, "results", None) or {}
    computed = results.get(key)
    if computed is None:
        return value
    if value is None:
        if _is_stale(atoms):
            raise ValueError(
                "in the calculator's results belongs to another geometry: compute it again, or "
                "detach the calculator (atoms.calc = None)"
            )
        return computed
    if not np.array_equal(_shaped(value, name, len(atoms)), _shaped(computed, name, len(atoms))):
        place = "atoms.arrays" if at_atoms else "atoms.info"
        raise ValueError(
            f"differs between {place} and the results of the calculator: rename or remove one"
        )
    return value


def _why_absent(atoms: Atoms, name: str, key: str) -> str:
    if level_of_label(name) == "system" and key in atoms.arrays:
        return (
            f"{key!r} is there, but as an array with a row for each atom (atoms.arrays), where "
            f"{name} belongs to the whole structure (atoms.info)"
        )
    if level_of_label(name) == "atom" and key in atoms.info:
        return (
            f"{key!r} is there, but as a value of the whole structure (atoms.info), where {name} "
            "has a row for each atom (atoms.arrays)"
        )
    return f"there is no key {key!r}"


def _is_stale(atoms: Atoms) -> bool:
    """Whether the calculator notes another geometry for its results than the one at hand."""
    of = getattr(atoms.calc, "atoms", None)
    if of is None:
        return False
    # not calc.check_state(): it takes longer than reading the structure from a file
    return not (
        np.array_equal(of.positions, atoms.positions)
        and np.array_equal(of.numbers, atoms.numbers)
        and np.array_equal(of.cell, atoms.cell)
        and np.array_equal(of.pbc, atoms.pbc)
    )


def _shaped(raw: Any, name: str, num_atoms: int) -> np.ndarray:
    """Value in the shape of its field, float64; ValueError if that can not be."""
    value = np.asarray(raw)
    if value.dtype.kind not in "iuf":
        raise ValueError(f"is no number but {str(raw)[:40]!r}")
    value = value.astype(np.float64)
    if not np.isfinite(value).all():
        raise ValueError("is not finite")
    expected: tuple[int, ...]
    others: tuple[tuple[int, ...], ...]
    if name in ("stress", "virial", "stress_from_virial"):
        if value.shape == (6,):
            return value[_VOIGT]
        expected, others, wanted = (3, 3), ((9,), (1, 3, 3)), "6, 9 or 3 x 3 numbers"
    elif name == "energy":
        expected, others, wanted = (), ((1,), (1, 1)), "one number"
    elif name == "forces":
        expected, others, wanted = (num_atoms, 3), (), f"shape [{num_atoms}, 3]"
    elif name == "charges":
        expected, others, wanted = (num_atoms,), ((num_atoms, 1),), f"shape [{num_atoms}]"
    else:
        expected, others, wanted = (3,), ((1, 3),), "3 numbers"
    if value.shape not in (expected, *others):
        raise ValueError(f"must have {wanted}: got shape {list(value.shape)}")
    return value.reshape(expected)


def _volume(atoms: Atoms) -> float:
    if not atoms.pbc.all():
        raise ValueError("gives no stress: it takes a cell that is periodic in all directions")
    return float(atoms.cell.volume)


def _resolution(energy: Any) -> float:
    value = np.asarray(energy)
    return float(np.spacing(np.abs(value)).max()) / 2 if value.dtype.kind == "f" else 0.0


def numeric_keys(atoms: Atoms) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Keys of a structure that hold numbers, with level and shape.

    Positions, atomic numbers and ASE's own bookkeeping are left out. The axis over the atoms has
    size -1.
    """
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for key, raw in atoms.arrays.items():
        own = key in _ASE_ARRAYS or (key in _ASE_ZEROS and not raw.any())
        if not own and raw.dtype.kind in "iuf":
            found[key] = ("atom", (-1, *raw.shape[1:]))
    results = getattr(atoms.calc, "results", None) or {}
    for key, raw in (*results.items(), *atoms.info.items()):
        kind = getattr(raw, "dtype", np.asarray(raw).dtype if np.isscalar(raw) else None)
        if kind is None or kind.kind not in "iuf":
            continue
        shape = np.shape(raw)
        of_atoms = key in results and bool(shape) and shape[0] == len(atoms) and key != "stress"
        found[key] = ("atom", (-1, *shape[1:])) if of_atoms else ("system", shape)
    return found


def similar_keys(
    name: str, key: str, there: Mapping[str, tuple[str, tuple[int, ...]]]
) -> list[str]:
    """Keys that may hold a label which was not found: right place, right shape, like name."""
    shapes: dict[str, tuple[tuple[int, ...], ...]] = {
        "energy": ((), (1,)),
        "forces": ((-1, 3),),
        "charges": ((-1,), (-1, 1)),
        "dipole": ((3,),),
    }
    fitting = [
        other
        for other, (level, shape) in there.items()
        if level == level_of_label(name) and shape in shapes.get(name, ((6,), (9,), (3, 3)))
    ]
    plain = key.lower().removesuffix("s")
    by_name = [o for o in fitting if plain in o.lower() or name.removesuffix("s") in o.lower()]
    close = difflib.get_close_matches(key, [o for o in fitting if o not in by_name], n=2)
    return sorted(by_name, key=len) + close
