"""What a data set holds, drawn."""

import textwrap
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from nvalchemi.notebook.plots.dataset_arrays import (
    DatasetArrays,
    compute_dataset,
    refine_dataset,
)
from nvalchemi.notebook.plots.facts import SIGN
from nvalchemi.notebook.plots.frame import finish, label, note, start
from nvalchemi.notebook.style import FAINT, PALETTE, PANEL, TEXT, WRONG, colour, hatch, styled

__all__ = ["compute_dataset", "draw_dataset", "plot_dataset", "refine_dataset"]

BINS, ELEMENTS, SETS = 40, 20, 6


def draw_dataset(arrays: DatasetArrays, figure: Figure | None = None) -> Figure:
    """Elements, sizes and missing labels on top; energies, forces and outliers below."""
    rects = {
        "elements": (0.06, 0.58, 0.25, 0.38),
        "sizes": (0.39, 0.58, 0.25, 0.38),
        "labels": (0.74, 0.58, 0.24, 0.38),
        "energy": (0.06, -0.05, 0.25, 0.38),
        "forces": (0.39, -0.05, 0.25, 0.38),
        "outliers": (0.69, -0.05, 0.29, 0.38),
    }
    with styled():
        figure, panels = start(figure, "dataset", rects)
        elements, sizes, labels, energy, forces, outliers = panels
        draw_elements(elements, arrays)
        draw_sizes(sizes, arrays)
        draw_missing(labels, arrays)
        draw_values(energy, arrays, arrays.residual, "energy beside the fit, eV/atom", "energies")
        with np.errstate(divide="ignore"):
            logarithm = np.log10(arrays.force)
        draw_values(forces, arrays, logarithm, "log10 of largest force, eV/Å", "forces")
        draw_outliers(outliers, arrays)
        return finish(figure, arrays.facts)


def draw_elements(axes: Axes, arrays: DatasetArrays) -> None:
    names = list(arrays.elements)[:ELEMENTS]
    places = np.arange(len(names))
    counts = [arrays.elements[name] for name in names]
    axes.bar(places, counts, 0.7, color=PALETTE[2], hatch="//", edgecolor=PANEL, linewidth=0)
    axes.set_xlim(-0.6, len(names) - 0.4)
    axes.set_ylim(0, 1.1 * max(counts))
    axes.set_xticks(places, names)
    axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
    left = len(arrays.elements) - len(names)
    label(axes, "element", "structures", "elements" + (f" (and {left} more)" if left else ""))


def draw_sizes(axes: Axes, arrays: DatasetArrays) -> None:
    values = arrays.atoms if arrays.sizes is None else arrays.sizes
    low, high = float(values.min()) - 0.5, float(values.max()) + 0.5
    edges = np.linspace(low, high, min(BINS, int(high - low)) + 1)
    counts, _ = np.histogram(values, edges)
    axes.bar(edges[:-1], counts, np.diff(edges), align="edge", color=PALETTE[0])
    axes.set_xlim(low, high)
    axes.set_ylim(0, 1.1 * max(1, int(counts.max())))
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
    label(axes, "atoms of a structure", "structures", "sizes")


def draw_missing(axes: Axes, arrays: DatasetArrays) -> None:
    """A bar for each label: the part that has it, and what is missing, red and crossed."""
    names = list(arrays.missing)
    total = max(1, int(arrays.read.sum()))
    for place, name in enumerate(names):
        lost = int(arrays.missing[name].sum())
        axes.barh(place, 1 - lost / total, 0.5, color=PALETTE[4], edgecolor=PANEL, lw=0)
        axes.barh(
            place, lost / total, 0.5, 1 - lost / total, color=WRONG, hatch="xx", edgecolor=PANEL,
            lw=0,
        )  # fmt: skip
        words = f"{SIGN} {lost:,} of {total:,} missing" if lost else "complete"
        axes.text(0, place + 0.4, words, fontsize=6.5, va="center", color=WRONG if lost else FAINT)
    axes.set_xlim(0, 1)
    axes.set_ylim(max(1.6, len(names) - 0.3), -0.5)
    axes.set_yticks(range(len(names)), names)
    axes.set_xticks([0, 0.5, 1], ["0 %", "50 %", "100 %"])
    label(axes, "structures with the label", "", "labels (red, crossed: missing)")


def draw_values(
    axes: Axes, arrays: DatasetArrays, values: NDArray[np.float64], name: str, title: str
) -> None:
    """Histogram of each data set; the bulk is shown, and how much lies outside is said."""
    known = np.isfinite(values)
    if not known.any():
        note(axes, "No structure that was read has it.", 26)
        label(axes, name, "structures", title)
        return
    low, high = np.percentile(values[known], [0.1, 99.9])
    room = 0.3 * (high - low) or 0.5
    edges = np.linspace(low - room, high + room, BINS + 1)
    sets = np.unique(arrays.datasets[known])
    lower = np.zeros(BINS)
    for j in sets.tolist()[:SETS]:
        counts, _ = np.histogram(values[known & (arrays.datasets == j)], edges)
        axes.bar(
            edges[:-1], counts, np.diff(edges), lower, align="edge", color=colour(j),
            hatch=hatch(j), edgecolor=PANEL, lw=0, label=f"set {j}",
        )  # fmt: skip
        lower += counts
    outside = int((known & ((values < edges[0]) | (values > edges[-1]))).sum())
    if outside:
        words = f"{SIGN} {outside:,} outside"
        axes.text(0.98, 0.95, words, transform=axes.transAxes, ha="right", color=WRONG, fontsize=7)
    if len(sets) > 1:
        axes.legend(loc="upper left", fontsize=6.5, borderpad=0.1)
    axes.set_xlim(edges[0], edges[-1])
    axes.set_ylim(0, 1.25 * max(1.0, float(lower.max())))
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
    label(axes, name, "structures", title)


def draw_outliers(axes: Axes, arrays: DatasetArrays) -> None:
    if not arrays.outliers:
        note(axes, "No structure that was read is far from the others.", 30)
    else:
        axes.set_xticks([])
        axes.set_yticks([])
        axes.set_xlim(0, 1)
        axes.set_ylim(0, 1)
        lines = [textwrap.shorten(str(outlier), 58) for outlier in arrays.outliers]
        axes.text(0.02, 0.96, "\n".join(lines), va="top", fontsize=6.5, color=TEXT)
    label(axes, "", "", "outliers by index, the farthest first")
    axes.set_axis_off()


def plot_dataset(
    dataset: Any,
    *,
    only: int | None = None,
    exact: bool = False,
    figure: Figure | None = None,
) -> Figure:
    """What a data set holds, as a figure: elements, sizes, labels, ranges, and outliers by name.

    Parameters
    ----------
    dataset : Dataset, InMemoryDataset, MultiDataset, or sequence of AtomicData
    only : int, optional
        One data set of a MultiDataset; by default all.
    exact : bool
        Read all structures, however long that takes.
    figure : Figure, optional
        One of this module, to be drawn anew.
    """
    if exact:
        *_, arrays = refine_dataset(dataset, only=only)
    else:
        arrays = compute_dataset(dataset, only=only)
    return draw_dataset(arrays, figure)
