"""BalancedBatchSampler: the samples of a step dealt to the ranks so that their work is even."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, TypeAlias

import numpy as np

from nvalchemi.data.datapipes.lpt import Costs, deal, exchange
from nvalchemi.data.datapipes.order import Indices
from nvalchemi.data.datapipes.sample_sizes import Sizes, sample_sizes
from nvalchemi.data.datapipes.samplers import MultiDatasetBatchSampler

Cost: TypeAlias = Literal["atoms", "edges"] | Sequence[float]

TOLERANCE = 1e-3
"""Exchanges end when no rank has more than the mean by this part: DDP efficiency above 0.999."""


@dataclass(frozen=True)
class OneDataset:
    """A single data set, as samplers over several look at it."""

    lengths: list[int]


class BalancedBatchSampler(MultiDatasetBatchSampler):
    """Batches of equal counts and even cost: in each step the large structures are spread out.

    Which samples a step has is what `MultiDatasetBatchSampler` says (for a single data set, what
    `EpochSampler` says) with the same seed and options, so it depends on the global batch
    ``batch_size * num_replicas`` and not on the number of ranks. Inside the step they are dealt to
    the ranks: the largest first to the least loaded rank, and then a few exchanges, so that no rank
    has more than its part by 0.1 % where the sizes allow that. Every rank computes the deal of all
    ranks from the sizes alone, without communication.

    All ranks get the same number of samples, so that DDP's mean over ranks of mean losses stays the
    mean over samples; only in a last step that is not full they may differ by one.

    Parameters
    ----------
    dataset : Dataset, InMemoryDataset, MultiDataset, or anything with a length
        Its ``sizes() -> (atoms, edges)`` is asked once, which reads no sample.
    batch_size : int
        Samples in a batch of one rank.
    cost : {"atoms", "edges"} or three numbers
        What is to be even. Numbers (a, b, c) >= 0 mean a + b * atoms + c * edges.
    sizes : array of shape (N,), or a pair of them, optional
        Atoms, or atoms and edges, of each sample (data set after data set), instead of those of the
        data set. Integers >= 0; unsigned ones, a memory map too, are not copied.
    **options
        As in `MultiDatasetBatchSampler`: weights, num_replicas, rank, shuffle, seed, drop_last and
        so on. Integer `samples_per_dataset` hold for a step as a whole, not in each batch.

    Raises
    ------
    ValueError, TypeError
        For a cost that nothing is known of, sizes that do not fit the data, and as
        `MultiDatasetBatchSampler`.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        batch_size: int,
        cost: Cost = "atoms",
        sizes: Any = None,
        **options: Any,
    ) -> None:
        several = hasattr(dataset, "datasets") or hasattr(dataset, "lengths")
        if not several and not hasattr(dataset, "__len__"):
            raise TypeError(f"dataset must have a length, got {type(dataset).__name__}")
        source = dataset if several else OneDataset([len(dataset)])
        super().__init__(source, batch_size=batch_size, **options)
        self.cost = cost
        atoms, edges = sample_sizes(dataset, sizes, sum(self.lengths))
        self._terms, self._constant = cost_terms(cost, atoms, edges)
        self._computed = self.batch_size * self.num_replicas

    def costs(self, samples: Indices) -> Costs:
        """Cost of each of the samples, by their indices."""
        total = np.full(samples.shape, self._constant)
        for factor, sizes in self._terms:
            total += factor * sizes[samples]
        return total

    def _deal(self, first_units: Indices, ranks: Indices, epoch: int) -> Indices:
        units = first_units[:, None] + np.arange(self.num_replicas)
        samples = self._units(units, epoch).reshape(len(first_units), -1)
        out = np.empty((len(samples), len(ranks), self.batch_size), dtype=np.int64)
        for row, step in zip(out, samples):
            row[:] = self._deal_step(step[step >= 0])[ranks]
        return out

    def _deal_step(self, samples: Indices) -> Indices:
        """Samples of a step, shape (ranks, batch_size), in each batch as they come in the order."""
        costs = self.costs(samples)
        ranks = np.arange(self.num_replicas)
        each, more = divmod(len(samples), self.num_replicas)
        members, loads = deal(costs, self.num_replicas, each + (ranks < more))
        limit = (1 + TOLERANCE) * float(costs.sum()) / self.num_replicas
        exchange(members, loads, costs, limit, moves=False)
        members = np.sort(np.where(members < 0, len(samples), members), axis=1)
        out = np.full((self.num_replicas, self.batch_size), -1, dtype=np.int64)
        out[:, : members.shape[1]] = np.append(samples, -1)[members]
        return out


def cost_terms(
    cost: Any, atoms: Sizes, edges: Sizes | None
) -> tuple[list[tuple[float, Sizes]], float]:
    """The cost as factors with the sizes that they multiply, and a constant."""
    if isinstance(cost, str):
        if cost not in ("atoms", "edges"):
            raise ValueError(f"cost must be 'atoms', 'edges' or three numbers, got {cost!r}")
        constant, per_atom, per_edge = 0.0, float(cost == "atoms"), float(cost == "edges")
    else:
        constant, per_atom, per_edge = check_factors(cost)
    terms = [(per_atom, atoms)] if per_atom else []
    if per_edge:
        if edges is None or not edges.any():
            what = "only atoms are given" if edges is None else "no structure has an edge"
            raise ValueError(
                f"cost={cost!r} counts edges, and {what}; store neighbour lists, give "
                "sizes=(atoms, edges), or use cost='atoms'"
            )
        terms.append((per_edge, edges))
    return terms, constant


def check_factors(cost: Any) -> list[float]:
    factors = list(cost) if hasattr(cost, "__iter__") else [cost]
    if not all(isinstance(f, Real) and not isinstance(f, bool) for f in factors):
        raise TypeError(f"cost must be 'atoms', 'edges' or three numbers (a, b, c), got {cost!r}")
    if len(factors) != 3 or not all(math.isfinite(f) and f >= 0 for f in factors):
        raise ValueError(
            f"cost must be three finite numbers >= 0, for a + b * atoms + c * edges, got {cost!r}"
        )
    if not factors[1] and not factors[2]:
        raise ValueError(
            f"cost must depend on atoms or edges, got {cost!r}; for batches without balance use "
            "MultiDatasetBatchSampler"
        )
    return [float(f) for f in factors]
