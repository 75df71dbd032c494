"""A hash of a plan: equal hashes mean equal orders."""

import hashlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from nvalchemi.data.datapipes.order import Indices
from nvalchemi.sharding.sources import spread_ranks

if TYPE_CHECKING:
    from nvalchemi.sharding.plan import ShardPlan


def hash_order(plan: "ShardPlan") -> str:
    """16 hex digits of lengths, ranks, batch, epochs, the sampler's settings and some batches."""
    parts = [plan.samples.lengths, plan.samples.several, plan.world_size, plan.batch_size]
    text = f"{parts} {plan.epochs} {plan.source.settings()}"
    digest = hashlib.blake2b(text.encode(), digest_size=8)
    for window in probes(plan):
        digest.update(np.ascontiguousarray(window).tobytes())
    return digest.hexdigest()


def probes(plan: "ShardPlan") -> Iterator[Indices]:
    """Batches of some ranks in the first and the last epoch; all of them of iterated samplers."""
    if not plan.source.cheap and plan.source.dealing() is not None:
        return  # the settings say it all, and drawing the order would take long
    ranks = spread_ranks(plan.world_size, 3)
    for epoch in sorted({0, plan.epochs - 1}):
        total = int(plan.source.steps(ranks, epoch).max(initial=0))
        steps = np.arange(total)
        if plan.source.cheap:
            steps = np.unique(np.array([0, total // 2, total - 1], dtype=np.int64)[: 3 * total])
        yield plan.source.window(steps, ranks, epoch)
