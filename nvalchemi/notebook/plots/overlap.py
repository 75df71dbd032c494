"""Which samples two ranks share: a matrix of ranks, or of blocks of ranks where there are many."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from numpy.typing import NDArray

from nvalchemi.data.datapipes.order import Indices
from nvalchemi.notebook.plots.facts import Facts, Number, percent, plan_line
from nvalchemi.notebook.plots.frame import finish, image, label, note, spread_ticks, start
from nvalchemi.notebook.plots.looked_at import QUICK, affordable_ranks, one_of_each
from nvalchemi.notebook.style import EMPTY, SEQUENTIAL, TEXT, styled
from nvalchemi.sharding.check_ranks import SHARED
from nvalchemi.sharding.coverage import COUNT_LIMIT
from nvalchemi.sharding.overlap import Overlap, count_pairs, dealt_once, measure_overlap
from nvalchemi.sharding.sources import as_indices
from nvalchemi.sharding.view import Chosen

if TYPE_CHECKING:
    from nvalchemi.sharding.plan import ShardPlan

BLOCKS = 64
# shares at which the colour changes, in all pictures: a padded sample must not look like a twin
LEVELS = (0.0, 0.0001, 0.001, 0.01, 0.1, 0.5, 1.0)
NAMES = ("none", "to 0.01 %", "to 0.1 %", "to 1 %", "to 10 %", "to 50 %", "more", "same samples")
COLOURS = ListedColormap([EMPTY, *(SEQUENTIAL(x) for x in np.linspace(0.05, 1.0, len(NAMES) - 1))])
NUMBERED = 16  # ranks whose cells have room for a number


@dataclass(frozen=True)
class OverlapArrays:
    """Samples that ranks share, as parts of the smaller of both.

    Attributes
    ----------
    facts : Facts
    ranks : int64 array, shape (R,)
        Looked at.
    share : float array, shape (R, R)
        Part of its samples that a rank shares with another; 0 on the diagonal.
    shared : int64 array, shape (R, R)
        As numbers of different samples; on the diagonal those that a rank sees.
    blocks : float array, shape (G, G)
        The highest share in each block of pairs of ranks; nan where a block has no pair.
    first_ranks : int64 array, shape (G,)
        First rank of each block.
    """

    facts: Facts
    ranks: Indices
    share: NDArray[np.float64]
    shared: Indices
    blocks: NDArray[np.float64]
    first_ranks: Indices


def compute_overlap(
    plan: "ShardPlan", epoch: int = 0, *, ranks: Chosen = None, draws: int = QUICK
) -> OverlapArrays:
    """Shared samples of all ranks, or of some where all would take long.

    Parameters
    ----------
    plan : ShardPlan
    epoch : int
    ranks : sequence of int or slice, optional
    draws : int
        How many samples are looked at, about.

    Raises
    ------
    ValueError, TypeError
        For ranks that the plan does not have, and an epoch without steps.
    """
    asked = as_indices("ranks", ranks, plan.world_size)
    chosen = affordable_ranks(plan, asked, draws)
    own = samples_of_a_rank(plan, chosen, epoch)
    dealing = plan.source.dealing(epoch)
    if dealing is not None and dealing.even and dealt_once(dealing, plan.samples.lengths):
        by_arithmetic = dealing.unit == 1 and not plan.source.cheap
        if not by_arithmetic and 4 * plan.batch_size * len(chosen) > draws // 2:
            chosen = one_of_each(chosen, BLOCKS)
        return assemble(plan, measure_overlap(plan, epoch, chosen), asked, "")
    if own * len(chosen) <= max(draws, COUNT_LIMIT if not plan.source.cheap else 0):
        return assemble(plan, measure_overlap(plan, epoch, chosen), asked, "")
    chosen = one_of_each(chosen, BLOCKS)
    return of_some_steps(plan, epoch, chosen, asked, draws // 2)


def refine_overlap(
    plan: "ShardPlan", epoch: int = 0, *, ranks: Chosen = None
) -> Iterator[OverlapArrays]:
    """As `compute_overlap`, of all ranks and steps, however long that takes."""
    asked = as_indices("ranks", ranks, plan.world_size)
    samples_of_a_rank(plan, asked, epoch)
    yield assemble(plan, measure_overlap(plan, epoch, asked), asked, "")


def samples_of_a_rank(plan: "ShardPlan", ranks: Indices, epoch: int) -> int:
    if not ranks.size:
        raise ValueError(f"ranks must name at least one of the {plan.world_size} ranks, got none")
    steps = int(plan.source.steps(ranks, epoch).max(initial=0))
    if not steps:
        raise ValueError(
            f"a picture needs at least one batch: epoch {epoch} of the plan has no steps"
        )
    return steps * plan.batch_size


def of_some_steps(
    plan: "ShardPlan", epoch: int, ranks: Indices, asked: Indices, draws: int
) -> OverlapArrays:
    """Samples shared within some of the steps: fewer than in the epoch, equal where ranks are."""
    total = int(plan.source.steps(ranks, epoch).max())
    steps = one_of_each(np.arange(total), max(1, draws // (len(ranks) * plan.batch_size)))
    window = plan.source.window(steps, ranks, epoch)
    own = [np.unique(column[column >= 0]) for column in np.moveaxis(window, 1, 0)]
    overlap = Overlap(epoch, ranks, count_pairs(own), len(ranks) == plan.world_size, "counted")
    part = f"only samples that ranks share within {len(steps):,} of {total:,} steps"
    return assemble(plan, overlap, asked, part)


def assemble(plan: "ShardPlan", overlap: Overlap, asked: Indices, part: str) -> OverlapArrays:
    share = overlap.share
    np.fill_diagonal(share, 0.0)
    number = len(overlap.ranks)
    exact = number == len(asked) and not part
    if exact:
        truth = f"exact: {overlap.method}, all pairs of {number:,} ranks"
    else:
        pairs = number * (number - 1) / max(1, len(asked) * (len(asked) - 1))
        about = part or "each pair exactly, other pairs are not looked at"
        truth = f"sample of {percent(pairs)}: {number:,} of {len(asked):,} ranks; {about}"
    starts, blocks = in_blocks(share)
    return OverlapArrays(
        facts=Facts(
            view="overlap",
            question="Do two ranks train on the same samples?",
            look_for="Each rank should have samples of its own: an empty picture but for the "
            "diagonal. Look for: bright cells and blocks.",
            exact=exact,
            truth=truth,
            numbers=overlap_numbers(plan, overlap, share),
            plan=plan_line(plan, overlap.epoch),
        ),
        ranks=overlap.ranks,
        share=share,
        shared=overlap.matrix,
        blocks=blocks,
        first_ranks=overlap.ranks[starts],
    )


def overlap_numbers(
    plan: "ShardPlan", overlap: Overlap, share: NDArray[np.float64]
) -> tuple[Number, ...]:
    a, b, most = overlap.most
    pairs = np.triu(np.ones(share.shape, dtype=bool), 1)
    same = int((share[pairs] == 1).sum())
    some = int((share[pairs] > SHARED).sum())
    dealing = plan.source.dealing(overlap.epoch)
    # samples that come more than once by the caller's wish meet on any two ranks
    meant = dealing is not None and not dealt_once(dealing, plan.samples.lengths)
    own = np.diagonal(overlap.matrix)
    return (
        Number("pairs with the same samples", f"{same:,}", same > 0),
        Number(f"pairs that share over {percent(SHARED)}", f"{some:,}", some > 0 and not meant),
        Number("most shared", percent(most), most > SHARED and not meant),
        Number("by ranks", f"{a} and {b}" if len(own) > 1 else "-"),
        Number("samples of a rank", f"{own.min():,} to {own.max():,}"),
    )


def in_blocks(share: NDArray[np.float64]) -> tuple[Indices, NDArray[np.float64]]:
    """First ranks of the blocks, and the highest share in each, without the diagonal."""
    number = len(share)
    groups = min(BLOCKS, number)
    starts = -(-np.arange(groups) * number // groups)
    off = np.where(np.eye(number, dtype=bool), -1.0, share)
    blocks = np.maximum.reduceat(np.maximum.reduceat(off, starts, axis=0), starts, axis=1)
    return starts, np.where(blocks < 0, np.nan, blocks)


def level_of(share: NDArray[np.float64]) -> NDArray[np.float64]:
    """Number of the colour; nan stays."""
    level = np.searchsorted(LEVELS, share, side="left").astype(np.float64)
    level[share >= 1.0] = len(LEVELS)
    level[np.isnan(share)] = np.nan
    return level


def draw_overlap(arrays: OverlapArrays, figure: Figure | None = None) -> Figure:
    """The matrix, and the key of its fixed colours."""
    rects = {"matrix": (0.075, 0.0, 0.56, 0.97), "key": (0.69, 0.0, 0.05, 0.97)}
    with styled():
        figure, (matrix, key) = start(figure, "overlap", rects)
        if len(arrays.ranks) < 2:
            note(matrix, "One rank has nobody to share samples with.")
            label(matrix, "rank", "rank")
        else:
            draw_matrix(matrix, arrays)
        levels = np.arange(len(NAMES), dtype=np.float64)[::-1, None]
        image(key, levels, (0, len(NAMES) - 1), COLOURS)
        key.set_xticks([])
        key.set_yticks(np.arange(len(NAMES)) + 0.5, list(NAMES[::-1]))
        key.yaxis.tick_right()
        label(key, "", "", "part of a rank's samples")
        return finish(figure, arrays.facts)


def draw_matrix(axes: Axes, arrays: OverlapArrays) -> None:
    levels = level_of(arrays.blocks)
    image(axes, levels, (0, len(NAMES) - 1), COLOURS)
    axes.set_xticks(*spread_ticks(arrays.first_ranks))
    axes.set_yticks(*spread_ticks(arrays.first_ranks))
    group = len(arrays.ranks) / len(arrays.blocks)
    blocks = "" if group == 1 else f" (blocks of {group:.3g}, the highest share of each)"
    words = ["white: the rank itself"] if np.isnan(arrays.blocks).any() else []
    if len(arrays.ranks) <= NUMBERED:
        words.append("numbers: samples that both have")
        for a, b in np.argwhere(~np.isnan(arrays.blocks)).tolist():
            bright = levels[a, b] == 0 or levels[a, b] >= 4
            number = f"{arrays.shared[a, b]:,}"
            ink = TEXT if bright else EMPTY
            axes.text(b + 0.5, a + 0.5, number, ha="center", va="center", color=ink, fontsize=7)
    elif (levels >= 5).any():
        words.append("crosses: over 10 % shared")
        rows, columns = np.nonzero(levels >= 5)
        axes.scatter(columns + 0.5, rows + 0.5, s=8, marker="x", c=TEXT, linewidths=0.6)
    label(axes, f"rank{blocks}", "rank", "; ".join(words))


def plot_overlap(
    plan: "ShardPlan",
    epoch: int = 0,
    *,
    ranks: Chosen = None,
    exact: bool = False,
    figure: Figure | None = None,
) -> Figure:
    """Which samples each two ranks share in an epoch, as a figure.

    Parameters
    ----------
    plan, epoch, ranks
        As of `compute_overlap`.
    exact : bool
        Look at all ranks and steps, however long that takes.
    figure : Figure, optional
        One of this module, to be drawn anew.
    """
    if exact:
        *_, arrays = refine_overlap(plan, epoch, ranks=ranks)
    else:
        arrays = compute_overlap(plan, epoch, ranks=ranks)
    return draw_overlap(arrays, figure)
