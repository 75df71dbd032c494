"""Faults that show only in later epochs, or only on some ranks; and what is no fault."""

import numpy as np
import pytest
from sharding_cases import Padded, found
from torch.utils.data import DistributedSampler

from nvalchemi.data.datapipes.budget import BudgetBatchSampler
from nvalchemi.sharding import ShardPlan


class OneForgets(Padded):
    def set_epoch(self, epoch):
        self.epoch = 0 if self.rank == 1 else epoch


class Sticks(Padded):
    """Epochs from 1 on are all alike."""

    def set_epoch(self, epoch):
        self.epoch = min(epoch, 1)


class ShortLater(Padded):
    def __iter__(self):
        order = list(super().__iter__())
        return iter(order[:-8] if self.rank == 1 and self.epoch else order)


class StarvesLater(Padded):
    def __iter__(self):
        return iter([i for i in super().__iter__() if self.epoch == 0 or i < 800])


def test_one_rank_whose_set_epoch_has_no_effect():
    findings = found(ShardPlan(64, sampler=OneForgets, world_size=2, batch_size=4, epochs=3))
    alone = findings["epochs of some ranks"]
    assert alone.severity == "error" and alone.data["ranks"] == [1]
    assert "Rank 1 repeats epoch 0 in epoch 1 and the others do not" in alone.sentence
    assert findings["overlapping ranks"].sentence.startswith("In epoch 1: ranks 0 and 1 share")


def test_later_epochs_that_are_all_alike():
    findings = found(ShardPlan(64, sampler=Sticks, world_size=2, batch_size=4, epochs=5))
    assert findings["equal epochs"].data["epochs"] == [1, 4]
    assert ShardPlan(64, sampler=Sticks, world_size=2, batch_size=4, epochs=2).check() == []


def test_ranks_that_are_uneven_in_a_later_epoch():
    finding = found(ShardPlan(64, sampler=ShortLater, world_size=2, batch_size=4, epochs=3))[
        "steps"
    ]
    assert finding.severity == "error" and finding.data["epoch"] == 1
    assert finding.sentence.startswith("In epoch 1: ranks have different numbers of steps")


def test_a_data_set_that_is_starved_in_a_later_epoch():
    plan = ShardPlan([800, 200], sampler=StarvesLater, world_size=1, batch_size=4, epochs=3)
    finding = found(plan)["starved data set"]
    assert finding.severity == "error" and finding.data["epoch"] == 1


class LeavesTwoOut(Padded):
    """A dropped tail of two; sample 100 is in that of epoch 0, or of the later ones."""

    unlucky = (0,)

    def order(self):
        order = super().order()
        at = np.flatnonzero(order == 100)
        to = -1 if self.epoch in self.unlucky else 0
        order[[at[0], to]] = order[[to, at[0]]]
        return order[:-2]

    def __iter__(self):
        return iter(self.order().tolist())


class Unlucky(LeavesTwoOut):
    unlucky = (1, 2)


class AlwaysUnlucky(LeavesTwoOut):
    unlucky = (0, 1, 2)


def test_a_small_data_set_that_chance_leaves_out_of_an_epoch_is_no_error():
    plan = ShardPlan([100, 1], sampler=LeavesTwoOut, world_size=1, batch_size=9, epochs=3)
    finding = found(plan)["starved data set"]
    assert finding.severity == "warning"
    assert finding.sentence.startswith("Data set 1 gets no sample in epoch 0 and 1 in epoch 1")
    later = ShardPlan([100, 1], sampler=Unlucky, world_size=1, batch_size=9, epochs=3)
    finding = found(later)["starved data set"]
    assert finding.severity == "warning"
    assert finding.sentence.startswith("Data set 1 gets no sample in epoch 1 and 1 in epoch 0")


def test_a_small_data_set_that_is_left_out_of_every_epoch_is_an_error():
    plan = ShardPlan([100, 1], sampler=AlwaysUnlucky, world_size=1, batch_size=9, epochs=3)
    assert found(plan)["starved data set"].severity == "error"
    one = ShardPlan([100, 1], sampler=LeavesTwoOut, world_size=1, batch_size=9)
    assert found(one)["starved data set"].severity == "error"


@pytest.mark.parametrize("ranks", [2, 3, 5, 8])
@pytest.mark.parametrize("batch_size", [4, 16, 32])
def test_padding_of_an_unknown_sampler_is_no_error(ranks, batch_size):
    """As torch pads: no rank of a small data set has more than a step, and some samples twice."""
    for number in [1, 2, 7, 17, 40, 61, 100]:
        for sampler in (Padded, DistributedSampler):
            plan = ShardPlan(
                number, sampler=sampler, world_size=ranks, batch_size=batch_size, epochs=2
            )
            assert [finding for finding in plan.check() if finding.severity == "error"] == []


def test_padding_that_is_much_is_told():
    plan = ShardPlan(17, sampler=Padded, world_size=5, batch_size=8)
    assert found(plan)["padding"].data["padded"] == 3


def test_identical_ranks_in_spite_of_enough_batches_are_an_error():
    class Same:
        """Says by what rule it deals, and does not keep to it."""

        num_replicas, batch_size, length, num_units, shuffle = 2, 4, 30, 8, True

        def __init__(self, dataset, num_replicas, rank, batch_size):
            self.rank = rank

        def __len__(self):
            return 5

        def __iter__(self):
            return iter(self.window(np.arange(5), [self.rank], 0)[:, 0].tolist())

        def order(self, positions, epoch):
            return np.asarray(positions)

        def window(self, steps, ranks, epoch):
            rows = (np.asarray(steps)[:, None] * 4 + np.arange(4)) % 30
            return np.repeat(rows[:, None], len(ranks), axis=1)

    finding = found(ShardPlan(30, sampler=Same, world_size=2, batch_size=4))["identical ranks"]
    assert finding.severity == "error"


def test_epochs_of_few_batches_may_be_equal_by_chance():
    for number in (8, 9, 10, 12):
        for seed in range(8):
            plan = ShardPlan(
                number,
                sampler=BudgetBatchSampler,
                world_size=1,
                epochs=3,
                seed=seed,
                sampler_kwargs={"max_atoms": 20},
                sizes=np.random.default_rng(seed).integers(1, 18, number),
            )
            assert "equal epochs" not in found(plan)
