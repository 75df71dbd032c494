"""What a data set holds: elements, sizes, energies, forces, labels that are missing, outliers."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from ase import Atoms
from ase.data import chemical_symbols
from numpy.typing import NDArray

from nvalchemi.data.batch import Batch
from nvalchemi.data.datapipes.order import Indices
from nvalchemi.data.fields import LABELS
from nvalchemi.notebook.plots.facts import Facts, Number, compact, percent
from nvalchemi.notebook.plots.looked_at import one_of_each
from nvalchemi.notebook.plots.outliers import OUTLIER, fitted_residual, robust_z

READ = 2048  # structures of a first picture, some tenths of a second
PART = 2048  # structures that are read at a time
PARTS_SHOWN = 4  # parts between two refined pictures
WANTED = ("energy", "forces")  # whose absence is said, others only where some have them
NAMED = 8  # outliers that are named


@dataclass(frozen=True)
class Outlier:
    """A structure that is far from the others of its data set.

    Attributes
    ----------
    index, dataset : int
    formula : str
    what : str
        "energy", for the residual of a fit of atomic energies (eV/atom), or "forces", for the norm
        of the largest force (eV/Angstrom).
    value, z : float
        And its robust z-score.
    """

    index: int
    dataset: int
    formula: str
    what: str
    value: float
    z: float

    def __str__(self) -> str:
        unit = "eV/atom off" if self.what == "energy" else "eV/Å"
        return (
            f"{self.index:,} {self.formula}: {self.what} {self.value:+.4g} {unit}, z {self.z:.3g}"
        )


@dataclass(frozen=True)
class DatasetArrays:
    """Of n structures that were read, out of N in D data sets.

    Attributes
    ----------
    facts : Facts
    lengths : list of int
        Structures of each data set.
    indices, datasets, atoms : int64 arrays, shape (n,)
        Index, data set and number of atoms of each.
    sizes : array, shape (N,), or None
        Atoms of all structures, where that is known without reading them.
    elements : dict of str to int
        Structures that have the element.
    energy, residual, force : float arrays, shape (n,)
        Energy per atom, and what a fit of one energy for each element leaves of it (eV/atom); norm
        of the largest force (eV/Angstrom). nan where it is missing.
    missing : dict of str to int64 array, shape (D,)
        Structures of each data set without the label, by label.
    read : int64 array, shape (D,)
        Structures of each data set that were read.
    outliers : list of Outlier
        The farthest ones.
    """

    facts: Facts
    lengths: list[int]
    indices: Indices
    datasets: Indices
    atoms: Indices
    sizes: NDArray[Any] | None
    elements: dict[str, int]
    energy: NDArray[np.float64]
    residual: NDArray[np.float64]
    force: NDArray[np.float64]
    missing: dict[str, Indices]
    read: Indices
    outliers: list[Outlier]


class Tally:
    """What has been read of a data set so far."""

    def __init__(self, dataset: Any, only: int | None) -> None:
        self.dataset = dataset
        self.lengths, self.first, self.end = chosen_range(dataset, only)
        self.ends = np.cumsum(self.lengths)
        self.parts: dict[str, list[NDArray[Any]]] = {
            name: [] for name in ("indices", "atoms", "energy", "force", "counts")
        }
        self.absent: dict[str, list[NDArray[np.bool_]]] = {name: [] for name in LABELS}
        self.fields = set(getattr(dataset, "field_names", None) or ())

    def add(self, indices: Indices) -> None:
        batch = read_batch(self.dataset, indices)
        number, numbers = batch.num_graphs, batch.atomic_numbers.cpu().numpy().astype(np.int64)
        owner = batch.batch_idx.cpu().numpy()
        counts = np.bincount(owner * 120 + numbers, minlength=number * 120).reshape(number, 120)
        atoms = counts.sum(axis=1)
        energy = np.full(number, np.nan)
        force = np.full(number, np.nan)
        for name in LABELS:
            values = batch[name] if name in batch else None
            lost = absent(values, owner, number)
            self.absent[name].append(lost)
            if values is not None and name == "energy":
                energy = values.double().cpu().numpy().ravel() / atoms
                energy[lost] = np.nan
            elif values is not None and name == "forces":
                norms = torch.linalg.vector_norm(values.double().cpu(), dim=1).numpy()
                force = np.zeros(number)
                np.maximum.at(
                    force, owner, np.nan_to_num(norms, nan=0.0)
                )  # those that lack it follow
                force[lost] = np.nan
        kept = (indices, atoms, energy, force, counts.astype(np.uint16))
        for name, values in zip(self.parts, kept):
            self.parts[name].append(values)

    def arrays(self) -> DatasetArrays:
        parts = {name: np.concatenate(values) for name, values in self.parts.items()}
        datasets = np.searchsorted(self.ends, parts["indices"], side="right")
        present = np.flatnonzero(parts["counts"].any(axis=0))
        counts = parts["counts"][:, present]
        structures = (counts > 0).sum(axis=0)
        residual = fitted_residual(parts["energy"], counts, datasets)
        absences = {name: np.concatenate(values) for name, values in self.absent.items()}
        shown = [n for n in LABELS if n in WANTED or not absences[n].all() or n in self.fields]
        number = len(self.lengths)
        missing = {n: np.bincount(datasets[absences[n]], minlength=number) for n in shown}
        far = find_outliers(parts, datasets, residual)
        elements = {chemical_symbols[z]: int(n) for z, n in zip(present.tolist(), structures)}
        return DatasetArrays(
            facts=self.facts(parts, missing, far, elements),
            lengths=self.lengths,
            indices=parts["indices"],
            datasets=datasets,
            atoms=parts["atoms"],
            sizes=self.sizes(),
            elements=dict(sorted(elements.items(), key=lambda pair: (-pair[1], pair[0]))),
            energy=parts["energy"],
            residual=residual,
            force=parts["force"],
            missing=missing,
            read=np.bincount(datasets, minlength=number),
            outliers=far[:NAMED],
        )

    def sizes(self) -> NDArray[Any] | None:
        try:
            return np.asarray(self.dataset.sizes()[0])[self.first : self.end]
        except (AttributeError, TypeError):  # a data set that keeps no table of them
            return None

    def facts(
        self,
        parts: dict[str, NDArray[Any]],
        missing: dict[str, Indices],
        far: list[Outlier],
        elements: dict[str, int],
    ) -> Facts:
        read, total = len(parts["indices"]), self.end - self.first
        numbers = [
            Number("structures", f"{total:,}"),
            Number("elements", f"{len(elements)}"),
            Number("outliers", f"{len(far):,}", bool(far)),
            Number("energy, eV/atom", spread(parts["energy"])),
            Number("largest force, eV/Å", spread(parts["force"])),
        ]
        for name, lost in missing.items():
            numbers.append(Number(f"no {name}", f"{lost.sum():,} of {read:,}", bool(lost.any())))
        numbers.append(Number("atoms", spread(parts["atoms"].astype(float))))
        truth = f"exact: all {total:,} structures are read"
        if read < total:
            part = percent(read / total)
            truth = f"sample of {part}: {read:,} of {total:,} structures; outliers may be missed"
        lengths = " + ".join(f"{n:,}" for n in self.lengths[:6])
        more = " + ..." if len(self.lengths) > 6 else ""
        return Facts(
            view="dataset",
            question="What is in the data?",
            look_for="Look for: labels that are missing, structures far from all others (energies "
            "beside a fit of atomic energies, forces), elements with few structures.",
            exact=read == total,
            truth=truth,
            numbers=tuple(numbers),
            plan=f"{lengths}{more} structures, {', '.join(sorted(elements))}",
        )


def spread(values: NDArray[Any]) -> str:
    known = values[np.isfinite(values)]
    if not known.size:
        return "missing"
    return f"{compact(float(known.min()))} to {compact(float(known.max()))}"


def absent(values: torch.Tensor | None, owner: Indices, number: int) -> NDArray[np.bool_]:
    """Structures that lack the label: there is none, or a part of it is no number."""
    if values is None:
        return np.ones(number, dtype=bool)
    broken = ~torch.isfinite(values.cpu()).reshape(len(values), -1).all(dim=1).numpy()
    if len(broken) == number:  # of structures, or of their only atoms
        return broken
    lost = np.zeros(number, dtype=bool)
    lost[owner[broken]] = True
    return lost


def find_outliers(
    parts: dict[str, NDArray[Any]], datasets: Indices, residual: NDArray[np.float64]
) -> list[Outlier]:
    """The farthest first; forces by the logarithm, for they are spread over orders of magnitude."""
    with np.errstate(divide="ignore"):
        logarithm = np.log10(parts["force"])
    scores = {
        "energy": (residual, np.abs(robust_z(residual, datasets))),
        "forces": (parts["force"], robust_z(logarithm, datasets)),
    }
    found = []
    for what, (values, z) in scores.items():
        for i in np.flatnonzero(z > OUTLIER).tolist():
            found.append((float(z[i]), what, i, float(values[i])))
    out: list[Outlier] = []
    for z_score, what, i, value in sorted(found, key=lambda entry: (-entry[0], entry[2])):
        row = parts["counts"][i] if len(out) < NAMED else None  # only those are named
        formula = "" if row is None else formula_of(row)
        out.append(
            Outlier(int(parts["indices"][i]), int(datasets[i]), formula, what, value, z_score)
        )
    return out


def formula_of(counts: NDArray[Any]) -> str:
    return str(Atoms(numbers=np.repeat(np.arange(len(counts)), counts)).get_chemical_formula())


def chosen_range(dataset: Any, only: int | None) -> tuple[list[int], int, int]:
    """Lengths of the data sets, and first and end of the indices to look at."""
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise TypeError(
            "a data set must have a length and structures by index to be shown, got "
            f"{type(dataset).__name__}"
        )
    lengths = [len(child) for child in getattr(dataset, "datasets", [dataset])]
    if not sum(lengths):
        raise ValueError("a data set must hold at least one structure to be shown, got none")
    ends = np.cumsum(lengths)
    if only is None:
        return lengths, 0, int(ends[-1])
    if not 0 <= only < len(lengths) or not lengths[only]:
        raise ValueError(
            f"only must be the number of a data set with structures, of {len(lengths)}, got {only}"
        )
    return lengths, int(ends[only]) - lengths[only], int(ends[only])


def read_batch(dataset: Any, indices: Indices) -> Batch:
    """Structures of a data set, or of a list of AtomicData, as one batch."""
    if hasattr(dataset, "load_batches"):
        whole: Batch = dataset.load_batches([indices.tolist()])[0]
        return whole
    items: Sequence[Any] = [dataset[i] for i in indices.tolist()]
    items = [item[0] if isinstance(item, tuple) else item for item in items]
    if not hasattr(items[0], "atomic_numbers") or not hasattr(items[0], "num_nodes"):
        raise TypeError(
            f"a data set must give AtomicData to be shown, got {type(items[0]).__name__}; "
            "nvalchemi.data.convert.import_atoms makes a store of structures of ASE"
        )
    return Batch.from_data_list(items)


def compute_dataset(
    dataset: Any, *, only: int | None = None, structures: int = READ
) -> DatasetArrays:
    """What a data set holds, from at most so many of its structures.

    Parameters
    ----------
    dataset : Dataset, InMemoryDataset, MultiDataset, or sequence of AtomicData
    only : int, optional
        One data set of a MultiDataset; by default all.
    structures : int
        Structures that are read at most, spread over all.

    Raises
    ------
    TypeError, ValueError
        For what is no data set, or an empty one.
    """
    tally = Tally(dataset, only)
    looked = one_of_each(np.arange(tally.first, tally.end), structures)
    for start in range(0, len(looked), PART):
        tally.add(looked[start : start + PART])
    return tally.arrays()


def refine_dataset(dataset: Any, *, only: int | None = None) -> Iterator[DatasetArrays]:
    """As `compute_dataset`, of more and more structures; the last of all of them."""
    tally = Tally(dataset, only)
    order = np.random.default_rng(0).permutation(np.arange(tally.first, tally.end))
    starts = range(0, len(order), PART)
    for count, first in enumerate(starts, 1):
        tally.add(np.sort(order[first : first + PART]))
        if count % PARTS_SHOWN == 0 or count == len(starts):
            yield tally.arrays()
