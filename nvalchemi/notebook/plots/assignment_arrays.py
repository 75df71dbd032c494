"""Which rank takes which samples at which step: cells of samples, or exact counts in tiles."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from nvalchemi.data.datapipes.order import Indices
from nvalchemi.notebook.plots.facts import Facts, Number, audit, compact, plan_line
from nvalchemi.notebook.plots.looked_at import (
    QUICK,
    LookedAt,
    choose,
    everything,
    in_parts,
    part_of,
)
from nvalchemi.sharding.composition import asked_shares
from nvalchemi.sharding.view import Chosen

if TYPE_CHECKING:
    from nvalchemi.sharding.plan import ShardPlan

CELLS = 4096  # samples that are drawn one by one
TILES, FEWEST, ROWS = 192, 24, 64
A_TILE = 8  # draws that a tile should have in each row
SIGMAS = 5.0
QUESTION = "Which rank takes which samples?"


@dataclass(frozen=True)
class AssignmentArrays:
    """Who takes what, sample by sample or in tiles of neighbouring samples.

    Attributes
    ----------
    facts : Facts
    ranks, steps : int64 arrays, shapes (R,) and (S,)
        Looked at.
    cells : int64 array, shape (S, R, B), or None
        Every sample by itself, -1 where there is none; None where there are too many.
    datasets : int64 array, shape (S, R, B), or None
        The data set of each.
    repeated : bool array, shape (S, R, B), or None
        Whether it came at an earlier step or a lower rank of those looked at.
    number_of_samples : int
    samples : (int, int)
        First sample shown, and the end.
    tiles : int64 array, shape (T + 1,)
        First sample of each tile, and the end.
    by_rank, by_step : int64 arrays, shapes (R', T) and (S', T)
        Draws of each tile by groups of ranks, and by groups of steps.
    expected_by_rank, expected_by_step : float arrays of the same shapes
        By the shares asked for, spread evenly over each data set.
    """

    facts: Facts
    ranks: Indices
    steps: Indices
    cells: Indices | None
    datasets: Indices | None
    repeated: NDArray[np.bool_] | None
    number_of_samples: int
    samples: tuple[int, int]
    tiles: Indices
    by_rank: Indices
    by_step: Indices
    expected_by_rank: NDArray[np.float64]
    expected_by_step: NDArray[np.float64]

    @property
    def z_by_rank(self) -> NDArray[np.float64]:
        """Found minus expected, in square roots of the expected; nan where nothing is expected."""
        return deviation(self.by_rank, self.expected_by_rank)

    @property
    def z_by_step(self) -> NDArray[np.float64]:
        return deviation(self.by_step, self.expected_by_step)


def deviation(found: Indices, expected: NDArray[np.float64]) -> NDArray[np.float64]:
    with np.errstate(divide="ignore", invalid="ignore"):
        z: NDArray[np.float64] = (found - expected) / np.sqrt(expected)
    # a draw where nothing is expected is as far off as the scale goes
    z[(expected == 0) & (found > 0)] = np.inf
    z[(expected == 0) & (found == 0)] = np.nan
    return z


class Tally:
    """Counts of an assignment, as windows are added."""

    def __init__(self, plan: "ShardPlan", look: LookedAt, samples: tuple[int, int] | None) -> None:
        self.plan, self.look = plan, look
        self.audit = audit(plan, look.epoch)
        plan.source.dealing(look.epoch)  # tells the sampler of which epoch the shares are asked
        self.shares = asked_shares(plan)
        self.low, self.high = check_range(samples, len(plan.samples))
        length = self.high - self.low
        self.rank_rows = min(ROWS, len(look.ranks))
        self.step_rows = min(ROWS, len(look.steps))
        draws = len(look.ranks) * len(look.steps) * plan.batch_size
        # fewer draws in a tile would make a picture of noise
        enough = draws // (A_TILE * max(self.rank_rows, self.step_rows))
        number = min(length, max(FEWEST, min(TILES, enough)))
        self.tiles = self.low - (-np.arange(number + 1) * length // number)
        self.by_rank = np.zeros((self.rank_rows, number), dtype=np.int64)
        self.by_step = np.zeros((self.step_rows, number), dtype=np.int64)
        self.drawn_by_rank = np.zeros(self.rank_rows, dtype=np.int64)
        self.drawn_by_step = np.zeros(self.step_rows, dtype=np.int64)
        self.orders = [0] * len(look.ranks)

    def add(self, places: Indices) -> Indices:
        """Count the draws of some of the steps, and give their window."""
        look = self.look
        window = self.plan.source.window(look.steps[places], look.ranks, look.epoch)
        step, rank, _ = np.nonzero(window >= 0)
        drawn = window[window >= 0]
        row = rank * self.rank_rows // len(look.ranks)
        line = places[step] * self.step_rows // len(look.steps)
        self.drawn_by_rank += np.bincount(row, minlength=self.rank_rows)
        self.drawn_by_step += np.bincount(line, minlength=self.step_rows)
        inside = (drawn >= self.low) & (drawn < self.high)
        number = len(self.tiles) - 1
        tile = (drawn[inside] - self.low) * number // (self.high - self.low)
        for counts, group in ((self.by_rank, row), (self.by_step, line)):
            cells = group[inside] * number + tile
            counts += np.bincount(cells, minlength=counts.size).reshape(counts.shape)
        for column in range(len(look.ranks)):
            own = np.ascontiguousarray(window[:, column])
            empty = (own < 0).all()
            self.orders[column] = hash((self.orders[column], b"" if empty else own.tobytes()))
        return window

    def arrays(self, done: int, window: Indices | None = None) -> AssignmentArrays:
        look = part_of(self.look, done)
        share = self.share_of_tiles()
        by_rank = self.drawn_by_rank[:, None] * share
        by_step = self.drawn_by_step[:, None] * share
        few = window is not None and window.size <= CELLS and look.exact
        cells = window if few else None
        expected = float(np.median(by_rank[by_rank > 0])) if (by_rank > 0).any() else 0.0
        error = f"{compact(expected)} expected in a tile, chance ± {compact(np.sqrt(expected))}"
        facts = Facts(
            view="assignment",
            question=QUESTION,
            look_for=LOOK_FOR_CELLS if few else LOOK_FOR_TILES,
            exact=look.exact,
            truth=look.truth(error) + ("" if few or not look.exact else f"; {error}"),
            numbers=(*self.audit, self.alike(), *self.clumping(by_rank, by_step, look.fraction)),
            plan=plan_line(self.plan, look.epoch),
        )
        return AssignmentArrays(
            facts=facts,
            ranks=look.ranks,
            steps=self.look.steps,
            cells=cells,
            datasets=None if cells is None else self.plan.samples.dataset_of(cells),
            repeated=None if cells is None else came_before(cells),
            number_of_samples=len(self.plan.samples),
            samples=(self.low, self.high),
            tiles=self.tiles,
            by_rank=self.by_rank.copy(),
            by_step=self.by_step.copy(),
            expected_by_rank=by_rank,
            expected_by_step=by_step,
        )

    def share_of_tiles(self) -> NDArray[np.float64]:
        """Part of all draws that each tile should have."""
        share = np.zeros(len(self.tiles) - 1)
        for first, end, asked in zip(
            self.plan.samples.offsets[:-1], self.plan.samples.offsets[1:], self.shares
        ):
            if end > first:
                share += asked * np.diff(np.clip(self.tiles, first, end)) / (end - first)
        return share

    def alike(self) -> Number:
        """Ranks whose every batch is that of another rank."""
        empty = hash_of_nothing(self.orders)
        orders = [order for order in self.orders if order not in empty]
        same = len(orders) - sum(orders.count(order) == 1 for order in set(orders))
        return Number("ranks alike", f"{same:,}", same > 0)

    def clumping(
        self, by_rank: NDArray[np.float64], by_step: NDArray[np.float64], fraction: float
    ) -> tuple[Number, ...]:
        """The larger variance of both pictures, over that of a random deal."""
        pairs = ((self.by_rank, by_rank), (self.by_step, by_step))
        ratios = [variance_ratio(*pair, fraction) for pair in pairs]
        known = [ratio for ratio in ratios if ratio is not None]
        if not known:
            return ()
        ratio, highest = max(known, key=lambda pair: pair[0] / pair[1])
        local = bool(getattr(getattr(self.plan.source, "sampler", None), "locality", 0))
        wrong = ratio > highest and not local and self.plan.source.shuffled is not False
        return (Number("clumping (random: 1)", f"{ratio:.3g}", wrong),)


def variance_ratio(
    found: Indices, expected: NDArray[np.float64], fraction: float
) -> tuple[float, float] | None:
    """Variance of the tiles over that of a random deal, and what chance does not exceed."""
    rows, tiles = expected.shape
    free = (tiles - 1) * (rows - fraction)  # of a whole epoch each tile has its fixed number
    if free < 10 or expected.min() < 1:
        return None
    ratio = float(((found - expected) ** 2 / expected).sum() / free)
    # where samples come more than once a tile's number is less fixed
    return ratio, rows / (rows - fraction) * (1 + SIGMAS * float(np.sqrt(2 / free)))


LOOK_FOR_CELLS = (
    "Each cell is a sample. Look for: rows that are alike, crosses (samples that came before), "
    "columns that end early."
)
LOOK_FOR_TILES = (
    "Even ranks and a good shuffle are flat grey. Look for: stripes, diagonals, blocks; blue: "
    "fewer draws than expected, orange: more."
)


def hash_of_nothing(orders: list[int]) -> set[int]:
    """Hashes of ranks without any sample, after one part or many."""
    value, found = 0, set()
    for _ in range(64):
        value = hash((value, b""))
        found.add(value)
    return found & set(orders)


def check_range(samples: tuple[int, int] | None, number: int) -> tuple[int, int]:
    low, high = (0, number) if samples is None else (int(samples[0]), int(samples[1]))
    if not 0 <= low < high <= number:
        raise ValueError(
            f"samples must be (first, end) with 0 <= first < end <= {number}, got {samples!r}"
        )
    return low, high


def came_before(cells: Indices) -> NDArray[np.bool_]:
    flat = cells.ravel()
    before = np.ones(flat.size, dtype=bool)
    before[np.unique(flat, return_index=True)[1]] = False
    return (before & (flat >= 0)).reshape(cells.shape)


def compute_assignment(
    plan: "ShardPlan",
    epoch: int = 0,
    *,
    ranks: Chosen = None,
    steps: Chosen = None,
    samples: tuple[int, int] | None = None,
    draws: int = QUICK,
) -> AssignmentArrays:
    """Who takes what, from at most about `draws` draws.

    Parameters
    ----------
    plan : ShardPlan
    epoch : int
    ranks, steps : int, sequence of int or slice, optional
        To zoom; by default all.
    samples : (int, int), optional
        First sample and the end, to zoom; by default all.
    draws : int

    Raises
    ------
    ValueError, TypeError
        For what the plan does not have, and an order that would take long to draw.
    """
    tally = Tally(plan, choose(plan, epoch, ranks, steps, draws=draws), samples)
    number = len(tally.look.steps)
    return tally.arrays(number, tally.add(np.arange(number)))


def refine_assignment(
    plan: "ShardPlan",
    epoch: int = 0,
    *,
    ranks: Chosen = None,
    steps: Chosen = None,
    samples: tuple[int, int] | None = None,
) -> Iterator[AssignmentArrays]:
    """As `compute_assignment`, of more and more draws; the last is exact."""
    look = everything(plan, epoch, ranks, steps)
    tally, done = Tally(plan, look, samples), 0
    for places, shown in in_parts(plan, look):
        window = tally.add(places)
        done += len(places)
        if shown:
            yield tally.arrays(done, window if done == len(places) else None)
