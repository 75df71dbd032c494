"""What is seen, seen again and never seen when another plan goes on in the middle of an epoch."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from numpy.typing import NDArray

from nvalchemi.data.datapipes.order import Indices
from nvalchemi.data.datapipes.weights import check_integer
from nvalchemi.notebook.plots.facts import (
    NOT_COUNTED,
    Facts,
    Number,
    compact,
    percent,
    plan_line,
)
from nvalchemi.notebook.plots.frame import finish, id_ticks, image, label, note, start
from nvalchemi.notebook.style import HATCHES, PALETTE, PANEL, TEXT, WRONG, styled
from nvalchemi.sharding.coverage import COUNT_LIMIT
from nvalchemi.sharding.diff import Resume, measure_resume

if TYPE_CHECKING:
    from nvalchemi.sharding.plan import ShardPlan

TILES = 192
CELLS = 4096  # samples that are drawn one by one
STATES = ("before the stop", "after it", "again", "never")
COLOURS = (PALETTE[0], PALETTE[4], PALETTE[1], WRONG)


@dataclass(frozen=True)
class ResumeArrays:
    """Samples before and after a change of plans.

    Attributes
    ----------
    facts : Facts
    world_sizes : (int, int)
        Ranks before and after.
    resume : Resume or None
        As `ShardPlan.diff` counts; None where counting takes long.
    counts : int64 array, shape (4,), or None
        Samples seen only before the stop, only after it, in both, and in neither although the
        first plan's epoch has them.
    states : int8 array, shape (N,), or None
        The same for each sample (-1: not in the epoch); None where there are more than 4096.
    tiles : int64 array, shape (T + 1,)
        First sample of each tile, and the end.
    by_tile : int64 array, shape (T, 4), or None
        The counts in each tile, where the samples were counted one by one.
    """

    facts: Facts
    world_sizes: tuple[int, int]
    resume: Resume | None
    counts: Indices | None
    states: NDArray[np.int8] | None
    tiles: Indices
    by_tile: Indices | None


def compute_resume(
    plan: "ShardPlan",
    other: "ShardPlan",
    epoch: int = 0,
    *,
    stop: int,
    start: int | None = None,
) -> ResumeArrays:
    """What becomes of each sample when `other` goes on where `plan` stops.

    Parameters
    ----------
    plan, other : ShardPlan
        Before and after the stop, over the same samples.
    epoch : int
    stop : int
        Steps that `plan` has done.
    start : int, optional
        Step at which `other` begins; by default where as many samples are consumed.

    Raises
    ------
    ValueError, TypeError
        For plans over other samples, steps that a plan does not have, and a missing `start` where
        the samples consumed are no whole number of steps.
    """
    epoch = check_plans(plan, other, epoch)
    small = all(few_draws(one, epoch) for one in (plan, other))
    if not small and not same_order(plan, other, epoch):
        return not_counted(plan, other, epoch)
    resume = measure_resume(plan, other, epoch, stop, start)
    states = states_of(plan, other, epoch, resume) if small else None
    return assemble(plan, other, epoch, resume, states)


def refine_resume(
    plan: "ShardPlan",
    other: "ShardPlan",
    epoch: int = 0,
    *,
    stop: int,
    start: int | None = None,
) -> Iterator[ResumeArrays]:
    """As `compute_resume`, counted however long that takes."""
    epoch = check_plans(plan, other, epoch)
    resume = measure_resume(plan, other, epoch, stop, start)
    small = all(few_draws(one, epoch) for one in (plan, other))
    states = states_of(plan, other, epoch, resume) if small else None
    yield assemble(plan, other, epoch, resume, states)


def check_plans(plan: "ShardPlan", other: "ShardPlan", epoch: int) -> int:
    if not hasattr(other, "samples"):
        raise TypeError(f"other must be a ShardPlan, got {type(other).__name__}")
    if len(plan.samples) != len(other.samples):
        raise ValueError(
            "plans can be compared over the same samples only: one has "
            f"{len(plan.samples)}, the other {len(other.samples)}"
        )
    return check_integer("epoch", epoch, 0)


def few_draws(plan: "ShardPlan", epoch: int) -> bool:
    if not plan.source.cheap and plan.source.dealing() is not None:
        return False
    return max(plan.estimated_draws, len(plan.samples)) <= COUNT_LIMIT // 4


def same_order(plan: "ShardPlan", other: "ShardPlan", epoch: int) -> bool:
    """Whether both deal out one order, so that arithmetic tells all."""
    name = plan.source.order_name(epoch)
    both = (plan.source.dealing(epoch), other.source.dealing(epoch))
    even = all(dealing is not None and dealing.even for dealing in both)
    return even and name is not None and name == other.source.order_name(epoch)


def states_of(
    plan: "ShardPlan", other: "ShardPlan", epoch: int, resume: Resume
) -> NDArray[np.int8]:
    """0 only before, 1 only after, 2 both, 3 neither, -1 not in the epoch; padding is no return."""
    number = len(plan.samples)
    before, after, whole = (np.zeros(number, dtype=bool) for _ in range(3))
    first = plan.window(None, None, epoch)
    before[present(first[: resume.stop])] = True
    whole[present(first)] = True
    rest = other.window(None, None, epoch)[resume.start :]
    after[present(rest)] = True
    dealing = other.source.dealing(epoch)
    if dealing is not None and dealing.padded and dealing.positions == number:
        again = np.arange(min(dealing.padded, resume.start * other.global_batch))
        after[other.source.order(again, epoch)] = False
    states = np.full(number, -1, dtype=np.int8)
    states[whole & ~before & ~after] = 3
    states[after & ~before] = 1
    states[before & ~after] = 0
    states[before & after] = 2
    return states


def present(window: Indices) -> Indices:
    return window[window >= 0]


def assemble(
    plan: "ShardPlan",
    other: "ShardPlan",
    epoch: int,
    resume: Resume,
    states: NDArray[np.int8] | None,
) -> ResumeArrays:
    number = len(plan.samples)
    tiles = -(-np.arange(min(TILES, number) + 1) * number // min(TILES, number))
    if states is None:
        drawn = plan.source.dealing(epoch)
        whole = number if drawn is None else min(drawn.positions, drawn.emitted)
        after = whole - resume.seen - resume.never
        counts = np.array([resume.seen - resume.again, after, resume.again, resume.never])
        by_tile = None
    else:
        by_tile = np.stack([np.add.reduceat(states == state, tiles[:-1]) for state in range(4)], 1)
        counts = by_tile.sum(axis=0)
    numbers = (
        Number("steps done", f"{resume.stop:,} of {plan.num_steps(epoch):,}"),
        Number("goes on at step", f"{resume.start:,} of {other.num_steps(epoch):,}"),
        Number("seen before", f"{resume.seen:,}"),
        Number("seen after", compact(int(counts[1]))),
        Number("again", f"{resume.again:,}", resume.again > 0),
        Number("never", f"{resume.never:,}", resume.never > 0),
    )
    facts = make_facts(plan, other, epoch, True, f"exact: {resume.method}", numbers)
    few = states if number <= CELLS else None
    sizes = (plan.world_size, other.world_size)
    return ResumeArrays(facts, sizes, resume, counts, few, tiles, by_tile)


def not_counted(plan: "ShardPlan", other: "ShardPlan", epoch: int) -> ResumeArrays:
    truth = "not counted: both orders have to be enumerated; ask for the exact picture (exact=True)"
    numbers = tuple(Number(name, NOT_COUNTED) for name in ("seen before", "again", "never"))
    facts = make_facts(plan, other, epoch, False, truth, numbers)
    sizes = (plan.world_size, other.world_size)
    return ResumeArrays(facts, sizes, None, None, None, np.array([0, len(plan.samples)]), None)


def make_facts(
    plan: "ShardPlan",
    other: "ShardPlan",
    epoch: int,
    exact: bool,
    truth: str,
    numbers: tuple[Number, ...],
) -> Facts:
    return Facts(
        view="resume",
        question=f"Does an epoch go on as it should, from {plan.world_size:,} to "
        f"{other.world_size:,} ranks?",
        look_for="Each sample of the epoch should come once, before or after the stop. Look for: "
        "samples that come again (lost time), and that never come (lost data).",
        exact=exact,
        truth=truth,
        numbers=numbers,
        plan=f"{plan_line(plan, epoch)}; then {other.world_size:,} x {other.batch_size}, plan "
        f"{other.hash}",
    )


def draw_resume(arrays: ResumeArrays, figure: Figure | None = None) -> Figure:
    """All samples as a bar, and where in the data set they are."""
    rects = {"bar": (0.03, 0.78, 0.94, 0.2), "samples": (0.03, 0.0, 0.94, 0.48)}
    with styled():
        figure, (bar, samples) = start(figure, "resume", rects)
        if arrays.counts is None:
            note(bar, "Not counted: this would take long.")
        else:
            draw_bar(bar, arrays.counts)
        draw_samples(samples, arrays)
        return finish(figure, arrays.facts)


def draw_bar(axes: Axes, counts: Indices) -> None:
    total, left = max(1, int(counts.sum())), 0.0
    for state, count in enumerate(counts.tolist()):
        width = count / total
        axes.barh(
            0, width, 1, left, color=COLOURS[state], hatch=HATCHES[state], edgecolor=PANEL, lw=0
        )
        left += width
    axes.set_xlim(0, 1)
    axes.set_ylim(-0.5, 0.5)
    axes.set_yticks([])
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0 %", "25 %", "50 %", "75 %", "100 %"])
    handles = [
        Patch(facecolor=COLOURS[i], hatch=HATCHES[i], edgecolor=PANEL, label=f"{name}: {count:,}")
        for i, (name, count) in enumerate(zip(STATES, counts.tolist()))
    ]
    axes.legend(handles=handles, loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=4)
    label(axes, f"part of the samples of the epoch ({percent(1)}: {total:,})", "", "seen")


def draw_samples(axes: Axes, arrays: ResumeArrays) -> None:
    if arrays.by_tile is None:
        note(axes, "By arithmetic on one order; samples are not told one by one at this size.", 80)
        label(axes, "sample", "")
        return
    if arrays.states is not None:
        states = arrays.states.astype(np.float64)
        states[states < 0] = np.nan
        image(axes, states[None], (0, 3), ListedColormap(list(COLOURS)))
        for state, mark in ((2, "^"), (3, "x")):
            places = np.flatnonzero(arrays.states == state)
            if places.size:
                axes.scatter(places + 0.5, np.full(places.size, 0.5), s=14, marker=mark, c=TEXT)
        axes.set_xticks(*id_ticks(np.arange(len(arrays.states) + 1)))
        axes.set_yticks([])
        label(axes, "sample", "", "each sample (triangle: again, cross: never)")
        return
    places = np.arange(len(arrays.by_tile) + 1)
    lower = np.zeros(len(places))
    for state in range(4):
        part = arrays.by_tile[:, state] / np.maximum(1, arrays.by_tile.sum(axis=1))
        upper = lower + np.append(part, part[-1])
        axes.fill_between(
            places, lower, upper, step="post", facecolor=COLOURS[state], hatch=HATCHES[state],
            edgecolor=PANEL, lw=0,
        )  # fmt: skip
        lower = upper
    axes.set_xlim(0, len(arrays.by_tile))
    axes.set_ylim(0, 1)
    axes.set_yticks([0, 1], ["0", "1"])
    axes.set_xticks(*id_ticks(arrays.tiles))
    width = compact(np.diff(arrays.tiles).mean())
    label(axes, "sample", "", f"parts of each tile of {width} samples")


def plot_resume(
    plan: "ShardPlan",
    other: "ShardPlan",
    epoch: int = 0,
    *,
    stop: int,
    start: int | None = None,
    exact: bool = False,
    figure: Figure | None = None,
) -> Figure:
    """Samples seen, seen again and never seen when the ranks change in an epoch, as a figure.

    Parameters
    ----------
    plan, other, epoch, stop, start
        As of `compute_resume`.
    exact : bool
        Count, however long that takes, where the plans do not share one order.
    figure : Figure, optional
        One of this module, to be drawn anew.
    """
    if exact:
        *_, arrays = refine_resume(plan, other, epoch, stop=stop, start=start)
    else:
        arrays = compute_resume(plan, other, epoch, stop=stop, start=start)
    return draw_resume(arrays, figure)
