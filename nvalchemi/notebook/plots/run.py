"""Runs, drawn: losses, learning rate, gradient, and how the work goes on each rank."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nvalchemi.notebook.plots.frame import crosses, finish, label, note, rule, start
from nvalchemi.notebook.plots.run_arrays import (
    Curve,
    OneRun,
    RankCurves,
    RunArrays,
    RunLike,
    compute_run,
)
from nvalchemi.notebook.style import FAINT, colour, marker, styled

__all__ = ["compute_run", "draw_run", "plot_run"]

RECTS = {
    # room for a legend on the right of the losses, the rates and the throughput
    "loss": (0.065, 0.59, 0.275, 0.41),
    "learning rate": (0.52, 0.59, 0.165, 0.41),
    "gradient": (0.81, 0.59, 0.165, 0.41),
    "throughput": (0.065, 0.0, 0.155, 0.32),
    "load": (0.355, 0.0, 0.145, 0.32),
    "memory": (0.575, 0.0, 0.145, 0.32),
    "lag": (0.81, 0.0, 0.165, 0.32),
}
DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 2)), (0, (8, 2)))
MARKS = 6  # markers of a curve
LOG_FROM = 10.0  # ratio of highest to lowest from which an axis is logarithmic
LEGEND = 6  # entries
LETTERS = 16  # of an entry


def draw_run(arrays: RunArrays, figure: Figure | None = None) -> Figure:
    """Curves on top, ranks below; several runs in colours, dashes and markers of their own."""
    with styled():
        figure, panels = start(figure, "run", RECTS)
        named = dict(zip(RECTS, panels))
        for axes in panels:
            _reset(axes)
        _draw_losses(named["loss"], arrays.runs)
        _draw_rates(named["learning rate"], arrays.runs)
        _draw_norms(named["gradient"], arrays.runs)
        gpu = any(run.on_gpu for run in arrays.runs)
        for name, y, title in (
            ("throughput", "structures/s", "throughput of a rank"),
            ("load", "atoms", "atoms of a batch, mean"),
            ("memory", "MB", "GPU memory, peak" if gpu else "memory of the process"),
        ):
            _draw_ranks(named[name], arrays.runs, name)
            label(named[name], "step", y, title)
        _draw_lag(named["lag"], arrays.runs)
        return finish(figure, arrays.facts)


def _reset(axes: Axes) -> None:
    """What the last picture set: scales, ticks and limits."""
    axes.set_xscale("linear")
    axes.set_yscale("linear")
    axes.autoscale(True)
    axes.dataLim.set_points(np.array([[np.inf, np.inf], [-np.inf, -np.inf]]))


def _line(axes: Axes, curve: Curve, number: int, name: str, **options: object) -> None:
    """A curve with the colour, the dashes and the markers of its number."""
    every = max(1, len(curve.x) // MARKS)
    drawn: dict[str, object] = {
        "color": colour(number),
        "linestyle": DASHES[number % len(DASHES)],
        "marker": marker(number),
        # the first marker of each curve is elsewhere, so that equal curves show all of theirs
        "markevery": (min(number * every // 7, max(len(curve.x) - 1, 0)), every),
        "markersize": 3.5,
        "linewidth": 1.2,
        "label": name,
    }
    axes.plot(curve.x, curve.y, **{**drawn, **options})  # type: ignore[arg-type]


def _draw_losses(axes: Axes, runs: Sequence[OneRun]) -> None:
    several = len(runs) > 1
    for i, run in enumerate(runs):
        curves = _shown(run.losses, several)
        for j, (name, curve) in enumerate(curves.items()):
            _line(axes, curve, i if several else j, run.name if several else name)
        validation = run.validations["loss"]
        _line(
            axes,
            validation,
            i if several else len(curves),
            "" if several else "validation",
            linewidth=0.8 if several else 1.2,
            marker="*",
            markevery=1,
            markersize=6,
        )
    _scale(axes)
    for run in runs:
        rule(axes, run.restarts)
        broken = run.losses["loss"].broken
        if broken.size:
            crosses(axes, broken, np.full(len(broken), axes.get_ylim()[0]))
    title = "loss, ★ validation" if several else "loss and its parts, unweighted"
    if any(run.restarts.size for run in runs):
        title += ", | restart"
    label(axes, "step", "loss", title)
    if not any(run.losses["loss"].x.size or run.losses["loss"].broken.size for run in runs):
        note(axes, "; ".join(run.sentence for run in runs))
        return
    _legend(axes)


def _shown(losses: Mapping[str, Curve], several: bool) -> dict[str, Curve]:
    """The total and its parts; of several runs, or where the only part is the total, that alone."""
    first, *others = losses.items()
    same = len(others) == 1 and np.array_equal(first[1].y, others[0][1].y)
    return dict([first]) if several or same else dict(losses)


def _draw_rates(axes: Axes, runs: Sequence[OneRun]) -> None:
    for i, run in enumerate(runs):
        for group, curve in enumerate(run.rates):
            _line(axes, curve, i if len(runs) > 1 else group, f"group {group}")
    _scale(axes)
    label(axes, "step", "", "learning rate")
    if not any(curve.x.size for run in runs for curve in run.rates):
        note(axes, "nothing yet", 20)
    if len(runs) == 1 and len(runs[0].rates) > 1:
        _legend(axes)


def _draw_norms(axes: Axes, runs: Sequence[OneRun]) -> None:
    for i, run in enumerate(runs):
        _line(axes, run.norms, i, "")
    _scale(axes)
    label(axes, "step", "", "norm of the gradient")
    if not any(run.norms.x.size for run in runs):
        note(axes, "nothing yet", 20)


def _draw_ranks(axes: Axes, runs: Sequence[OneRun], quantity: str) -> None:
    several, drawn = len(runs) > 1, 0
    for i, run in enumerate(runs):
        ranks: RankCurves = getattr(run, quantity)
        if "median" in ranks.curves:
            low, high = ranks.curves["lowest"], ranks.curves["highest"]
            if len(low.x) == len(high.x):
                axes.fill_between(low.x, low.y, high.y, color=colour(i), alpha=0.25, linewidth=0)
            _line(axes, ranks.curves["median"], i, "median,\nrange" if i == 0 else "")
        else:
            for j, (name, curve) in enumerate(ranks.curves.items()):
                options = {"linewidth": 0.8} if several else {}
                _line(axes, curve, i if several else j, "" if several else name, **options)
        drawn += len(ranks.curves)
    if not drawn:
        note(axes, "nothing yet", 20)
        return
    axes.set_ylim(0, 1.1 * axes.dataLim.ymax)
    if quantity == "throughput" and not several:
        _legend(axes, 4)


def _draw_lag(axes: Axes, runs: Sequence[OneRun]) -> None:
    known = [(i, run.lag) for i, run in enumerate(runs) if run.lag is not None]
    label(axes, "rank", "s", "last lag behind the first")
    if not any(len(lag.seconds) > 1 for _, lag in known):
        note(axes, "one rank" if known else "nothing yet", 20)
        return
    for i, lag in known:
        ranks = np.arange(len(lag.seconds))
        # no line: there is nothing between two ranks
        look: dict[str, Any] = {"color": colour(i), "marker": marker(i), "markersize": 5 - i % 3}
        axes.plot(ranks, lag.seconds, linestyle="none", clip_on=False, **look)
    axes.set_ylim(bottom=0, top=max(axes.get_ylim()[1], 0.01))
    most = max(len(lag.seconds) for _, lag in known)
    axes.set_xticks(np.unique(np.linspace(0, most - 1, min(most, 5)).astype(int)))
    axes.margins(x=0.1)


def _scale(axes: Axes) -> None:
    """A logarithmic axis where all values are positive and far apart."""
    values = [np.asarray(line.get_ydata(), dtype=float) for line in axes.lines]
    together = np.concatenate(values) if values else np.empty(0)
    positive = together.size > 0 and together.min() > 0
    if positive and together.max() > LOG_FROM * together.min():
        axes.set_yscale("log")
    axes.autoscale_view()


def _legend(axes: Axes, entries: int = LEGEND) -> None:
    """Beside the panel, where no curve is."""
    handles, labels = axes.get_legend_handles_labels()
    named = [(h, _short(name)) for h, name in zip(handles, labels) if name]
    if named:
        place: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.04)}
        look: dict[str, Any] = {"frameon": False, "handlelength": 1.8, "handletextpad": 0.4}
        look |= {"borderpad": 0.2, "borderaxespad": 0.3}
        axes.legend(*zip(*named[:entries]), fontsize=6.5, labelcolor=FAINT, **place, **look)


def _short(name: str) -> str:
    """A name in the room that a legend has; its end tells runs apart more often."""
    return name if len(name) <= LETTERS else f"…{name[1 - LETTERS :]}"


def plot_run(runs: RunLike | Sequence[RunLike], *, figure: Figure | None = None) -> Figure:
    """How one training goes, or several beside each other, as a figure.

    Parameters
    ----------
    runs : Run, path, or a list of them
        Run folders of `nvalchemi.training.RunFolder`, running or finished.
    figure : Figure, optional
        One that this function has returned, drawn anew.

    Returns
    -------
    Figure
        Save it with `nvalchemi.notebook.export.save`, or its own ``savefig``.

    Raises
    ------
    ValueError, TypeError, FileNotFoundError
        See `compute_run`. A `Run` whose folder is not there yet is drawn as what it is.
    """
    return draw_run(compute_run(runs), figure)
