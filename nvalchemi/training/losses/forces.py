"""Losses of the forces in eV/Angstrom: dense [V, 3], or padded [B, Vmax, 3]."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from nvalchemi.training.losses.base import BaseLossFunction, DtypePolicy, check_delta
from nvalchemi.training.losses.reductions import (
    LossTerms,
    ReductionContext,
    element_terms,
    graph_terms,
    per_graph_sum,
    row_sums,
)


class _ForceLoss(BaseLossFunction):
    """`normalize_by_atom_count`: mean over structures of each one's mean; else one global mean.

    Dense forces are assigned to structures by `batch_idx` (with `num_graphs`) or
    `num_nodes_per_graph`; padded ones need `num_nodes_per_graph` or `node_mask`.
    """

    requires_eval_grad: ClassVar[bool | None] = True
    normalize_by_atom_count: bool

    def validate(self, pred: Tensor, target: Tensor) -> None:
        super().validate(pred, target)
        if pred.ndim not in (2, 3) or pred.shape[-1] != 3:
            raise ValueError(
                f"{type(self).__name__} needs forces of shape [V, 3] or padded [B, Vmax, 3]: "
                f"prediction {self.prediction_key!r} has {tuple(pred.shape)}"
            )

    def mask(self, pred: Tensor, target: Tensor, context: ReductionContext) -> Tensor | None:
        valid = super().mask(pred, target, context)
        if pred.ndim == 2:
            return valid
        real = self._real_atoms(pred, context).unsqueeze(-1)
        return real.expand_as(pred) if valid is None else valid & real

    def reduce(
        self, residual: Tensor, valid: Tensor | None, context: ReductionContext
    ) -> LossTerms:
        balanced = self.normalize_by_atom_count
        if residual.ndim == 3:
            return graph_terms(*row_sums(residual, valid), balanced=balanced)
        batch_idx, num_graphs = self._assignment(len(residual), context)
        if batch_idx is None:
            return element_terms(residual, valid)
        atoms = context.get("num_nodes_per_graph")
        if valid is None and atoms is not None:  # all atoms count: no second scatter
            sums = per_graph_sum(residual.sum(1), batch_idx, len(atoms))
            return graph_terms(sums, atoms.to(sums) * residual.shape[1], balanced=balanced)
        atom_sums, atom_counts = row_sums(residual, valid)
        sums = per_graph_sum(atom_sums, batch_idx, num_graphs)
        counts = per_graph_sum(atom_counts, batch_idx, len(sums))
        return graph_terms(sums, counts, balanced=balanced)

    def _assignment(
        self, num_atoms: int, context: ReductionContext
    ) -> tuple[Tensor | None, int | None]:
        """Structure of each atom of dense forces and the number of structures, where known."""
        batch_idx = context.get("batch_idx")
        if batch_idx is not None:
            return batch_idx, context.get("num_graphs")
        counts = context.get("num_nodes_per_graph")
        if counts is not None:
            if int(counts.sum()) != num_atoms:
                raise ValueError(
                    f"{type(self).__name__}: num_nodes_per_graph must sum to the number of "
                    f"forces: {int(counts.sum())} != {num_atoms}"
                )
            return torch.repeat_interleave(counts, output_size=num_atoms), len(counts)
        if self.normalize_by_atom_count:
            raise ValueError(
                f"{type(self).__name__}(normalize_by_atom_count=True) must know to which "
                "structure each of the dense forces [V, 3] belongs: pass batch_idx= with "
                f"num_graphs=, or num_nodes_per_graph=, got {sorted(context)}"
            )
        return None, None

    def _real_atoms(self, forces: Tensor, context: ReductionContext) -> Tensor:
        """Which of the padded rows are atoms, bool [B, Vmax]."""
        shape = forces.shape[:2]
        mask = context.get("node_mask")
        if mask is not None:
            if mask.shape != shape or mask.dtype != torch.bool:
                raise ValueError(
                    f"{type(self).__name__}: node_mask must be bool [B, Vmax] = {tuple(shape)}: "
                    f"got {mask.dtype} {tuple(mask.shape)}"
                )
            return mask
        counts = context.get("num_nodes_per_graph")
        if counts is None:
            raise ValueError(
                f"{type(self).__name__} must know which of the padded forces [B, Vmax, 3] are "
                f"atoms: pass num_nodes_per_graph= or node_mask=, got {sorted(context)}"
            )
        if counts.shape != shape[:1]:
            raise ValueError(
                f"{type(self).__name__}: num_nodes_per_graph must have one entry for each "
                f"structure: {tuple(counts.shape)} != {tuple(shape[:1])}"
            )
        return torch.arange(shape[1], device=forces.device) < counts.unsqueeze(1)


class ForceMSELoss(_ForceLoss):
    """Mean over structures of the mean squared force component, or the mean over all components."""

    def __init__(
        self,
        *,
        target_key: str = "forces",
        prediction_key: str = "predicted_forces",
        normalize_by_atom_count: bool = True,
        ignore_nonfinite: bool = False,
        dtype_policy: DtypePolicy = "strict",
    ) -> None:
        super().__init__(
            target_key=target_key,
            prediction_key=prediction_key,
            ignore_nonfinite=ignore_nonfinite,
            dtype_policy=dtype_policy,
        )
        self.normalize_by_atom_count = normalize_by_atom_count

    def compute_residual(self, pred: Tensor, target: Tensor) -> Tensor:
        return (pred - target).square()


class ForceHuberLoss(_ForceLoss):
    """Mean Huber loss of the force components; `delta` in eV/Angstrom."""

    def __init__(
        self,
        *,
        target_key: str = "forces",
        prediction_key: str = "predicted_forces",
        normalize_by_atom_count: bool = False,
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
        self.normalize_by_atom_count = normalize_by_atom_count
        self.delta = check_delta(delta)

    def compute_residual(self, pred: Tensor, target: Tensor) -> Tensor:
        return torch.nn.functional.huber_loss(pred, target, reduction="none", delta=self.delta)


class ForceL2NormLoss(_ForceLoss):
    """Mean length of the error vector of an atom; an atom counts if its whole label is finite."""

    def __init__(
        self,
        *,
        target_key: str = "forces",
        prediction_key: str = "predicted_forces",
        normalize_by_atom_count: bool = True,
        ignore_nonfinite: bool = True,
        dtype_policy: DtypePolicy = "strict",
    ) -> None:
        super().__init__(
            target_key=target_key,
            prediction_key=prediction_key,
            ignore_nonfinite=ignore_nonfinite,
            dtype_policy=dtype_policy,
        )
        self.normalize_by_atom_count = normalize_by_atom_count

    def mask(self, pred: Tensor, target: Tensor, context: ReductionContext) -> Tensor | None:
        valid = super().mask(pred, target, context)
        return None if valid is None else valid.all(-1, keepdim=True)

    def compute_residual(self, pred: Tensor, target: Tensor) -> Tensor:
        return torch.linalg.vector_norm(pred - target, dim=-1, keepdim=True)
