"""ExactEvalSampler: every sample once over all ranks, for evaluation."""

from collections.abc import Iterator, Sized
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nvalchemi.data.datapipes.order import MAX_SIZE, CyclicOrder, Indices
from nvalchemi.data.datapipes.samplers import emit_batches
from nvalchemi.data.datapipes.sharded import ShardedSampler
from nvalchemi.data.datapipes.weights import check_integer


class ExactEvalSampler(ShardedSampler[list[int]]):
    """Batches in which every sample comes exactly once over all ranks, in the order of the data.

    Sums over batches and ranks (of errors and of counts) are therefore those of one process, for
    any number of ranks. All ranks have the same number of steps. Before the last step every batch
    has `batch_size` samples; those of the last step are spread evenly, and where there are fewer of
    them than ranks, the ranks after them get an empty list: no sample is repeated to fill it.

    A loader reads no batch without samples, so with one the empty list is left out, in place of
    ``for batch in loader``::

        for batch in loader.read(filter(None, loader.index_batches())): ...

    Where ranks must move in step (a model that communicates), iterate over the sampler and take
    part with nothing when the list is empty; `tail` says beforehand for whom it will be.

    Parameters
    ----------
    dataset : sized
        The data set.
    batch_size : int
        Samples in a batch of one rank.
    num_replicas, rank : int, optional
        Default 1 and 0. torch.distributed is not asked.
    distributed_manager : DistributedManager, optional
        Gives both, if it is initialised.

    Attributes
    ----------
    length : int
        Samples over all ranks.
    num_padded, num_dropped : int
        Batches that come again, or that are left out: none.

    Raises
    ------
    ValueError, TypeError
        For an empty data set, one without a length, or arguments out of range.
    """

    num_padded = num_dropped = 0

    def __init__(
        self,
        dataset: Sized,
        *,
        batch_size: int,
        num_replicas: int | None = None,
        rank: int | None = None,
        distributed_manager: Any = None,
    ) -> None:
        if not hasattr(dataset, "__len__"):
            raise TypeError(f"dataset must have a length, got {type(dataset).__name__}")
        self.length = len(dataset)
        if not 1 <= self.length <= MAX_SIZE:
            raise ValueError(f"dataset must hold 1 to 2^40 samples, got {self.length}")
        self.batch_size = check_integer("batch_size", batch_size, 1)
        super().__init__(
            unit=self.batch_size,
            positions=self.length,
            num_replicas=num_replicas,
            rank=rank,
            distributed_manager=distributed_manager,
            seed=0,
            generator=None,
            drop_last=False,
        )

    @property
    def tail(self) -> NDArray[np.bool_]:
        """Whether each rank has samples at the last step, shape (num_replicas,).

        At all steps before, every rank has.
        """
        last, ranks = len(self) - 1, np.arange(self.num_replicas)
        first_unit = np.array([last * self.num_replicas])
        return self._shares(first_unit, ranks)[1][0] > 0

    def _sequence(self, epoch: int) -> Any:
        return CyclicOrder(self.length)

    def _signature(self) -> str:
        return f"all {self.length} samples in order"

    def _shares(self, first_units: Indices, ranks: Indices) -> tuple[Indices, Indices]:
        """First sample and number of samples of ranks at steps, both (steps, ranks)."""
        start = (first_units * self._unit)[:, None]
        left = np.clip(self.length - start, 0, self._unit * self.num_replicas)
        each, more = np.divmod(left, self.num_replicas)
        return start + ranks * each + np.minimum(ranks, more), each + (ranks < more)

    def _deal(self, first_units: Indices, ranks: Indices, epoch: int) -> Indices:
        start, count = self._shares(first_units, ranks)
        slots = np.arange(self._unit)
        return np.where(slots < count[..., None], start[..., None] + slots, -1)

    def _emit(self, rows: Indices) -> Iterator[list[int]]:
        return emit_batches(rows)
