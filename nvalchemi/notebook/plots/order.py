"""Whether the order is a good shuffle, drawn: epoch against epoch, sample against next sample."""

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nvalchemi.notebook.plots.frame import deviation_key, deviations, finish, id_ticks, label, start
from nvalchemi.notebook.plots.order_arrays import OrderArrays, Pairs, compute_order, refine_order
from nvalchemi.notebook.style import PALETTE, styled
from nvalchemi.sharding.view import Chosen

if TYPE_CHECKING:
    from nvalchemi.sharding.plan import ShardPlan

__all__ = ["compute_order", "draw_order", "plot_order", "refine_order"]


def draw_order(arrays: OrderArrays, figure: Figure | None = None) -> Figure:
    """Points where there are few pairs, else tiles."""
    rects = {
        "epochs": (0.095, 0.0, 0.35, 0.94),
        "next": (0.55, 0.0, 0.35, 0.94),
        "key": (0.915, 0.15, 0.012, 0.6),
    }
    one, other = arrays.epochs
    what = "place of a sample" if arrays.kind == "places" else "sample at a place"
    with styled():
        figure, (epochs, following, key) = start(figure, "order", rects)
        draw_pairs(epochs, arrays.between)
        label(epochs, f"{what} in epoch {one}", f"{what} in epoch {other}", "from epoch to epoch")
        draw_pairs(following, arrays.following)
        label(following, "sample", "next sample of the batch", "from sample to sample")
        deviation_key(key)
        return finish(figure, arrays.facts)


def draw_pairs(axes: Axes, pairs: Pairs) -> None:
    tiles = len(pairs.counts)
    if pairs.x.size:
        scale = tiles / pairs.size
        axes.scatter(
            (pairs.x + 0.5) * scale, (pairs.y + 0.5) * scale, s=5, marker="o", c=PALETTE[0], lw=0
        )
        axes.set_xlim(0, tiles)
        axes.set_ylim(tiles, 0)
    else:
        deviations(axes, pairs.z)
    edges = np.arange(tiles + 1) * pairs.size // tiles
    axes.set_xticks(*id_ticks(edges))
    axes.set_yticks(*id_ticks(edges))


def plot_order(
    plan: "ShardPlan",
    epoch: int = 0,
    *,
    following: int | None = None,
    ranks: Chosen = None,
    steps: Chosen = None,
    exact: bool = False,
    figure: Figure | None = None,
) -> Figure:
    """The order of an epoch against the next one, and each sample against the next, as a figure.

    Parameters
    ----------
    plan, epoch, following, ranks, steps
        As of `compute_order`.
    exact : bool
        Look at all draws, however long that takes (about 20 s for 1e8).
    figure : Figure, optional
        One of this module, to be drawn anew.
    """
    chosen = {"following": following, "ranks": ranks, "steps": steps}
    if exact:
        *_, arrays = refine_order(plan, epoch, **chosen)  # type: ignore[arg-type]
    else:
        arrays = compute_order(plan, epoch, **chosen)  # type: ignore[arg-type]
    return draw_order(arrays, figure)
