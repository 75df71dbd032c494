"""Weights by temperature and by stages of a training."""

import math
from itertools import chain
from typing import Any

import numpy as np
import pytest
from sampler_cases import Lengths, per_rank

from nvalchemi.data.datapipes.samplers import MultiDatasetBatchSampler, MultiDatasetSampler

BATCHES = MultiDatasetBatchSampler


def test_temperature_flattens_the_sizes():
    data = Lengths(8100, 100)
    assert BATCHES(data, batch_size=82, temperature=1).samples_per_dataset == [81, 1]
    assert BATCHES(data, batch_size=10, temperature=2).samples_per_dataset == [9, 1]
    rooted = BATCHES(data, batch_size=4, temperature=4.0).samples_per_dataset
    assert rooted == pytest.approx([3, 1], abs=1e-9)  # 8100 ** 0.25 is no fraction
    assert BATCHES(data, batch_size=4, temperature=math.inf).samples_per_dataset == [2, 2]
    single = MultiDatasetSampler(data, temperature=2, num_samples=1000)
    assert single.draws_per_dataset == [900, 100]


def test_temperature_leaves_empty_data_sets_out():
    sampler = BATCHES(Lengths(50, 0, 50), batch_size=4, temperature=3)
    assert sampler.samples_per_dataset == [2, 0, 2]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"temperature": 0}, ValueError, "temperature must be > 0, got 0"),
        ({"temperature": -2.0}, ValueError, "temperature must be > 0, got -2.0"),
        ({"temperature": math.nan}, ValueError, "temperature must be > 0, got nan"),
        ({"temperature": "2"}, TypeError, "temperature must be a number"),
        ({"temperature": True}, TypeError, "temperature must be a number"),
        ({"temperature": 1e-3}, ValueError, "temperature must be large enough"),
        ({"temperature": 2, "weights": [1, 1]}, ValueError, "weights and temperature are mutually"),
        (
            {"temperature": 2, "samples_per_dataset": [2, 2]},
            ValueError,
            "temperature and samples_per_dataset are mutually",
        ),
        ({"weights": {}}, ValueError, "ascending epochs from 0"),
        ({"weights": {1: [1, 1]}}, ValueError, r"from 0, got the epochs \[1\]"),
        ({"weights": {0: [1, 1], 5: [1, 2], 3: [2, 1]}}, ValueError, r"\[0, 5, 3\]"),
        ({"weights": {0.0: [1, 1]}}, TypeError, "first epoch of a stage must be an integer"),
        ({"weights": {0: [1, 1], 2: [1]}}, ValueError, r"2 entries of weights\[2\], got 1"),
        ({"weights": {0: [1, 1], 2: 3}}, TypeError, r"weights\[2\] must be a sequence"),
        ({"weights": {0: [1, 1], 2: [1, -1]}}, ValueError, r"weights\[2\]\[1\] must be finite"),
        ({"weights": {0: [1, 1], 2: [9999, 1]}}, ValueError, "data set 1 has a positive weight"),
        (
            {"weights": {0: [1, 1], 2: [3, 1]}, "epoch_policy": "max_size"},
            ValueError,
            r"from epochs \[0, 2\] on have \[50, 100\] batches; give num_batches",
        ),
    ],
)
def test_mistakes_are_named(options: dict[str, Any], error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        BATCHES(Lengths(100, 100), **{"batch_size": 4, **options})


def test_stages_hold_from_their_epoch_on():
    sampler = BATCHES(Lengths(100, 100), batch_size=4, weights={0: [1, 0], 2: [1, 1], 5: [1, 3]})
    counts, lengths = [], []
    for epoch in range(7):
        sampler.set_epoch(epoch)
        flat = np.array(list(chain(*sampler)))
        counts.append(int((flat >= 100).sum()))
        lengths.append(len(sampler))
        assert sampler.draws_per_dataset[1] == counts[-1]
    assert counts == [0, 0, 100, 100, 100, 150, 150]
    assert lengths == [50] * 7
    assert sampler.samples_per_dataset == [1, 3]


@pytest.mark.parametrize("cls", [BATCHES, MultiDatasetSampler])
def test_an_epoch_of_a_stage_is_that_of_a_sampler_with_its_weights(cls: Any):
    options = {"batch_size": 6} if cls is BATCHES else {}

    def emitted(weights: Any) -> list[Any]:
        sampler = cls(Lengths(70, 50), weights=weights, seed=4, **options)
        sampler.set_epoch(3)
        return list(sampler)

    assert emitted({0: [1, 1], 3: [2, 1]}) == emitted([2, 1])
    assert emitted({0: [1, 1], 4: [2, 1]}) == emitted([1, 1])


def test_the_state_of_a_staged_order_belongs_to_its_stages():
    def sampler(weights: Any) -> MultiDatasetBatchSampler:
        return BATCHES(Lengths(70, 50), batch_size=6, weights=weights)

    state = sampler({0: [1, 1], 3: [2, 1]}).state_dict()
    sampler({0: [2, 2], 3: [4, 2]}).load_state_dict(state)
    for other in ({0: [1, 1], 4: [2, 1]}, [1, 1]):
        with pytest.raises(ValueError, match="belongs to another order"):
            sampler(other).load_state_dict(state)


def test_thousands_of_data_sets_have_each_sample_once_and_windows_anywhere():
    lengths = np.random.default_rng(0).integers(0, 40, 2000).tolist()
    ranks = per_rank(4, BATCHES, Lengths(*lengths), batch_size=16)
    dealt = [batch for step in zip(*ranks) for batch in step]
    number = -(-sum(lengths) // 16)
    assert sorted(chain(*dealt[:number])) == list(range(sum(lengths)))
    sampler = BATCHES(Lengths(*lengths), batch_size=16, num_replicas=4, rank=2)
    sampler.set_epoch_step(500)
    assert next(iter(sampler)) == ranks[2][500] == sampler.window([500], [2])[0, 0].tolist()


def test_thousands_of_weights_are_exact_to_a_sample():
    rng = np.random.default_rng(1)
    weights = (rng.random(1500) + 0.1).tolist()
    sampler = BATCHES(Lengths(*[30] * 1500), batch_size=32, weights=weights, num_batches=2000)
    expected = np.array(weights) / sum(weights) * 64_000
    assert np.abs(np.array(sampler.draws_per_dataset) - expected).max() < 1.1
    found = np.bincount(np.array(list(chain(*sampler))) // 30, minlength=1500)
    assert found.tolist() == sampler.draws_per_dataset
