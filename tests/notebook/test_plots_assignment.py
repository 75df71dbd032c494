"""The picture of who takes what, against every batch of the plan."""

import numpy as np
import pytest
from plot_cases import Blocks, Dealt, RankBlind, Uneven, drawn, numbers, samples, wrong
from torch.utils.data import DistributedSampler

from nvalchemi.data.datapipes import EpochSampler, MultiDatasetSampler
from nvalchemi.notebook.plots import plot_assignment
from nvalchemi.notebook.plots.assignment import (
    compute_assignment,
    draw_assignment,
    refine_assignment,
)
from nvalchemi.sharding import ShardPlan

SAMPLERS = [None, DistributedSampler, EpochSampler, MultiDatasetSampler, Dealt]


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_small_plans_are_drawn_sample_by_sample(sampler):
    lengths = [50, 14] if sampler in (None, MultiDatasetSampler) else 64
    plan = ShardPlan(lengths, sampler=sampler, world_size=4, batch_size=5)
    arrays = compute_assignment(plan)
    assert arrays.facts.exact and arrays.facts.truth.startswith("exact: every draw of the epoch")
    seen: set[int] = set()
    for step in range(plan.num_steps()):
        for rank in range(4):
            row = arrays.cells[step, rank]
            assert row[row >= 0].tolist() == plan.batch(rank, step).tolist()
            for place in np.flatnonzero(row >= 0):
                assert arrays.repeated[step, rank, place] == (int(row[place]) in seen)
                seen.add(int(row[place]))
                inside = int(np.searchsorted(plan.samples.offsets, row[place], side="right")) - 1
                assert arrays.datasets[step, rank, place] == inside


@pytest.mark.parametrize("sampler", [None, Dealt])
def test_tiles_count_every_draw(sampler):
    plan = ShardPlan(9001, sampler=sampler, world_size=6, batch_size=7)
    arrays = compute_assignment(plan, 1)
    assert arrays.cells is None and arrays.facts.exact
    by_rank, by_step = np.zeros_like(arrays.by_rank), np.zeros_like(arrays.by_step)
    for rank, step, batch in drawn(plan, 1):
        for sample in batch:
            tile = int(np.searchsorted(arrays.tiles, sample, side="right")) - 1
            by_rank[rank, tile] += 1
            by_step[step * len(by_step) // plan.num_steps(1), tile] += 1
    assert (arrays.by_rank == by_rank).all() and (arrays.by_step == by_step).all()
    assert arrays.tiles[0] == 0 and arrays.tiles[-1] == 9001
    np.testing.assert_allclose(arrays.expected_by_rank.sum(), by_rank.sum())
    assert "clumping (random: 1)" not in wrong(arrays)


def test_zoom_is_the_same_picture_in_part():
    plan = ShardPlan(9001, sampler=EpochSampler, world_size=6, batch_size=7)
    part = compute_assignment(plan, ranks=[2, 4], steps=slice(10, 20))
    own = samples(plan, 0, [2, 4], range(10, 20))
    assert sorted(part.cells.ravel().tolist()) == sorted(own)
    assert part.facts.truth.startswith("exact: every draw of the steps and ranks chosen")
    near = compute_assignment(plan, samples=(100, 1100))
    inside = [s for s in samples(plan) if 100 <= s < 1100]
    assert near.by_rank.sum() == len(inside) and near.tiles[-1] == 1100


def test_a_sample_says_so_and_is_refined_to_all():
    plan = ShardPlan(20000, sampler=EpochSampler, world_size=8, batch_size=5)
    few = compute_assignment(plan, draws=2000)
    assert not few.facts.exact and few.facts.truth.startswith("sample of 10")
    assert "expected in a tile" in few.facts.truth and few.by_rank.sum() == 2000
    *_, all_of_it = refine_assignment(plan)
    assert all_of_it.facts.exact and all_of_it.by_rank.sum() == 20000
    assert (all_of_it.by_rank == compute_assignment(plan).by_rank).all()


def test_identical_ranks_are_counted_and_red():
    for number in (40, 4000):
        plan = ShardPlan(number, sampler=RankBlind, world_size=4, batch_size=5)
        arrays = compute_assignment(plan)
        assert numbers(arrays)["ranks alike"].value == "4"
        assert numbers(arrays)["repeated"].value == f"{3 * number:,}"
        assert {"ranks alike", "repeated"} <= wrong(arrays)
        assert "⚠ ranks alike: 4" in arrays.facts.alt


def test_uneven_and_idle_ranks():
    arrays = compute_assignment(ShardPlan(13, sampler=Uneven, world_size=4, batch_size=1))
    assert numbers(arrays)["steps"].value == "3 to 4" and "steps" in wrong(arrays)
    arrays = compute_assignment(ShardPlan(3, sampler=Uneven, world_size=4, batch_size=1))
    assert numbers(arrays)["idle ranks"].value == "1" and "idle ranks" in wrong(arrays)


def test_padded_evaluation_is_red_and_a_good_plan_is_not():
    arrays = compute_assignment(ShardPlan(21, world_size=4, batch_size=3, shuffle=False))
    assert numbers(arrays)["padded"].value == "3" and "padded" in wrong(arrays)
    assert arrays.repeated.sum() == 3
    for sampler in (None, EpochSampler, Dealt):
        arrays = compute_assignment(ShardPlan(9600, sampler=sampler, world_size=4, batch_size=4))
        assert wrong(arrays) == set()


def test_blocks_are_clumped():
    plan = ShardPlan([6400, 6400], sampler=Blocks, world_size=8, batch_size=16)
    assert "clumping (random: 1)" in wrong(compute_assignment(plan))


def test_weights_are_not_a_deviation():
    options = {"sampler_kwargs": {"weights": [0.5, 0.5]}}
    plan = ShardPlan([18000, 2000], world_size=4, batch_size=10, **options)
    z = compute_assignment(plan).z_by_rank
    assert np.nanmax(np.abs(z)) < 4.5 and wrong(compute_assignment(plan)) <= {"never seen"}


def test_bad_questions_get_a_sentence():
    plan = ShardPlan(64, world_size=4, batch_size=4)
    with pytest.raises(ValueError, match="ranks must be in"):
        plot_assignment(plan, ranks=[4])
    with pytest.raises(ValueError, match="steps must be in"):
        plot_assignment(plan, steps=[99])
    with pytest.raises(ValueError, match="epoch must be"):
        plot_assignment(plan, -1)
    with pytest.raises(ValueError, match="samples must be"):
        plot_assignment(plan, samples=(5, 5))
    empty = ShardPlan(3, world_size=4, batch_size=4, drop_last=True)
    with pytest.raises(ValueError, match="has no steps"):
        plot_assignment(empty)
    long = ShardPlan(10**8, world_size=1024, batch_size=64)
    with pytest.raises(ValueError, match="use EpochSampler as sampler_cls"):
        plot_assignment(long)


def test_the_picture_has_labels_and_names_its_samples():
    figure = draw_assignment(compute_assignment(ShardPlan([10, 6], world_size=2, batch_size=4)))
    (axes,) = figure.axes
    assert axes.get_xlabel().startswith("step") and axes.get_ylabel() == "rank"
    names = {text.get_text() for text in axes.texts}
    assert names == {f"{'a' if i < 10 else 'b'}{i}" for i in range(16)}
    figure = plot_assignment(ShardPlan(9600, world_size=4, batch_size=4))
    labels = [axes.get_ylabel() for axes in figure.axes]
    assert labels[:2] == ["rank", "step"]
