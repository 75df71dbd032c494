"""Which batches a loader's pass has, from where, and how far the training loop has got with them.

A loader reads ahead, so a sampler does not know which of its batches were used: the loader counts
those that it has handed out and asks its order for the state after them. A position counts samples
that all ranks together have consumed, so that a state fits any number of ranks.
"""

import copy
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Protocol

import torch
from torch.utils.data import BatchSampler

from nvalchemi.data.datapipes.order import derive_key
from nvalchemi.data.datapipes.sharded import ShardedSampler
from nvalchemi.data.datapipes.sharded_sampler import can_shard
from nvalchemi.data.datapipes.weights import check_integer, check_state


class LoaderOrder(Protocol):
    """The batches of a loader's passes."""

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass."""
        ...

    def begin(self, skip: int | None) -> Iterator[Sequence[int]]:
        """Batches of a pass: after `skip` of them if given, else from where it was set to begin."""
        ...

    def state_dict(self, done: int, skip: int | None) -> dict[str, Any]:
        """State when `done` batches of the last pass are used, or the next will skip so many."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next pass begin where the state was taken."""
        ...


def order_of(
    batch_sampler: Any, sampler: Any, batch_size: int, drop_last: bool, size: int
) -> LoaderOrder:
    """The order that a loader's samplers make; `size` is the length of its data set."""
    if batch_sampler is None:
        batch_sampler = BatchSampler(sampler, batch_size, drop_last)
    if isinstance(batch_sampler, ShardedSampler):
        return SeekableOrder(batch_sampler, batch_sampler, 1)
    plain = type(batch_sampler) is BatchSampler
    if plain and isinstance(batch_sampler.sampler, ShardedSampler):
        return SeekableOrder(batch_sampler, batch_sampler.sampler, batch_sampler.batch_size)
    return CountedOrder(batch_sampler, size)


class SeekableOrder:
    """Batches of one of our samplers, which reach any position directly.

    Parameters
    ----------
    batches : iterable of lists of int
        The sampler itself, or a BatchSampler around it.
    sampler : ShardedSampler
    steps : int
        Steps of the sampler in a batch.
    """

    def __init__(
        self, batches: Iterable[Sequence[int]], sampler: ShardedSampler[Any], steps: int
    ) -> None:
        self._batches, self._sampler, self._steps = batches, sampler, steps
        self._start, self._epoch = 0, sampler.epoch  # of the last pass

    def set_epoch(self, epoch: int) -> None:
        self._sampler.set_epoch(epoch)

    def begin(self, skip: int | None) -> Iterator[Sequence[int]]:
        if skip is not None:
            self._sampler.set_epoch_step(min(skip * self._steps, len(self._sampler)))
        self._start, self._epoch = self._sampler.next_position or 0, self._sampler.epoch
        return iter(self._batches)

    def state_dict(self, done: int, skip: int | None) -> dict[str, Any]:
        own = self._sampler
        if skip is not None:
            return own.state_dict(own.position_after(0, skip * self._steps))
        if own.next_position is not None:
            return own.state_dict(own.next_position)
        if own.epoch != self._epoch:
            return own.state_dict(0)
        return own.state_dict(own.position_after(self._start, done * self._steps))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._sampler.load_state_dict(state)


class CountedOrder:
    """Batches of any other sampler, which are counted, and skipped over one by one.

    The order must be the same whenever a pass of an epoch begins. torch's random samplers draw
    anew each time; for them the loader draws the seed of a pass and keeps it in the state.
    """

    def __init__(self, batches: Any, size: int) -> None:
        self._batches, self._size = batches, size
        self._inner: Any = getattr(batches, "sampler", None)
        self._random = (
            type(batches) is BatchSampler
            and can_shard(self._inner)
            and hasattr(self._inner, "generator")
        )
        replicas = getattr(batches, "num_replicas", getattr(self._inner, "num_replicas", 1))
        # samples that all ranks consume in a step; batches, where their size is not known
        self._unit = int(getattr(batches, "batch_size", None) or 1) * int(replicas)
        self._told = 0
        self._start, self._epoch, self._seed = 0, self.epoch, 0  # of the last pass
        self._loaded: dict[str, Any] | None = None

    @property
    def epoch(self) -> int:
        """The epoch of the sampler, or that which was told in vain to one without epochs."""
        for target in (self._batches, self._inner):
            if isinstance(own := getattr(target, "epoch", None), int):
                return own
        return self._told

    def set_epoch(self, epoch: int) -> None:
        self._told = epoch
        targets: tuple[Any, ...] = (self._batches, self._inner)
        for target in targets:
            if hasattr(target, "set_epoch"):
                target.set_epoch(epoch)
                return

    def begin(self, skip: int | None) -> Iterator[Sequence[int]]:
        given, self._loaded = self._pending(), None
        self._epoch = self.epoch
        self._start = skip * self._unit if skip is not None else (given or {}).get("position", 0)
        batches = self._seeded(given) if self._random else self._batches
        return islice(iter(batches), -(-self._start // self._unit), None)

    def _seeded(self, given: dict[str, Any] | None) -> BatchSampler:
        """The batches of one pass, by a seed of its own that can be kept."""
        # torch's RandomSampler begins a pass with this draw, from the global generator
        drawn = torch.empty((), dtype=torch.int64).random_(generator=self._inner.generator)
        self._seed = int(drawn) if given is None else given["seed"]
        batches, inner = copy.copy(self._batches), copy.copy(self._inner)
        inner.generator = torch.Generator().manual_seed(self._seed)
        batches.sampler = inner
        return batches

    def state_dict(self, done: int, skip: int | None) -> dict[str, Any]:
        given, seed = self._pending(), self._seed
        position = self._start + done * self._unit
        if skip is not None:
            position = skip * self._unit
        elif given is not None:
            position, seed = given["position"], given.get("seed", 0)
        elif self.epoch != self._epoch:
            position = 0
        state = {"epoch": self.epoch, "position": position, "order": self._order_hash()}
        return {**state, "seed": seed} if self._random else state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        check_state(state)
        needed = {"epoch", "position", "order", *(["seed"] if self._random else [])}
        if not needed <= set(state):
            raise ValueError(
                f"a state of this loader must have {sorted(needed)}, got {sorted(state)}"
            )
        if state["order"] != self._order_hash():
            raise ValueError(
                "the state belongs to another order: the sampler, its seed and shuffle and the "
                f"number of samples must be the same; this loader has {self._signature()}. Under "
                "DDP, load it when the samplers of the ranks are installed"
            )
        epoch = check_integer("epoch", state["epoch"], 0)
        position = check_integer("position", state["position"], 0)
        if position % self._unit and position < len(self._batches) * self._unit:
            raise ValueError(
                f"position must be a multiple of the samples in a step, {self._unit}, got "
                f"{position}; keep batch_size times the number of ranks as it was"
            )
        self.set_epoch(epoch)
        self._loaded = {**state, "epoch": self.epoch}

    def _pending(self) -> dict[str, Any] | None:
        """The state that was loaded, unless another epoch was chosen since."""
        loaded = self._loaded
        return loaded if loaded is not None and loaded["epoch"] == self.epoch else None

    def _signature(self) -> str:
        sampler = self._batches if self._inner is None else self._inner
        known = [name for name in ("seed", "shuffle") if hasattr(sampler, name)]
        options = [f"{name}={getattr(sampler, name)}" for name in known]
        return " ".join([type(sampler).__name__, f"of {self._size} samples", *options])

    def _order_hash(self) -> str:
        return format(int(derive_key("signature", self._signature())[0]), "016x")
