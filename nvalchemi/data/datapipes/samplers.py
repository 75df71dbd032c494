"""Samplers whose start, seek and memory do not grow with the data or the number of ranks."""

import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

import numpy as np
import torch

from nvalchemi.data.datapipes.allocation import (
    Stages,
    Weights,
    check_no_repeat,
    check_policy,
    check_reached,
    choose_compositions,
    dataset_lengths,
    stage_at,
    staged_positions,
    warn_of_left_over,
)
from nvalchemi.data.datapipes.epoch_sampler import EpochSampler
from nvalchemi.data.datapipes.mixture import Allocation, Contiguous, FixedBatches
from nvalchemi.data.datapipes.order import Indices, child_key, derive_key
from nvalchemi.data.datapipes.quota import Quota
from nvalchemi.data.datapipes.sequence import EpochOrder, choose_drawing
from nvalchemi.data.datapipes.sharded import ShardedSampler, resolve_rank
from nvalchemi.data.datapipes.weights import check_integer

__all__ = [
    "DistributedSamplerProtocol",
    "EpochPolicy",
    "EpochSampler",
    "MultiDatasetBatchSampler",
    "MultiDatasetSampler",
]

EpochPolicy: TypeAlias = Literal["dataset_size", "min_size", "max_size"]


@runtime_checkable
class DistributedSamplerProtocol(Protocol):
    """A sampler that knows its rank: torch's DistributedSampler and all of ours."""

    num_replicas: int
    rank: int

    def set_epoch(self, epoch: int) -> None: ...


