"""Samplers whose start, seek and memory do not grow with the data or the number of ranks."""

import math
from collections.abc import Iterator, Sequence, Sized
from functools import partial
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

import numpy as np
import torch

from nvalchemi.data.datapipes.allocation import (
    check_integer,
    check_no_repeat,
    check_policy,
    check_reached,
    choose_composition,
    dataset_lengths,
    epoch_positions,
    warn_of_left_over,
)
from nvalchemi.data.datapipes.mixture import Allocation, Contiguous, FixedBatches
from nvalchemi.data.datapipes.order import (
    MAX_SIZE,
    CyclicOrder,
    IndependentDraws,
    Indices,
    Order,
    PassOrder,
    derive_key,
)
from nvalchemi.data.datapipes.sharded import Orders, Sequenced, ShardedSampler

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
    evenly over it; the last batch may be short (with drop_last=True it is left out). With them an
    epoch has as many whole batches as `epoch_policy` or `num_batches` says, and a data set's
    samples that are not drawn in it wait for other epochs (`draws_per_dataset` has the numbers).

    Parameters
    ----------
    dataset : MultiDataset, or anything with `datasets` or `lengths`
        Lengths are read once. Indices are global: those of data set j begin at the sum of the
        lengths before it.
    batch_size : int
        Samples in a batch of one rank.
    weights : sequence of float, optional
        Shares of the data sets, at any position exact to about a sample.
    samples_per_dataset : sequence, optional
        All integers: exact counts in each batch, with the sum `batch_size`. Any float: ratios, as
        `weights`.
    num_batches : int, optional
        Batches of an epoch over all ranks, instead of `epoch_policy`.
    epoch_policy : {"dataset_size", "min_size", "max_size"}
        "dataset_size": as many batches as the samples fill. "min_size": until one data set has been
        seen whole. "max_size": until all have.
    replacement : bool, optional
        Unset: a data set is drawn without repetition, and passed over again, in another order,
        only where its share asks for more samples than it has. True: independent draws (with
        shuffle=False: cyclic). False: never a repetition within an epoch; what cannot be had so is
        an error, and samples left over by "dataset_size" are a UserWarning.
    shuffle : bool
        Otherwise each data set is read in order, and where every batch has the same counts its
        samples come data set after data set.
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
        Samples of each data set in a batch; floats (means) where batches differ.
    draws_per_dataset : list of int
        Samples of each data set in an epoch, over all ranks, before padding or truncation.
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
        weights: Sequence[float] | None = None,
        samples_per_dataset: Sequence[float] | None = None,
        num_batches: int | None = None,
        epoch_policy: EpochPolicy = "dataset_size",
        replacement: bool | None = None,
        shuffle: bool = True,
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
        if num_batches is not None:
            num_batches = check_integer("num_batches", num_batches, 1)
        composition = choose_composition(
            self.lengths, weights, samples_per_dataset, self.batch_size
        )
        positions = epoch_positions(
            composition, self.lengths, self.batch_size, num_batches, epoch_policy, replacement
        )
        if composition.asked:
            check_reached(composition, positions, self.batch_size)
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
        self.samples_per_dataset = composition.per_batch(self.batch_size)
        self._shares, self._allocation = composition.shares, composition.allocation
        if not shuffle and positions % self.batch_size == 0:
            if all(isinstance(number, int) for number in self.samples_per_dataset):
                self._allocation = FixedBatches([int(n) for n in self.samples_per_dataset])
        self._offsets = np.cumsum([0, *self.lengths[:-1]])
        self.draws_per_dataset = composition.allocation.counts(self._positions)
        if replacement is False and num_batches is None and epoch_policy == "dataset_size":
            warn_of_left_over(self.lengths, self.draws_per_dataset, composition)

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
            generator=generator,
            num_replicas=num_replicas,
            rank=rank,
            distributed_manager=distributed_manager,
            seed=seed,
            drop_last=drop_last,
        )

    def _sequence(self, epoch: int) -> Sequenced:
        orders = make_orders(self.lengths, self.seed, epoch, self.shuffle, self.replacement)
        return Sequenced(self._allocation, orders, self._offsets)

    def _signature(self) -> str:
        divisor = math.gcd(*self._shares)
        shares = [share // divisor for share in self._shares]
        drawn = "replacement" if self.replacement else "passes"
        return f"{self.lengths} {shares} {drawn} shuffle={self.shuffle}"

    def _emit(self, rows: Indices) -> Iterator[list[int]]:
        return emit_batches(rows)


class MultiDatasetSampler(ShardedSampler[int]):
    """Single samples over several data sets, dealt to ranks; for use inside a BatchSampler.

    At step t rank r of R takes the sample at position t * R + r of one global order. With
    shuffle=False the order is data set after data set, else they are spread evenly.

    Parameters
    ----------
    weights : sequence of float, optional
        Shares of the data sets; default their lengths, and then every sample comes once an epoch.
    num_samples : int, optional
        Samples of an epoch over all ranks; default all.
    replacement : bool, optional
        As in `MultiDatasetBatchSampler`.
    dataset, shuffle, generator, num_replicas, rank, distributed_manager, seed, drop_last
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
        weights: Sequence[float] | None = None,
        num_samples: int | None = None,
        replacement: bool | None = None,
        shuffle: bool = True,
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
        composition = choose_composition(self.lengths, weights, None, 1)
        if composition.asked:
            check_reached(composition, self.num_samples, 1, "num_samples")
        self.draws_per_dataset = composition.allocation.counts(self.num_samples)
        if replacement is False:
            check_no_repeat(self.lengths, self.draws_per_dataset)
        self._allocation: Allocation = (
            composition.allocation if shuffle else Contiguous(self.draws_per_dataset)
        )
        self._shares = composition.shares
        self._offsets = np.cumsum([0, *self.lengths[:-1]])
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

    def _sequence(self, epoch: int) -> Sequenced:
        orders = make_orders(self.lengths, self.seed, epoch, self.shuffle, self.replacement)
        return Sequenced(self._allocation, orders, self._offsets)

    def _signature(self) -> str:
        drawn = "replacement" if self.replacement else "passes"
        size = "" if self.shuffle else f" of {self.num_samples}"
        return f"{self.lengths} {self._shares}{size} {drawn} shuffle={self.shuffle}"

    def _emit(self, rows: Indices) -> Iterator[int]:
        return iter(rows[:, 0].tolist())


class EpochSampler(ShardedSampler[int]):
    """Every sample of one data set once an epoch, dealt to ranks, without a list of the data set.

    A replacement for torch's DistributedSampler, also as ``DDPHook(sampler_cls=EpochSampler)``: the
    first sample of 1e8 comes within a millisecond, and the samples of a step do not depend on the
    number of ranks that share a global batch.

    Parameters
    ----------
    dataset : sized
        One data set.
    num_replicas, rank : int, optional
        Default 1 and 0.
    shuffle : bool
        Whether the order is drawn anew from (seed, epoch), or is that of the data set.
    seed : int
    drop_last : bool
        False: the first samples come again at the end until all ranks have the same number. True:
        samples that do not fill a step of all ranks are left out.

    Attributes
    ----------
    num_samples, total_size : int
        Samples of this rank and of all ranks, with the padding.
    """

    def __init__(
        self,
        dataset: Sized,
        *,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        if not hasattr(dataset, "__len__"):
            raise TypeError(f"dataset must have a length, got {type(dataset).__name__}")
        self.length = len(dataset)
        if not 1 <= self.length <= MAX_SIZE:
            raise ValueError(f"dataset must hold 1 to 2^40 samples, got {self.length}")
        self.shuffle = shuffle
        super().__init__(
            unit=1,
            positions=self.length,
            num_replicas=num_replicas,
            rank=rank,
            distributed_manager=None,
            seed=seed,
            generator=None,
            drop_last=drop_last,
        )
        self.num_samples = len(self)
        self.total_size = self.num_samples * self.num_replicas

    def _sequence(self, epoch: int) -> Sequenced:
        orders = make_orders([self.length], self.seed, epoch, self.shuffle, None)
        return Sequenced(None, orders, np.zeros(1, dtype=np.int64))

    def _signature(self) -> str:
        return f"{self.length} shuffle={self.shuffle}"

    def _emit(self, rows: Indices) -> Iterator[int]:
        return iter(rows[:, 0].tolist())


def make_orders(
    lengths: list[int], seed: int, epoch: int, shuffle: bool, replacement: bool | None
) -> Orders:
    return Orders(partial(make_order, lengths, seed, epoch, shuffle, replacement))


def make_order(
    lengths: list[int], seed: int, epoch: int, shuffle: bool, replacement: bool | None, j: int
) -> Order:
    """The order of data set j in an epoch."""
    if not shuffle:
        return CyclicOrder(lengths[j])
    key = derive_key(seed, j, epoch)
    return IndependentDraws(lengths[j], key) if replacement else PassOrder(lengths[j], key)


def emit_batches(rows: Indices) -> Iterator[list[int]]:
    """Rows as lists; only the last batch of an epoch is short, marked by -1 at its end."""
    short = (rows[:, -1] < 0).tolist()
    for batch, is_short in zip(rows.tolist(), short):
        yield [index for index in batch if index >= 0] if is_short else batch
