"""The pictures of mixtures and of how often samples come, against every batch of the plan."""

from collections import Counter

import numpy as np
import pytest
from plot_cases import Blocks, Dealt, Starving, drawn, numbers, samples, wrong

from nvalchemi.data.datapipes import BalancedBatchSampler, EpochSampler, MultiDatasetSampler
from nvalchemi.notebook.plots import plot_composition, plot_coverage
from nvalchemi.notebook.plots.composition import compute_composition, refine_composition
from nvalchemi.notebook.plots.coverage import compute_coverage, refine_coverage
from nvalchemi.sharding import ShardPlan


@pytest.mark.parametrize("sampler", [None, MultiDatasetSampler, Dealt])
def test_shares_and_first_steps_by_brute_force(sampler):
    plan = ShardPlan([900, 100, 7], sampler=sampler, world_size=3, batch_size=4)
    arrays = compute_composition(plan)
    counts, first = np.zeros_like(arrays.counts), [-1, -1, -1]
    for _, step, batch in sorted(drawn(plan), key=lambda item: item[1]):
        for sample in batch:
            j = int(plan.samples.dataset_of(np.array([sample]))[0])
            counts[step * len(counts) // plan.num_steps(), j] += 1
            first[j] = step if first[j] < 0 else first[j]
    assert (arrays.counts == counts).all() and arrays.first.tolist() == first
    np.testing.assert_allclose(arrays.realised, counts.sum(0) / counts.sum())
    np.testing.assert_allclose(arrays.shares.sum(axis=1), 1)
    assert arrays.facts.exact and "starved data sets" not in wrong(arrays)


def test_one_rank_alone():
    plan = ShardPlan([60, 40], world_size=2, batch_size=5)
    arrays = compute_composition(plan, ranks=[1])
    first = [sample < 60 for sample in samples(plan, 0, [1])]
    assert arrays.counts.sum(axis=0).tolist() == [sum(first), len(first) - sum(first)]


@pytest.mark.parametrize("exact", [False, True])
def test_the_bars_count_what_was_asked_about(exact):
    """A rank of one data set: of all ranks together, half are of each."""

    class Turns(Dealt):
        def order(self):
            return np.arange(160)[:, None].repeat(2, 1).ravel() + np.tile([0, 160], 160)

    plan = ShardPlan([160, 160], sampler=Turns, world_size=2, batch_size=8)
    for chosen, share in ({"ranks": [0]}, [1, 0]), ({"ranks": [1]}, [0, 1]), ({}, [0.5, 0.5]):
        axes = plot_composition(plan, exact=exact, **chosen).axes[1]
        assert [bar.get_width() for bar in axes.patches] == share
        what = "the ranks and steps chosen" if chosen else "the epoch"
        assert axes.get_xlabel() == f"share of the samples of {what}"
    assert compute_composition(plan, ranks=[0]).error.tolist() == [0, 0]


@pytest.mark.parametrize("lengths", [[240, 80, 12], [100 + j for j in range(30)]])
def test_the_number_counts_what_the_picture_shows(lengths):
    """Groups of steps of which a border lies outside of the dotted lines around it."""
    plan = ShardPlan(lengths, sampler=Dealt, world_size=2, batch_size=8)
    arrays = compute_composition(plan)
    axes = plot_composition(plan).axes[0]
    dotted = [line.get_ydata()[:-1] for line in axes.lines if line.get_linestyle() == ":"]
    borders = np.cumsum(arrays.shares @ arrays.drawn.T, axis=1)[:, :-1].T
    assert len(dotted) == 2 * len(borders)
    low, high = np.array(dotted[::2]), np.array(dotted[1::2])
    outside = int(((borders < low) | (borders > high)).any(axis=0).sum())
    number = numbers(arrays)["groups outside the lines"]
    assert number.value.startswith(f"{outside} of {len(arrays.steps)}, chance ")
    assert not number.wrong


def test_one_rank_of_a_balanced_step_has_no_bound_of_its_own():
    options = {"world_size": 3, "batch_size": 10, "sampler_kwargs": {"weights": [0.45, 0.55]}}
    sizes = np.random.default_rng(0).integers(5, 80, 648)
    plan = ShardPlan([135, 513], sampler=BalancedBatchSampler, sizes=sizes, **options)
    assert compute_composition(plan).kind == "bound"
    one = compute_composition(plan, ranks=[0])
    assert one.kind == "standard deviation" and wrong(one) == set()


def test_chance_crosses_the_lines_as_often_as_the_number_says():
    got, said = 0, 0
    for seed in range(20):
        options = {"world_size": 2, "batch_size": 8, "sampler_kwargs": {"seed": seed}}
        arrays = compute_composition(ShardPlan([2400, 800, 100], sampler=Dealt, **options))
        number = numbers(arrays)["groups outside the lines"]
        parts = number.value.replace(",", "").split()
        got, said = got + int(parts[0]), said + int(parts[-1])
        assert not number.wrong and wrong(arrays) == set()
    assert abs(got - said) < 4 * said**0.5 and said > 50


def test_weights_that_nobody_reads_are_red():
    """All groups lie a little or far beside what was asked for, none of them more than 5 sigma."""
    for weights, outside in ([0.4, 0.3, 0.3], True), ([0.69, 0.25, 0.06], False):
        options = {"world_size": 2, "batch_size": 16, "sampler_kwargs": {"weights": weights}}
        arrays = compute_composition(ShardPlan([240, 80, 12], sampler=Starving, **options))
        assert "largest gap (data set 0)" in wrong(arrays) and arrays.off[0]
        assert ("groups outside the lines" in wrong(arrays)) == outside


def test_a_starved_set_is_red_and_named():
    options = {"sampler_kwargs": {"weights": [0.2, 0.8]}}
    plan = ShardPlan([900, 100], sampler=Starving, world_size=2, batch_size=10, **options)
    arrays = compute_composition(plan)
    assert arrays.starved.tolist() == [False, True]
    assert numbers(arrays)["starved data sets"].value == "1"
    assert "starved data sets" in wrong(arrays)
    words = [text.get_text() for text in plot_composition(plan).axes[1].texts]
    assert words[1].startswith("⚠ asked 80.0 %, got 10.0 %")
    assert words[0].startswith("⚠ asked 20.0 %, got 90.0 %")


def test_stripes_are_red_and_a_shuffle_is_not():
    plan = ShardPlan([640, 640], sampler=Blocks, world_size=4, batch_size=8)
    striped = wrong(compute_composition(plan))
    assert {"variance (random: 1)", "groups outside the lines"} <= striped
    for sampler in (None, MultiDatasetSampler, Dealt):
        plan = ShardPlan([640, 640], sampler=sampler, world_size=4, batch_size=8)
        assert wrong(compute_composition(plan)) == set()


@pytest.mark.parametrize(
    "kwargs", [{"samples_per_dataset": [6, 2]}, {"weights": [0.7, 0.3]}, {"temperature": 2.0}]
)
def test_the_band_holds_what_was_asked_for(kwargs):
    plan = ShardPlan([9000, 1000], world_size=4, batch_size=8, sampler_kwargs=kwargs)
    arrays = compute_composition(plan)
    assert "groups outside the lines" not in wrong(arrays)
    assert numbers(arrays)["groups outside the lines"].value.startswith("0 of ")
    assert arrays.kind == ("exact" if "samples_per_dataset" in kwargs else "bound")


def test_a_sample_of_the_steps_says_so_and_is_refined():
    plan = ShardPlan([15000, 5000], world_size=8, batch_size=5)
    few = compute_composition(plan, draws=1000)
    assert not few.facts.exact and "shares ±" in few.facts.truth
    *_, all_of_it = refine_composition(plan)
    assert all_of_it.facts.exact and all_of_it.counts.sum(axis=0).tolist() == [15000, 5000]


def test_many_sets_are_shown_together_but_for_the_starved():
    lengths = [100 + j for j in range(30)]
    weights = [1.0] * 29 + [30.0]
    options = {"sampler_kwargs": {"weights": weights}}
    arrays = compute_composition(
        ShardPlan(lengths, sampler=Starving, world_size=2, batch_size=10, **options)
    )
    assert len(arrays.shown) < 9 and 29 in arrays.shown and arrays.starved[29]
    figure = plot_composition(ShardPlan(lengths, world_size=2, batch_size=10))
    assert "others" in figure.axes[1].get_yticklabels()[-1].get_text()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sampler": EpochSampler},
        {"drop_last": True},
        {"sampler": Dealt},
        {"sampler_kwargs": {"weights": [0.5, 0.5]}},
        {"sampler_kwargs": {"replacement": True}},
    ],
)
@pytest.mark.parametrize("epochs", [1, 3])
def test_how_often_samples_come(options, epochs):
    lengths = [90, 13] if "sampler_kwargs" in options else 103
    plan = ShardPlan(lengths, world_size=4, batch_size=3, epochs=epochs, **options)
    arrays = compute_coverage(plan)
    times = Counter(s for epoch in range(epochs) for s in samples(plan, epoch))
    for j, (a, b) in enumerate(zip(plan.samples.offsets[:-1], plan.samples.offsets[1:])):
        expected = Counter(times[s] for s in range(a, b))
        assert {k: n for k, n in enumerate(arrays.histogram[j].tolist()) if n} == expected
    assert arrays.coverage.never == sum(times[s] == 0 for s in range(103))


