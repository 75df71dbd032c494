"""Which steps and ranks a question looks at: those asked for, else all, else a random part."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from nvalchemi.data.datapipes.order import Indices
from nvalchemi.data.datapipes.weights import check_integer
from nvalchemi.sharding.sources import as_indices

if TYPE_CHECKING:
    from nvalchemi.sharding.plan import ShardPlan

Chosen: TypeAlias = "int | Iterable[int] | slice | None"

VIEWED = 2**20  # draws that are looked at unasked, a quarter of a second


def choose_view(
    plan: "ShardPlan", epoch: int, steps: Chosen, ranks: Chosen, draws: int = VIEWED
) -> tuple[Indices, Indices, bool]:
    """Steps, ranks, and whether these are all steps; steps are sampled where they are not given."""
    chosen = as_indices("ranks", ranks, plan.world_size)
    total = int(plan.source.steps(chosen, check_integer("epoch", epoch, 0)).max(initial=0))
    if steps is None:
        rows = sample_steps(plan, total, draws, len(chosen))
    else:
        rows = as_indices("steps", steps, total)
    return rows, chosen, len(np.unique(rows)) == total


def sample_steps(plan: "ShardPlan", total: int, draws: int, ranks: int) -> Indices:
    """All of `total` steps if so many ranks draw at most `draws` in them, else some at random."""
    number = max(1, draws // max(1, ranks * plan.batch_size))
    if total <= number:
        return np.arange(total)
    chosen = np.random.default_rng(0).choice(total, number, replace=False, shuffle=False)
    return np.sort(chosen)
