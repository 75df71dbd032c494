"""Modes and requires_grad, set for a while and put back submodule by submodule."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from nvalchemi.training import evaluating, unwrap_model
from nvalchemi.training.modes import training_modes


def net():
    return nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Dropout(), nn.BatchNorm1d(2)))


def modes(*models):
    return [module.training for model in models for module in model.modules()]


def test_evaluating_puts_each_submodule_back():
    # W30: train() on the root would put the dropout, which was in evaluation mode, into training
    first, second = net(), net().eval()
    first[1][0].eval()
    before = modes(first, second)
    with evaluating([first, second]):
        assert not any(modes(first, second))
    assert modes(first, second) == before
    with pytest.raises(KeyError), evaluating(first):
        assert not any(modes(first)) and not any(modes(second))
        raise KeyError
    assert modes(first, second) == before


def test_evaluating_with_a_shared_submodule():
    shared = nn.Dropout()
    first, second = nn.Sequential(shared), nn.Sequential(shared)
    with evaluating(model for model in (first, second)):
        assert not shared.training
    assert shared.training and first.training and second.training


def test_trained_models_keep_their_parts_in_evaluation_mode():
    trained = net()
    trained[1][1].eval()
    before = modes(trained)
    with training_modes([trained], []):
        assert modes(trained) == before
    asleep = net().eval()
    with training_modes([asleep], []):
        assert all(modes(asleep))
    assert not any(modes(asleep))


def test_other_models_are_frozen_for_a_while():
    trained, other = net(), net()
    other[0].bias.requires_grad_(False)
    grads = [parameter.requires_grad for parameter in other.parameters()]
    before = modes(trained, other)
    with pytest.raises(KeyError), training_modes([trained], [other]):
        assert all(modes(trained)) and not any(modes(other))
        assert not any(parameter.requires_grad for parameter in other.parameters())
        assert all(parameter.requires_grad for parameter in trained.parameters())
        raise KeyError
    assert modes(trained, other) == before
    assert [parameter.requires_grad for parameter in other.parameters()] == grads


def test_unwrap_leaves_a_bare_model():
    model = net()
    assert unwrap_model(model) is model


BEHIND_DDP = """
import os, sys, torch, torch.distributed as dist
from torch import nn
from nvalchemi.training.modes import training_modes, unwrap_model

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = nn.Sequential(nn.Linear(2, 2), nn.Dropout()).eval()
wrapped = nn.parallel.DistributedDataParallel(model)
assert unwrap_model(wrapped) is model
assert wrapped.training  # the wrapper itself always says so
with training_modes([wrapped], []):
    print([module.training for module in model.modules()])
print([module.training for module in model.modules()], flush=True)
os._exit(0)
"""


def test_a_wrapped_model_in_evaluation_mode_is_trained_in_training_mode():
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", BEHIND_DDP],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:2] == ["[True, True, True]", "[False, False, False]"]


def test_gradients_are_left_alone():
    model = net()
    model(torch.ones(3, 2)).sum().backward()
    before = [parameter.grad.clone() for parameter in model.parameters()]
    with evaluating(model):
        model(torch.ones(3, 2))
    assert all(torch.equal(p.grad, old) for p, old in zip(model.parameters(), before))
