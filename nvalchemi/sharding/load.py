"""Cost per rank and step: how unequal the ranks are, what DDP loses by it, the largest batch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from nvalchemi.data.datapipes.order import Indices

if TYPE_CHECKING:
    from nvalchemi.sharding.plan import ShardPlan


@dataclass(frozen=True)
class LargestBatch:
    """The batch with the highest cost among those looked at.

    Attributes
    ----------
    epoch, step, rank : int
    cost : float
    samples : int64 array
        What is in it, the costliest first.
    costs : array
        Of each of its samples.
    """

    epoch: int
    step: int
    rank: int
    cost: float
    samples: Indices
    costs: NDArray[Any]


@dataclass(frozen=True)
class Load:
    """Cost of the batches of some ranks and steps; in DDP every step waits for the slowest rank.

    Attributes
    ----------
    epoch : int
    steps, ranks : int64 arrays, shapes (S,) and (R,)
    cost : float array, shape (S, R)
        In `unit`: "atoms", or "cost" as given.
    all_steps : bool
        Whether these are all steps of the epoch.
    imbalance : float
        Highest over mean cost of the ranks, averaged over the steps with the steps' costs; 1 is
        even.
    efficiency : float
        Mean over highest: the part of the time in which the average rank works, for a time in
        proportion to cost; 1 / imbalance.
    error : float
        Standard error of `efficiency` where steps are sampled, else 0.
    largest : LargestBatch
    bound : float
        Cost of the costliest batch that the data set and the sampler allow.
    """

    epoch: int
    steps: Indices
    ranks: Indices
    cost: NDArray[np.float64]
    unit: str
    all_steps: bool
    imbalance: float
    efficiency: float
    error: float
    largest: LargestBatch
    bound: float

    def __str__(self) -> str:
        about = "" if self.all_steps else f" ± {self.error:.2g} ({len(self.steps)} steps looked at)"
        big = self.largest
        return (
            f"highest over mean {self.unit} of the ranks {self.imbalance:.3f}, DDP efficiency "
            f"{self.efficiency:.3f}{about}; largest batch {big.cost:.6g} {self.unit} (epoch "
            f"{big.epoch}, step {big.step}, rank {big.rank}), at most possible {self.bound:.6g}"
        )


def measure_load(
    plan: "ShardPlan", epoch: int, steps: Indices, ranks: Indices, all_steps: bool
) -> Load:
    costs = plan.samples.costs
    if costs is None:
        raise ValueError(
            "load needs the size of each sample, and the plan knows none: give sizes=atoms per "
            "sample or costs=..., or plan from a data set that has sizes()"
        )
    window = plan.source.window(steps, ranks, epoch)
    if not window.size:
        raise ValueError("load needs at least one batch: the plan has no steps")
    each = np.where(window >= 0, costs[np.maximum(window, 0)], 0)
    cost = each.sum(axis=2, dtype=np.float64)
    highest, mean = cost.max(axis=1), cost.mean(axis=1)
    efficiency = float(mean.sum() / highest.sum()) if highest.any() else 1.0
    return Load(
        epoch=epoch,
        steps=steps,
        ranks=ranks,
        cost=cost,
        unit=plan.samples.unit,
        all_steps=all_steps,
        imbalance=1 / efficiency if efficiency else float("inf"),
        efficiency=efficiency,
        error=0.0 if all_steps else ratio_error(mean, highest, efficiency, plan.num_steps(epoch)),
        largest=find_largest(window, each, cost, epoch, steps, ranks),
        bound=largest_possible(plan),
    )


def largest_possible(plan: "ShardPlan") -> float:
    """Cost of the costliest samples in one batch, or the budget that a sampler keeps to."""
    assert plan.samples.ranked_costs is not None
    return bound_of(plan, plan.samples.unit, plan.samples.ranked_costs[1])


def bound_of(plan: "ShardPlan", unit: str, sum_of_largest: Callable[[int], float]) -> float:
    """As `largest_possible`, in "atoms", "edges" or "cost"."""
    bound = float(sum_of_largest(plan.batch_size))
    budget = getattr(getattr(plan.source, "sampler", None), f"max_{unit}", None)
    # a sample that is larger than the budget may have a batch of its own
    return bound if budget is None else min(bound, max(float(budget), sum_of_largest(1)))


def ratio_error(mean: NDArray[Any], highest: NDArray[Any], ratio: float, total_steps: int) -> float:
    """Standard error of sum(mean) / sum(highest) over sampled steps (ratio estimator)."""
    number = len(mean)
    if number < 2 or not highest.any():
        return float("nan")
    residual = mean - ratio * highest
    finite = 1 - number / total_steps
    return float(np.sqrt(finite * residual.var(ddof=1) / number) / highest.mean())


def find_largest(
    window: Indices,
    each: NDArray[Any],
    cost: NDArray[Any],
    epoch: int,
    steps: Indices,
    ranks: Indices,
) -> LargestBatch:
    row, column = np.unravel_index(int(cost.argmax()), cost.shape)
    inside = window[row, column] >= 0
    samples, own = window[row, column][inside], each[row, column][inside]
    order = np.argsort(-own.astype(np.float64), kind="stable")
    return LargestBatch(
        epoch=epoch,
        step=int(steps[row]),
        rank=int(ranks[column]),
        cost=float(cost[row, column]),
        samples=samples[order],
        costs=own[order],
    )
