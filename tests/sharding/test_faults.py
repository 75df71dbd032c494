"""Faults that hurt users of other samplers, reproduced here, and found by the plan.

The thread of each is named by its row in the survey behind this project.
"""

import numpy as np
import pytest
from sharding_cases import (
    Blocks,
    GlobalRandom,
    IgnoresWeights,
    NoSetEpoch,
    Padded,
    RankBlind,
    SeedPerRank,
    SplitThenInterleave,
    Strided,
    found,
)
from torch.utils.data import DistributedSampler

from nvalchemi.data.datapipes.budget import BudgetBatchSampler
from nvalchemi.data.datapipes.samplers import EpochSampler, MultiDatasetSampler
from nvalchemi.sharding import Finding, ShardPlan


def test_a_good_plan_has_no_error_and_no_warning():
    for sampler in (None, EpochSampler, Padded):
        plan = ShardPlan(96, sampler=sampler, world_size=4, batch_size=4, epochs=3)
        assert plan.check() == []
    assert ShardPlan([64, 32], world_size=4, batch_size=4, epochs=3).check() == []


def test_every_epoch_in_the_same_order():
    """Row 1 (pytorch#31771): set_epoch is not called or does nothing."""
    plan = ShardPlan(96, sampler=NoSetEpoch, world_size=4, batch_size=4)
    finding = found(plan)["equal epochs"]
    assert finding.severity == "warning" and "set_epoch" in finding.sentence
    assert "equal epochs" not in found(ShardPlan(96, sampler=Padded, world_size=4, batch_size=4))
    unshuffled = found(ShardPlan(96, world_size=4, batch_size=4, shuffle=False))
    assert list(unshuffled) == ["no shuffle"] and unshuffled["no shuffle"].severity == "info"


def test_padding_in_an_evaluation():
    """Row 3 (pytorch#25162): validation depends on the number of ranks."""
    findings = found(ShardPlan(21, world_size=4, batch_size=3, shuffle=False))
    assert findings["padding"].data["padded"] == 3
    assert findings["padding"].severity == "warning"
    assert "3 of 24" in findings["padding"].sentence


def test_uneven_ranks():
    """Row 7 (Lightning#20404): one rank has fewer batches and the others wait for ever."""
    plan = ShardPlan(13, sampler=Strided, world_size=4, batch_size=1)
    finding = found(plan)["steps"]
    assert finding.severity == "error" and "for ever" in finding.sentence
    assert finding.data["steps"].tolist() == [4, 3, 3, 3]


def test_all_ranks_replay_the_same_batches():
    """Row 17 (deepmd-kit#5823)."""
    plan = ShardPlan(40, sampler=RankBlind, world_size=4, batch_size=5)
    finding = found(plan)["identical ranks"]
    assert finding.severity == "error" and finding.data["ranks"] == [0, 1, 2, 3]
    assert (plan.overlap().share == 1).all()
    built_for_one = [DistributedSampler(range(40), num_replicas=1, rank=0)] * 4
    plan = ShardPlan(40, sampler=built_for_one, world_size=4, batch_size=5)
    assert found(plan)["identical ranks"].data["ranks"] == [0, 1, 2, 3]


def test_a_set_smaller_than_a_batch_with_drop_last():
    """Row 21 (mace#1422): no batch is left, and the error is an opaque one elsewhere."""
    plan = ShardPlan(50, world_size=1, batch_size=64, drop_last=True)
    finding = found(plan)["steps"]
    assert finding.severity == "error"
    assert "No rank has a step: 50 samples do not fill a batch of 64" in finding.sentence
    # our samplers say so when they are built
    with pytest.raises(ValueError, match="every rank must have a step"):
        ShardPlan([40, 10], world_size=1, batch_size=64, drop_last=True)


def test_split_then_interleave():
    """Row 23 (datasets#7868): one source is split over the ranks, another one is not."""
    plan = ShardPlan([60, 15], sampler=SplitThenInterleave, world_size=4, batch_size=5)
    finding = found(plan)["overlapping ranks"]
    assert finding.severity == "error" and finding.data["share"] == pytest.approx(0.5)
    assert plan.overlap().matrix[0].tolist() == [30, 15, 15, 15]


def test_fewer_ranks_after_a_resume():
    """Row 29 (torchtitan#816): the step is kept, the global batch is another one."""
    four = ShardPlan([80, 16], world_size=4, batch_size=4)
    three = ShardPlan([80, 16], world_size=3, batch_size=4)
    wrong = four.diff(three, stop=3, start=3)
    assert (wrong.resume.seen, wrong.resume.again, wrong.resume.never) == (48, 12, 0)
    assert four.diff(three, stop=3, start=5).resume.never == 12
    right = four.diff(three, stop=3)
    assert right.resume.start == 4
    assert (right.resume.again, right.resume.never) == (0, 0)
    assert "the global batches differ in size" in str(right)


