"""The picture of the ranks' work, against every batch of the plan."""

import numpy as np
import pytest
from plot_cases import Dealt, drawn, numbers, wrong

from nvalchemi.data.datapipes import BalancedBatchSampler, BudgetBatchSampler, EpochSampler
from nvalchemi.notebook.plots import plot_load
from nvalchemi.notebook.plots.load import compute_load, refine_load
from nvalchemi.sharding import ShardPlan

SIZES = np.random.default_rng(0).integers(5, 200, 2000)
EDGES = SIZES * 12


@pytest.mark.parametrize("sampler", [None, EpochSampler, Dealt, BalancedBatchSampler])
@pytest.mark.parametrize("by", ["cost", "atoms", "edges"])
def test_bands_and_efficiency_by_brute_force(sampler, by):
    plan = ShardPlan(2000, sampler=sampler, world_size=6, batch_size=8, sizes=(SIZES, EDGES))
    arrays = compute_load(plan, by=by)
    costs = EDGES if by == "edges" else SIZES
    work = np.zeros((plan.num_steps(), 6))
    for rank, step, batch in drawn(plan):
        work[step, rank] = costs[batch].sum()
    assert arrays.unit == ("atoms" if by == "cost" else by) and arrays.facts.exact
    assert arrays.efficiency == pytest.approx(work.mean(axis=1).sum() / work.max(axis=1).sum())
    for step in range(plan.num_steps()):
        expected = np.quantile(work[step], [0, 0.05, 0.5, 0.95, 1])
        np.testing.assert_allclose(arrays.bands[step], expected, rtol=1e-6)
    np.testing.assert_allclose(arrays.highest.T, work)
    assert arrays.largest.cost == work.max()
    assert arrays.bound == np.sort(costs)[-8:].sum()
    if by == "cost":
        assert arrays.efficiency == pytest.approx(plan.load().efficiency)


def test_groups_of_steps_keep_the_maximum():
    sizes = np.full(4000, 20)
    sizes[7] = 5000
    plan = ShardPlan(4000, sampler=EpochSampler, world_size=4, batch_size=4, sizes=sizes)
    arrays = compute_load(plan)
    assert len(arrays.bands) < plan.num_steps()
    assert arrays.bands[:, 4].max() == arrays.highest.max() == 5060
    assert 7 in plan.batch(arrays.largest.rank, arrays.largest.step)


def test_uneven_work_is_red_and_balanced_work_is_beside_it():
    sizes = np.random.default_rng(0).integers(1, 400, 3200)
    plan = ShardPlan(3200, sampler=EpochSampler, world_size=8, batch_size=4, sizes=sizes)
    arrays = compute_load(plan)
    assert {"DDP efficiency", "time waited"} <= wrong(arrays)
    options = {"world_size": 8, "batch_size": 4, "sizes": sizes}
    balanced = ShardPlan(3200, sampler=BalancedBatchSampler, **options)
    assert arrays.beside_efficiency == pytest.approx(balanced.load().efficiency)
    assert numbers(arrays)["efficiency if balanced"].value == f"{arrays.beside_efficiency:.3f}"
    own = compute_load(balanced)
    assert np.isnan(own.beside_efficiency) and "balanced already" in own.beside_note
    assert wrong(own) == set()
    labels = plot_load(plan).axes[0].get_legend().get_texts()
    assert "highest rank if balanced" in [text.get_text() for text in labels]


@pytest.mark.parametrize("limit", ["atoms", "edges"])
def test_a_budget_is_the_largest_possible_and_nothing_is_recommended(limit):
    options = {"sampler_kwargs": {f"max_{limit}": 4000}, "sizes": (SIZES, EDGES)}
    plan = ShardPlan(2000, sampler=BudgetBatchSampler, world_size=4, **options)
    arrays = compute_load(plan, by=limit)
    assert arrays.bound == 4000 and numbers(arrays)["largest possible"].value == "4,000"
    assert "efficiency if balanced" not in numbers(arrays) and np.isnan(arrays.beside).all()
    assert "chooses the sizes of its batches" in arrays.beside_note


def test_what_is_worse_is_not_recommended():
    """Batches of a sampler of the user's that all have the same work already."""

    class Even(Dealt):
        def order(self):
            return np.array([[i, 799 - i] for i in range(400)]).ravel()

        def __iter__(self):
            pairs = self.order().reshape(-1, self.num_replicas, 2)
            return iter(pairs[:, self.rank].tolist())

    sizes = np.arange(1, 801)
    plan = ShardPlan(800, sampler=Even, world_size=4, batch_size=2, sizes=sizes)
    arrays = compute_load(plan)
    assert arrays.efficiency == 1 and np.isnan(arrays.beside_efficiency)
    assert "efficiency if balanced" not in numbers(arrays)
    assert arrays.beside_note.startswith("no better than this plan: 0.87")


def test_a_sample_says_how_far_it_may_be_off_and_is_refined():
    sizes = np.random.default_rng(0).integers(5, 200, 20000)
    plan = ShardPlan(20000, sampler=EpochSampler, world_size=8, batch_size=5, sizes=sizes)
    few = compute_load(plan, draws=2000)
    assert not few.facts.exact and few.error > 0 and "efficiency ±" in few.facts.truth
    *_, all_of_it = refine_load(plan, beside=False)
    assert all_of_it.facts.exact and all_of_it.error == 0
    assert all_of_it.efficiency == pytest.approx(compute_load(plan).efficiency)
    assert abs(few.efficiency - all_of_it.efficiency) < 6 * few.error


def test_without_sizes_there_is_a_sentence():
    with pytest.raises(ValueError, match="load by cost needs it of each sample"):
        plot_load(ShardPlan(64, world_size=2, batch_size=4))
    plan = ShardPlan(64, world_size=2, batch_size=4, sizes=np.ones(64, int))
    with pytest.raises(ValueError, match="load by edges"):
        plot_load(plan, by="edges")
    with pytest.raises(ValueError, match="by must be"):
        plot_load(plan, by="forces")
    axes = plot_load(plan).axes
    assert axes[0].get_ylabel() == "atoms of a batch of one rank" and axes[0].get_xlabel() == "step"
