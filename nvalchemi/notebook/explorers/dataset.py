"""DatasetExplorer: what is in the data before anything is trained on it."""

import html
from typing import Any

import ipywidgets
import numpy as np

from nvalchemi.data.label_audit import LabelAudit
from nvalchemi.notebook.explorers.controls import choice, number
from nvalchemi.notebook.explorers.pane import TEXT_COLOUR, Pane
from nvalchemi.notebook.explorers.shell import Explorer, Page
from nvalchemi.notebook.plots import View
from nvalchemi.notebook.plots.dataset_arrays import DatasetArrays, read_batch

ALL = -1  # of all data sets; a dropdown with the value None shows nothing
READ_UNASKED = 2**17  # structures that are read while the kernel is idle, in some minutes at most
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class DatasetExplorer(Explorer):
    """Shows counts, elements, sizes, ranges of energies and forces, missing labels and outliers.

    At first from a part of the structures where there are many, which is said; then of all of them,
    while the kernel is idle. Outliers are named by index and formula: those whose energy is far
    from a fit of one energy for each element, or whose largest force is far from the others'.

    Parameters
    ----------
    dataset : Dataset, InMemoryDataset, MultiDataset, sequence of AtomicData, or LabelAudit
        What to show.
    audit : LabelAudit, optional
        Of the import that made the data set: a second tab shows it.

    Attributes
    ----------
    controls : dict of str to widget
        dataset (which of a MultiDataset), sample (named below the picture).
    """

    def __init__(self, dataset: Any, *, audit: LabelAudit | None = None) -> None:
        self._dataset = None if isinstance(dataset, LabelAudit) else dataset
        self._audit = dataset if isinstance(dataset, LabelAudit) else audit
        several = range(len(getattr(dataset, "datasets", ())))
        names = [("all data sets", ALL), *((f"data set {j}", j) for j in several)]
        self._only = choice("show", names, ALL)
        self._only.disabled = len(names) < 3
        length = len(dataset) if hasattr(dataset, "__len__") else 1
        self._sample = number("name structure", 0, 0, max(0, length - 1))
        self._named, self._listed = ipywidgets.HTML(), ipywidgets.HTML()
        self._data = Pane(View("dataset"), self._read)
        pages: dict[str, Page] = {}
        if self._dataset is not None or self._audit is None:
            below = [self._listed, self._sample, self._named]
            pages["Data"] = [self._only, self._data, *below]
        if self._audit is not None:
            pages["Label audit"] = [Pane(View("labels"), lambda: ((self._audit,), {}))]
        controls = {"dataset": self._only, "sample": self._sample} if "Data" in pages else {}
        super().__init__(ipywidgets.HTML(), controls, [], pages)

    def _read(self) -> Arguments:
        return (self._dataset,), {"only": None if self._only.value == ALL else self._only.value}

    def is_affordable(self, pane: Pane) -> bool:
        arrays = pane.arrays
        return isinstance(arrays, DatasetArrays) and sum(arrays.lengths) <= READ_UNASKED

    def drawn(self) -> None:
        arrays: DatasetArrays | None = self._data.arrays
        rows = "" if arrays is None else outlier_rows(arrays)
        self._listed.value = f'<div style="{TEXT_COLOUR}">{rows}</div>'
        if arrays is not None:
            words = html.escape(describe_structure(self._dataset, self._sample.value))
            self._named.value = f'<div style="{TEXT_COLOUR}">{words}</div>'


def outlier_rows(arrays: DatasetArrays) -> str:
    """The outliers as a table."""
    if not arrays.outliers:
        return ""
    head = "".join(
        f'<th scope="col">{name}</th>'
        for name in ("outlier", "data set", "formula", "what is far", "value", "z")
    )
    rows = "".join(
        f"<tr><td>{o.index:,}</td><td>{o.dataset}</td><td>{html.escape(o.formula)}</td>"
        f"<td>{o.what}</td><td>{o.value:.5g}</td><td>{o.z:.3g}</td></tr>"
        for o in arrays.outliers
    )
    return f'<table aria-label="outliers"><tr>{head}</tr>{rows}</table>'


def describe_structure(dataset: Any, index: int) -> str:
    """Formula, atoms, energy and largest force of a structure in a sentence."""
    try:
        batch = read_batch(dataset, np.array([index]))
    except Exception as error:
        return f"Structure {index:,} can not be read ({type(error).__name__}: {error})."
    from ase import Atoms

    formula = Atoms(numbers=batch.atomic_numbers.cpu().numpy()).get_chemical_formula()
    parts = [f"Structure {index:,}: {formula}, {batch.num_nodes} atoms"]
    energy = float(batch.energy.ravel()[0]) if "energy" in batch else float("nan")
    parts.append(f"energy {energy:.6g} eV" if np.isfinite(energy) else "no energy")
    force = float(batch.forces.norm(dim=1).max()) if "forces" in batch else float("nan")
    parts.append(f"largest force {force:.4g} eV/Å" if np.isfinite(force) else "no forces")
    return ", ".join(parts) + "."
