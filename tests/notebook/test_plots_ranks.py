"""Overlap of ranks, order of epochs, and resume: against every batch of the plan."""

from itertools import pairwise

import numpy as np
import pytest
from plot_cases import Dealt, NoSetEpoch, RankBlind, drawn, numbers, samples, wrong

from nvalchemi.data.datapipes import EpochSampler
from nvalchemi.notebook.plots import plot_order, plot_overlap, plot_resume
from nvalchemi.notebook.plots.order import compute_order, refine_order
from nvalchemi.notebook.plots.overlap import compute_overlap, refine_overlap
from nvalchemi.notebook.plots.resume import compute_resume, refine_resume
from nvalchemi.sharding import ShardPlan


@pytest.mark.parametrize("sampler", [None, EpochSampler, Dealt, RankBlind])
def test_shared_samples_by_brute_force(sampler):
    plan = ShardPlan(103, sampler=sampler, world_size=5, batch_size=4)
    arrays = compute_overlap(plan)
    seen = [set(samples(plan, 0, [r])) for r in range(5)]
    for a in range(5):
        for b in range(5):
            assert arrays.shared[a, b] == len(seen[a] & seen[b])
            share = 0 if a == b else len(seen[a] & seen[b]) / min(len(seen[a]), len(seen[b]))
            assert arrays.share[a, b] == pytest.approx(share)
    assert arrays.facts.exact and "all pairs of 5 ranks" in arrays.facts.truth


def test_identical_ranks_are_in_red():
    arrays = compute_overlap(ShardPlan(40, sampler=RankBlind, world_size=4, batch_size=5))
    assert numbers(arrays)["pairs with the same samples"].value == "6"
    assert {"pairs with the same samples", "most shared"} <= wrong(arrays)
    good = compute_overlap(ShardPlan(9600, sampler=EpochSampler, world_size=4, batch_size=4))
    assert wrong(good) == set()


def test_blocks_of_ranks_keep_the_highest_share():
    plan = ShardPlan(3000, sampler=RankBlind, world_size=130, batch_size=10)
    arrays = compute_overlap(plan)
    assert arrays.blocks.shape == (64, 64) and np.nanmin(arrays.blocks) == 1.0
    names = plot_overlap(plan).axes[0].get_xlabel()
    assert names.startswith("rank (blocks of 2.03")


def test_the_words_are_those_of_what_is_drawn():
    few = plot_overlap(ShardPlan(40, sampler=RankBlind, world_size=4, batch_size=5)).axes[0]
    assert few.get_title("left") == "white: the rank itself; numbers: samples that both have"
    assert len(few.texts) == 12 and not few.collections
    for sampler, crossed in ((RankBlind, True), (EpochSampler, False)):
        axes = plot_overlap(ShardPlan(3400, sampler=sampler, world_size=17, batch_size=4)).axes[0]
        assert ("crosses" in axes.get_title("left")) == crossed == bool(axes.collections)


def test_some_pairs_of_many_ranks_say_so():
    plan = ShardPlan(10**8, sampler=EpochSampler, world_size=1024, batch_size=64)
    few = compute_overlap(plan)
    assert not few.facts.exact and "64 of 1,024 ranks" in few.facts.truth
    *_, all_of_it = refine_overlap(plan)
    assert all_of_it.facts.exact and all_of_it.share.shape == (1024, 1024)
    at = np.searchsorted(all_of_it.ranks, few.ranks)
    assert (all_of_it.shared[np.ix_(at, at)] == few.shared).all()


@pytest.mark.parametrize("sampler", [None, EpochSampler, Dealt, NoSetEpoch])
def test_places_in_both_epochs_by_brute_force(sampler):
    plan = ShardPlan(103, sampler=sampler, world_size=3, batch_size=4)
    arrays = compute_order(plan, 1)
    places: list[dict[int, int]] = [{}, {}]
    for found, epoch in zip(places, (1, 2)):
        for rank, step, batch in sorted(drawn(plan, epoch), key=lambda item: (item[1], item[0])):
            for slot, sample in enumerate(batch):
                found.setdefault(sample, step * 12 + rank * 4 + slot)
    expected = {(places[0][s], places[1][s]) for s in places[0].keys() & places[1].keys()}
    assert set(zip(arrays.between.x.tolist(), arrays.between.y.tolist())) == expected
    following = [pair for *_, batch in drawn(plan, 1) for pair in pairwise(batch)]
    pairs = zip(arrays.following.x.tolist(), arrays.following.y.tolist())
    assert sorted(pairs) == sorted(following)
    assert arrays.following.counts.sum() == len(following)


