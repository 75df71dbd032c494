"""The indices of a plan are those that the real samplers emit, batch by batch."""

import copy
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sharding_cases import (
    GlobalRandom,
    Lengths,
    Padded,
    Strided,
    emitted,
)
from torch.utils.data import BatchSampler, DistributedSampler

from nvalchemi.data.datapipes.balanced import BalancedBatchSampler
from nvalchemi.data.datapipes.budget import BudgetBatchSampler
from nvalchemi.data.datapipes.exact import ExactEvalSampler
from nvalchemi.data.datapipes.samplers import (
    EpochSampler,
    MultiDatasetBatchSampler,
    MultiDatasetSampler,
)
from nvalchemi.sharding import ShardPlan


def torch_batches(n, ranks, batch, epoch, **options):
    drop = options.get("drop_last", False)
    out = []
    for rank in range(ranks):
        sampler = DistributedSampler(range(n), num_replicas=ranks, rank=rank, **options)
        sampler.set_epoch(epoch)
        out.append([list(b) for b in BatchSampler(sampler, batch, drop)])
    return out


@settings(deadline=None, max_examples=150)
@given(
    n=st.integers(1, 60),
    ranks=st.integers(1, 9),
    batch=st.integers(1, 7),
    epoch=st.integers(0, 3),
    seed=st.integers(0, 5),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
)
def test_torchs_distributed_sampler(n, ranks, batch, epoch, seed, shuffle, drop_last):
    options = {"shuffle": shuffle, "seed": seed, "drop_last": drop_last}
    plan = ShardPlan(n, world_size=ranks, batch_size=batch, **options)
    real = torch_batches(n, ranks, batch, epoch, **options)
    assert plan.source.name == "DistributedSampler"
    assert emitted(plan, epoch) == real
    check_counts(plan, real, epoch)


def check_counts(plan, real, epoch):
    """Arithmetic says what counting says."""
    flat = [i for rank in real for batch in rank for i in batch]
    coverage = plan.coverage(epoch)
    assert (coverage.drawn, coverage.seen) == (len(flat), len(set(flat)))
    assert coverage.never == len(plan.samples) - len(set(flat))
    assert coverage.padded + coverage.repeated == len(flat) - len(set(flat))
    sets = [{i for batch in rank for i in batch} for rank in real]
    overlap = plan.overlap(epoch)
    assert overlap.matrix.tolist() == [[len(a & b) for b in sets] for a in sets]


@settings(deadline=None, max_examples=150)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    ranks=st.integers(1, 6),
    batch=st.integers(1, 7),
    epoch=st.integers(0, 2),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
    kind=st.sampled_from(["whole", "weights", "replacement"]),
)
def test_our_batch_sampler(lengths, ranks, batch, epoch, shuffle, drop_last, kind):
    kwargs = {"num_batches": 12} if kind == "weights" else {}
    if kind != "whole":
        kwargs["weights"] = [1.0] * len(lengths)
    if kind == "replacement":
        kwargs |= {"replacement": True, "num_batches": 12}
    options = {"shuffle": shuffle, "drop_last": drop_last}
    if kind == "whole" and drop_last and sum(lengths) < batch * ranks:
        return
    real = []
    for rank in range(ranks):
        sampler = MultiDatasetBatchSampler(
            Lengths(*lengths),
            batch_size=batch,
            num_replicas=ranks,
            rank=rank,
            **options,
            **kwargs,
        )
        sampler.set_epoch(epoch)
        real.append(list(sampler))
    plan = ShardPlan(lengths, world_size=ranks, batch_size=batch, sampler_kwargs=kwargs, **options)
    assert emitted(plan, epoch) == real
    check_counts(plan, real, epoch)
    check_shares(plan, real, epoch)


def check_shares(plan, real, epoch):
    composition = plan.composition(epoch)
    flat = np.array([i for rank in real for batch in rank for i in batch])
    by_hand = np.bincount(plan.samples.dataset_of(flat), minlength=len(plan.samples.lengths))
    assert composition.counts.tolist() == by_hand.tolist()
    assert composition.per_batch.sum(axis=(0, 1)).tolist() == by_hand.tolist()
    assert composition.asked.sum() == pytest.approx(1)


