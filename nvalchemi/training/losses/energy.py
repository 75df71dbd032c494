"""Losses of the total energy [B] or [B, 1], in eV or, per atom, in eV/atom."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from nvalchemi.training.losses.base import BaseLossFunction, DtypePolicy, check_delta
from nvalchemi.training.losses.reductions import (
    LossTerms,
    ReductionContext,
    graph_terms,
    per_graph_sum,
)


class _EnergyLoss(BaseLossFunction):
    """One value per structure; `per_atom` divides both energies by the number of atoms."""

    requires_eval_grad: ClassVar[bool | None] = False
    weight_by_atoms: ClassVar[bool] = True  # per_atom: sum N_i e_i / sum N_i, else the plain mean
    per_atom: bool

    def validate(self, pred: Tensor, target: Tensor) -> None:
        super().validate(pred, target)
        if pred.ndim not in (1, 2) or pred.shape[1:] not in ((), (1,)):
            raise ValueError(
                f"{type(self).__name__} needs one energy per structure, shape [B] or [B, 1]: "
                f"prediction {self.prediction_key!r} has {tuple(pred.shape)}"
            )

    def normalize(
        self, pred: Tensor, target: Tensor, context: ReductionContext
    ) -> tuple[Tensor, Tensor]:
        if not self.per_atom:
            return pred, target
        atoms = self._atom_counts(len(pred), context).to(pred).clamp_min(1)
        atoms = atoms.reshape(-1, *[1] * (pred.ndim - 1))
        return pred / atoms, target / atoms

    def reduce(
        self, residual: Tensor, valid: Tensor | None, context: ReductionContext
    ) -> LossTerms:
        residual = residual.reshape(len(residual))
        if self.per_atom and self.weight_by_atoms:
            weight = self._atom_counts(len(residual), context).to(residual)
        else:
            weight = torch.ones_like(residual)
        if valid is not None:
            valid = valid.reshape(len(residual))
            residual, weight = torch.where(valid, residual, 0), weight * valid
        return graph_terms(weight * residual, weight, balanced=False)

    def _atom_counts(self, num_graphs: int, context: ReductionContext) -> Tensor:
        counts = context.get("num_nodes_per_graph")
        batch_idx = context.get("batch_idx")
        if counts is None and batch_idx is not None:
            counts = per_graph_sum(torch.ones_like(batch_idx), batch_idx, num_graphs)
        if counts is None:
            raise ValueError(
                f"{type(self).__name__}(per_atom=True) needs the number of atoms of each "
                f"structure: pass num_nodes_per_graph= or batch_idx=, got {sorted(context)}"
            )
        if counts.numel() != num_graphs:
            raise ValueError(
                f"{type(self).__name__}: num_nodes_per_graph must have one entry for each "
                f"energy: {counts.numel()} != {num_graphs}"
            )
        return counts.reshape(-1)


class EnergyMSELoss(_EnergyLoss):
    """Mean squared error of the energy: mean of dE^2, or sum N (dE/N)^2 / sum N per atom."""

    def __init__(
        self,
        *,
        target_key: str = "energy",
        prediction_key: str = "predicted_energy",
        per_atom: bool = False,
        ignore_nonfinite: bool = False,
        dtype_policy: DtypePolicy = "strict",
    ) -> None:
        super().__init__(
            target_key=target_key,
            prediction_key=prediction_key,
            ignore_nonfinite=ignore_nonfinite,
            dtype_policy=dtype_policy,
        )
        self.per_atom = per_atom

    def compute_residual(self, pred: Tensor, target: Tensor) -> Tensor:
        return (pred - target).square()


class EnergyMAELoss(_EnergyLoss):
    """Mean absolute error of the energy: sum |dE| / sum N per atom, or the mean of |dE|."""

    def __init__(
        self,
        *,
        target_key: str = "energy",
        prediction_key: str = "predicted_energy",
        per_atom: bool = True,
        ignore_nonfinite: bool = True,
        dtype_policy: DtypePolicy = "strict",
    ) -> None:
        super().__init__(
            target_key=target_key,
            prediction_key=prediction_key,
            ignore_nonfinite=ignore_nonfinite,
            dtype_policy=dtype_policy,
        )
        self.per_atom = per_atom

    def compute_residual(self, pred: Tensor, target: Tensor) -> Tensor:
        return (pred - target).abs()


class EnergyHuberLoss(_EnergyLoss):
    """Mean over structures of Huber(dE/N) per atom, or of Huber(dE); `delta` in that unit.

    Huber(d) = d^2 / 2 for |d| < delta, delta (|d| - delta / 2) beyond.
    """

    weight_by_atoms: ClassVar[bool] = False

    def __init__(
        self,
        *,
        target_key: str = "energy",
        prediction_key: str = "predicted_energy",
        per_atom: bool = True,
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
        self.per_atom = per_atom
        self.delta = check_delta(delta)

    def compute_residual(self, pred: Tensor, target: Tensor) -> Tensor:
        return torch.nn.functional.huber_loss(pred, target, reduction="none", delta=self.delta)