class MultiDatasetBatchSampler(ShardedSampler[list[int]]):
    """Batches over several data sets, dealt to ranks.

    Batch i is positions [i * batch_size, (i + 1) * batch_size) of one global order; at step t rank
    r of R takes batch t * R + r. Every rank emits the same number of batches.

    Without `weights` and `samples_per_dataset` an epoch has every sample once, the data sets spread
    evenly over it; the last batch may be short (with drop_last=True it is left out). With them, or
    with replacement=True, an epoch has as many whole steps of all ranks as `epoch_policy` says, or
    `num_batches` whole batches, and a data set's samples that are not drawn in it wait for other
    epochs (`draws_per_dataset` has the numbers).

    Parameters
    ----------
    dataset : MultiDataset, or anything with `datasets` or `lengths`
        Lengths are read once. Indices are global: those of data set j begin at the sum of the
        lengths before it.
    batch_size : int
        Samples in a batch of one rank.
    weights : sequence of float, or {int: sequence of float}, optional
        Shares of the data sets, at any position exact to within a sample. A mapping has stages, by
        the epoch from which each holds: ``{0: [1, 0], 5: [1, 1]}``. All stages must have epochs of
        one length; `set_epoch` chooses.
    temperature : float, optional
        Weights in proportion to size^(1 / temperature), instead of `weights`: 1 keeps the sizes,
        more brings small data sets closer to large ones, math.inf makes all equal.
    samples_per_dataset : sequence, optional
        All integers: exact counts in each batch, with the sum `batch_size`. Any float: ratios, as
        `weights`.
    num_batches : int, optional
        Batches of an epoch over all ranks, instead of `epoch_policy`: with twice the ranks and half
        the `batch_size`, an epoch of the same samples has twice as many.
    epoch_policy : {"dataset_size", "min_size", "max_size"}
        "dataset_size": as many steps as the samples fill. "min_size": until one data set has been
        seen whole. "max_size": until all have. Steps are whole, which makes an epoch the same on
        any number of ranks with the same ``batch_size * num_replicas``.
    replacement : bool, optional
        Unset: a data set is drawn without repetition, and passed over again, in another order,
        only where its share asks for more samples than it has. True: independent draws (with
        shuffle=False: cyclic). False: never a repetition within an epoch; what cannot be had so is
        an error, and samples left over by "dataset_size" are a UserWarning.
    shuffle : bool
        Otherwise each data set is read in order, and where every batch has the same counts its
        samples come data set after data set.
    locality : int
        0 shuffles globally. Otherwise each data set is shuffled in windows of so many chunks, which
        are read once, one window after the other; every rank reads all of them.
        `locality.measured_price` says what that does to batches.
    chunk_size : int or sequence of int, optional
        Consecutive samples that are read together, of all data sets or of each; for `locality`.
    generator : torch.Generator, optional
        Draws the seed, once, at construction; it must stand at the same state on all ranks.
    num_replicas, rank : int, optional
        Default 1 and 0. torch.distributed is not asked.
    distributed_manager : DistributedManager, optional
        Gives both, if it is initialised.
    seed : int
        The order is a function of seed and epoch.
    drop_last : bool
        False: the first batches come again at the end until all ranks have the same number. True:
        batches that do not fill a step of all ranks, and a short one, are left out.

    Attributes
    ----------
    lengths : list of int
    samples_per_dataset : list
        Samples of each data set in a batch of this epoch; floats (means) where batches differ.
    draws_per_dataset : list of int
        Samples of each data set in this epoch, over all ranks, before padding or truncation.
    num_batches : int
        Batches of an epoch, over all ranks, before padding or truncation.

    Raises
    ------
    ValueError, TypeError
        For arguments that contradict each other or the data sets.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        batch_size: int,
        weights: Weights | None = None,
        temperature: float | None = None,
        samples_per_dataset: Sequence[float] | None = None,
        num_batches: int | None = None,
        epoch_policy: EpochPolicy = "dataset_size",
        replacement: bool | None = None,
        shuffle: bool = True,
        locality: int = 0,
        chunk_size: int | Sequence[int] | None = None,
        generator: torch.Generator | None = None,
        num_replicas: int | None = None,
        rank: int | None = None,
        distributed_manager: Any = None,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        self.batch_size = check_integer("batch_size", batch_size, 1)
        self.lengths = dataset_lengths(dataset)
        check_policy(epoch_policy)
        self.epoch_policy = epoch_policy
        self.replacement, self.shuffle = replacement, shuffle
        given = None if num_batches is None else check_integer("num_batches", num_batches, 1)
        self._drawing = choose_drawing(
            self.lengths,
            shuffle=shuffle,
            replacement=replacement,
            locality=locality,
            chunk_size=chunk_size,
        )
        self._stages = choose_compositions(
            self.lengths, weights, temperature, samples_per_dataset, self.batch_size
        )
        positions = staged_positions(
            self._stages,
            self.lengths,
            self.batch_size,
            resolve_rank(num_replicas, rank, distributed_manager)[0],
            given,
            epoch_policy,
            replacement,
        )
        super().__init__(
            unit=self.batch_size,
            positions=positions,
            num_replicas=num_replicas,
            rank=rank,
            distributed_manager=distributed_manager,
            seed=seed,
            generator=generator,
            drop_last=drop_last,
        )
        self.num_batches = self.num_units
        self._whole = positions % self.batch_size == 0
        if replacement is False and given is None and epoch_policy == "dataset_size":
            self._warn_of_left_over()

    def _warn_of_left_over(self) -> None:
        for composition in self._stages.values():
            draws = composition.allocation.counts(self._positions)
            warn_of_left_over(self.lengths, draws, composition)

    @property
    def samples_per_dataset(self) -> list[int] | list[float]:
        return stage_at(self._stages, self.epoch).per_batch(self.batch_size)

    @property
    def draws_per_dataset(self) -> list[int]:
        return stage_at(self._stages, self.epoch).allocation.counts(self._positions)

    @classmethod
    def balanced(
        cls,
        dataset: Any,
        *,
        batch_size: int,
        num_batches: int | None = None,
        epoch_policy: EpochPolicy = "dataset_size",
        replacement: bool | None = None,
        shuffle: bool = True,
        locality: int = 0,
        chunk_size: int | Sequence[int] | None = None,
        generator: torch.Generator | None = None,
        num_replicas: int | None = None,
        rank: int | None = None,
        distributed_manager: Any = None,
        seed: int = 0,
        drop_last: bool = False,
    ) -> "MultiDatasetBatchSampler":
        """The sampler with the same share for every data set."""
        return cls(
            dataset,
            batch_size=batch_size,
            weights=[1] * len(dataset_lengths(dataset)),
            num_batches=num_batches,
            epoch_policy=epoch_policy,
            replacement=replacement,
            shuffle=shuffle,
            locality=locality,
            chunk_size=chunk_size,
            generator=generator,
            num_replicas=num_replicas,
            rank=rank,
            distributed_manager=distributed_manager,
            seed=seed,
            drop_last=drop_last,
        )

    def _sequence(self, epoch: int) -> EpochOrder:
        composition = stage_at(self._stages, epoch)
        per_batch = composition.per_batch(self.batch_size)
        allocation: Allocation = composition.allocation
        if not self.shuffle and self._whole and all(isinstance(n, int) for n in per_batch):
            allocation = FixedBatches([int(n) for n in per_batch])
        return EpochOrder(self._drawing, derive_key(self.seed, epoch), allocation)

    def _signature(self) -> str:
        return f"{self._drawing} {describe(self._stages)}"

    def _emit(self, rows: Indices) -> Iterator[list[int]]:
        return emit_batches(rows)


class MultiDatasetSampler(ShardedSampler[int]):
    """Single samples over several data sets, dealt to ranks; for use inside a BatchSampler.

    At step t the R ranks take positions t * R to t * R + R - 1 of one global order. With
    shuffle=False the order is data set after data set and rank r takes position t * R + r. Else the
    data sets are spread evenly, and a hash of the step says which rank begins: dealt always from
    rank 0 on, two data sets that alternate would each go to ranks of their own.

    Parameters
    ----------
    weights, temperature
        As in `MultiDatasetBatchSampler`; by default the shares are the lengths, and then every
        sample comes once an epoch.
    num_samples : int, optional
        Samples of an epoch over all ranks; default all.
    replacement : bool, optional
        As in `MultiDatasetBatchSampler`.
    dataset, shuffle, locality, chunk_size, generator
        As in `MultiDatasetBatchSampler`.
    num_replicas, rank, distributed_manager, seed, drop_last
        As in `MultiDatasetBatchSampler`, with samples for batches.

    Attributes
    ----------
    lengths, draws_per_dataset : list of int
    num_samples : int
        Samples of an epoch over all ranks, before padding or truncation.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        weights: Weights | None = None,
        temperature: float | None = None,
        num_samples: int | None = None,
        replacement: bool | None = None,
        shuffle: bool = True,
        locality: int = 0,
        chunk_size: int | Sequence[int] | None = None,
        generator: torch.Generator | None = None,
        num_replicas: int | None = None,
        rank: int | None = None,
        distributed_manager: Any = None,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        self.lengths = dataset_lengths(dataset)
        self.replacement, self.shuffle = replacement, shuffle
        self.num_samples = sum(self.lengths)
        if num_samples is not None:
            self.num_samples = check_integer("num_samples", num_samples, 1)
        self._drawing = choose_drawing(
            self.lengths,
            shuffle=shuffle,
            replacement=replacement,
            locality=locality,
            chunk_size=chunk_size,
        )
        self._stages = choose_compositions(self.lengths, weights, temperature, None, 1)
        for composition in self._stages.values():
            if composition.asked:
                check_reached(composition, self.num_samples, 1, "num_samples")
            if replacement is False:
                draws = composition.allocation.counts(self.num_samples)
                check_no_repeat(self.lengths, draws)
        super().__init__(
            unit=1,
            positions=self.num_samples,
            num_replicas=num_replicas,
            rank=rank,
            distributed_manager=distributed_manager,
            seed=seed,
            generator=generator,
            drop_last=drop_last,
        )

    @property
    def draws_per_dataset(self) -> list[int]:
        return stage_at(self._stages, self.epoch).allocation.counts(self.num_samples)

    def _sequence(self, epoch: int) -> EpochOrder:
        allocation: Allocation = stage_at(self._stages, epoch).allocation
        if not self.shuffle:
            allocation = Contiguous(allocation.counts(self.num_samples))
        return EpochOrder(self._drawing, derive_key(self.seed, epoch), allocation)

    def _deal(self, first_units: Indices, ranks: Indices, epoch: int) -> Indices:
        if not self.shuffle:
            return super()._deal(first_units, ranks, epoch)
        # by the unit and not by the step, so that a pass that begins elsewhere deals alike
        key = derive_key("deal", self.seed, epoch)
        turn = (child_key(key, first_units)[0] >> np.uint64(11)).astype(np.int64)
        return self._units(
            first_units[:, None] + (ranks + turn[:, None]) % self.num_replicas, epoch
        )

    def _signature(self) -> str:
        size = "" if self.shuffle else f" of {self.num_samples}"
        return f"{self._drawing} {describe(self._stages)}{size}"

    def _emit(self, rows: Indices) -> Iterator[int]:
        return iter(rows[:, 0].tolist())


def emit_batches(rows: Indices) -> Iterator[list[int]]:
    """Rows as lists; only the last batch of an epoch is short, marked by -1 at its end."""
    short = (rows[:, -1] < 0).tolist()
    for batch, is_short in zip(rows.tolist(), short):
        yield [index for index in batch if index >= 0] if is_short else batch


def describe(stages: Stages) -> str:
    """Shares by first epoch, without a common factor, which the order does not depend on.

    A quota is named: states from before there were any belong to other orders.
    """
    parts = []
    for first, composition in stages.items():
        divisor = math.gcd(*composition.shares)
        quota = " in quota" if isinstance(composition.allocation, Quota) else ""
        parts.append(f"{first}: {[share // divisor for share in composition.shares]}{quota}")
    return ", ".join(parts)
