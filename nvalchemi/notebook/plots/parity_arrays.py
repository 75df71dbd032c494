"""Predictions beside references: counted, and their errors by data set and element."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from ase.data import chemical_symbols
from numpy.typing import NDArray
from torch import Tensor

from nvalchemi.data.datapipes.multidataset import DATASET_INDEX_METADATA_KEY
from nvalchemi.notebook.plots.facts import Facts, Number, compact
from nvalchemi.notebook.plots.predictions import Part, parts_of

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
POINTS = 4000  # of more, the density is drawn
CELLS = 120  # of the density, along each axis


@dataclass(frozen=True)
class Pairs:
    """Reference and prediction of each structure's energy per atom, or each force component.

    Attributes
    ----------
    reference, predicted : float64 arrays, shape (n,)
        eV/atom or eV/Angstrom; only those that have a reference.
    dataset : int64 array, shape (n,)
    missing : int
        References that are not there: structures, or atoms.
    broken : int
        Predictions that are not finite, although there is a reference.
    """

    reference: Floats
    predicted: Floats
    dataset: Ints
    missing: int
    broken: int

    @property
    def errors(self) -> Floats:
        return self.predicted - self.reference


@dataclass(frozen=True)
class Density:
    """How many pairs fall into each cell: all are counted.

    Attributes
    ----------
    counts : int64 array, shape (CELLS, CELLS)
        By prediction and reference, from low to high.
    low, high : float
        Ends of both axes.
    """

    counts: Ints
    low: float
    high: float


@dataclass(frozen=True)
class ErrorRow:
    """Errors of a part of the data; NaN where it has no reference.

    Attributes
    ----------
    kind, name : str
        "all", "data set" or "element", and its name.
    structures, atoms : int
        With a reference energy, with reference forces. A structure belongs to each of its
        elements, so the energy of an element is that of the structures that contain it.
    energy_mae, energy_rmse : float
        eV/atom.
    forces_mae, forces_rmse : float
        eV/Angstrom, over components.
    """

    kind: str
    name: str
    structures: int
    atoms: int
    energy_mae: float
    energy_rmse: float
    forces_mae: float
    forces_rmse: float


@dataclass(frozen=True)
class ParityArrays:
    """All that `draw_parity` draws.

    Attributes
    ----------
    energy, forces : Pairs
    energy_density, forces_density : Density, optional
        Where there are too many pairs to be drawn one by one.
    rows : tuple of ErrorRow
        All, then data sets, then elements.
    names : tuple of str
        Of the data sets.
    facts : Facts
    """

    energy: Pairs
    forces: Pairs
    energy_density: Density | None
    forces_density: Density | None
    rows: tuple[ErrorRow, ...]
    names: tuple[str, ...]
    facts: Facts


def compute_parity(
    source: Any, data: Any = None, *, names: Sequence[str] | None = None
) -> ParityArrays:
    """Predictions against references, as arrays; see `parity` for the arguments."""
    parts = list(parts_of(source, data))
    if not parts:
        raise ValueError("parity needs at least one batch: there is none")
    gathered = _Gathered(names)
    for part in parts:
        gathered.add(part)
    return gathered.arrays()


class _Gathered:
    """Numbers of all batches."""

    def __init__(self, names: Sequence[str] | None) -> None:
        self._given = list(names) if names is not None else None
        self._names: list[str] = []  # of data sets that were named by their parts
        self._of_structures: list[tuple[Floats, Floats, Ints, Ints]] = []
        self._of_atoms: list[tuple[Floats, Floats, Ints, Ints]] = []
        self._contains: list[NDArray[np.bool_]] = []

    def add(self, part: Part) -> None:
        """Energies per atom of each structure and forces of each atom; NaN where absent."""
        batch, counts = part.batch, np.array(part.batch.num_nodes_list)
        dataset = self._dataset(part)
        numbers = _array(batch.atomic_numbers).astype(np.int64)
        owner = np.repeat(np.arange(len(counts)), counts)
        energies = [_field(x, "energy", (len(counts),)) / counts for x in (batch, part.predictions)]
        forces = [_field(x, "forces", (len(numbers), 3)) for x in (batch, part.predictions)]
        contains = np.zeros((len(counts), len(chemical_symbols)), dtype=bool)
        contains[owner, numbers] = True
        self._of_structures.append((*energies, dataset, counts))
        self._of_atoms.append((*forces, dataset[owner], numbers))  # type: ignore[arg-type]
        self._contains.append(contains)

    def _dataset(self, part: Part) -> Ints:
        size = part.batch.num_graphs
        if part.name is not None:
            if part.name not in self._names:
                self._names.append(part.name)
            return np.full(size, self._names.index(part.name))
        index = part.batch.metadata.get(DATASET_INDEX_METADATA_KEY)
        return np.zeros(size, dtype=np.int64) if index is None else _array(index).astype(np.int64)

    def arrays(self) -> ParityArrays:
        structures = [np.concatenate(column) for column in zip(*self._of_structures)]
        atoms = [np.concatenate(column) for column in zip(*self._of_atoms)]
        names = self._labels(int(structures[2].max()) + 1)
        with_energy = np.isfinite(structures[0])
        with_forces = np.isfinite(atoms[0]).all(axis=1)
        predicted = [not np.isnan(pair[1]).all() for pair in (structures, atoms)]
        # what nobody has predicted can not be compared
        with_energy &= predicted[0]
        with_forces &= predicted[1]
        if not with_energy.any() and not with_forces.any():
            raise ValueError(
                "parity needs a label beside its prediction: there is neither an energy nor "
                "forces that have both a finite reference and a prediction"
            )
        energy = _paired(structures, with_energy, predicted[0])
        forces = _paired(atoms, with_forces, predicted[1])
        rows = _rows(structures, atoms, with_energy, with_forces, self._contained(), names)
        return ParityArrays(
            energy=energy,
            forces=forces,
            energy_density=_density(energy),
            forces_density=_density(forces),
            rows=rows,
            names=names,
            facts=_facts(rows, energy, forces, len(with_energy), len(with_forces)),
        )

    def _contained(self) -> NDArray[np.bool_]:
        return np.concatenate(self._contains)

    def _labels(self, number: int) -> tuple[str, ...]:
        if self._given is None:
            return tuple(self._names or [f"data set {j}" for j in range(number)])
        if len(self._given) < number:
            raise ValueError(
                f"names must name each data set: {len(self._given)} names for {number} data sets"
            )
        return tuple(self._given)


def _field(holder: Any, name: str, shape: tuple[int, ...]) -> Floats:
    """A quantity, all NaN where it is absent."""
    value = holder.get(name) if isinstance(holder, Mapping) else getattr(holder, name, None)
    if value is None:
        return np.full(shape, np.nan)
    array = _array(value).astype(np.float64)
    if array.size != np.prod(shape):
        raise ValueError(
            f"predictions must be of the batch beside them: {name} has {array.size} numbers, "
            f"{int(np.prod(shape))} are expected"
        )
    return array.reshape(shape)


def _array(value: Any) -> NDArray[Any]:
    return np.asarray(value.detach().cpu().numpy() if isinstance(value, Tensor) else value)


def _paired(columns: Sequence[NDArray[Any]], known: NDArray[np.bool_], predicted: bool) -> Pairs:
    reference, prediction, dataset = (column[known] for column in columns[:3])
    components = reference[0].size if len(reference) else 1
    broken = ~np.isfinite(prediction).reshape(len(prediction), components).all(axis=1)
    missing = int((~known).sum()) if predicted else 0
    return Pairs(
        reference=reference.ravel(),
        predicted=prediction.ravel(),
        dataset=np.repeat(dataset, components),
        missing=missing,
        broken=int(broken.sum()),
    )


def _density(pairs: Pairs) -> Density | None:
    if len(pairs.reference) <= POINTS:
        return None
    good = np.isfinite(pairs.predicted)
    x, y = pairs.reference[good], pairs.predicted[good]
    if not len(x):
        return None
    low, high = float(min(x.min(), y.min())), float(max(x.max(), y.max()))
    scale = CELLS / (high - low) if high > low else 0.0
    column, row = (
        np.minimum(((values - low) * scale).astype(np.int64), CELLS - 1) for values in (x, y)
    )
    counts = np.bincount(row * CELLS + column, minlength=CELLS**2).reshape(CELLS, CELLS)
    return Density(counts, low, high)


def _rows(
    structures: Sequence[NDArray[Any]],
    atoms: Sequence[NDArray[Any]],
    with_energy: NDArray[np.bool_],
    with_forces: NDArray[np.bool_],
    contains: NDArray[np.bool_],
    names: Sequence[str],
) -> tuple[ErrorRow, ...]:
    energy_errors, force_errors = structures[1] - structures[0], atoms[1] - atoms[0]

    def row(kind: str, name: str, in_part: Any, atom_in_part: Any) -> ErrorRow:
        of_structures, of_atoms = with_energy & in_part, with_forces & atom_in_part
        energy, forces = energy_errors[of_structures], force_errors[of_atoms]
        return ErrorRow(
            kind,
            name,
            int(of_structures.sum()),
            int(of_atoms.sum()),
            *_mae_rmse(energy),
            *_mae_rmse(forces),
        )

    rows = [row("all", "all", True, True)]
    if len(names) > 1:
        rows += [
            row("data set", name, structures[2] == j, atoms[2] == j) for j, name in enumerate(names)
        ]
    rows += [
        row("element", chemical_symbols[z], contains[:, z], atoms[3] == z)
        for z in np.flatnonzero(contains.any(axis=0)).tolist()
    ]
    return tuple(rows)


def _mae_rmse(errors: Floats) -> tuple[float, float]:
    if not errors.size:
        return np.nan, np.nan
    return float(np.abs(errors).mean()), float(np.sqrt(np.square(errors).mean()))


def _facts(
    rows: Sequence[ErrorRow], energy: Pairs, forces: Pairs, structures: int, atoms: int
) -> Facts:
    whole = rows[0]
    broken = energy.broken + forces.broken
    numbers = [
        Number("energy MAE, meV/atom", milli(whole.energy_mae)),
        Number("energy RMSE, meV/atom", milli(whole.energy_rmse)),
        Number("forces MAE, meV/Å", milli(whole.forces_mae)),
        Number("forces RMSE, meV/Å", milli(whole.forces_rmse)),
        Number("energies without label", compact(energy.missing)),
        Number("atoms without forces", compact(forces.missing)),
    ]
    if broken:
        numbers.append(Number("predictions not finite", compact(broken), True))
    return Facts(
        view="parity",
        question="How far are predictions from their references?",
        look_for="Look for: points off the line, data sets or elements with larger errors (an "
        "element has the energies of the structures that contain it)",
        exact=True,
        truth=f"exact: all {len(energy.reference):,} energies and {len(forces.reference):,} force "
        "components that have a label",
        numbers=tuple(numbers),
        plan=f"{structures:,} structures, {atoms:,} atoms",
    )


def milli(value: float) -> str:
    """An error in thousandths of its unit, in at most six letters."""
    error = 1000 * value
    if np.isnan(error) or not np.isfinite(error):
        return "-" if np.isnan(error) else f"{error:.0f}"
    if error == 0:
        return "0"
    if not 0.001 <= error < 99_999.5:
        digits, _, power = f"{error:.1e}".partition("e")
        return f"{digits}e{int(power)}"
    return f"{error:.{0 if error >= 99.95 else 1 if error >= 9.995 else 2 if error >= 1 else 3}f}"