def test_a_seed_for_each_rank():
    """Row 35 (LongLive#71): ranks deal from other orders, and share a part of them."""
    plan = ShardPlan(2000, sampler=SeedPerRank, world_size=4, batch_size=10)
    finding = found(plan)["overlapping ranks"]
    assert finding.data["share"] == pytest.approx(0.25, abs=0.06)
    assert found(plan)["never seen"].severity == "warning"


def test_weights_that_have_no_effect():
    """Row 19 (mace#1182): asked and realised shares differ."""
    plan = ShardPlan(
        [900, 100],
        sampler=IgnoresWeights,
        world_size=2,
        batch_size=10,
        sampler_kwargs={"weights": [0.2, 0.8]},
    )
    finding = found(plan)["starved data set"]
    assert finding.data["dataset"] == 1 and "80.00% were asked for" in finding.sentence


def test_shares_that_are_not_those_asked_for():
    """Less than half is starved; what chance and rounding can not explain is told as well."""

    def plan(lengths, weights, **options):
        options = {"sampler": IgnoresWeights, "world_size": 2, "batch_size": 16} | options
        return ShardPlan(lengths, sampler_kwargs={"weights": weights}, **options)

    findings = found(plan([240, 80, 12], [0.4, 0.3, 0.3]))
    assert findings["starved data set"].data["dataset"] == 2
    shares = findings["shares"]
    assert shares.severity == "warning" and shares.data["datasets"] == [0, 1]
    assert "72.29% of data set 0 (40.00% asked for)" in shares.sentence
    assert "24.10% of data set 1 (30.00% asked for)" in shares.sentence
    assert found(plan([240, 80], [0.7, 0.3]))["shares"].data["datasets"] == [0, 1]
    assert "shares" not in found(plan([240, 80], [0.75, 0.25]))
    assert "shares" not in found(plan([240, 80], [0.4, 0.6])), "the starved one says it all"


def test_shares_that_chance_and_rounding_explain():
    class Weighted(IgnoresWeights):
        def order(self):
            draw = np.random.default_rng([self.seed, self.epoch])
            own = [draw.integers(0, 240, self.size), draw.integers(240, 320, self.size)]
            return np.where(draw.random(self.size) < 0.4, *own)

    asked = {"sampler_kwargs": {"weights": [0.4, 0.6]}, "world_size": 3}
    for sampler, batch_size in [(Weighted, 7), (None, 1), (None, 7), (MultiDatasetSampler, 16)]:
        plan = ShardPlan([240, 80], sampler=sampler, batch_size=batch_size, epochs=3, **asked)
        assert "shares" not in found(plan)
    uneven = {"world_size": 3, "batch_size": 7, "sampler_kwargs": {"weights": [0.113, 0.887]}}
    assert "shares" not in found(ShardPlan([240, 80], **uneven))


def test_one_is_not_spoken_of_as_many():
    once = found(ShardPlan(61, world_size=2, batch_size=4, shuffle=False))["padding"].sentence
    assert once.startswith("1 of 62 draws of an epoch is padding") and "this sample" in once
    foreign = found(ShardPlan(61, sampler=Padded, world_size=2, batch_size=16))["padding"].sentence
    assert foreign.startswith("1 draw of an epoch is of a sample that was drawn before")
    never = {"world_size": 2, "batch_size": 7, "drop_last": True, "shuffle": False}
    assert (
        "5 of 61 samples are not in the epoch."
        in found(ShardPlan(61, **never))["never seen"].sentence
    )
    one = found(ShardPlan(57, epochs=2, **never))["never seen"].sentence
    assert one == "1 of 57 samples is in none of the 2 planned epochs."
    alone = found(ShardPlan(1, world_size=1, batch_size=2, drop_last=True))["steps"].sentence
    assert alone == "No rank has a step: 1 sample does not fill a batch of 2."
    atom = found(ShardPlan(2, world_size=1, batch_size=1, sizes=np.ones(2, int)))["largest batch"]
    assert "has 1 atom (epoch" in atom.sentence


def test_a_data_set_that_gets_nothing():
    class First(Padded):
        def __iter__(self):
            return iter([i for i in super().__iter__() if i < 60])

    findings = found(ShardPlan([60, 4], sampler=First, world_size=1, batch_size=4))
    assert findings["starved data set"].severity == "error"
    assert findings["never seen"].data["never_of"].tolist() == [0, 4]


def test_batches_that_are_blocks_of_one_data_set():
    """Row 25 (streaming#657): the order is shuffled, block by block."""
    plan = ShardPlan([640, 640], sampler=Blocks, world_size=4, batch_size=8)
    assert "stripes" in found(plan)
    assert "stripes" not in found(ShardPlan([640, 640], sampler=Padded, world_size=4, batch_size=8))


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_data_sets_that_alternate_reach_every_rank(ranks):
    """Dealt in turn, an even mixture would give each rank one data set."""
    plan = ShardPlan([800, 800], sampler=MultiDatasetSampler, world_size=ranks, batch_size=8)
    shares = plan.composition().per_batch.sum(axis=0)
    own = 1600 // ranks
    assert (abs(shares - own / 2) < 4 * (own / 4) ** 0.5).all(), shares
    assert plan.check() == []


