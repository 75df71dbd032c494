"""Parity: predicted against reference energies and forces, drawn, with a table of errors."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from nvalchemi.notebook.plots.frame import finish, label, note, start
from nvalchemi.notebook.plots.parity_arrays import (
    Density,
    ErrorRow,
    Pairs,
    ParityArrays,
    compute_parity,
    milli,
)
from nvalchemi.notebook.style import FAINT, PANEL, SEQUENTIAL, TEXT, colour, marker, styled

__all__ = ["compute_parity", "draw_parity", "parity"]

RECTS = {
    "energy": (0.075, 0.0, 0.235, 0.94),
    "forces": (0.395, 0.0, 0.235, 0.94),
    "errors": (0.665, -0.2, 0.325, 1.14),
}
ROWS = 16  # of the table; all of them are in ParityArrays.rows
COLUMNS = (0.46, 0.64, 0.82, 1.0)  # right edges, for six letters each
NAME = 11  # letters of a name


def draw_parity(arrays: ParityArrays, figure: Figure | None = None) -> Figure:
    """Energies on the left, force components in the middle, the table on the right."""
    with styled():
        figure, (energy, forces, errors) = start(figure, "parity", RECTS)
        _draw_pairs(energy, arrays.energy, arrays.energy_density, arrays.names)
        label(energy, "reference, eV/atom", "predicted, eV/atom", "energy per atom")
        _draw_pairs(forces, arrays.forces, arrays.forces_density, arrays.names)
        label(forces, "reference, eV/Å", "predicted, eV/Å", "force components")
        _draw_table(errors, arrays.rows)
        return finish(figure, arrays.facts)


def _draw_pairs(axes: Axes, pairs: Pairs, density: Density | None, names: Sequence[str]) -> None:
    good = np.isfinite(pairs.predicted)
    if not good.any():
        note(axes, "no label with a prediction", 20)
        return
    axes.autoscale(True)
    x, y = pairs.reference[good], pairs.predicted[good]
    low, high = float(min(x.min(), y.min())), float(max(x.max(), y.max()))
    margin = 0.04 * (high - low) or 0.5
    if density is not None:
        _draw_density(axes, density)
    else:
        for j, name in enumerate(names):
            own = pairs.dataset[good] == j
            if own.any():
                axes.scatter(
                    x[own], y[own], s=9, marker=marker(j), c=colour(j), alpha=0.6, lw=0, label=name
                )
    axes.plot([low, high], [low, high], color=TEXT, linewidth=0.7, linestyle="--", zorder=0.5)
    axes.set_xlim(low - margin, high + margin)
    axes.set_ylim(low - margin, high + margin)
    ticks = [t for t in axes.xaxis.get_major_locator().tick_values(low, high) if low <= t <= high]
    axes.set_xticks(ticks[:: max(1, len(ticks) // 4)])
    axes.set_yticks(ticks)
    if density is None and len(names) > 1:
        axes.legend(loc="upper left", fontsize=6.5, labelcolor=FAINT, handletextpad=0.1)


def _draw_density(axes: Axes, density: Density) -> None:
    most = int(density.counts.max())
    axes.imshow(
        np.ma.masked_equal(density.counts, 0),
        extent=(density.low, density.high, density.low, density.high),
        origin="lower",
        aspect="auto",
        cmap=SEQUENTIAL,
        norm=LogNorm(1, max(most, 2)),
    )
    words = f"dark: 1 in a cell, light: {most:,}"
    box = {"facecolor": PANEL, "edgecolor": "none", "pad": 1.5}
    axes.text(0.03, 0.96, words, transform=axes.transAxes, fontsize=6.5, va="top", bbox=box)


def _draw_table(axes: Axes, rows: Sequence[ErrorRow]) -> None:
    """MAE and RMSE in meV; the largest of each kind in bold."""
    axes.set_axis_off()
    axes.set_xlim(0, 1)
    axes.set_ylim(ROWS + 3.5, 0)
    head = ("MAE", "RMSE", "MAE", "RMSE")
    axes.text(0, 1.5, "◀ largest", color=FAINT, fontsize=7)
    axes.text(COLUMNS[1], 0.6, "meV/atom", ha="right", color=FAINT, fontsize=7)
    axes.text(COLUMNS[3], 0.6, "meV/Å", ha="right", color=FAINT, fontsize=7)
    for right, word in zip(COLUMNS, head):
        axes.text(right, 1.5, word, ha="right", color=FAINT, fontsize=7)
    for i, row in enumerate(rows[:ROWS]):
        place = i + 2.6
        worst = _is_worst(row, rows)
        weight = "bold" if worst or row.kind == "all" else "normal"
        most = NAME - 2 if worst else NAME
        name = row.name if len(row.name) <= most else f"{row.name[: most - 1]}…"
        axes.text(0.0, place, f"{name}{' ◀' if worst else ''}", fontsize=7.5, fontweight=weight)
        values = (row.energy_mae, row.energy_rmse, row.forces_mae, row.forces_rmse)
        for right, value in zip(COLUMNS, values):
            axes.text(right, place, milli(value), ha="right", fontsize=7.5, fontweight=weight)
    if len(rows) > ROWS:
        axes.text(0, ROWS + 2.6, f"and {len(rows) - ROWS} more", color=FAINT, fontsize=7)


def _is_worst(row: ErrorRow, rows: Sequence[ErrorRow]) -> bool:
    """Whether it has the largest error in forces, or without any in energies, of its kind."""
    same = [other for other in rows if other.kind == row.kind]
    if len(same) < 2:
        return False
    by_forces = any(not np.isnan(other.forces_mae) for other in same)
    values = [other.forces_mae if by_forces else other.energy_mae for other in same]
    own = row.forces_mae if by_forces else row.energy_mae
    return bool(own == np.nanmax(values))


def parity(
    source: Any,
    data: Any = None,
    *,
    names: Sequence[str] | None = None,
    figure: Figure | None = None,
) -> Figure:
    """Predicted against reference energies per atom and forces, with their errors, as a figure.

    It is for the process that looks at a result: it predicts for all of the data by itself, and
    other ranks have no part in it.

    Parameters
    ----------
    source : TrainingStrategy, pair, list of pairs, or dict
        A strategy predicts in evaluation mode. A pair is (predictions, batch): a Batch, or a dict
        with energy [B, 1] in eV and forces [V, 3] in eV/Angstrom, beside the Batch with the
        references. A dict has pairs, or lists of them, by the name of the data set.
    data : loader, list of Batch, or Batch, optional
        What a strategy predicts for; by default its validation data.
    names : sequence of str, optional
        Of the data sets of a MultiDataset.
    figure : Figure, optional
        One that this function has returned, drawn anew.

    Returns
    -------
    Figure
        Labels that are missing (absent or NaN) are left out and counted. Of more than 4000 pairs
        the density is drawn, in cells that count all of them. The numbers of the table are in
        ``compute_parity(...).rows``.

    Raises
    ------
    TypeError
        For another source.
    ValueError
        If there is no data, no label with a prediction, or predictions are of another batch.
    """
    return draw_parity(compute_parity(source, data, names=names), figure)