@pytest.mark.parametrize("cls", [EpochSampler, MultiDatasetSampler])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("n", "ranks", "batch"), [(53, 4, 3), (48, 4, 4), (7, 3, 2), (20, 1, 6)])
def test_our_samplers_of_single_samples(cls, drop_last, n, ranks, batch):
    several = cls is MultiDatasetSampler
    dataset = Lengths(n - 5, 5) if several else range(n)
    real = []
    for rank in range(ranks):
        sampler = cls(dataset, num_replicas=ranks, rank=rank, drop_last=drop_last, seed=3)
        sampler.set_epoch(1)
        real.append([list(b) for b in BatchSampler(sampler, batch, drop_last)])
    plan = ShardPlan(
        [n - 5, 5] if several else n,
        sampler=cls,
        world_size=ranks,
        batch_size=batch,
        drop_last=drop_last,
        seed=3,
    )
    assert plan.source.cheap
    assert emitted(plan, 1) == real
    check_counts(plan, real, 1)
    check_shares(plan, real, 1)


def test_balanced_batches_are_planned_with_the_sizes_of_the_plan():
    sizes = np.random.default_rng(0).integers(1, 200, 240)
    options = {"world_size": 4, "batch_size": 5, "sizes": sizes}
    plan = ShardPlan([200, 40], sampler=BalancedBatchSampler, **options)
    plain = ShardPlan([200, 40], **options)
    assert plan.load().efficiency > 0.99 > plain.load().efficiency
    difference = plan.diff(plain)
    assert difference.steps_equal == difference.steps_compared == 12
    assert difference.first is not None and not difference.same
    real = [
        list(
            BalancedBatchSampler(
                Lengths(200, 40), batch_size=5, sizes=sizes, num_replicas=4, rank=r
            )
        )
        for r in range(4)
    ]
    assert emitted(plan) == real
    check_counts(plan, real, 0)


@pytest.mark.parametrize("ranks", [1, 3, 5, 14])
def test_exact_evaluation_is_planned_with_its_empty_tail(ranks):
    plan = ShardPlan([10, 3], sampler=ExactEvalSampler, world_size=ranks, batch_size=2)
    coverage = plan.coverage()
    assert (coverage.seen, coverage.drawn, coverage.never) == (13, 13, 0)
    assert (coverage.padded, coverage.method) == (0, "by construction")
    check_counts(plan, emitted(plan), 0)
    check_shares(plan, emitted(plan), 0)
    if ranks == 5:
        assert plan.batch(4, 1).size == 0


def test_weights_that_change_from_epoch_to_epoch():
    kwargs = {"weights": {0: [1, 0], 2: [1, 1]}, "num_batches": 10}
    plan = ShardPlan([50, 50], world_size=2, batch_size=4, epochs=3, sampler_kwargs=kwargs)
    assert plan.composition(0).counts.tolist() == [40, 0]
    assert plan.composition(2).counts.tolist() == [20, 20]
    assert plan.composition(0).asked.tolist() == [1, 0]
    assert plan.composition(2).asked.tolist() == [0.5, 0.5]
    flat = [i for e in range(3) for rank in emitted(plan, e) for batch in rank for i in batch]
    assert plan.coverage().seen == len(set(flat))


@pytest.mark.parametrize("cls", [Strided, Padded])
@pytest.mark.parametrize("epoch", [0, 2])
def test_a_class_that_only_keeps_the_protocol_is_iterated(cls, epoch):
    plan = ShardPlan(23, sampler=cls, world_size=4, batch_size=3, seed=1)
    real = []
    for rank in range(4):
        sampler = cls(range(23), 4, rank, seed=1)
        sampler.set_epoch(epoch)
        real.append([list(b) for b in BatchSampler(sampler, 3, False)])
    assert emitted(plan, epoch) == real
    check_counts(plan, real, epoch)
    dropping = ShardPlan(23, sampler=cls, world_size=4, batch_size=3, seed=1, drop_last=True)
    assert emitted(dropping, epoch) == [[b for b in rank if len(b) == 3] for rank in real]


class OwnBatches:
    """Yields batches of different sizes, and knows no epochs."""

    def __init__(self, dataset, num_replicas, rank, batch_size):
        self.rank, self.num_replicas, self.batch_size = rank, num_replicas, batch_size
        self.generator = np.random.default_rng(rank)

    def __iter__(self):
        for _ in range(3):
            yield self.generator.integers(0, 10, self.generator.integers(1, 6)).tolist()


def test_batches_of_different_sizes_and_an_order_that_depends_on_earlier_passes():
    plan = ShardPlan(10, sampler=OwnBatches, world_size=2, batch_size=4)
    for rank in range(2):
        sampler = OwnBatches(range(10), 2, rank, 4)
        for epoch in range(3):
            assert emitted(plan, epoch)[rank] == list(sampler)


