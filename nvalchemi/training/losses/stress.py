"""Losses of the stress [B, 3, 3] in eV/Angstrom^3."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from nvalchemi.training.losses.base import BaseLossFunction, DtypePolicy, check_delta
from nvalchemi.training.losses.reductions import (
    LossTerms,
    ReductionContext,
    graph_terms,
    row_sums,
)


class _StressLoss(BaseLossFunction):
    """Mean over the structures that have a stress of the mean over its nine components."""

    requires_eval_grad: ClassVar[bool | None] = True

    def validate(self, pred: Tensor, target: Tensor) -> None:
        super().validate(pred, target)
        if pred.ndim != 3 or pred.shape[1:] != (3, 3):
            raise ValueError(
                f"{type(self).__name__} needs one 3x3 stress per structure, shape [B, 3, 3]: "
                f"prediction {self.prediction_key!r} has {tuple(pred.shape)}"
            )

    def reduce(
        self, residual: Tensor, valid: Tensor | None, context: ReductionContext
    ) -> LossTerms:
        return graph_terms(*row_sums(residual, valid), balanced=True)


class StressMSELoss(_StressLoss):
    """Mean squared stress component, each structure with the same weight."""

    def __init__(
        self,
        *,
        target_key: str = "stress",
        prediction_key: str = "predicted_stress",
        ignore_nonfinite: bool = False,
        dtype_policy: DtypePolicy = "strict",
    ) -> None:
        super().__init__(
            target_key=target_key,
            prediction_key=prediction_key,
            ignore_nonfinite=ignore_nonfinite,
            dtype_policy=dtype_policy,
        )

    def compute_residual(self, pred: Tensor, target: Tensor) -> Tensor:
        return (pred - target).square()


class StressHuberLoss(_StressLoss):
    """Mean Huber loss of the stress components; `delta` in eV/Angstrom^3."""

    def __init__(
        self,
        *,
        target_key: str = "stress",
        prediction_key: str = "predicted_stress",
        delta: float = 0.01,
        ignore_nonfinite: bool = True,
        dtype_policy: DtypePolicy = "strict",
    ) -> None:
        super().__init__(
            target_key=target_key,
            prediction_key=prediction_key,
            ignore_nonfinite=ignore_nonfinite,
            dtype_policy=dtype_policy,
        )
        self.delta = check_delta(delta)

    def compute_residual(self, pred: Tensor, target: Tensor) -> Tensor:
        return torch.nn.functional.huber_loss(pred, target, reduction="none", delta=self.delta)
