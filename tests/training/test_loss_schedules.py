"""Weights that change over the training."""

import importlib
import math

import pytest
from pydantic import ValidationError

from nvalchemi.training.losses import (
    ConstantWeight,
    CosineWeight,
    LinearWeight,
    LossWeightSchedule,
    PiecewiseWeight,
)

SCHEDULES = [
    ConstantWeight(value=2.0),
    LinearWeight(start=1.0, end=3.0, num_steps=4),
    CosineWeight(start=1.0, end=0.0, num_steps=10, per_epoch=True),
    PiecewiseWeight(boundaries=[2, 5], values=[1.0, 10.0, 100.0]),
]


def test_values():
    constant, linear, _, piecewise = SCHEDULES
    cosine = CosineWeight(start=1.0, end=0.0, num_steps=10)
    assert [constant(step, None) for step in (0, 9)] == [2.0, 2.0]
    assert [linear(step, None) for step in range(6)] == [1.0, 1.5, 2.0, 2.5, 3.0, 3.0]
    assert [piecewise(step, None) for step in (0, 1, 2, 4, 5, 99)] == [1, 1, 10, 10, 100, 100]
    right = [0.5 * (1 + math.cos(math.pi * min(step, 10) / 10)) for step in range(13)]
    assert [cosine(step, None) for step in range(13)] == pytest.approx(right)
    assert (cosine(0, None), cosine(10, None)) == (1.0, 0.0)


def test_per_epoch_follows_the_epoch():
    ramp = LinearWeight(start=0.0, end=1.0, num_steps=2, per_epoch=True)
    assert [ramp(1000, epoch) for epoch in range(4)] == [0.0, 0.5, 1.0, 1.0]
    with pytest.raises(ValueError, match=r"LinearWeight\(per_epoch=True\) needs the epoch"):
        ramp(1000, None)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)
def test_protocol_spec_and_immutability(schedule):
    assert isinstance(schedule, LossWeightSchedule)
    spec = schedule.to_spec()
    module, _, name = spec.pop("cls_path").rpartition(".")
    assert getattr(importlib.import_module(module), name)(**spec) == schedule
    with pytest.raises(ValidationError, match="frozen"):
        schedule.per_epoch = True


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LinearWeight(start=0, end=1, num_steps=0), "greater than 0"),
        (lambda: ConstantWeight(value=float("nan")), "finite"),
        (lambda: ConstantWeight(value=1.0, warmup=3), "Extra inputs"),
        (lambda: PiecewiseWeight(boundaries=[1], values=[1.0]), r"1 != 1 \+ 1"),
        (lambda: PiecewiseWeight(boundaries=[5, 5], values=[1, 2, 3]), r"increase: \(5, 5\)"),
        (lambda: PiecewiseWeight(boundaries=[0], values=[1, 2]), r"positive"),
    ],
)
def test_mistakes(make, message):
    with pytest.raises(ValidationError, match=message):
        make()