def test_a_forgotten_set_epoch_is_red():
    name = "at the same place in epoch 1"
    for number in (960, 20000):
        arrays = compute_order(ShardPlan(number, sampler=NoSetEpoch, world_size=4, batch_size=4))
        assert numbers(arrays)[name].value == "100 %" and name in wrong(arrays)
        good = ShardPlan(number, sampler=Dealt, world_size=4, batch_size=4)
        assert wrong(compute_order(good)) == set()
    assert "pattern, epochs (random: 1)" in wrong(arrays)
    unshuffled = compute_order(ShardPlan(2000, world_size=4, batch_size=4, shuffle=False))
    assert "followed by one of the next 4" in wrong(unshuffled)


def test_orders_of_many_samples_compare_what_is_at_a_place():
    plan = ShardPlan(10**8, sampler=EpochSampler, world_size=1024, batch_size=64, epochs=2)
    arrays = compute_order(plan)
    assert arrays.kind == "samples" and not arrays.facts.exact and wrong(arrays) == set()
    assert plot_order(plan).axes[0].get_xlabel() == "sample at a place in epoch 0"
    *_, small = refine_order(ShardPlan(4000, sampler=EpochSampler, world_size=4, batch_size=4))
    assert small.kind == "places" and small.facts.exact


@pytest.mark.parametrize(("stop", "start"), [(3, 3), (3, 5), (3, None), (0, None), (6, 8)])
def test_resume_by_brute_force(stop, start):
    four = ShardPlan([80, 16], world_size=4, batch_size=4)
    three = ShardPlan([80, 16], world_size=3, batch_size=4)
    arrays = compute_resume(four, three, stop=stop, start=start)
    first = samples(four, 0, None, range(stop))
    begin = arrays.resume.start
    after = samples(three, 0, None, range(begin, 8))
    for sample in range(96):
        state = {(1, 0): 0, (0, 1): 1, (1, 1): 2, (0, 0): 3}[sample in first, sample in after]
        assert arrays.states[sample] == state
    assert arrays.counts.tolist() == np.bincount(arrays.states, minlength=4).tolist()
    resume = four.diff(three, stop=stop, start=start).resume
    assert arrays.counts.tolist()[2:] == [resume.again, resume.never]
    lost = {name for name, n in (("again", resume.again), ("never", resume.never)) if n}
    assert wrong(arrays) == lost


def test_resume_of_large_plans_is_arithmetic_or_not_counted():
    one, two = (
        ShardPlan(10**8, sampler=EpochSampler, world_size=r, batch_size=64) for r in (1024, 512)
    )
    arrays = compute_resume(one, two, stop=300)
    assert arrays.facts.exact and arrays.counts.tolist() == [19660800, 80339200, 0, 0]
    other = ShardPlan(10**8, sampler=EpochSampler, world_size=512, batch_size=64, seed=1)
    unknown = compute_resume(one, other, stop=300)
    assert unknown.counts is None and unknown.facts.truth.startswith("not counted")
    *_, small = refine_resume(
        ShardPlan(96, world_size=4, batch_size=4), ShardPlan(96, world_size=2, batch_size=8), stop=2
    )
    assert small.facts.exact and wrong(small) == set()


def test_bad_questions_get_a_sentence():
    plan = ShardPlan(96, world_size=4, batch_size=4)
    with pytest.raises(ValueError, match="over the same samples"):
        plot_resume(plan, ShardPlan(95, world_size=4, batch_size=4), stop=1)
    with pytest.raises(TypeError, match="other must be a ShardPlan"):
        plot_resume(plan, 7, stop=1)
    with pytest.raises(ValueError, match="stop must be at most 6"):
        plot_resume(plan, plan, stop=7)
    with pytest.raises(ValueError, match="ranks must name at least one"):
        plot_overlap(plan, ranks=[])
    with pytest.raises(ValueError, match="following must be"):
        plot_order(plan, following=-1)