def test_planning_leaves_the_users_generators_alone():
    torch.manual_seed(5), random.seed(5), np.random.seed(5)  # noqa: NPY002
    before = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy())  # noqa: NPY002
    plan = ShardPlan(30, sampler=GlobalRandom, world_size=2, batch_size=4)
    assert "not reproducible" in [finding.data["check"] for finding in plan.check()]
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()
    assert (before[2] == np.random.get_state()[1]).all()  # noqa: NPY002


def test_built_samplers():
    ours = MultiDatasetBatchSampler(Lengths(30, 10), batch_size=4, num_replicas=3, rank=2, seed=9)
    ours.set_position(24)
    plan = ShardPlan([30, 10], sampler=ours, world_size=3)
    assert plan.hash == ShardPlan([30, 10], world_size=3, batch_size=4, seed=9).hash
    plan.coverage([0, 1, 2])
    assert ours.state_dict()["position"] == 24 and ours.epoch == 0
    theirs = DistributedSampler(range(40), num_replicas=3, rank=1, seed=9)
    plan = ShardPlan(40, sampler=BatchSampler(theirs, 4, True), world_size=3)
    assert emitted(plan) == [
        [b for b in rank if len(b) == 4] for rank in torch_batches(40, 3, 4, 0, seed=9)
    ]
    each = [Padded(range(40), 3, rank) for rank in range(3)]
    plan = ShardPlan(40, sampler=each, world_size=3, batch_size=4)
    assert emitted(plan) == emitted(ShardPlan(40, sampler=Padded, world_size=3, batch_size=4))
    assert [sampler.epoch for sampler in each] == [0, 0, 0]
    assert emitted(plan, 2) != emitted(plan, 0)
    assert [sampler.epoch for sampler in each] == [0, 0, 0]


def test_factories_and_what_ddphook_leaves_out():
    def factory(dataset, num_replicas, rank):  # knows no shuffle, seed or drop_last
        return Padded(copy.copy(dataset), num_replicas, rank, seed=7)

    plan = ShardPlan(23, sampler=factory, world_size=4, batch_size=3)
    same = ShardPlan(23, sampler=Padded, world_size=4, batch_size=3, seed=7)
    assert emitted(plan) == emitted(same)


def test_batches_up_to_a_budget():
    sizes = np.random.default_rng(4).integers(1, 60, 500)
    kwargs = {"max_atoms": 200}
    plan = ShardPlan(
        500, sampler=BudgetBatchSampler, world_size=3, sampler_kwargs=kwargs, sizes=sizes
    )
    real = []
    for rank in range(3):
        sampler = BudgetBatchSampler(
            range(500), max_atoms=200, sizes=sizes, num_replicas=3, rank=rank
        )
        sampler.set_epoch(1)
        real.append(list(sampler))
    assert emitted(plan, 1) == real
    load = plan.load()
    assert load.largest.cost <= load.bound == 200
    check_counts(plan, real, 1)
    with pytest.raises(ValueError, match="chooses the sizes of batches itself"):
        ShardPlan(500, sampler=BudgetBatchSampler, world_size=3, batch_size=4, sizes=sizes)


@settings(deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=3),
    ranks=st.integers(1, 9),
    epoch=st.integers(0, 2),
    drop_last=st.booleans(),
)
def test_counts_of_batches_up_to_a_budget_follow_from_their_ends(lengths, ranks, epoch, drop_last):
    number = sum(lengths)
    sizes = np.random.default_rng(number).integers(1, 40, number)
    try:
        plan = ShardPlan(
            lengths,
            sampler=BudgetBatchSampler,
            world_size=ranks,
            drop_last=drop_last,
            sampler_kwargs={"max_atoms": 100},
            sizes=sizes,
        )
    except ValueError as refusal:
        assert drop_last and "every rank must have a step" in str(refusal)
        return
    real = emitted(plan, epoch)
    check_counts(plan, real, epoch)
    check_shares(plan, real, epoch)
    coverage = plan.coverage(epoch)
    assert coverage.method == "by construction"
    assert coverage.drawn == number + coverage.padded - coverage.dropped


def test_a_resumed_epoch_of_a_budget_has_nothing_again():
    sizes = np.random.default_rng(4).integers(1, 60, 500)
    plans = [
        ShardPlan(
            500,
            sampler=BudgetBatchSampler,
            world_size=ranks,
            sampler_kwargs={"max_atoms": 200},
            sizes=sizes,
        )
        for ranks in (4, 2)
    ]
    resume = plans[0].diff(plans[1], stop=7).resume
    assert (resume.start, resume.again, resume.never) == (14, 0, 0)