@pytest.mark.parametrize("ranks", [2, 4, 7, 64])
def test_padding_is_no_overlap(ranks):
    """Few structures: ranks share a tenth of their samples and more by padding alone."""
    sizes = np.random.default_rng(0).integers(5, 80, 200)
    budget = ShardPlan(
        200,
        sampler=BudgetBatchSampler,
        world_size=ranks,
        sampler_kwargs={"max_atoms": 600},
        sizes=sizes,
    )
    assert budget.coverage().padded > 0 and budget.overlap().most[2] > 0.1
    assert [finding for finding in budget.check() if finding.severity == "error"] == []
    same = found(budget).get("identical ranks")
    assert (same is not None) == (ranks > 15) and (same is None or same.severity == "warning")
    for number in (13, 26, 27):
        foreign = ShardPlan(number, sampler=Padded, world_size=ranks, batch_size=2)
        if foreign.num_steps() > 1:
            assert "overlapping ranks" not in found(foreign)


def test_ranks_with_another_mixture_than_the_others():
    class HalfEach(Padded):
        def __iter__(self):
            return iter(range(self.rank * 200, self.rank * 200 + 200))

    findings = found(ShardPlan([200, 200], sampler=HalfEach, world_size=2, batch_size=8))
    assert findings["rank composition"].severity == "warning"


def test_batches_too_small_for_the_mixture_are_noted_and_no_fault():
    """A batch of one: by its turn it is of one data set, and each rank always has the same turn."""
    small = found(ShardPlan([400, 400], world_size=2, batch_size=1))["rank composition"]
    assert small.severity == "info" and "whole numbers of each data set" in small.remedy
    assert ShardPlan([400, 400], world_size=2, batch_size=2).check() == []


def test_a_seed_without_shuffle():
    assert "seed 5 has no effect" in str(
        found(ShardPlan(96, world_size=4, batch_size=4, seed=5, shuffle=False))[
            "seed without effect"
        ]
    )
    kwargs = {"seed": 5, "shuffle": False}
    plan = ShardPlan([96, 96], world_size=4, batch_size=4, sampler_kwargs=kwargs)
    assert "seed without effect" in found(plan)


def test_an_order_that_nobody_can_repeat():
    plan = ShardPlan(96, sampler=GlobalRandom, world_size=4, batch_size=4)
    assert found(plan)["not reproducible"].severity == "warning"


def test_samples_that_are_never_seen():
    shuffled = ShardPlan(10003, world_size=4, batch_size=4, drop_last=True)
    assert found(shuffled)["never seen"].severity == "info"
    assert found(shuffled)["never seen"].data["never"] == 3
    same = ShardPlan(10003, world_size=4, batch_size=4, drop_last=True, shuffle=False, epochs=5)
    assert found(same)["never seen"].severity == "warning"
    later = ShardPlan(10003, world_size=4, batch_size=4, drop_last=True, epochs=5)
    assert "never seen" not in found(later)


def test_empty_batches():
    class WithHole:
        def __init__(self, dataset, num_replicas, rank, batch_size):
            self.num_replicas, self.rank = num_replicas, rank

        def __iter__(self):
            return iter([[self.rank], [], [self.rank + 2]])

    finding = found(ShardPlan(8, sampler=WithHole, world_size=2, batch_size=1))["empty batch"]
    assert finding.severity == "error" and finding.data["step"] == 1


def test_load_findings():
    sizes = np.ones(64, dtype=int)
    sizes[7] = 100
    plan = ShardPlan(64, world_size=4, batch_size=4, sizes=sizes)
    findings = found(plan)
    big = findings["largest batch"].data["largest"]
    assert big.cost == 103 and big.samples[0] == 7 and big.costs.tolist() == [100, 1, 1, 1]
    assert 7 in plan.batch(big.rank, big.step, big.epoch)
    assert findings["largest batch"].data["bound"] == 103
    assert findings["imbalance"].data["imbalance"] > 1.25
    assert "imbalance" not in found(plan, max_imbalance=50)
    with pytest.raises(ValueError, match="max_imbalance must be >= 1"):
        plan.check(max_imbalance=0.5)


def test_findings_come_gravest_first_and_read_as_sentences():
    plan = ShardPlan(13, sampler=Strided, world_size=4, batch_size=1, sizes=np.ones(13))
    findings = plan.check()
    assert all(isinstance(finding, Finding) for finding in findings)
    severities = [finding.severity for finding in findings]
    assert severities == sorted(severities, key=["error", "warning", "info"].index)
    for finding in findings:
        assert finding.sentence.endswith(".") and finding.remedy.endswith(".")
        assert str(finding).startswith(finding.severity)


def test_what_would_take_long_is_named_and_not_done():
    plan = ShardPlan(10**8, world_size=1024, batch_size=64)
    assert "was not drawn" in found(plan)["not drawn"].sentence
    assert plan.source._orders == {}
