"""Work of the ranks by step: how uneven it is, what DDP loses by it, and the largest batch."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from nvalchemi.data.datapipes.balanced import BalancedBatchSampler
from nvalchemi.data.datapipes.order import Indices
from nvalchemi.notebook.plots.facts import Facts, Number, compact, percent, plan_line
from nvalchemi.notebook.plots.looked_at import (
    QUICK,
    LookedAt,
    choose,
    everything,
    in_parts,
    part_of,
)
from nvalchemi.sharding.load import LargestBatch, bound_of, find_largest, ratio_error
from nvalchemi.sharding.samples import SampleSet, summarise
from nvalchemi.sharding.view import Chosen

if TYPE_CHECKING:
    from nvalchemi.sharding.plan import ShardPlan

By = Literal["cost", "atoms", "edges"]

COLUMNS, ROWS = 96, 64
BESIDE = 2**15  # draws that are dealt out anew for a first picture: dealing takes its time
UNEVEN = 1 / 1.25  # efficiency from which on a check of a plan finds the ranks uneven
# what the balanced plan takes over from the plan's own sampler
SHARES = ("weights", "samples_per_dataset", "temperature", "epoch_policy", "num_batches")
QUANTILES = (0.0, 0.05, 0.5, 0.95, 1.0)


@dataclass(frozen=True)
class LoadArrays:
    """Work of the batches in groups of steps.

    Attributes
    ----------
    facts : Facts
    unit : str
        "atoms", "edges" or "cost".
    steps : int64 array, shape (T,)
        First step of each group.
    ranks : int64 array, shape (G,)
        First rank of each group.
    bands : float array, shape (T, 5)
        Lowest, 5 %, median, 95 % and highest work of a rank in a step of the group.
    highest : float array, shape (G, T)
        Highest work of a rank of the group in a step of the group.
    mean : float
        Of all batches looked at.
    efficiency, error : float
        Mean over highest work of a step, and its standard error where steps are sampled.
    largest : LargestBatch
    bound : float
        Cost of the costliest samples in one batch.
    beside : float array, shape (T,)
        Highest work of a rank with BalancedBatchSampler; nan where it was not dealt out, or is no
        better.
    beside_efficiency : float
        nan where it was not dealt out, or is no better.
    beside_note : str
        Why not, or in how many steps.
    """

    facts: Facts
    unit: str
    steps: Indices
    ranks: Indices
    bands: NDArray[np.float64]
    highest: NDArray[np.float64]
    mean: float
    efficiency: float
    error: float
    largest: LargestBatch
    bound: float
    beside: NDArray[np.float64]
    beside_efficiency: float
    beside_note: str


class Tally:
    """Work by step, as windows are added; all ranks of a step at a time."""

    def __init__(self, plan: "ShardPlan", look: LookedAt, by: By, beside: bool, most: int) -> None:
        self.plan, self.look = plan, look
        self.costs, self.unit = costs_by(plan, by)
        self.columns = min(COLUMNS, len(look.steps))
        self.rows = min(ROWS, len(look.ranks))
        self.highest = np.full((self.rows, self.columns), np.nan)
        self.values: list[list[NDArray[np.float32]]] = [[] for _ in range(self.columns)]
        self.means: list[NDArray[np.float64]] = []
        self.peaks: list[NDArray[np.float64]] = []
        self.largest: LargestBatch | None = None
        self.other, self.note = balanced(plan) if beside else (None, "not asked for")
        self.most = most  # draws that are dealt out anew
        self.dealt = np.full(len(look.steps), np.nan)
        self.dealt_means: list[float] = []

    def add(self, places: Indices) -> None:
        look, steps = self.look, self.look.steps[places]
        window = self.plan.source.window(steps, look.ranks, look.epoch)
        each = self.work(window)
        cost = each.sum(axis=2, dtype=np.float64)
        self.means.append(cost.mean(axis=1))
        self.peaks.append(cost.max(axis=1))
        column = places * self.columns // len(look.steps)
        row = np.arange(len(look.ranks)) * self.rows // len(look.ranks)
        by_row = np.maximum.reduceat(cost, np.flatnonzero(np.diff(row, prepend=-1)), axis=1)
        for group in np.unique(column).tolist():
            here = column == group
            self.values[group].append(cost[here].ravel().astype(np.float32))
            self.highest[:, group] = np.fmax(self.highest[:, group], by_row[here].max(axis=0))
        found = find_largest(window, each, cost, look.epoch, steps, look.ranks)
        if self.largest is None or found.cost > self.largest.cost:
            self.largest = found
        self.deal_anew(places)

    def work(self, window: Indices) -> NDArray[Any]:
        each: NDArray[Any] = np.where(window >= 0, self.costs[np.maximum(window, 0)], 0)
        return each

    def deal_anew(self, places: Indices) -> None:
        """The same steps with BalancedBatchSampler, as many as there is time for."""
        left = self.most - len(self.dealt_means) * self.plan.global_batch
        number = min(len(places), max(left, 0) // self.plan.global_batch)
        if not self.dealt_means:
            number = max(number, 1)
        if self.other is None or not number:
            return
        chosen = places[np.arange(number) * len(places) // number]
        chosen = chosen[self.look.steps[chosen] < len(self.other)]
        if not chosen.size:
            return
        window = self.other.window(
            self.look.steps[chosen], np.arange(self.plan.world_size), self.look.epoch
        )
        cost = self.work(window).sum(axis=2, dtype=np.float64)
        self.dealt[chosen] = cost.max(axis=1)
        self.dealt_means += cost.mean(axis=1).tolist()

    def arrays(self, done: int) -> LoadArrays:
        look = part_of(self.look, done)
        means, peaks = np.concatenate(self.means), np.concatenate(self.peaks)
        efficiency = float(means.sum() / peaks.sum()) if peaks.any() else 1.0
        error = 0.0
        if not look.exact:
            error = ratio_error(means, peaks, efficiency, len(look.asked_steps))
        assert self.largest is not None
        beside, note = float("nan"), self.note or f"dealt out in {len(self.dealt_means):,} steps"
        if self.dealt_means:
            beside = float(np.sum(self.dealt_means) / np.nansum(self.dealt))
        better = beside >= efficiency  # nothing else is worth a look
        if not better and self.dealt_means:
            beside, note = float("nan"), f"no better than this plan: {beside:.3f}"
        facts = Facts(
            view="load",
            question=f"Do the ranks have equal work ({self.unit} per step)?",
            look_for="Every step waits for the rank with the highest line. Look for: a wide band, "
            "peaks, one rank that is always dark or bright.",
            exact=look.exact,
            truth=look.truth(f"efficiency ± {error:.2g}, peaks may be missed"),
            numbers=self.numbers(efficiency, error, beside, float(means.mean())),
            plan=plan_line(self.plan, look.epoch),
        )
        return LoadArrays(
            facts=facts,
            unit=self.unit,
            steps=group_starts(self.look.steps, self.columns),
            ranks=group_starts(self.look.ranks, self.rows),
            bands=np.array([quantiles(parts) for parts in self.values]),
            highest=self.highest.copy(),
            mean=float(means.mean()),
            efficiency=efficiency,
            error=error,
            largest=self.largest,
            bound=self.bound(),
            beside=self.beside_columns() if better else np.full(self.columns, np.nan),
            beside_efficiency=beside,
            beside_note=note,
        )

    def beside_columns(self) -> NDArray[np.float64]:
        column = np.arange(len(self.dealt)) * self.columns // len(self.dealt)
        out = np.full(self.columns, np.nan)
        np.fmax.at(out, column, self.dealt)
        return out

    def numbers(
        self, efficiency: float, error: float, beside: float, mean: float
    ) -> tuple[Number, ...]:
        big = self.largest
        assert big is not None
        about = f" ± {error:.1g}" if error else ""
        numbers = [
            Number("DDP efficiency", f"{efficiency:.3f}{about}", efficiency < UNEVEN),
            Number("time waited", percent(max(0.0, 1 - efficiency)), efficiency < UNEVEN),
            Number(f"mean batch ({self.unit})", compact(mean)),
            Number(f"largest batch ({self.unit})", compact(big.cost)),
            Number("it is", f"step {big.step}, rank {big.rank}"),
            Number("largest possible", compact(self.bound())),
        ]
        if not np.isnan(beside):
            numbers.append(Number("efficiency if balanced", f"{beside:.3f}"))
        return tuple(numbers)

    def bound(self) -> float:
        """As a plan's: the costliest samples in one batch, or the budget of the sampler."""
        ranked = RANKED.setdefault(self.plan.samples, {})
        if self.unit not in ranked:
            ranked[self.unit] = summarise(self.costs)[1]
        return bound_of(self.plan, self.unit, ranked[self.unit])


