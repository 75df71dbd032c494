"""Losses of energies, forces and stresses, their weighted sums and weight schedules."""

from nvalchemi.training.losses.base import (
    BaseLossFunction,
    assert_same_shape,
    loss_component_to_spec,
)
from nvalchemi.training.losses.composed import (
    ComposedLossFunction,
    ComposedLossOutput,
    assemble_loss_targets,
)
from nvalchemi.training.losses.energy import EnergyHuberLoss, EnergyMAELoss, EnergyMSELoss
from nvalchemi.training.losses.forces import ForceHuberLoss, ForceL2NormLoss, ForceMSELoss
from nvalchemi.training.losses.reductions import (
    LossTerms,
    ReductionContext,
    frobenius_mse,
    graph_balanced_mean,
    masked_mean,
    per_graph_mean,
    per_graph_sum,
)
from nvalchemi.training.losses.schedules import (
    ConstantWeight,
    CosineWeight,
    LinearWeight,
    LossWeightSchedule,
    PiecewiseWeight,
)
from nvalchemi.training.losses.stress import StressHuberLoss, StressMSELoss

__all__ = [
    "BaseLossFunction",
    "ComposedLossFunction",
    "ComposedLossOutput",
    "ConstantWeight",
    "CosineWeight",
    "EnergyHuberLoss",
    "EnergyMAELoss",
    "EnergyMSELoss",
    "ForceHuberLoss",
    "ForceL2NormLoss",
    "ForceMSELoss",
    "LinearWeight",
    "LossTerms",
    "LossWeightSchedule",
    "PiecewiseWeight",
    "ReductionContext",
    "StressHuberLoss",
    "StressMSELoss",
    "assemble_loss_targets",
    "assert_same_shape",
    "frobenius_mse",
    "graph_balanced_mean",
    "loss_component_to_spec",
    "masked_mean",
    "per_graph_mean",
    "per_graph_sum",
]
