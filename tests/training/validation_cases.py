"""Structures, losses and strategies for tests of validation."""

import functools
from itertools import islice

import torch
from loop_cases import strategy, structure

from nvalchemi.data import Batch
from nvalchemi.models import MLPPotential
from nvalchemi.training import (
    BaseLossFunction,
    EnergyHuberLoss,
    EnergyMAELoss,
    EnergyMSELoss,
    ForceHuberLoss,
    ForceL2NormLoss,
    ForceMSELoss,
    ValidationConfig,
)

ALL_LOSSES = (
    2 * EnergyMSELoss()
    + EnergyMSELoss(per_atom=True)
    + EnergyMAELoss()
    + EnergyHuberLoss()
    + 3 * ForceMSELoss()
    + ForceMSELoss(normalize_by_atom_count=False)
    + ForceHuberLoss()
    + ForceL2NormLoss()
)


@functools.cache
def potential():
    torch.manual_seed(1)
    return MLPPotential(hidden_features=4).double()


def validating(data, **fields):
    """A strategy over the potential, with a validation_config of these fields."""
    own = {name: fields.pop(name) for name in ("models", "loss_fn", "hooks") if name in fields}
    own = {"models": potential(), "loss_fn": ALL_LOSSES, **own}
    return strategy(validation_config=ValidationConfig(validation_data=data, **fields), **own)


def cut(data, sizes):
    """Consecutive batches of these sizes."""
    rest = iter(data)
    return [Batch.from_data_list(list(islice(rest, size))) for size in sizes]


class Custom(BaseLossFunction):
    """A user's loss that overrides forward, and says nothing about gradients."""

    def forward(self, pred, target, **meta):
        return (pred - target).square().mean()


DATA = [structure(number) for number in range(10)]
