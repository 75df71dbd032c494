"""Which steps and ranks a picture looks at: all of them where that is quick, else a random part."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from nvalchemi.data.datapipes.balanced import BalancedBatchSampler
from nvalchemi.data.datapipes.budget import BudgetBatchSampler
from nvalchemi.data.datapipes.order import Indices
from nvalchemi.data.datapipes.weights import check_integer
from nvalchemi.notebook.plots.facts import percent
from nvalchemi.sharding.look import ITERATED
from nvalchemi.sharding.sources import as_indices
from nvalchemi.sharding.view import Chosen

if TYPE_CHECKING:
    from nvalchemi.sharding.plan import ShardPlan

QUICK = 2**18  # draws of a first picture, some 30 ms
PART = 2**19  # draws by which a picture is refined
PARTS_SHOWN = 8  # parts between two refined pictures
RANKS = 64  # ranks that a part of many has
# these deal out a whole step for each batch that is asked for
WHOLE_STEPS = (BalancedBatchSampler, BudgetBatchSampler)


@dataclass(frozen=True)
class LookedAt:
    """Steps and ranks of an epoch that are looked at, out of those that were asked for.

    Attributes
    ----------
    epoch : int
    ranks, steps : int64 arrays
        Looked at; of many, one at random out of each of equal groups.
    asked_ranks, asked_steps : int64 arrays
        Asked for; by default all.
    whole : bool
        Whether all of the epoch was asked for.
    """

    epoch: int
    ranks: Indices
    steps: Indices
    asked_ranks: Indices
    asked_steps: Indices
    whole: bool

    @property
    def exact(self) -> bool:
        return self.fraction == 1.0

    @property
    def fraction(self) -> float:
        looked = len(self.ranks) * len(self.steps)
        return looked / (len(self.asked_ranks) * len(self.asked_steps))

    def truth(self, error: str) -> str:
        """The label of a picture; `error` says how far a sample may be off."""
        if self.exact:
            what = "the epoch" if self.whole else "the steps and ranks chosen"
            return f"exact: every draw of {what} is counted"
        return (
            f"sample of {percent(self.fraction)}: {len(self.steps):,} of "
            f"{len(self.asked_steps):,} steps, {len(self.ranks):,} of {len(self.asked_ranks):,} "
            f"ranks; {error}"
        )


def choose(
    plan: "ShardPlan",
    epoch: int,
    ranks: Chosen = None,
    steps: Chosen = None,
    *,
    draws: int = QUICK,
    every_rank: bool = False,
) -> LookedAt:
    """What a picture of at most about `draws` draws looks at.

    Raises
    ------
    ValueError, TypeError
        For ranks or steps that the plan does not have, an epoch without steps, and an order that
        would have to be drawn whole, which takes long.
    """
    epoch = check_integer("epoch", epoch, 0)
    asked_ranks = as_indices("ranks", ranks, plan.world_size)
    if not asked_ranks.size:
        raise ValueError(f"ranks must name at least one of the {plan.world_size} ranks, got none")
    refuse_long_order(plan, draws)
    columns = affordable_ranks(plan, asked_ranks, draws)
    total = int(plan.source.steps(columns, epoch).max(initial=0))
    if not total:
        raise ValueError(
            f"a picture needs at least one batch: epoch {epoch} of the plan has no steps"
        )
    asked_steps = as_indices("steps", steps, total)
    if not asked_steps.size:
        raise ValueError(f"steps must name at least one of the {total} steps, got none")
    if not every_rank and not isinstance(getattr(plan.source, "sampler", None), WHOLE_STEPS):
        if len(columns) * len(asked_steps) * plan.batch_size > draws:
            columns = one_of_each(columns, RANKS)
    number = max(1, draws // (len(columns) * plan.batch_size))
    rows = asked_steps if len(asked_steps) <= number else one_of_each(asked_steps, number)
    whole = len(np.unique(asked_ranks)) == plan.world_size and len(np.unique(asked_steps)) == total
    return LookedAt(epoch, columns, rows, asked_ranks, asked_steps, whole)


def everything(
    plan: "ShardPlan", epoch: int, ranks: Chosen = None, steps: Chosen = None
) -> LookedAt:
    """All that was asked for, however long it takes."""
    return choose(plan, epoch, ranks, steps, draws=2**62)


def refuse_long_order(plan: "ShardPlan", draws: int) -> None:
    if draws < 2**62 and plan.source.dealing() is not None and not plan.source.cheap:
        seconds = max(1, round(len(plan.samples) / 1e7))
        raise ValueError(
            f"{plan.source.name} draws the order of all {len(plan.samples):,} samples at once "
            f"(about {seconds} s), which a quick picture must not wait for: ask for the exact "
            "picture (exact=True), or use EpochSampler as sampler_cls, which starts at once"
        )


def affordable_ranks(plan: "ShardPlan", ranks: Indices, draws: int) -> Indices:
    """Not all, where each has to be iterated through a long epoch."""
    if draws >= 2**62 or plan.source.cheap or plan.source.dealing() is not None:
        return ranks
    return one_of_each(ranks, max(2, ITERATED // len(plan.samples)))


def one_of_each(values: Indices, groups: int) -> Indices:
    """One at random out of each of equal groups of neighbours; all if there are no more."""
    if len(values) <= groups:
        return values
    edges = np.arange(groups + 1) * len(values) // groups
    inside = np.random.default_rng(0).random(groups) * np.diff(edges)
    return values[edges[:-1] + inside.astype(np.int64)]


def in_parts(plan: "ShardPlan", look: LookedAt) -> Iterator[tuple[Indices, bool]]:
    """Places of the steps, some at a time in random order, and whether to show what there is.

    After each part those so far are a random sample of all.
    """
    number = max(1, PART // (len(look.ranks) * plan.batch_size))
    order = np.random.default_rng(0).permutation(len(look.steps))
    starts = range(0, len(order), number)
    for count, first in enumerate(starts, 1):
        shown = count % PARTS_SHOWN == 0 or count == len(starts)
        yield np.sort(order[first : first + number]), shown


def part_of(look: LookedAt, done: int) -> LookedAt:
    """What is looked at when so many of the steps are done."""
    return LookedAt(
        look.epoch,
        look.ranks,
        look.steps[:done],
        look.asked_ranks,
        look.asked_steps,
        look.whole,
    )
