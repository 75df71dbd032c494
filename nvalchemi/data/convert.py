"""Structures of ASE and files in extended XYZ -> AtomicData and stores, with their labels.

Which key holds which label is said by `LabelKeys`. A label that was asked for and is not there is
reported, and never invented; nothing is changed in silence.
"""

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import torch
from ase import Atoms

from nvalchemi.data.ase_atoms import (
    Missing,
    check_choice,
    complaint,
    energy_loss,
    frame_problem,
    from_ase,
    to_data,
    warn_user,
)
from nvalchemi.data.atomic_data import AtomicData
from nvalchemi.data.batch import Batch
from nvalchemi.data.extxyz import iterate_extxyz
from nvalchemi.data.label_audit import MAX_ENERGY_LOSS, LabelAudit, precision_sentence
from nvalchemi.data.labels import LabelKeys, check_units

__all__ = [
    "LabelAudit",
    "LabelKeys",
    "audit_labels",
    "from_ase",
    "import_atoms",
    "import_extxyz",
    "read_extxyz",
]

_DEFAULT_KEYS = LabelKeys()

# A block is written when it has this many structures or atoms: some tens of MB of memory.
_BLOCK_STRUCTURES = 4096
_BLOCK_ATOMS = 200_000


class _MixedPeriodicity(Exception):
    """Periodic and non-periodic structures in one import: all of them need a cell and pbc."""


def read_extxyz(
    path: str | Path,
    *,
    label_keys: LabelKeys | Mapping[str, str | None] = _DEFAULT_KEYS,
    dtype: torch.dtype = torch.float32,
    missing: Missing = "raise",
    units: str = "eV/Angstrom",
) -> Iterator[AtomicData]:
    """Read a file in extended XYZ, one structure at a time.

    Parameters
    ----------
    path : path
        The file.
    label_keys : LabelKeys or mapping
        What is wanted, and under which key the file holds it; by default energy and forces.
    dtype : torch.dtype
        Of all floating-point fields.
    missing : {"raise", "skip", "allow"}
        What to do with a structure that lacks a wanted label: an error that counts all such
        structures of the file; leave it out, with a warning at the end; keep it without the label.
    units : str
        Unit of the labels, see `from_ase`.

    Yields
    ------
    AtomicData
        In the order of the file.

    Raises
    ------
    FileNotFoundError, ValueError
        If there is no file or no structure in it, a structure can not be parsed, something stands
        behind a blank line at the end, or as in `from_ase`.

    Warns
    -----
    UserWarning
        Once each: structures left out, energies that `dtype` does not resolve to 1e-4 eV, energies
        that are impossible in the unit given.
    """
    choices = ("raise", "skip", "allow")
    check_choice("missing", missing, choices)
    check_units(units)
    audit = LabelAudit(Path(path).name, label_keys, units)
    return _convert(iterate_extxyz(path), audit, missing, dtype, choices)


def audit_labels(
    source: str | Path | Iterable[Atoms],
    label_keys: LabelKeys | Mapping[str, str | None] = _DEFAULT_KEYS,
    *,
    units: str = "eV/Angstrom",
) -> LabelAudit:
    """Look through a file in extended XYZ, or structures of ASE, and convert nothing.

    Parameters
    ----------
    source : path or iterable of ase.Atoms
        What to look at.
    label_keys : LabelKeys or mapping
        What would be asked for.
    units : str
        Unit of the labels, see `from_ase`.

    Returns
    -------
    LabelAudit
        Counts, ranges, keys that are there, and findings in sentences.
    """
    check_units(units)
    if isinstance(source, str | Path):
        name, frames = Path(source).name, iterate_extxyz(source)
    else:
        name, frames = "structures", iter(source)
    audit = LabelAudit(name, label_keys, units)
    for atoms in frames:
        audit.see(atoms)
    return audit


def import_extxyz(
    path: str | Path,
    store: str | Path,
    *,
    label_keys: LabelKeys | Mapping[str, str | None] = _DEFAULT_KEYS,
    cutoff: float | None = None,
    dtype: torch.dtype = torch.float32,
    missing: Literal["raise", "skip"] = "raise",
    units: str = "eV/Angstrom",
) -> LabelAudit:
    """Import a file in extended XYZ into a new store, in blocks of bounded memory.

    Parameters
    ----------
    path : path
        The file.
    store : path
        The store to make. It appears complete or not at all.
    label_keys, dtype, units
        As in `read_extxyz`.
    cutoff : float, optional
        Store neighbour lists up to this distance (Angstrom).
    missing : {"raise", "skip"}
        Refuse the file if a wanted label is missing anywhere, or leave those structures out. A
        store holds a label for all of its structures or for none.

    Returns
    -------
    LabelAudit
        What was found, and in `refused` what was left out.

    Raises
    ------
    FileExistsError
        If there is a store already.
    ValueError
        As in `read_extxyz`, or if no structure is left.
    """
    return _import(
        lambda: iterate_extxyz(path),
        Path(path).name,
        store,
        label_keys,
        cutoff,
        dtype,
        missing,
        units,
    )


