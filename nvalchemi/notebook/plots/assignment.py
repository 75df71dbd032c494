"""Which rank takes which samples at which step, drawn: cells of samples, or tiles of counts."""

from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from numpy.typing import NDArray

from nvalchemi.data.datapipes.order import Indices
from nvalchemi.notebook.plots.assignment_arrays import (
    AssignmentArrays,
    compute_assignment,
    refine_assignment,
)
from nvalchemi.notebook.plots.facts import compact
from nvalchemi.notebook.plots.frame import (
    crosses,
    deviation_key,
    deviations,
    finish,
    id_ticks,
    label,
    rule,
    spread_ticks,
    start,
)
from nvalchemi.notebook.style import EMPTY, PANEL, SEQUENTIAL, TEXT, colour, styled
from nvalchemi.sharding.view import Chosen

if TYPE_CHECKING:
    from nvalchemi.sharding.plan import ShardPlan

__all__ = ["compute_assignment", "draw_assignment", "plot_assignment", "refine_assignment"]

NAMED = 260  # cells that have room for their number
LINES = 256  # between steps
HEIGHTS = 4  # of bars, which tell data sets apart where there is no room for letters


def draw_assignment(arrays: AssignmentArrays, figure: Figure | None = None) -> Figure:
    """Cells where there are few samples, else tiles by rank and by step."""
    with styled():
        if arrays.cells is not None:
            figure, (axes,) = start(
                figure, "assignment of samples", {"cells": (0.07, 0.0, 0.91, 1.0)}
            )
            draw_cells(axes, arrays)
        else:
            rects = {
                "ranks": (0.075, 0.0, 0.385, 0.94),
                "steps": (0.535, 0.0, 0.365, 0.94),
                "key": (0.915, 0.15, 0.012, 0.6),
            }
            figure, (by_rank, by_step, key) = start(figure, "assignment in tiles", rects)
            draw_tiles(by_rank, arrays, arrays.z_by_rank, arrays.ranks, "rank")
            draw_tiles(by_step, arrays, arrays.z_by_step, arrays.steps, "step")
            deviation_key(key)
        return finish(figure, arrays.facts)


def draw_tiles(
    axes: Axes,
    arrays: AssignmentArrays,
    z: NDArray[np.float64],
    rows: Indices,
    name: str,
) -> None:
    deviations(axes, z)
    axes.set_xticks(*id_ticks(arrays.tiles))
    edges = np.arange(len(z)) * len(rows) // len(z)
    axes.set_yticks(*spread_ticks(rows[edges]))
    width = np.diff(arrays.tiles).mean()
    label(axes, f"sample (tiles of {compact(width)})", name, f"draws by {name} and sample")


def draw_cells(axes: Axes, arrays: AssignmentArrays) -> None:
    cells, datasets = arrays.cells, arrays.datasets
    assert cells is not None and datasets is not None and arrays.repeated is not None
    steps, ranks, size = cells.shape
    flat, own = by_rank(cells), by_rank(datasets)
    again = by_rank(arrays.repeated)
    low, high = arrays.samples
    shown = (flat >= low) & (flat < high)
    several = bool((own[flat >= 0] > 0).any())
    named = flat.size <= NAMED
    colours = cell_colours(flat, own, shown, several, arrays.number_of_samples)
    if several and not named:
        colours = as_bars(colours, own)
    axes.imshow(colours, extent=(0, flat.shape[1], ranks, 0), aspect="auto")
    axes.set_xlim(0, flat.shape[1])
    axes.set_ylim(ranks, 0)
    rule(axes, np.arange(1, steps)[:LINES] * float(size))
    places, names = spread_ticks(arrays.steps, 16)
    axes.set_xticks([place * size for place in places], names)
    axes.set_yticks(*spread_ticks(arrays.ranks, 16))
    label(axes, f"step (each with {size} places)", "rank", cells_title(several, named))
    if named:
        write_ids(axes, flat, own, shown, several)
    rows, columns = np.nonzero(shown & again)
    if rows.size:
        crosses(axes, columns + (0.8 if named else 0.5), rows + (0.22 if named else 0.5))


def by_rank(values: NDArray[Any]) -> NDArray[Any]:
    """(S, R, B) as (R, S * B)."""
    return np.moveaxis(values, 1, 0).reshape(values.shape[1], -1)


def cells_title(several: bool, named: bool) -> str:
    cross = "red cross: came before"
    if not several:
        return f"colour: number of the sample, dark to bright; {cross}"
    cue = "letter: data set (a, b, ...)" if named else "height: data set (the first is highest)"
    return f"colour and {cue}; {cross}"


def cell_colours(
    flat: Indices, own: Indices, shown: NDArray[np.bool_], several: bool, number: int
) -> NDArray[np.float64]:
    if several:
        table = np.array([to_rgb(colour(j)) for j in range(int(own.max()) + 1)])
        out: NDArray[np.float64] = 0.35 + 0.65 * table[own]
    else:
        out = SEQUENTIAL(flat / max(1, number - 1))[..., :3]
    out[~shown] = to_rgb(EMPTY)
    return out


def as_bars(colours: NDArray[np.float64], own: Indices) -> NDArray[np.float64]:
    """Each row as bars whose height tells the data set: the second cue."""
    levels = HEIGHTS + 1  # the topmost stays free, between two rows
    bars = np.repeat(colours, levels, axis=0)
    level = np.tile(np.arange(levels), len(own))[:, None]
    bars[level <= np.repeat(own % HEIGHTS, levels, axis=0)] = to_rgb(PANEL)
    return bars


def write_ids(
    axes: Axes, flat: Indices, own: Indices, shown: NDArray[np.bool_], several: bool
) -> None:
    size = 8.0 if flat.size <= 100 else 6.0
    dark = flat / max(1, flat.max()) < 0.55
    for row, column in np.argwhere(shown).tolist():
        letter = chr(97 + int(own[row, column]) % 26) if several else ""
        ink = PANEL if dark[row, column] and not several else TEXT
        words = f"{letter}{flat[row, column]}"
        place = (column + 0.5, row + 0.5)
        axes.text(*place, words, ha="center", va="center", fontsize=size, color=ink)


def plot_assignment(
    plan: "ShardPlan",
    epoch: int = 0,
    *,
    ranks: Chosen = None,
    steps: Chosen = None,
    samples: tuple[int, int] | None = None,
    exact: bool = False,
    figure: Figure | None = None,
) -> Figure:
    """Which rank takes which samples at which step, as a figure.

    Up to 4096 samples are drawn one by one. More are counted in tiles, coloured by how far each
    count is from the expected one on a scale that is the same in all pictures.

    Parameters
    ----------
    plan, epoch, ranks, steps, samples
        As of `compute_assignment`.
    exact : bool
        Count all draws, however long that takes (about 10 s for 1e8).
    figure : Figure, optional
        One of this module, to be drawn anew.
    """
    options = {"ranks": ranks, "steps": steps, "samples": samples}
    if exact:
        *_, arrays = refine_assignment(plan, epoch, **options)  # type: ignore[arg-type]
    else:
        arrays = compute_assignment(plan, epoch, **options)  # type: ignore[arg-type]
    return draw_assignment(arrays, figure)
