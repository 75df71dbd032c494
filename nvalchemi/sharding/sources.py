"""How the indices of a sampler are obtained: by its window, by torch's rule, or by iterating it.

A source answers for all ranks. `WindowSource` asks a sampler that can be asked anywhere (all of
ours), `TorchSource` computes the order of torch's DistributedSampler once an epoch and slices it,
and what is left is iterated once per rank and epoch (`iterated.py`).
"""

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch.utils.data import DistributedSampler

from nvalchemi.data.datapipes.order import Indices
from nvalchemi.sharding.samples import SampleSet


@dataclass(frozen=True)
class Dealing:
    """An epoch as the first samples of one global order, which begins again where it ends.

    From it the numbers of padded, dropped, repeated and unseen samples follow without enumerating.

    Attributes
    ----------
    positions : int
        Samples of the order.
    emitted : int
        Samples that all ranks together get.
    unit : int
        The order is dealt in units of so many samples: unit u comes at step u // R.
    draws : int64 array, shape (D,)
        Samples of each data set among the positions.
    independent : bool
        Whether draws are independent, so that any of them may repeat; else a data set is passed
        over before any of its samples comes again.
    even : bool
        Whether all units but the last have `unit` samples; else that is the most that one has.
    """

    positions: int
    emitted: int
    unit: int
    draws: Indices
    independent: bool
    even: bool = True

    @property
    def padded(self) -> int:
        return max(0, self.emitted - self.positions)

    @property
    def dropped(self) -> int:
        return max(0, self.positions - self.emitted)


class Source(Protocol):
    """What a plan asks.

    Attributes
    ----------
    name : str
        The class of the sampler.
    batch_size : int
        Samples of the largest batch.
    world_size : int
    shuffled : bool or None
        None where it does not say.
    cheap : bool
        Whether windows cost no more than their size, at any place.
    """

    name: str
    batch_size: int
    world_size: int
    shuffled: bool | None
    cheap: bool

    def steps(self, ranks: Indices, epoch: int) -> Indices:
        """Batches of each of the ranks in an epoch."""
        ...

    def window(self, steps: Indices, ranks: Indices, epoch: int) -> Indices:
        """int64 (S, R, batch_size); -1 where a batch is short or a rank has none."""
        ...

    def dealing(self, epoch: int = 0) -> Dealing | None:
        """The arithmetic of an epoch, if the sampler keeps to one."""
        ...

    def order(self, positions: Indices, epoch: int) -> Indices:
        """Samples at positions of the global order; only where there is a `dealing`."""
        ...

    def order_name(self, epoch: int) -> str | None:
        """Equal for equal global orders, also on other numbers of ranks; None if unknown."""
        ...

    def settings(self) -> str:
        """What the order was asked to be."""
        ...


def batches_of(samples: int, batch_size: int, drop_last: bool) -> int:
    """Batches that a BatchSampler makes of the samples of a rank."""
    return samples // batch_size if drop_last else -(-samples // batch_size)


class WindowSource:
    """A sampler with ``window(steps, ranks, epoch)``, alone or inside a BatchSampler.

    If it has ``num_units``, ``order(positions, epoch)``, and ``draws_per_dataset`` or ``length``
    (every sample once), it promises that an epoch is the beginning of one global order, and step t
    of all ranks the units t * R to t * R + R - 1.
    """

    cheap = True

    def __init__(
        self, sampler: Any, samples: SampleSet, batch_size: int | None, drop_last: bool
    ) -> None:
        self.sampler = copy.copy(sampler)  # its epoch is set here, and the user's is left alone
        self.name = type(sampler).__name__
        self.world_size = int(sampler.num_replicas)
        self.shuffled = getattr(sampler, "shuffle", None)
        self._lengths = samples.lengths
        self._batched = batch_size is None  # by itself
        self._drop_last = drop_last
        self.batch_size = int(sampler.batch_size) if batch_size is None else batch_size
        self._units = len(sampler)
        self._steps = (
            self._units if self._batched else batches_of(self._units, self.batch_size, drop_last)
        )

    def steps(self, ranks: Indices, epoch: int) -> Indices:
        return np.full(len(ranks), self._steps, dtype=np.int64)

    def window(self, steps: Indices, ranks: Indices, epoch: int) -> Indices:
        if self._batched:
            rows: Indices = self.sampler.window(steps, ranks, epoch)
            rows[steps >= self._steps] = -1
            return rows
        units = steps[:, None] * self.batch_size + np.arange(self.batch_size)
        flat = self.sampler.window(units.ravel(), ranks, epoch)[..., 0]
        flat[(units >= self._steps * self.batch_size).ravel() | (units.ravel() >= self._units)] = -1
        return np.moveaxis(flat.reshape(*units.shape, len(ranks)), 1, 2)

    def dealing(self, epoch: int = 0) -> Dealing | None:
        sampler = self.sampler
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        draws = getattr(sampler, "draws_per_dataset", None)
        if draws is None and hasattr(sampler, "length"):
            draws = self._lengths
        known = hasattr(sampler, "num_units") and hasattr(sampler, "order")
        if draws is None or len(draws) != len(self._lengths) or not known:
            return None
        draws = np.array(draws, dtype=np.int64)
        unit = self.batch_size if self._batched else 1
        positions = int(draws.sum())
        if not self._batched:
            used = self._units
            if self._drop_last:
                used = self._steps * self.batch_size
            emitted = used * self.world_size
        else:
            rounds, rest = divmod(self._units * self.world_size, int(sampler.num_units))
            emitted = rounds * positions + min(rest * unit, positions)
        independent = bool(getattr(sampler, "replacement", False)) and self.shuffled is not False
        return Dealing(positions, emitted, unit, draws, independent)

    def order(self, positions: Indices, epoch: int) -> Indices:
        out: Indices = self.sampler.order(positions, epoch)
        return out

    def order_name(self, epoch: int) -> str | None:
        state = self._state()
        if not {"order", "seed"} <= set(state):
            return None
        counts = getattr(self.sampler, "samples_per_dataset", [])
        # counts that hold in each batch make the order depend on the size of a batch
        counted = counts if all(isinstance(number, int) for number in counts) else []
        return f"{self.name} {state['order']} seed={state['seed']} {epoch} {counted}"

    def _state(self) -> dict[str, Any]:
        return dict(self.sampler.state_dict()) if hasattr(self.sampler, "state_dict") else {}

    def settings(self) -> str:
        state = self._state()
        known = {name: state.get(name) for name in ("order", "seed")}
        return f"{self.name} {known} units={self._units} drop_last={self._drop_last}"