@pytest.mark.parametrize("number", [96, 103])
@pytest.mark.parametrize("drop_last", [False, True])
def test_by_construction_is_what_counting_gives(number, drop_last):
    from nvalchemi.notebook.plots.coverage import count_times, times_by_construction

    options = {"world_size": 4, "batch_size": 4, "drop_last": drop_last}
    plans = [ShardPlan(number, **options), ShardPlan(number, sampler=EpochSampler, **options)]
    plans += [ShardPlan([number - 20, 20], **options)]
    known = 0
    for plan in plans:
        found = times_by_construction(plan, [1])
        if found is not None:
            known += 1
            counted = count_times(plan, [1])
            width = max(found.shape[1], counted.shape[1])
            pad = [np.pad(h, ((0, 0), (0, width - h.shape[1]))) for h in (found, counted)]
            assert (pad[0] == pad[1]).all()
    assert known >= 2


def test_dropped_and_never_seen_are_red_in_an_evaluation():
    plan = ShardPlan(103, world_size=4, batch_size=4, drop_last=True, shuffle=False)
    assert {"dropped", "never seen"} <= wrong(compute_coverage(plan))
    assert plot_coverage(plan).axes[0].get_xlabel() == "times that a sample is drawn"


def test_expected_coverage_is_not_called_exact():
    options = {"weights": [0.5, 0.5], "replacement": True}
    plan = ShardPlan(
        [9 * 10**7, 10**7], world_size=1024, batch_size=64, epochs=2, sampler_kwargs=options
    )
    arrays = compute_coverage(plan)
    assert not arrays.facts.exact and arrays.histogram is None
    assert arrays.facts.truth.startswith("expected: mean over all seeds")
    *_, small = refine_coverage(ShardPlan([90, 10], world_size=2, batch_size=5))
    assert small.facts.exact and small.histogram is not None
    with pytest.raises(ValueError, match="at least one epoch"):
        compute_coverage(plan, [])
