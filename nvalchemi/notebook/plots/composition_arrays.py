"""Which data sets the batches are of: share by step, asked and realised, where each first comes."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from nvalchemi.data.datapipes.balanced import BalancedBatchSampler
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
from nvalchemi.sharding.check import FAR, STRIPES
from nvalchemi.sharding.composition import (
    SIGMAS,
    SpreadKind,
    asked_shares,
    batch_spread,
    count_rows,
    epoch_counts,
    explained_gap,
    random_spread,
    wished_shares,
)
from nvalchemi.sharding.view import Chosen

if TYPE_CHECKING:
    from nvalchemi.sharding.plan import ShardPlan

COLUMNS = 96
SHOWN = 6  # data sets that have a colour of their own
SCANNED = 2**15  # draws at the beginning that are searched for each data set
LINES = 2.0  # standard deviations at which a line is drawn
TRIALS = 64  # random orders that tell how often chance crosses the lines
RARE = 1e-4  # so seldom that it is not put down to chance


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
    band : float array, shape (T, G - 1)
        How far each border between two of the G that are `drawn` may be from where it was asked
        for: the most that the rule allows, or two standard deviations of a random draw.
    kind : {"exact", "bound", "standard deviation"}
    asked, realised, error : float arrays, shape (D,)
        Shares asked for, and in what was asked about, with its standard error (0 where counted).
    whole : bool
        Whether that is the epoch, or only some ranks or steps of it.
    first : int64 array, shape (D,)
        First step at which each comes; -1 where it was not found.
    searched : int
        Steps that were searched for it.
    starved : bool array, shape (D,)
        Asked for, and less than half of that.
    off : bool array, shape (D,)
        Further from what was asked for than chance and rounding explain.
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
    whole: bool
    first: Indices
    searched: int
    starved: NDArray[np.bool_]
    off: NDArray[np.bool_]
    shown: Indices

    @property
    def drawn(self) -> NDArray[np.bool_]:
        """Data sets of each colour, shape (G, D)."""
        return drawn_sets(self.shown, len(self.asked))

    @property
    def shares(self) -> NDArray[np.float64]:
        """Shape (T, D)."""
        shares: NDArray[np.float64] = self.counts / np.maximum(1, self.counts.sum(1, keepdims=True))
        return shares


class Tally:
    """Counts of a composition, as windows are added."""

    def __init__(self, plan: "ShardPlan", look: LookedAt) -> None:
        self.plan, self.look = plan, look
        self.wished = wished_shares(plan) is not None
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
        if isinstance(getattr(plan.source, "sampler", None), BalancedBatchSampler):
            if self.kind == "bound" and len(look.ranks) < plan.world_size:
                self.kind = "standard deviation"  # it deals a step out by size: no rule for a rank
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

    @property
    def whole(self) -> bool:
        """Whether all of the epoch was asked about, and is counted: not the draws looked at."""
        return self.look.whole and self.method != "sampled"

    def counted(self) -> Indices:
        return self.total if self.whole else self.counts.sum(axis=0)

    def realised(self) -> NDArray[np.float64]:
        counts = self.counted()
        shares: NDArray[np.float64] = counts / max(1, counts.sum())
        return shares

    def ratio(self) -> float:
        return float(self.squares.sum() / self.variances.sum()) if self.variances.any() else 0.0

    def arrays(self, done: int) -> CompositionArrays:
        look = part_of(self.look, done)
        realised, drawn = self.realised(), max(1, int(self.counts.sum()))
        sampled = not self.whole and not look.exact
        error = np.sqrt(realised * (1 - realised) / drawn) * sampled
        starved = starved_sets(self.asked, realised, int(self.counted().sum()))
        off = self.off()
        shown = choose_sets(self.asked, realised, starved | off)
        band = self.band(shown)
        worst = float(np.sqrt(0.25 / drawn))
        facts = Facts(
            view="composition",
            question="Is each batch mixed as asked?",
            look_for="Look for: borders that leave their lines, stripes (batches of one data set), "
            "drift, a data set that comes late or never.",
            exact=look.exact,
            truth=look.truth(f"shares ± {percent(worst)}"),
            numbers=self.numbers(shown, band, starved, off),
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
            whole=look.whole,
            first=self.first,
            searched=self.searched,
            starved=starved,
            off=off,
            shown=shown,
        )

    def off(self) -> NDArray[np.bool_]:
        """As the check of a plan: where shares were asked for, and chance does not explain it."""
        counts = self.counted()
        explained = explained_gap(
            self.plan, self.look.epoch, self.asked, counts, self.whole, self.ratio()
        )
        off: NDArray[np.bool_] = np.abs(counts - self.asked * counts.sum()) > explained
        return off & self.wished

    def band(self, shown: Indices) -> NDArray[np.float64]:
        """Of the borders in each column."""
        below = sets_below(shown, len(self.asked))
        drawn = np.maximum(1, self.counts.sum(axis=1))[:, None]
        if self.kind == "standard deviation":
            size = self.plan.batch_size
            share = np.clip(below @ self.asked, 0, 1)
            of_one = random_spread(self.plan, share, size) / np.sqrt(size)
            random: NDArray[np.float64] = LINES * of_one / np.sqrt(drawn)
            return random
        # batches of all ranks in one step are one run of positions, others are runs by themselves
        steps = len(self.look.steps)
        runs = self.batches
        if len(self.look.ranks) == self.plan.world_size:
            runs = np.bincount(np.arange(steps) * self.columns // steps, minlength=self.columns)
        # what one side of a border has too much, the other one has too little
        spread = np.minimum(below @ self.spread, ~below @ self.spread)
        bound: NDArray[np.float64] = spread * runs[:, None] / drawn
        return bound

    def outside(self, shown: Indices, band: NDArray[np.float64]) -> Number:
        """Groups of steps with a border outside of its lines, beside what chance would do."""
        here = self.counts.sum(axis=1) > 0
        counts, band, below = self.counts[here], band[here], sets_below(shown, len(self.asked))
        drawn = counts.sum(axis=1)
        gap = np.abs(counts @ below.T / drawn[:, None] - below @ self.asked)
        name, columns = "groups outside the lines", len(counts)
        if self.kind != "standard deviation":
            last = (
                np.arange(columns) == columns - 1
            )  # may have a short step, and be off by a sample
            out = (gap > band + (last / drawn)[:, None] + 1e-9).any(axis=1)
            return Number(name, f"{out.sum()} of {columns}", bool(out.any()))
        number = int((gap > band).any(axis=1).sum())
        random = np.random.default_rng(0).multinomial(drawn, self.asked, (TRIALS, columns))
        crossed = np.abs(random @ below.T / drawn[:, None] - below @ self.asked) > band
        expected = float(crossed.any(axis=2).sum() / TRIALS)
        far = (gap > SIGMAS / LINES * band + 1 / drawn[:, None]).any()
        rare = at_least(number, columns, expected / columns) < RARE
        return Number(name, f"{number} of {columns}, chance {expected:.0f}", bool(far or rare))

    def numbers(
        self,
        shown: Indices,
        band: NDArray[np.float64],
        starved: NDArray[np.bool_],
        off: NDArray[np.bool_],
    ) -> tuple[Number, ...]:
        gaps = self.realised() - self.asked
        far = int(np.abs(np.where(off, gaps, 0) if off.any() else gaps).argmax())
        gap, variance = float(gaps[far]), self.ratio()
        missing = int(((self.first < 0) & (self.asked > 0)).sum())
        return (
            Number("starved data sets", str(int(starved.sum())), bool(starved.any())),
            Number(
                f"largest gap (data set {far})",
                f"{'+' if gap >= 0 else '-'}{percent(abs(gap))}",
                bool(starved[far] or off[far]),
            ),
            self.outside(shown, band),
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


def at_least(number: int, of: int, part: float) -> float:
    """Probability of so many or more, where each has probability `part`."""
    return sum(math.comb(of, k) * part**k * (1 - part) ** (of - k) for k in range(number, of + 1))


def drawn_sets(shown: Indices, number: int) -> NDArray[np.bool_]:
    """Which data sets each colour stands for, (G, D): one each, and the others together."""
    drawn = np.arange(number) == shown[:, None]
    rest = ~drawn.any(axis=0)
    return np.vstack([drawn, rest]) if rest.any() else drawn


def sets_below(shown: Indices, number: int) -> NDArray[np.bool_]:
    """Which data sets are below each border of the colours, (G - 1, D)."""
    below: NDArray[np.bool_] = np.logical_or.accumulate(drawn_sets(shown, number))[:-1]
    return below


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
    asked: NDArray[np.float64], realised: NDArray[np.float64], wrong: NDArray[np.bool_]
) -> Indices:
    """Data sets with a wrong share, then the largest ones."""
    order = np.lexsort((-asked, ~wrong))
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