class TorchSource:
    """torch's DistributedSampler in a BatchSampler, by its own rule.

    The order of an epoch is ``torch.randperm`` from a generator with the seed ``seed + epoch``;
    it is padded with its own beginning, or cut, to a multiple of the ranks, and rank r takes every
    R-th from r on. Drawing it needs 8 bytes per sample and about 0.1 s per million; one epoch is
    kept (more of small ones).
    """

    def __init__(
        self, sampler: "DistributedSampler[Any]", samples: SampleSet, batch_size: int, drop: bool
    ) -> None:
        self.sampler = sampler
        self.name = "DistributedSampler"
        self.world_size = sampler.num_replicas
        self.batch_size = batch_size
        self.shuffled: bool | None = bool(sampler.shuffle)
        self._length = len(samples)
        self._draws = np.array(samples.lengths, dtype=np.int64)
        self._drop_last = drop
        self._own = sampler.num_samples
        self._steps = batches_of(self._own, batch_size, drop)
        self._orders: dict[int, Indices] = {}
        self.cheap = not sampler.shuffle or self._length <= CHEAP_ORDER

    def steps(self, ranks: Indices, epoch: int) -> Indices:
        return np.full(len(ranks), self._steps, dtype=np.int64)

    def window(self, steps: Indices, ranks: Indices, epoch: int) -> Indices:
        own = steps[:, None, None] * self.batch_size + np.arange(self.batch_size)
        positions = own * self.world_size + ranks[None, :, None]
        inside = (own < self._own) & (steps < self._steps)[:, None, None]
        out = self.order(positions % self._length, epoch)
        out[~np.broadcast_to(inside, out.shape)] = -1
        return out

    def dealing(self, epoch: int = 0) -> Dealing:
        used = self._steps * self.batch_size if self._drop_last else self._own
        return Dealing(self._length, used * self.world_size, 1, self._draws, False)

    def order(self, positions: Indices, epoch: int) -> Indices:
        if not self.shuffled:
            return np.array(positions, dtype=np.int64)
        return self._order(epoch)[positions].astype(np.int64)

    def _order(self, epoch: int) -> Indices:
        if epoch not in self._orders:
            while self._orders and (len(self._orders) + 1) * self._length > KEPT_INDICES:
                del self._orders[next(iter(self._orders))]
            generator = torch.Generator()
            generator.manual_seed(self.sampler.seed + epoch)
            order = torch.randperm(self._length, generator=generator).numpy()
            self._orders[epoch] = order.astype(np.int32) if self._length < 2**31 else order
        return self._orders[epoch]

    def order_name(self, epoch: int) -> str:
        drawn = f"seed={self.sampler.seed + epoch}" if self.shuffled else "in order"
        return f"{self.name} {self._length} {drawn}"

    def settings(self) -> str:
        # a few draws tell versions of torch apart whose randperm differs
        generator = torch.Generator().manual_seed(self.sampler.seed)
        drawn = torch.randperm(64, generator=generator).tolist() if self.shuffled else []
        return (
            f"{self.name} {self._length} shuffle={self.shuffled} seed={self.sampler.seed} "
            f"{self._own} drop_last={self._drop_last} {drawn}"
        )


KEPT_INDICES = 2**26  # of drawn or iterated orders, 0.5 GB at most beside the one in use
CHEAP_ORDER = 2**22  # an order that is drawn in half a second


def spread_ranks(world_size: int, number: int) -> Indices:
    """At most `number` ranks, with the first and the last."""
    if world_size <= number:
        return np.arange(world_size)
    return np.unique(np.linspace(0, world_size - 1, number).astype(np.int64))


def as_indices(name: str, values: "int | Iterable[int] | slice | None", size: int) -> Indices:
    """Numbers in range(size): all for None, else those given."""
    if values is None:
        return np.arange(size)
    if isinstance(values, slice):
        return np.arange(size)[values]
    array = np.atleast_1d(np.asarray(values if isinstance(values, int) else list(values)))
    if array.size and array.dtype.kind not in "iu":
        raise TypeError(f"{name} must be integers, got {values!r}")
    array = array.astype(np.int64)
    if array.ndim != 1 or (array.size and not 0 <= array.min() <= array.max() < size):
        raise ValueError(f"{name} must be in [0, {size}), got {values!r}")
    return array


Method = Literal["by construction", "counted", "sampled", "expected"]
