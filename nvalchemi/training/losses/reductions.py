"""From errors per component to one number, always as a numerator over a denominator.

A mean of batch means weights a structure by the size of its batch. Every loss here therefore keeps
the two halves of its mean apart (`LossTerms`): adding the halves over batches, or over ranks, gives
exactly the value that one big batch would have given.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

import torch
from torch import Tensor


class ReductionContext(TypedDict, total=False):
    """What a loss may need to know about the batch beside prediction and target.

    Attributes
    ----------
    batch_idx : Tensor
        Structure of each atom, int [V].
    num_graphs : int
        Number of structures B.
    num_nodes_per_graph : Tensor
        Atoms of each structure, int [B].
    node_mask : Tensor
        Real (not padding) atoms of padded fields, bool [B, Vmax].
    """

    batch_idx: Tensor
    num_graphs: int
    num_nodes_per_graph: Tensor
    node_mask: Tensor


@dataclass(frozen=True, slots=True)
class LossTerms:
    """The two halves of a loss value, which may be summed over batches and ranks.

    Attributes
    ----------
    numerator, denominator : Tensor
        Scalars. The denominator counts what was averaged (structures, atoms or components) and
        carries no gradient.
    per_sample : Tensor or None
        The value of each structure taken alone, [B], detached; NaN where it has no label.
    """

    numerator: Tensor
    denominator: Tensor
    per_sample: Tensor | None = None

    @property
    def value(self) -> Tensor:
        """The loss: numerator / denominator, and 0 where nothing was counted."""
        return self.numerator / self.denominator.clamp_min(1)

    def detach(self) -> LossTerms:
        """The same halves without their graph, and without the values of single structures."""
        return LossTerms(self.numerator.detach(), self.denominator.detach())

    def __add__(self, other: LossTerms) -> LossTerms:
        return LossTerms(self.numerator + other.numerator, self.denominator + other.denominator)


def per_graph_sum(values: Tensor, batch_idx: Tensor, num_graphs: int | None = None) -> Tensor:
    """Sum of the atoms' values in each structure.

    Parameters
    ----------
    values : Tensor
        [V, ...].
    batch_idx : Tensor
        Structure of each atom, int [V]; any order.
    num_graphs : int, optional
        Number of structures B. Without it, the largest index + 1 is read back from the device.

    Returns
    -------
    Tensor
        [B, ...]; zero for a structure without atoms.

    Raises
    ------
    ValueError
        If `batch_idx` does not name one structure for each row of `values`.
    """
    if batch_idx.shape != values.shape[:1]:
        raise ValueError(
            f"batch_idx must name one structure for each atom: batch_idx has shape "
            f"{tuple(batch_idx.shape)}, the values have shape {tuple(values.shape)}"
        )
    if num_graphs is None:
        num_graphs = int(batch_idx.max()) + 1 if batch_idx.numel() else 0
    return values.new_zeros(num_graphs, *values.shape[1:]).index_add(0, batch_idx, values)


def per_graph_mean(values: Tensor, batch_idx: Tensor, num_graphs: int | None = None) -> Tensor:
    """Mean of the atoms' values in each structure, [B, ...]; zero for one without atoms.

    Parameters and errors as `per_graph_sum`.
    """
    sums = per_graph_sum(values, batch_idx, num_graphs)
    counts = per_graph_sum(values.new_ones(len(values)), batch_idx, len(sums)).clamp_min(1)
    return sums / counts.reshape(-1, *[1] * (sums.ndim - 1))


def masked_mean(values: Tensor, valid: Tensor | None = None) -> Tensor:
    """Mean of the values where `valid`; 0 where none is. Invalid ones pass on no gradient."""
    return element_terms(values, valid).value


def graph_balanced_mean(
    values: Tensor,
    batch_idx: Tensor,
    num_graphs: int | None = None,
    valid: Tensor | None = None,
) -> Tensor:
    """Mean over structures of the mean over a structure's valid components.

    A structure counts the same whatever its size; one without any valid component does not count.

    Parameters
    ----------
    values : Tensor
        [V, ...].
    batch_idx, num_graphs
        As in `per_graph_sum`.
    valid : Tensor, optional
        bool, broadcastable to the shape of `values`.
    """
    sums, counts = row_sums(values, valid)
    graph_sums = per_graph_sum(sums, batch_idx, num_graphs)
    return graph_terms(
        graph_sums, per_graph_sum(counts, batch_idx, len(graph_sums)), balanced=True
    ).value


def frobenius_mse(pred: Tensor, target: Tensor) -> Tensor:
    """Squared Frobenius norm of the difference per component, mean over the matrices [B, 3, 3]."""
    sums, counts = row_sums((pred - target).square(), None)
    return graph_terms(sums, counts, balanced=True).value


def row_sums(values: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
    """Sum of the valid components of each row of `values` [N, ...] and their number, both [N]."""
    flat = values.reshape(len(values), -1) if values.ndim > 1 else values.unsqueeze(1)
    if valid is None:
        return flat.sum(1), flat.new_full((len(flat),), float(flat.shape[1]))
    valid = valid.expand_as(values).reshape(flat.shape)
    return torch.where(valid, flat, 0).sum(1), valid.sum(1).to(flat.dtype)


def element_terms(values: Tensor, valid: Tensor | None) -> LossTerms:
    """Terms of the mean over all valid elements."""
    if valid is None:
        return LossTerms(values.sum(), values.new_full((), float(values.numel())))
    valid = valid.expand_as(values)
    return LossTerms(torch.where(valid, values, 0).sum(), valid.sum().to(values.dtype))


def graph_terms(sums: Tensor, counts: Tensor, *, balanced: bool) -> LossTerms:
    """Terms of a mean over structures, from each one's sum and (weighted) count, both [B].

    Balanced: each structure's own mean first, then the mean over the structures that have one.
    Otherwise all the structures' components are averaged together.
    """
    per_sample = sums.detach() / counts  # 0 / 0 is NaN: no label, no value
    if not balanced:
        return LossTerms(sums.sum(), counts.sum(), per_sample)
    means = sums / counts.clamp_min(1)
    return LossTerms(means.sum(), (counts > 0).sum().to(sums.dtype), per_sample)