def import_atoms(
    frames: Sequence[Atoms],
    store: str | Path,
    *,
    label_keys: LabelKeys | Mapping[str, str | None] = _DEFAULT_KEYS,
    cutoff: float | None = None,
    dtype: torch.dtype = torch.float32,
    missing: Literal["raise", "skip"] = "raise",
    units: str = "eV/Angstrom",
) -> LabelAudit:
    """Import structures of ASE into a new store; parameters and errors as in `import_extxyz`."""
    if not isinstance(frames, Sequence):
        raise TypeError(f"frames must be a list of ase.Atoms: got {type(frames).__name__}")
    return _import(lambda: frames, "structures", store, label_keys, cutoff, dtype, missing, units)


# Many structures.


def _convert(
    frames: Iterable[Atoms],
    audit: LabelAudit,
    missing: Missing,
    dtype: torch.dtype,
    choices: tuple[str, ...],
) -> Iterator[AtomicData]:
    """Convert structures; all are seen by the audit before the first that is refused raises."""
    remaining = iter(frames)
    warned: set[str] = set()
    for index, atoms in enumerate(remaining):
        found = audit.see(atoms)
        problem = frame_problem(atoms, found, missing)
        if problem is not None and missing == "skip":
            audit.refused[index] = problem
            continue
        if problem is not None:
            for later in remaining:
                audit.see(later)
            raise ValueError(complaint(audit, missing, choices))
        audit.max_energy_loss = max(audit.max_energy_loss, energy_loss(found, dtype))
        _warn_once(audit, warned)
        yield to_data(atoms, found, audit.keys, dtype, AtomicData)
    if audit.refused:
        warn_user(_refusal(audit))


def _warn_once(audit: LabelAudit, warned: set[str]) -> None:
    if audit.max_energy_loss > MAX_ENERGY_LOSS and "precision" not in warned:
        warned.add("precision")
        warn_user(precision_sentence(audit.max_energy_loss))
    if audit.frames_beyond_thomas_fermi and "unit" not in warned:
        warned.add("unit")
        warn_user(f"{audit.source}: {audit.unit_sentence()}")


def _refusal(audit: LabelAudit) -> str:
    shown = [f"{index}: {reason}" for index, reason in list(audit.refused.items())[:3]]
    more = ", ..." if len(audit.refused) > 3 else ""
    return (
        f"{audit.source}: {len(audit.refused)} of {audit.num_frames} structures are left out "
        f"({', '.join(shown)}{more})"
    )


# Into a store.


def _import(
    make_frames: Callable[[], Iterable[Atoms]],
    source: str,
    store: str | Path,
    keys: LabelKeys | Mapping[str, str | None],
    cutoff: float | None,
    dtype: torch.dtype,
    missing: Missing,
    units: str,
) -> LabelAudit:
    choices = ("raise", "skip")
    check_choice("missing", missing, choices)
    check_units(units)
    keys = LabelKeys.of(keys)
    target = Path(store)
    if target.exists():
        raise FileExistsError(f"{target} exists already: choose another path or remove it")
    for always_cell in (False, True):
        audit = LabelAudit(source, keys, units)
        structures = _convert(make_frames(), audit, missing, dtype, choices)
        try:
            _write_store(structures, target, cutoff, always_cell)
        except _MixedPeriodicity:
            continue
        return audit
    raise AssertionError("with always_cell no structure differs in its fields")


def _write_store(
    structures: Iterator[AtomicData], target: Path, cutoff: float | None, always_cell: bool
) -> None:
    """Write beside the target and rename at the end, so that no half of a store is ever seen."""
    from nvalchemi.data.datapipes.zarr_store import AtomicDataZarrWriter
    from nvalchemi.data.neighbors import add_neighbor_list

    partial = target.with_name(f".{target.name}.partial-{os.getpid()}")
    writer = AtomicDataZarrWriter(partial)
    try:
        started = False
        for block in _blocks(structures, always_cell):
            batch = Batch.from_data_list(block)
            if cutoff is not None:
                batch = add_neighbor_list(batch, cutoff)
            (writer.append if started else writer.write)(batch)
            started = True
        if not started:
            raise ValueError(f"no structure is left for {target}: see the audit of the source")
        os.rename(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _blocks(structures: Iterator[AtomicData], always_cell: bool) -> Iterator[list[AtomicData]]:
    block: list[AtomicData] = []
    num_atoms = 0
    periodic: bool | None = None
    for data in structures:
        if always_cell and data.pbc is None:
            data.pbc = torch.zeros(1, 3, dtype=torch.bool)
            data.cell = torch.zeros(1, 3, 3, dtype=data.dtype)
        if periodic is None:
            periodic = data.pbc is not None
        elif periodic != (data.pbc is not None):
            raise _MixedPeriodicity
        block.append(data)
        num_atoms += data.num_nodes
        if len(block) == _BLOCK_STRUCTURES or num_atoms >= _BLOCK_ATOMS:
            yield block
            block, num_atoms = [], 0
    if block:
        yield block
