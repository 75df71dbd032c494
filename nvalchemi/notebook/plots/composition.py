"""Which data sets the batches are of, drawn: stacked shares by step, and asked beside realised."""

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from nvalchemi.notebook.plots.composition_arrays import (
    CompositionArrays,
    compute_composition,
    refine_composition,
)
from nvalchemi.notebook.plots.facts import SIGN, percent
from nvalchemi.notebook.plots.frame import finish, label, spread_ticks, start
from nvalchemi.notebook.style import FAINT, LINE, PANEL, TEXT, WRONG, colour, hatch, styled
from nvalchemi.sharding.view import Chosen

if TYPE_CHECKING:
    from nvalchemi.sharding.plan import ShardPlan

__all__ = ["compute_composition", "draw_composition", "plot_composition", "refine_composition"]


BANDS = {
    "exact": "lines: asked, exact in each batch",
    "bound": "lines: asked, and the most that the rule allows",
    "standard deviation": "lines: asked, ± 2 σ of a random draw",
}


def draw_composition(arrays: CompositionArrays, figure: Figure | None = None) -> Figure:
    """Shares by step on the left, over the whole epoch on the right."""
    rects = {"steps": (0.065, 0.0, 0.50, 0.94), "shares": (0.68, 0.0, 0.30, 0.94)}
    with styled():
        figure, (steps, shares) = start(figure, "composition", rects)
        draw_ribbon(steps, arrays)
        draw_shares(shares, arrays)
        return finish(figure, arrays.facts)


def groups(arrays: CompositionArrays) -> tuple[list[str], list[str], list[str], NDArray[np.bool_]]:
    """Names, colours and hatches of what is drawn, and which data sets each has, shape (G, D)."""
    member = arrays.drawn
    names = [f"data set {j}" for j in arrays.shown.tolist()]
    colours = [colour(i) for i in range(len(names))]
    hatches = [hatch(i) for i in range(len(names))]
    if len(member) > len(arrays.shown):
        rest = int(member[-1].sum())
        names.append(f"{rest} other{'s' if rest > 1 else ''}")
        colours.append(LINE)
        hatches.append("||")
    return names, colours, hatches, member


def draw_ribbon(axes: Axes, arrays: CompositionArrays) -> None:
    _, colours, hatches, member = groups(arrays)
    shares = arrays.shares @ member.T
    places = np.arange(len(shares) + 1)
    lower = np.zeros(len(places))
    edge = 0.0
    for j, (tint, cue) in enumerate(zip(colours, hatches)):
        upper = lower + np.append(shares[:, j], shares[-1, j])
        axes.fill_between(
            places, lower, upper, step="post", facecolor=tint, hatch=cue, edgecolor=PANEL, lw=0
        )
        edge += float(arrays.asked @ member[j])
        if j + 1 < len(colours):
            draw_band(axes, places, edge, arrays.band[:, j])
        lower = upper
    axes.set_xlim(0, len(shares))
    axes.set_ylim(0, 1)
    axes.set_xticks(*spread_ticks(arrays.steps, 7))
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0 %", "25 %", "50 %", "75 %", "100 %"])
    label(axes, "step", "share of the samples", BANDS[arrays.kind])


def draw_band(
    axes: Axes, places: NDArray[np.int64], edge: float, width: NDArray[np.float64]
) -> None:
    axes.axhline(edge, color=TEXT, linewidth=0.9, linestyle="--")
    if width.any():
        for side in (-1, 1):
            border = np.clip(edge + side * np.append(width, width[-1]), 0, 1)
            axes.step(places, border, where="post", color=TEXT, linewidth=0.6, linestyle=":")


def draw_shares(axes: Axes, arrays: CompositionArrays) -> None:
    names, colours, hatches, member = groups(arrays)
    asked, realised = member @ arrays.asked, member @ arrays.realised
    places = np.arange(len(names))
    axes.barh(places, realised, 0.5, color=colours, hatch=hatches, edgecolor=PANEL, linewidth=0)
    axes.vlines(asked, places - 0.36, places + 0.36, color=TEXT, linewidth=1.4)
    top = max(asked.max(), realised.max()) * 1.02
    for row, words, wrong in zip(
        places.tolist(), share_words(arrays, member), wrongs(arrays, member)
    ):
        axes.text(0, row + 0.47, words, va="center", color=WRONG if wrong else FAINT, fontsize=7)
    axes.set_xlim(0, top)
    axes.set_ylim(len(names) - 0.3, -0.5)
    axes.set_yticks(places, names)
    ticks = np.linspace(0, top, 4)
    axes.set_xticks(ticks, [percent(float(tick)) for tick in ticks])
    what = "the epoch" if arrays.whole else "the ranks and steps chosen"
    label(axes, f"share of the samples of {what}", "", "bar: realised, line: asked")


def wrongs(arrays: CompositionArrays, member: NDArray[np.bool_]) -> list[bool]:
    return [bool((row & (arrays.starved | arrays.off)).any()) for row in member]


def share_words(arrays: CompositionArrays, member: NDArray[np.bool_]) -> list[str]:
    """Asked, realised and first step of each bar."""
    out = []
    for row, wrong in zip(member, wrongs(arrays, member)):
        asked, got = float(row @ arrays.asked), float(row @ arrays.realised)
        about = float(np.sqrt(row @ arrays.error**2))
        words = f"asked {percent(asked)}, got {percent(got)}" + (
            f" ± {percent(about)}" if about else ""
        )
        if row.sum() == 1:
            first = int(arrays.first[int(row.argmax())])
            words += f", first at step {first}" if first >= 0 else ", later than searched"
        out.append(f"{SIGN} {words}" if wrong else words)
    return out


def plot_composition(
    plan: "ShardPlan",
    epoch: int = 0,
    *,
    ranks: Chosen = None,
    steps: Chosen = None,
    exact: bool = False,
    figure: Figure | None = None,
) -> Figure:
    """Share of each data set by step, asked beside realised, as a figure.

    Parameters
    ----------
    plan, epoch, ranks, steps
        As of `compute_composition`.
    exact : bool
        Count all draws, however long that takes (about 10 s for 1e8).
    figure : Figure, optional
        One of this module, to be drawn anew.
    """
    if exact:
        *_, arrays = refine_composition(plan, epoch, ranks=ranks, steps=steps)
    else:
        arrays = compute_composition(plan, epoch, ranks=ranks, steps=steps)
    return draw_composition(arrays, figure)