# Sorting out 1e8 sizes takes longer than a picture: once for all plans of the same samples.
RANKED: "WeakKeyDictionary[SampleSet, dict[str, Any]]" = WeakKeyDictionary()
BALANCED: "WeakKeyDictionary[ShardPlan, tuple[BalancedBatchSampler | None, str]]" = (
    WeakKeyDictionary()
)


def costs_by(plan: "ShardPlan", by: By) -> tuple[NDArray[Any], str]:
    """What each sample costs, and in which unit."""
    if by not in ("cost", "atoms", "edges"):
        raise ValueError(f"by must be 'cost', 'atoms' or 'edges', got {by!r}")
    samples = plan.samples
    costs = {"cost": samples.costs, "atoms": samples.atoms, "edges": samples.edges}[by]
    if costs is None:
        raise ValueError(
            f"load by {by} needs it of each sample, and the plan knows none: give ShardPlan("
            "sizes=atoms) or sizes=(atoms, edges), or plan from a data set that has sizes()"
        )
    return costs, samples.unit if by == "cost" else by


def balanced(plan: "ShardPlan") -> tuple[BalancedBatchSampler | None, str]:
    """The same plan with BalancedBatchSampler, or why there is none."""
    if plan not in BALANCED:
        BALANCED[plan] = build_balanced(plan)
    return BALANCED[plan]


