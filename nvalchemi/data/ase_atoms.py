"""One `ase.Atoms` -> AtomicData: the geometry as it is, the labels that were found."""

import sys
import warnings
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import torch
from ase import Atoms
from torch import Tensor

from nvalchemi.data.atomic_data import AtomicData
from nvalchemi.data.label_audit import (
    MAX_ENERGY_LOSS,
    LabelAudit,
    precision_sentence,
    structure_problem,
)
from nvalchemi.data.labels import STANDARD_KEYS, FoundLabels, LabelKeys, check_units, find_labels

Missing = Literal["raise", "skip", "allow"]

# Of the labels that `from_ase` takes unasked, those that missing="raise" demands.
_NEEDED = ("energy", "forces")


def from_ase(
    atoms: Atoms,
    *,
    label_keys: LabelKeys | Mapping[str, str | None] | None = None,
    dtype: torch.dtype = torch.float32,
    missing: Literal["raise", "allow"] = "allow",
    units: str = "eV/Angstrom",
    cls: type[AtomicData] = AtomicData,
) -> Any:
    """Make an AtomicData from an `ase.Atoms`, which is neither changed nor shared.

    Parameters
    ----------
    atoms : ase.Atoms
        The structure. Labels are looked up in ``atoms.info`` (of the structure) or
        ``atoms.arrays`` (of the atoms), and among the raw results of the attached calculator; no
        calculation is started, and constraints do not change forces.
    label_keys : LabelKeys or mapping, optional
        What is wanted and where it is. By default energy, forces, stress, virial, dipole and
        charges are taken where they are there under these names, and ``missing="raise"`` asks for
        energy and forces alone.
    dtype : torch.dtype
        Of all floating-point fields.
    missing : {"allow", "raise"}
        Whether a label that is not there stays absent or is an error.
    units : {"eV/Angstrom", "kcal/mol/Angstrom", "Hartree/Angstrom", "Hartree/Bohr"}
        Unit of the forces in the data; other labels are in the same energy and length. They are
        converted to eV and Angstrom. Positions and cell are in Angstrom always.
    cls : type
        AtomicData or a subclass.

    Returns
    -------
    AtomicData
        atomic_numbers (int64) and positions; cell and pbc where the structure is periodic in some
        direction; the labels; other numbers of ``atoms.info`` in `info`. Masses, tags, momenta and
        constraints are not taken. A non-periodic structure has neither cell nor stress.

    Raises
    ------
    TypeError
        If `atoms` is no `ase.Atoms`, or `label_keys` are none.
    ValueError
        If a label has a wrong shape, is not finite, belongs to another geometry or contradicts
        another one; if a wanted one is absent with ``missing="raise"``; if the structure has no
        atoms, or is periodic along a zero cell vector.

    Warns
    -----
    UserWarning
        If `dtype` changes the energy by more than 1e-4 eV.
    """
    if not isinstance(atoms, Atoms):
        raise TypeError(f"from_ase takes an ase.Atoms: got {type(atoms).__name__}")
    choices = ("raise", "allow")
    check_choice("missing", missing, choices)
    check_units(units)
    keys = STANDARD_KEYS if label_keys is None else LabelKeys.of(label_keys)
    found = find_labels(atoms, keys, units)
    if label_keys is None:
        found.absent = {name: why for name, why in found.absent.items() if name in _NEEDED}
    if frame_problem(atoms, found, missing) is not None:
        told = keys if label_keys is not None else LabelKeys(**{n: n for n in found.broken})
        audit = LabelAudit(f"structure {atoms.get_chemical_formula()}", told, units)
        audit.see(atoms)
        raise ValueError(complaint(audit, missing, choices))
    loss = energy_loss(found, dtype)
    if loss > MAX_ENERGY_LOSS:
        warn_user(precision_sentence(loss))
    return to_data(atoms, found, keys, dtype, cls)


def to_data(
    atoms: Atoms, found: FoundLabels, keys: LabelKeys, dtype: torch.dtype, cls: type[AtomicData]
) -> AtomicData:
    def real(value: Any) -> Tensor:
        return torch.tensor(np.asarray(value, dtype=np.float64), dtype=dtype)

    tensors = {
        "atomic_numbers": torch.tensor(atoms.numbers, dtype=torch.int64),
        "positions": real(atoms.positions),
    }
    if atoms.pbc.any():
        tensors["cell"] = real(atoms.cell)[None]
        tensors["pbc"] = torch.tensor(atoms.pbc)[None]
    for name, value in found.values.items():
        tensor = real(value)
        of_atoms = name in ("forces", "charges")
        tensors[name] = tensor if of_atoms else tensor.reshape(1, *(value.shape or (1,)))
    labels = {key for _, key in keys.wanted()}
    info = {}
    for key, raw in atoms.info.items():
        array = np.asarray(raw) if np.isscalar(raw) or isinstance(raw, np.ndarray) else None
        if key not in labels and array is not None and array.dtype.kind in "iufb":
            info[key] = torch.tensor(array)
    return cls(info=info, **tensors)


def frame_problem(atoms: Atoms, found: FoundLabels, missing: Missing) -> str | None:
    """Why a structure is refused under a policy; None if it is not."""
    reasons = [structure_problem(atoms), *found.broken.values()]
    if missing != "allow":
        reasons += [f"{name} is missing: {reason}" for name, reason in found.absent.items()]
    stated = [reason for reason in reasons if reason is not None]
    return "; ".join(stated) if stated else None


def complaint(audit: LabelAudit, missing: str, choices: tuple[str, ...]) -> str:
    """What is wrong, and what the called function, which takes these policies, can do about it."""
    stated = audit.unusable if missing == "allow" else audit.problems
    remedies = []
    if "skip" in choices:
        remedies.append("missing='skip' leaves such structures out")
    if "allow" in choices and not audit.unusable:
        remedies.append("missing='allow' keeps them without the label")
    if audit.broken_labels:
        unread = ", ".join(f"{name}=None" for name in audit.broken_labels)
        remedies.append(f"LabelKeys({unread}) does not read the label")
    remedy = f" {', '.join(remedies)}." if remedies else ""
    return f"{audit.source}: {'; '.join(stated)}.{remedy}"


def warn_user(message: str) -> None:
    """Warn at the line that called this package, however deep in it the finding was made."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("nvalchemi."):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, UserWarning, stacklevel=level)


def energy_loss(found: FoundLabels, dtype: torch.dtype) -> float:
    """Error (eV) of the energy in `dtype`, or in the type that it came in if that is larger."""
    if "energy" not in found.values:
        return 0.0
    energy = torch.tensor(float(found.values["energy"]), dtype=torch.float64)
    cast = abs(float(energy.to(dtype).double() - energy))
    return max(cast, found.energy_resolution)


def check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}: got {value!r}")
