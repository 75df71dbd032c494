"""Coverage beside the enumeration of what all ranks emit, where a shortcut could be wrong."""

import numpy as np
import pytest
from torch.utils.data import DistributedSampler

from nvalchemi.data.datapipes.samplers import EpochSampler
from nvalchemi.sharding import ShardPlan


@pytest.mark.parametrize(
    ("lengths", "ranks", "batch_size"),
    [([4, 1], 2, 1), ([20, 1], 1, 5), ([63, 1, 1], 1, 63), ([12, 4], 2, 3)],
)
@pytest.mark.parametrize("sampler", [EpochSampler, DistributedSampler])
def test_tails_that_are_dropped_are_other_ones_in_each_epoch(lengths, ranks, batch_size, sampler):
    """What several epochs show together does not follow from the numbers of each."""
    for seed in range(20):
        plan = ShardPlan(
            lengths,
            sampler=sampler,
            world_size=ranks,
            batch_size=batch_size,
            epochs=4,
            drop_last=True,
            seed=seed,
        )
        windows = [plan.window(None, None, epoch) for epoch in range(4)]
        coverage = plan.coverage(exact=True)
        assert coverage.seen == np.unique([i for w in windows for i in w[w >= 0]]).size


def test_a_plan_without_steps_has_no_composition():
    plan = ShardPlan(3, sampler=DistributedSampler, world_size=3, batch_size=2, drop_last=True)
    with pytest.raises(ValueError, match="composition needs at least one batch"):
        plan.composition()