def build_balanced(plan: "ShardPlan") -> tuple[BalancedBatchSampler | None, str]:
    samples, own = plan.samples, getattr(plan.source, "sampler", None)
    if isinstance(own, BalancedBatchSampler):
        return None, "this plan is balanced already"
    dealing = plan.source.dealing()
    if dealing is not None and not dealing.even:
        return None, "the sampler of this plan chooses the sizes of its batches"
    if samples.atoms is None:
        return None, "the atoms of the samples are not known"
    options = {name: plan.sampler_kwargs[name] for name in SHARES if name in plan.sampler_kwargs}
    sizes = samples.atoms if samples.edges is None else (samples.atoms, samples.edges)
    try:
        sampler = BalancedBatchSampler(
            samples.dataset,
            batch_size=plan.batch_size,
            sizes=sizes,
            num_replicas=plan.world_size,
            rank=0,
            seed=int(getattr(own, "seed", 0) or 0),
            **options,
        )
    except (ValueError, TypeError) as error:
        return None, str(error)
    return sampler, ""


def quantiles(parts: list[NDArray[np.float32]]) -> NDArray[np.float64]:
    if not parts:
        return np.full(len(QUANTILES), np.nan)
    out: NDArray[np.float64] = np.quantile(np.concatenate(parts), QUANTILES).astype(np.float64)
    return out


def group_starts(values: Indices, groups: int) -> Indices:
    """The first of each of equal groups."""
    return values[-(-np.arange(groups) * len(values) // groups)]


def compute_load(
    plan: "ShardPlan",
    epoch: int = 0,
    *,
    ranks: Chosen = None,
    steps: Chosen = None,
    by: By = "cost",
    beside: bool = True,
    draws: int = QUICK,
) -> LoadArrays:
    """Work of the ranks by step, from at most about `draws` draws.

    Parameters
    ----------
    plan : ShardPlan
    epoch : int
    ranks, steps : int, sequence of int or slice, optional
        To zoom; by default all ranks, and of the steps as many as there is time for.
    by : {"cost", "atoms", "edges"}
        What is work; by default the plan's costs, which are atoms where none were given.
    beside : bool
        Whether some steps are dealt out anew by BalancedBatchSampler, to compare.
    draws : int

    Raises
    ------
    ValueError, TypeError
        Without sizes; for what the plan does not have; for an order that would take long to draw.
    """
    costs_by(plan, by)
    look = choose(plan, epoch, ranks, steps, draws=draws, every_rank=True)
    tally = Tally(plan, look, by, beside, BESIDE)
    tally.add(np.arange(len(look.steps)))
    return tally.arrays(len(look.steps))


def refine_load(
    plan: "ShardPlan",
    epoch: int = 0,
    *,
    ranks: Chosen = None,
    steps: Chosen = None,
    by: By = "cost",
    beside: bool = True,
) -> Iterator[LoadArrays]:
    """As `compute_load`, of more and more steps; the last is exact, but for what is beside it."""
    costs_by(plan, by)
    look = everything(plan, epoch, ranks, steps)
    tally, done = Tally(plan, look, by, beside, 8 * BESIDE), 0
    for places, shown in in_parts(plan, look):
        tally.add(places)
        done += len(places)
        if shown:
            yield tally.arrays(done)
