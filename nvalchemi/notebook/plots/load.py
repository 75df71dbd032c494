"""Work of the ranks by step, drawn: bands and the maximum, and the highest by rank and step."""

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from nvalchemi.notebook.plots.facts import compact
from nvalchemi.notebook.plots.frame import (
    finish,
    image,
    label,
    sequential_key,
    spread_ticks,
    start,
)
from nvalchemi.notebook.plots.load_arrays import By, LoadArrays, compute_load, refine_load
from nvalchemi.notebook.style import PALETTE, SEQUENTIAL, TEXT, styled
from nvalchemi.sharding.view import Chosen

if TYPE_CHECKING:
    from nvalchemi.sharding.plan import ShardPlan

__all__ = ["compute_load", "draw_load", "plot_load", "refine_load"]


def draw_load(arrays: LoadArrays, figure: Figure | None = None) -> Figure:
    """Bands over the ranks on the left, the highest of each rank on the right."""
    rects = {
        "bands": (0.08, 0.0, 0.40, 0.94),
        "ranks": (0.555, 0.0, 0.345, 0.94),
        "key": (0.915, 0.15, 0.012, 0.6),
    }
    with styled():
        figure, (bands, ranks, key) = start(figure, "load", rects)
        draw_bands(bands, arrays)
        top = float(np.nanmax(arrays.highest))
        image(ranks, arrays.highest, (0.0, top or 1.0), SEQUENTIAL)
        mark_largest(ranks, arrays)
        ranks.set_xticks(*spread_ticks(arrays.steps, 6))
        ranks.set_yticks(*spread_ticks(arrays.ranks))
        label(ranks, "step", "rank", f"highest {arrays.unit} of a batch; ring: the largest one")
        sequential_key(key, top, 0.0, arrays.unit, SEQUENTIAL)
        return finish(figure, arrays.facts)


def draw_bands(axes: Axes, arrays: LoadArrays) -> None:
    places = np.arange(len(arrays.bands) + 1)
    low, five, median, high, most = (np.append(band, band[-1]) for band in arrays.bands.T)
    axes.fill_between(places, low, most, step="post", facecolor=PALETTE[4], alpha=0.35, lw=0)
    axes.fill_between(
        places, five, high, step="post", facecolor=PALETTE[0], alpha=0.35, lw=0, hatch="//"
    )
    axes.step(places, median, where="post", color=PALETTE[0], lw=1.2, label="median rank")
    axes.step(places, most, where="post", color=TEXT, lw=1.2, ls="-", label="highest rank")
    axes.plot([], [], color=PALETTE[0], lw=5, alpha=0.35, label="5 % to 95 % of the ranks")
    known = ~np.isnan(arrays.beside)
    if known.any():
        axes.plot(
            places[:-1][known] + 0.5,
            arrays.beside[known],
            color=PALETTE[2],
            lw=0.8,
            ls=":",
            marker="^",
            ms=3.5,
            label="highest rank if balanced",
        )
    axes.set_xlim(0, len(arrays.bands))
    axes.set_ylim(0, 1.32 * (np.nanmax(most) or 1.0))
    axes.set_xticks(*spread_ticks(arrays.steps, 7))
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: compact(value)))
    axes.legend(loc="upper left", ncols=2, borderpad=0.1, handlelength=1.6)
    label(axes, "step", f"{arrays.unit} of a batch of one rank", "work of the ranks in each step")


def mark_largest(axes: Axes, arrays: LoadArrays) -> None:
    row = int(np.searchsorted(arrays.ranks, arrays.largest.rank, side="right")) - 1
    column = int(np.searchsorted(arrays.steps, arrays.largest.step, side="right")) - 1
    axes.scatter(
        [column + 0.5], [row + 0.5], s=60, facecolors="none", edgecolors="#D55E00", linewidths=1.6
    )


def plot_load(
    plan: "ShardPlan",
    epoch: int = 0,
    *,
    ranks: Chosen = None,
    steps: Chosen = None,
    by: By = "cost",
    exact: bool = False,
    figure: Figure | None = None,
) -> Figure:
    """Work per rank and step, beside the same plan with BalancedBatchSampler, as a figure.

    Parameters
    ----------
    plan, epoch, ranks, steps, by
        As of `compute_load`.
    exact : bool
        Look at all steps, however long that takes (about 10 s for 1e8 samples).
    figure : Figure, optional
        One of this module, to be drawn anew.
    """
    if exact:
        *_, arrays = refine_load(plan, epoch, ranks=ranks, steps=steps, by=by)
    else:
        arrays = compute_load(plan, epoch, ranks=ranks, steps=steps, by=by)
    return draw_load(arrays, figure)
