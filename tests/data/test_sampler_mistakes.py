"""Samplers: what a user can get wrong is named, with the value and what is allowed."""

from itertools import chain
from typing import Any

import pytest
from sampler_cases import Lengths

from nvalchemi.data.datapipes.samplers import (
    EpochSampler,
    MultiDatasetBatchSampler,
    MultiDatasetSampler,
)

BATCHES = MultiDatasetBatchSampler


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"batch_size": 0}, ValueError, "batch_size must be >= 1, got 0"),
        ({"batch_size": 2.0}, TypeError, "batch_size must be an integer"),
        ({"weights": [1]}, ValueError, "Expected 2 dataset weights, got 1"),
        ({"weights": [1, float("nan")]}, ValueError, r"weights\[1\] must be finite"),
        ({"weights": [float("inf"), 1]}, ValueError, r"weights\[0\] must be finite"),
        ({"weights": [1, -1]}, ValueError, r"weights\[1\] must be finite and >= 0, got -1"),
        ({"weights": [0, 0]}, ValueError, "must have a positive entry"),
        ({"weights": ["a", 1]}, TypeError, r"weights\[0\] must be a number"),
        ({"samples_per_dataset": [2, 3]}, ValueError, "must sum to batch_size: 5 != 4"),
        ({"samples_per_dataset": [True, 3]}, TypeError, "must be integral counts"),
        ({"samples_per_dataset": [5, -1]}, ValueError, ">= 0, got -1"),
        ({"samples_per_dataset": [4]}, ValueError, "Expected 2 entries of samples_per_dataset"),
        ({"samples_per_dataset": [2, 2], "weights": [1, 1]}, ValueError, "mutually exclusive"),
        ({"epoch_policy": "max"}, ValueError, "epoch_policy must be one of .* got 'max'"),
        ({"epoch_policy": "max", "num_batches": 2}, ValueError, "epoch_policy must be one of"),
        ({"num_batches": 0}, ValueError, "num_batches must be >= 1"),
        ({"num_replicas": 0}, ValueError, "num_replicas must be >= 1"),
        ({"num_replicas": 2, "rank": 2}, ValueError, r"rank must be in \[0, 2\), got 2"),
        ({"rank": -1}, ValueError, r"rank must be in \[0, 1\), got -1"),
        ({"seed": 1.5}, TypeError, "seed must be an integer"),
        ({"num_replicas": 6, "drop_last": True}, ValueError, "5 batches for 6 ranks"),
        ({"batch_size": True}, TypeError, "batch_size must be an integer, got True"),
        ({"weights": 1.0}, TypeError, "weights must be a sequence .* 2 data sets, got 1.0"),
        ({"weights": "ab"}, TypeError, "weights must be a sequence"),
        ({"weights": [1, float("-inf")]}, ValueError, r"weights\[1\] must be finite"),
        ({"weights": {0: 1}}, TypeError, r"weights\[0\] must be a sequence"),
        ({"samples_per_dataset": 4}, TypeError, "samples_per_dataset must be a sequence"),
        ({"samples_per_dataset": [1.0, float("nan")]}, ValueError, r"\[1\] must be finite"),
        ({"samples_per_dataset": [4, None]}, TypeError, r"\[1\] must be a number, got None"),
        ({"num_batches": 2.5}, TypeError, "num_batches must be an integer"),
        ({"epoch_policy": None}, ValueError, "epoch_policy must be one of .* got None"),
        ({"shuffle": "False"}, TypeError, "shuffle must be True or False, got 'False'"),
        ({"drop_last": 1}, TypeError, "drop_last must be True or False, got 1"),
        ({"replacement": "no"}, TypeError, "replacement must be True or False, got 'no'"),
        ({"num_replicas": 1.0}, TypeError, "num_replicas must be an integer"),
        ({"rank": "0"}, TypeError, "rank must be an integer"),
        ({"generator": 3}, TypeError, "generator must be a torch.Generator, got 3"),
        ({"distributed_manager": 3}, TypeError, "must have rank and world_size, got 3"),
        ({"weights": [999, 1], "num_batches": 3}, ValueError, "data set 1 .* num_batches=1"),
    ],
)
def test_mistakes_are_named(options: dict[str, Any], error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        BATCHES(Lengths(10, 10), **{"batch_size": 4, **options})


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"weights": [1]}, ValueError, "Expected 2 dataset weights, got 1"),
        ({"weights": [float("nan"), 1]}, ValueError, r"weights\[0\] must be finite"),
        ({"weights": [1, 999], "num_samples": 5}, ValueError, "data set 0 .* num_samples="),
        ({"num_samples": 0}, ValueError, "num_samples must be >= 1, got 0"),
        ({"num_samples": 1.5}, TypeError, "num_samples must be an integer"),
        ({"temperature": float("nan")}, ValueError, "temperature must be > 0, got nan"),
        ({"num_replicas": 2, "rank": 2}, ValueError, r"rank must be in \[0, 2\), got 2"),
        ({"num_replicas": 21, "drop_last": True}, ValueError, "20 samples for 21 ranks"),
        ({"shuffle": None}, TypeError, "shuffle must be True or False, got None"),
        ({"num_samples": 30, "replacement": False}, ValueError, "data set 0 has 10 samples"),
    ],
)
def test_mistakes_with_single_samples_are_named(
    options: dict[str, Any], error: type[Exception], message: str
):
    with pytest.raises(error, match=message):
        MultiDatasetSampler(Lengths(10, 10), **options)


