"""Samplers that can only be iterated: one per rank, once an epoch, and what they gave is kept."""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import numpy as np
import torch

from nvalchemi.data.datapipes.order import Indices
from nvalchemi.sharding.samples import SampleSet
from nvalchemi.sharding.sources import KEPT_INDICES, Dealing

Log = tuple[Indices, Indices]  # indices one after another, and where each batch begins and ends


class LoggedSource:
    """Batches of each rank and epoch as a list that some subclass knows how to get."""

    name: str
    world_size: int
    batch_size: int
    shuffled: bool | None = None
    cheap = False

    def log(self, rank: int, epoch: int) -> Log:
        raise NotImplementedError

    def settings(self) -> str:
        raise NotImplementedError

    def steps(self, ranks: Indices, epoch: int) -> Indices:
        return np.array([len(self.log(int(r), epoch)[1]) - 1 for r in ranks], dtype=np.int64)

    def window(self, steps: Indices, ranks: Indices, epoch: int) -> Indices:
        logs = [self.log(int(rank), epoch) for rank in ranks]
        largest = [int(np.diff(offsets).max(initial=1)) for _, offsets in logs]
        self.batch_size = max(self.batch_size, *largest) if largest else self.batch_size
        out = np.full((len(steps), len(ranks), self.batch_size), -1, dtype=np.int64)
        slots = np.arange(self.batch_size)
        for column, (indices, offsets) in enumerate(logs):
            here = np.flatnonzero(steps < len(offsets) - 1)
            start = offsets[steps[here]]
            filled = slots < (offsets[steps[here] + 1] - start)[:, None]
            rows = np.full(filled.shape, -1, dtype=np.int64)
            rows[filled] = indices[(start[:, None] + slots)[filled]]
            out[here, column] = rows
        return out

    def dealing(self, epoch: int = 0) -> Dealing | None:
        return None

    def order(self, positions: Indices, epoch: int) -> Indices:
        raise NotImplementedError("a sampler that is iterated has no positions")

    def order_name(self, epoch: int) -> str | None:
        return None


class IteratedSource(LoggedSource):
    """Any sampler, built for each rank or given for each.

    An epoch of a rank is kept until more than `KEPT_INDICES` are held; then the oldest is dropped
    and would be iterated again.

    Parameters
    ----------
    make : callable
        ``rank -> sampler``.
    fresh : bool
        Whether `make` builds a new one each time, so that the order of an epoch does not depend on
        what was iterated before.
    batch_size : int or None
        Of the BatchSampler around it; None if it may make batches itself.
    """

    def __init__(
        self,
        make: Callable[[int], Any],
        samples: SampleSet,
        world_size: int,
        batch_size: int | None,
        drop_last: bool,
        *,
        fresh: bool,
        first: Any,
    ) -> None:
        self.name = type(first).__name__
        self.world_size = world_size
        self.batch_size = batch_size or int(getattr(first, "batch_size", None) or 1)
        shuffle = getattr(first, "shuffle", None)
        self.shuffled = shuffle if isinstance(shuffle, bool) else None
        self._make, self._fresh = make, fresh
        self._size, self._given_size, self._drop_last = len(samples), batch_size, drop_last
        self._logs: dict[tuple[int, int], Log] = {}
        self._held = 0

    def log(self, rank: int, epoch: int) -> Log:
        key = (rank, epoch)
        if key not in self._logs:
            log = self.iterate(rank, epoch)
            while self._logs and self._held + log[0].size > KEPT_INDICES:
                self._held -= self._logs.pop(next(iter(self._logs)))[0].size
            self._logs[key] = log
            self._held += log[0].size
        return self._logs[key]

    def iterate(self, rank: int, epoch: int, state: int = 0) -> Log:
        """What the sampler of a rank gives in an epoch, not from the cache.

        Global generators are seeded with `state` meanwhile, and put back.
        """
        with global_generators(state if self._fresh else state + epoch):
            sampler = self._make(rank)
            before = getattr(sampler, "epoch", None)
            # an order that depends on the passes before it is followed from the first
            first = epoch if hasattr(sampler, "set_epoch") or not self._fresh else 0
            for number in range(first, epoch + 1):
                if hasattr(sampler, "set_epoch"):
                    sampler.set_epoch(number)
                log = self._read(sampler, rank)
            if not self._fresh and isinstance(before, int) and hasattr(sampler, "set_epoch"):
                sampler.set_epoch(before)
        return log

    def _read(self, sampler: Any, rank: int) -> Log:
        items = iter(sampler)
        head = list(islice(items, 1))
        if head and np.ndim(head[0]) == 0:
            indices = flat_indices(chain_head(head, items), self.name, rank)
            log = (indices, regular_offsets(indices.size, self._given_size or 1, self._drop_last))
        else:
            log = read_batches(chain_head(head, items), self.name, rank)
        check_inside(log[0], self._size, f"{self.name} of rank {rank}")
        return log

    def settings(self) -> str:
        return f"{self.name} batch_size={self._given_size} drop_last={self._drop_last}"


@contextmanager
def global_generators(seed: int) -> Iterator[None]:
    """Seed the generators of Python, numpy and torch, and put the user's back at the end."""
    python, legacy = random.getstate(), np.random.get_state()  # noqa: NPY002
    with torch.random.fork_rng(devices=[]):
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        torch.manual_seed(seed)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(legacy)  # noqa: NPY002


def chain_head(head: list[Any], rest: Iterator[Any]) -> Iterator[Any]:
    yield from head
    yield from rest


def flat_indices(items: Iterable[Any], name: str, rank: int) -> Indices:
    indices = np.fromiter(islice(items, KEPT_INDICES + 1), dtype=np.int64)
    return refuse_endless(indices, name, rank)


def refuse_endless(indices: Indices, name: str, rank: int) -> Indices:
    if indices.size > KEPT_INDICES:
        raise ValueError(
            f"an epoch of a rank must have at most {KEPT_INDICES} samples to be planned by "
            f"iterating, and {name} of rank {rank} goes on; give it window(steps, ranks, epoch) as "
            "our samplers have, or an end"
        )
    return indices


def regular_offsets(number: int, batch_size: int, drop_last: bool) -> Indices:
    """Where batches of `batch_size` out of `number` samples begin, and where the last ends."""
    offsets = np.arange(0, number + 1, batch_size, dtype=np.int64)
    if offsets[-1] < number and not drop_last:
        offsets = np.append(offsets, number)
    return offsets


def read_batches(items: Iterable[Sequence[int]], name: str, rank: int) -> Log:
    parts: list[Indices] = []
    total = 0
    for batch in items:
        parts.append(np.asarray(batch, dtype=np.int64).ravel())
        total += parts[-1].size
        if total > KEPT_INDICES or len(parts) > KEPT_INDICES:
            refuse_endless(np.broadcast_to(np.int64(0), KEPT_INDICES + 1), name, rank)
    sizes = np.array([part.size for part in parts], dtype=np.int64)
    indices = np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)
    return indices, np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


def check_inside(indices: Indices, size: int, who: str) -> None:
    if indices.size and not 0 <= indices.min() <= indices.max() < size:
        wrong = indices[(indices < 0) | (indices >= size)][0]
        raise ValueError(f"{who} gives index {wrong}; it must be in [0, {size}), the data set's")
