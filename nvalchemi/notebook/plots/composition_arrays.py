"""Which data sets the batches are of: share by step, asked and realised, where each first comes."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from nvalchemi.data.datapipes.order import Indices
from nvalchemi.notebook.plots.facts import Facts, Number, percent, plan_line
from nvalchemi.notebook.plots.looked_at import (
    QUICK,
    LookedAt,
    choose,
    everything,
    in_parts,
    part_of,
)
from nvalchemi.sharding.check import FAR, SIGMAS, STRIPES
from nvalchemi.sharding.composition import (
    SpreadKind,
    asked_shares,
    batch_spread,
    count_rows,
    epoch_counts,
)
from nvalchemi.sharding.view import Chosen

if TYPE_CHECKING:
    from nvalchemi.sharding.plan import ShardPlan

COLUMNS = 96
SHOWN = 6  # data sets that have a colour of their own
SCANNED = 2**15  # draws at the beginning that are searched for each data set


@dataclass(frozen=True)
class CompositionArrays:
    """Shares of D data sets in groups of steps, and in the epoch.

    Attributes
    ----------
    facts : Facts
    steps : int64 array, shape (T,)
        First step of each group.
    counts : int64 array, shape (T, D)
        Samples of each data set in each group, of the ranks looked at.
    band : float array, shape (T, D)
        How far the share of a group may be from `asked`: the most that the rule allows, or two
        standard deviations of a random draw.
    kind : {"exact", "bound", "standard deviation"}
    asked, realised, error : float arrays, shape (D,)
        Shares asked for, and in the whole epoch, with its standard error (0 where it is counted).
    first : int64 array, shape (D,)
        First step at which each comes; -1 where it was not found.
    searched : int
        Steps that were searched for it.
    starved : bool array, shape (D,)
        Asked for, and less than half of that.
    shown : int64 array
        Data sets with a colour of their own; the others are drawn together.
    """

    facts: Facts
    steps: Indices
    counts: Indices
    band: NDArray[np.float64]
    kind: SpreadKind
    asked: NDArray[np.float64]
    realised: NDArray[np.float64]
    error: NDArray[np.float64]
    first: Indices
    searched: int
    starved: NDArray[np.bool_]
    shown: Indices

    @property
    def shares(self) -> NDArray[np.float64]:
        """Shape (T, D)."""
        shares: NDArray[np.float64] = self.counts / np.maximum(1, self.counts.sum(1, keepdims=True))
        return shares


class Tally:
    """Counts of a composition, as windows are added."""

    def __init__(self, plan: "ShardPlan", look: LookedAt) -> None:
        self.plan, self.look = plan, look
        self.total, self.method = epoch_counts(plan, look.epoch)
        self.asked = asked_shares(plan)  # of this epoch: `epoch_counts` has told the sampler
        number = len(self.asked)
        self.columns = min(COLUMNS, len(look.steps))
        self.counts = np.zeros((self.columns, number), dtype=np.int64)
        self.batches = np.zeros(self.columns, dtype=np.int64)
        self.by_rank = np.zeros((len(look.ranks), number), dtype=np.int64)
        self.squares = np.zeros(number)  # of the batches' deviations from the share asked for
        self.variances = np.zeros(number)
        self.spread, self.kind = batch_spread(plan, self.asked, float(plan.batch_size))
        self.first, self.searched = first_steps(plan, look, self.asked)

    def add(self, places: Indices) -> None:
        look = self.look
        window = self.plan.source.window(look.steps[places], look.ranks, look.epoch)
        rows = count_rows(self.plan, window)
        column = places * self.columns // len(look.steps)
        np.add.at(self.counts, column, rows.sum(axis=1))
        sizes = rows.sum(axis=2, keepdims=True)
        self.batches += np.bincount(column, (sizes[..., 0] > 0).sum(1), self.columns).astype(int)
        self.by_rank += rows.sum(axis=0)
        share = self.realised()
        self.squares += ((rows - sizes * share) ** 2).sum(axis=(0, 1))
        self.variances += (sizes * share * (1 - share)).sum(axis=(0, 1))

    def realised(self) -> NDArray[np.float64]:
        counts = self.counts.sum(axis=0) if self.method == "sampled" else self.total
        shares: NDArray[np.float64] = counts / max(1, counts.sum())
        return shares

    def arrays(self, done: int) -> CompositionArrays:
        look = part_of(self.look, done)
        realised, drawn = self.realised(), max(1, int(self.counts.sum()))
        sampled = self.method == "sampled" and not (look.exact and look.whole)
        error = np.sqrt(realised * (1 - realised) / drawn) * sampled
        counted = drawn if self.method == "sampled" else int(self.total.sum())
        starved = starved_sets(self.asked, realised, counted)
        band = self.band()
        worst = float(np.sqrt(0.25 / drawn))
        facts = Facts(
            view="composition",
            question="Is each batch mixed as asked?",
            look_for="Look for: shares that leave their band, stripes (batches of one data set), "
            "drift, a data set that comes late or never.",
            exact=look.exact,
            truth=look.truth(f"shares ± {percent(worst)}"),
            numbers=self.numbers(band, realised, starved),
            plan=plan_line(self.plan, look.epoch),
        )
        return CompositionArrays(
            facts=facts,
            steps=look_starts(self.look.steps, self.columns),
            counts=self.counts.copy(),
            band=band,
            kind=self.kind,
            asked=self.asked,
            realised=realised,
            error=error,
            first=self.first,
            searched=self.searched,
            starved=starved,
            shown=choose_sets(self.asked, realised, starved),
        )

    def band(self) -> NDArray[np.float64]:
        """Of the shares of each column."""
        drawn = np.maximum(1, self.counts.sum(axis=1))[:, None]
        if self.kind == "standard deviation":
            of_one = self.spread / np.sqrt(self.plan.batch_size)
            random: NDArray[np.float64] = 2 * of_one / np.sqrt(drawn)
            return random
        # batches of all ranks in one step are one run of positions, others are runs by themselves
        steps = len(self.look.steps)
        runs = self.batches
        if len(self.look.ranks) == self.plan.world_size:
            runs = np.bincount(np.arange(steps) * self.columns // steps, minlength=self.columns)
        bound: NDArray[np.float64] = self.spread * runs[:, None] / drawn
        return bound

    def numbers(
        self, band: NDArray[np.float64], realised: NDArray[np.float64], starved: NDArray[np.bool_]
    ) -> tuple[Number, ...]:
        drawn = self.counts.sum(axis=1)
        shares = self.counts[drawn > 0] / drawn[drawn > 0, None]
        allowed = band[drawn > 0]
        if self.kind == "standard deviation":
            allowed = allowed / 2 * SIGMAS
        # the last step may be short: then its share may be off by a sample
        outside = (np.abs(shares - self.asked) > allowed + 1 / drawn[drawn > 0, None]).any(axis=1)
        far = int(np.abs(realised - self.asked).argmax())
        off = float(realised[far] - self.asked[far])
        variance = float(self.squares.sum() / self.variances.sum()) if self.variances.any() else 0.0
        missing = int(((self.first < 0) & (self.asked > 0)).sum())
        return (
            Number("starved data sets", str(int(starved.sum())), bool(starved.any())),
            Number(
                f"largest gap (data set {far})",
                f"{'+' if off >= 0 else '-'}{percent(abs(off))}",
                bool(starved[far]),
            ),
            Number("groups of steps out of band", f"{outside.sum()}", bool(outside.any())),
            Number("variance (random: 1)", f"{variance:.2f}", variance > STRIPES),
            Number("ranks mixed otherwise", str(self.ranks_off()), self.ranks_off() > 0),
            Number(
                f"sets not in first {self.searched:,} steps",
                str(missing),
                bool((starved & (self.first < 0)).any()),
            ),
        )

    def ranks_off(self) -> int:
        """Ranks whose mixture is not that of the others, as the check of a plan counts."""
        got = self.by_rank.astype(np.float64)
        expected = got.sum(1, keepdims=True) * (got.sum(0) / max(1.0, got.sum()))
        off = np.abs(got - expected)
        wrong = (off > FAR * expected) & (off > SIGMAS * np.sqrt(np.maximum(expected, 1)))
        return int(wrong.any(axis=1).sum())


def starved_sets(
    asked: NDArray[np.float64], realised: NDArray[np.float64], drawn: int
) -> NDArray[np.bool_]:
    """As the check of a plan: less than half of what was asked for, and not by chance."""
    wish, count = asked * drawn, realised * drawn
    few = (count < FAR * wish) & (wish - count > SIGMAS * np.sqrt(wish))
    starved: NDArray[np.bool_] = few | ((asked > 0) & (realised == 0))
    return starved


def first_steps(
    plan: "ShardPlan", look: LookedAt, asked: NDArray[np.float64]
) -> tuple[Indices, int]:
    """First step of each data set among the first steps of the ranks looked at."""
    ranks = look.ranks
    number = max(1, SCANNED // (len(ranks) * plan.batch_size))
    steps = np.arange(min(number, int(plan.source.steps(ranks, look.epoch).max())))
    rows = count_rows(plan, plan.source.window(steps, ranks, look.epoch)).sum(axis=1)
    return np.where((rows > 0).any(axis=0), (rows > 0).argmax(axis=0), -1), len(steps)


def look_starts(steps: Indices, groups: int) -> Indices:
    """First step of each of equal groups."""
    return steps[-(-np.arange(groups) * len(steps) // groups)]


def choose_sets(
    asked: NDArray[np.float64], realised: NDArray[np.float64], starved: NDArray[np.bool_]
) -> Indices:
    """Starved data sets, then the largest ones."""
    order = np.lexsort((-asked, ~starved))
    return np.sort(order[: SHOWN if len(order) > SHOWN + 1 else SHOWN + 1])


def compute_composition(
    plan: "ShardPlan",
    epoch: int = 0,
    *,
    ranks: Chosen = None,
    steps: Chosen = None,
    draws: int = QUICK,
) -> CompositionArrays:
    """Shares of the data sets, from at most about `draws` draws.

    Parameters
    ----------
    plan : ShardPlan
    epoch : int
    ranks : int or sequence of int, optional
        One rank, or those whose batches are taken together; by default all.
    steps : int, sequence of int or slice, optional
    draws : int

    Raises
    ------
    ValueError, TypeError
        For what the plan does not have, and an order that would take long to draw.
    """
    tally = Tally(plan, choose(plan, epoch, ranks, steps, draws=draws))
    tally.add(np.arange(len(tally.look.steps)))
    return tally.arrays(len(tally.look.steps))


def refine_composition(
    plan: "ShardPlan", epoch: int = 0, *, ranks: Chosen = None, steps: Chosen = None
) -> Iterator[CompositionArrays]:
    """As `compute_composition`, of more and more draws; the last is exact."""
    look = everything(plan, epoch, ranks, steps)
    tally, done = Tally(plan, look), 0
    for places, shown in in_parts(plan, look):
        tally.add(places)
        done += len(places)
        if shown:
            yield tally.arrays(done)