def test_empty_data_sets_and_foreign_ones_are_named():
    assert sorted(chain(*BATCHES(Lengths(0, 9), batch_size=4))) == list(range(9))
    with pytest.raises(ValueError, match="data set 0 is empty"):
        BATCHES.balanced(Lengths(0, 9), batch_size=4)
    with pytest.raises(ValueError, match="must hold 1 to 2"):
        BATCHES(Lengths(0, 0), batch_size=4)
    with pytest.raises(TypeError, match="for a single data set use EpochSampler"):
        BATCHES(range(9), batch_size=4)
    with pytest.raises(ValueError, match="must hold 1 to 2"):
        EpochSampler([])
    with pytest.raises(TypeError, match="must have a length, got generator"):
        EpochSampler(i for i in range(3))
    with pytest.raises(ValueError, match="2 samples for 3 ranks with drop_last=True leave none"):
        EpochSampler(range(2), num_replicas=3, rank=0, drop_last=True)
    with pytest.raises(TypeError, match="drop_last must be True or False, got 'yes'"):
        EpochSampler(range(2), drop_last="yes")
    with pytest.raises(ValueError, match=r"rank must be in \[0, 2\), got 2"):
        EpochSampler(range(9), num_replicas=2, rank=2)
    with pytest.raises(ValueError, match="epoch must be >= 0"):
        EpochSampler(range(2)).set_epoch(-1)


def test_the_smallest_epoch_that_reaches_a_data_set_is_right():
    data, options = Lengths(100, 100), {"batch_size": 4, "weights": [999, 1]}
    with pytest.raises(ValueError, match="num_batches=(125|126)") as refusal:
        BATCHES(data, num_batches=3, **options)
    smallest = int(str(refusal.value).rpartition("=")[2])
    assert BATCHES(data, num_batches=smallest, **options).draws_per_dataset[1] == 1
    with pytest.raises(ValueError, match="data set 1"):
        BATCHES(data, num_batches=smallest - 1, **options)


def test_the_warning_of_samples_left_over_points_at_the_line_that_makes_the_sampler():
    class Two:
        datasets = (range(10), range(7))

        def __len__(self):
            return 17

    with pytest.warns(UserWarning, match="uses 12 of 17 samples") as caught:
        MultiDatasetBatchSampler(Two(), batch_size=4, samples_per_dataset=[2, 2], replacement=False)
    assert caught[0].filename == __file__
