"""How often each sample comes in some epochs, and which never do."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator
from numpy.typing import NDArray

from nvalchemi.data.datapipes.order import Indices
from nvalchemi.data.datapipes.weights import check_integer
from nvalchemi.notebook.plots.facts import (
    Facts,
    Number,
    compact,
    coverage_numbers,
    percent,
    plan_line,
    quick_coverage,
)
from nvalchemi.notebook.plots.frame import finish, label, note, start
from nvalchemi.notebook.style import FAINT, PANEL, WRONG, colour, hatch, styled
from nvalchemi.sharding.coverage import COUNT_LIMIT, Coverage, blocks
from nvalchemi.sharding.overlap import dealt_once
from nvalchemi.sharding.sources import Dealing
from nvalchemi.sharding.view import Chosen

if TYPE_CHECKING:
    from nvalchemi.sharding.plan import ShardPlan

TIMES = 12  # bars of the histogram
BARS = 7
How = Literal["counted", "by construction", "expected"]


@dataclass(frozen=True)
class CoverageArrays:
    """How often samples come.

    Attributes
    ----------
    facts : Facts
    epochs : list of int
    histogram : int64 array, shape (D, K + 1), or None
        Samples of each data set that come 0, 1, ... K times; None where that is not known without
        counting.
    coverage : Coverage or None
        As the plan counts; None where that takes long.
    lengths : int64 array, shape (D,)
    """

    facts: Facts
    epochs: list[int]
    histogram: Indices | None
    coverage: Coverage | None
    lengths: Indices


def compute_coverage(plan: "ShardPlan", epochs: Chosen = None) -> CoverageArrays:
    """How often samples come in some epochs (default: all of the plan), in bounded time.

    Raises
    ------
    ValueError, TypeError
        For epochs that are no numbers from 0 on, or none.
    """
    numbers = check_epochs(plan, epochs)
    coverage = quick_coverage(plan, numbers)
    draws = plan.estimated_draws * len(numbers)
    cheap = plan.source.cheap or plan.source.dealing() is None
    if coverage is not None and cheap and draws <= COUNT_LIMIT // 8:
        return assemble(plan, numbers, coverage, count_times(plan, numbers), "counted")
    histogram = times_by_construction(plan, numbers)
    return assemble(plan, numbers, coverage, histogram, "by construction")


def refine_coverage(plan: "ShardPlan", epochs: Chosen = None) -> Iterator[CoverageArrays]:
    """As `compute_coverage`, counted: 0.1 s per million draws, and two bytes for each sample."""
    numbers = check_epochs(plan, epochs)
    histogram = times_by_construction(plan, numbers)
    coverage = quick_coverage(plan, numbers)
    if histogram is None or coverage is None or coverage.method == "expected":
        histogram = count_times(plan, numbers)
        coverage = plan.coverage(numbers, exact=True)
        yield assemble(plan, numbers, coverage, histogram, "counted")
        return
    yield assemble(plan, numbers, coverage, histogram, "by construction")


def check_epochs(plan: "ShardPlan", epochs: Chosen) -> list[int]:
    if isinstance(epochs, slice):
        epochs = range(plan.epochs)[epochs]
    chosen = range(plan.epochs) if epochs is None else np.atleast_1d(np.asarray(epochs)).tolist()
    numbers = [check_integer("epochs", epoch, 0) for epoch in chosen]
    if not numbers:
        raise ValueError("epochs must name at least one epoch, got none")
    return numbers


def count_times(plan: "ShardPlan", epochs: list[int]) -> Indices:
    """How often each sample is drawn, as a histogram for each data set."""
    times = np.zeros(len(plan.samples), dtype=np.uint16)
    for epoch in epochs:
        for block in blocks(plan, epoch):
            drawn, number = np.unique(block, return_counts=True)
            times[drawn] += np.minimum(number, np.uint16(65535) - times[drawn]).astype(np.uint16)
    bins = int(times.max()) + 1
    edges = plan.samples.offsets
    parts = [np.bincount(times[a:b], minlength=bins) for a, b in pairwise(edges)]
    return np.array(parts, dtype=np.int64)


def times_by_construction(plan: "ShardPlan", epochs: list[int]) -> Indices | None:
    """From the lengths alone: a data set is passed over before any of its samples comes again."""
    dealings = [plan.source.dealing(epoch) for epoch in epochs]
    lengths = np.array(plan.samples.lengths)
    counts: list[NDArray[np.int64]] = []
    for dealing in dealings:
        if dealing is None or not simple(dealing, len(epochs), lengths):
            return None
        counts.append(dealing.draws)
    least, more = np.divmod(np.sum(counts, axis=0), np.maximum(1, lengths))
    # `simple` has seen to it that padding and dropping are of one data set and one epoch
    dealing = dealings[0]
    assert dealing is not None
    histogram = np.zeros((len(lengths), int(least.max()) + 3), dtype=np.int64)
    rows = np.arange(len(lengths))
    histogram[rows, least] += lengths - more
    histogram[rows, least + 1] += more
    if dealing.padded or dealing.dropped:
        once = 1 if dealing.padded else -1
        histogram[0, least[0]] -= abs(dealing.emitted - dealing.positions)
        histogram[0, least[0] + once] += abs(dealing.emitted - dealing.positions)
    top = int(np.flatnonzero(histogram.any(axis=0)).max(initial=0))
    return histogram[:, : top + 1]


def simple(dealing: Dealing, epochs: int, lengths: Indices) -> bool:
    """Whether the times follow: whole passes, or one pass with what is padded or dropped."""
    if dealing.independent:
        return False
    if dealing.padded or dealing.dropped:
        once = dealt_once(dealing, lengths.tolist()) and dealing.positions == lengths.sum()
        return epochs == 1 and len(lengths) == 1 and once
    # of a part of a data set each epoch shows another part
    return epochs == 1 or bool((dealing.draws % np.maximum(1, lengths) == 0).all())


def assemble(
    plan: "ShardPlan",
    epochs: list[int],
    coverage: Coverage | None,
    histogram: Indices | None,
    how: How,
) -> CoverageArrays:
    exact = histogram is not None and coverage is not None and coverage.method != "expected"
    if exact:
        truth = f"exact: {how}"
    elif coverage is not None and coverage.method == "expected":
        truth = f"expected: mean over all seeds, seen and never ± {compact(coverage.error)}"
    elif coverage is not None:
        truth = f"exact numbers: {coverage.method}; how often each sample comes is not counted"
    else:
        truth = "not counted: the order has to be enumerated; ask for the exact one (exact=True)"
    numbers = coverage_numbers(plan, coverage, len(epochs))
    if coverage is not None:
        seen = percent(coverage.seen / coverage.samples)
        numbers = (Number("seen", seen), Number("drawn", compact(coverage.drawn)), *numbers)
    if histogram is not None:
        numbers += (Number("most often", f"{histogram.shape[1] - 1} times"),)
    which = str(epochs[0]) if len(epochs) == 1 else f"{epochs[0]} to {epochs[-1]}"
    facts = Facts(
        view="coverage",
        question=f"Does every sample come, and how often (epoch {which})?",
        look_for="One pass over the data is one bar at 1. Look for: samples at 0 (never seen), and "
        "some that come more often than the others (repeats, padding).",
        exact=exact,
        truth=truth,
        numbers=numbers,
        plan=plan_line(plan, which),
    )
    return CoverageArrays(facts, epochs, histogram, coverage, np.array(plan.samples.lengths))


def draw_coverage(arrays: CoverageArrays, figure: Figure | None = None) -> Figure:
    """How often samples come on the left; seen and never by data set on the right."""
    rects = {"times": (0.075, 0.0, 0.50, 0.94), "sets": (0.69, 0.0, 0.28, 0.94)}
    with styled():
        figure, (times, sets) = start(figure, "coverage", rects)
        if arrays.histogram is None:
            note(times, "How often each sample comes is not counted: this would take long.")
        else:
            draw_times(times, arrays.histogram)
        label(times, "times that a sample is drawn", "samples", "how often samples come")
        if arrays.coverage is None:
            note(sets, "Not counted.")
        else:
            draw_sets(sets, arrays.coverage, arrays.lengths)
        label(sets, "part of the data set", "", "seen, and never (red, crossed)")
        return finish(figure, arrays.facts)


def draw_times(axes: Axes, histogram: Indices) -> None:
    shown, names = merge_times(histogram)
    places = np.arange(shown.shape[1])
    lower = np.zeros(len(places))
    order = np.argsort(-shown.sum(axis=1), kind="stable")[:BARS]
    for j in np.sort(order).tolist():
        axes.bar(
            places, shown[j], 0.7, lower, color=colour(j), hatch=hatch(j), edgecolor=PANEL,
            lw=0, label=f"data set {j}",
        )  # fmt: skip
        lower += shown[j]
    rest = shown.sum(axis=0) - lower
    if rest.any():
        axes.bar(places, rest, 0.7, lower, color=FAINT, label=f"{len(shown) - BARS} others")
    for place, number in zip(places.tolist(), shown.sum(axis=0).tolist()):
        if number:
            ink = WRONG if names[place] == "0" else FAINT
            axes.text(place, number, f"{number:,}", ha="center", va="bottom", fontsize=7, color=ink)
    axes.set_xlim(-0.6, len(places) - 0.4)
    axes.set_ylim(0, 1.2 * max(1, int(shown.sum(axis=0).max())))
    axes.set_xticks(places, names)
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: compact(value)))
    if len(shown) > 1:
        axes.legend(loc="upper right", ncols=2, borderpad=0.1)


def merge_times(histogram: Indices) -> tuple[Indices, list[str]]:
    """Counts and names of at most `TIMES` bars; 0 stays by itself."""
    most = histogram.shape[1] - 1
    if most < TIMES:
        padded = np.pad(histogram, ((0, 0), (0, max(0, 2 - most))))
        return padded, [str(k) for k in range(padded.shape[1])]
    edges = np.unique(np.round(np.linspace(1, most + 1, TIMES)).astype(int))
    parts = [histogram[:, a:b].sum(1, keepdims=True) for a, b in pairwise(edges)]
    names = [f"{a}" if b - a == 1 else f"{a}-{b - 1}" for a, b in pairwise(edges)]
    return np.concatenate([histogram[:, :1], *parts], axis=1), ["0", *names]


def draw_sets(axes: Axes, coverage: Coverage, lengths: Indices) -> None:
    never = coverage.never_of / np.maximum(1, lengths)
    order = np.argsort(-never, kind="stable")[:BARS]  # those that lack most
    shown = np.sort(order)
    places = np.arange(len(shown))
    colours = [colour(j) for j in shown.tolist()]
    hatches = [hatch(j) for j in shown.tolist()]
    seen = 1 - never[shown]
    axes.barh(places, seen, 0.6, color=colours, hatch=hatches, edgecolor=PANEL, linewidth=0)
    axes.barh(places, never[shown], 0.6, seen, color=WRONG, hatch="xx", edgecolor=PANEL, lw=0)
    for place, j in zip(places.tolist(), shown.tolist()):
        words = f"{coverage.seen_of[j]:,} of {lengths[j]:,} seen"
        ink = WRONG if coverage.never_of[j] else FAINT
        axes.text(0, place + 0.44, words, va="center", fontsize=7, color=ink)
    axes.set_xlim(0, 1)
    axes.set_ylim(len(shown) - 0.4, -0.5)
    axes.set_yticks(places, [f"data set {j}" for j in shown.tolist()])
    axes.set_xticks([0, 0.5, 1], ["0 %", "50 %", "100 %"])


def plot_coverage(
    plan: "ShardPlan",
    epochs: Chosen = None,
    *,
    exact: bool = False,
    figure: Figure | None = None,
) -> Figure:
    """How often samples come in some epochs (default: all), as a figure.

    Parameters
    ----------
    plan, epochs
        As of `compute_coverage`.
    exact : bool
        Count, however long that takes, where it does not follow from the lengths.
    figure : Figure, optional
        One of this module, to be drawn anew.
    """
    if exact:
        *_, arrays = refine_coverage(plan, epochs)
    else:
        arrays = compute_coverage(plan, epochs)
    return draw_coverage(arrays, figure)
