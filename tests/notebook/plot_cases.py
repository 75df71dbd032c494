"""Samplers as users wrote them, right and wrong, for the pictures of a plan."""

from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np


class Dealt:
    """A shuffle of its own, padded and dealt in turn."""

    def __init__(self, dataset: Any, num_replicas: int, rank: int, seed: int = 0) -> None:
        self.size, self.num_replicas, self.rank, self.seed = len(dataset), num_replicas, rank, seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def order(self) -> np.ndarray:
        return np.random.default_rng([self.seed, self.epoch]).permutation(self.size)

    def __iter__(self) -> Iterator[int]:
        size = -(-self.size // self.num_replicas) * self.num_replicas
        return iter(np.resize(self.order(), size)[self.rank :: self.num_replicas].tolist())


class RankBlind(Dealt):
    """Every rank replays the same order."""

    def __iter__(self) -> Iterator[int]:
        return iter(self.order().tolist())


class NoSetEpoch(Dealt):
    """set_epoch is there and does nothing."""

    def set_epoch(self, epoch: int) -> None:
        pass


class Uneven(Dealt):
    """Forgets to pad."""

    def __iter__(self) -> Iterator[int]:
        return iter(self.order()[self.rank :: self.num_replicas].tolist())


class Starving(Dealt):
    """Takes weights and forgets them."""

    def __init__(self, dataset: Any, num_replicas: int, rank: int, weights: Any) -> None:
        super().__init__(dataset, num_replicas, rank)


class Blocks(Dealt):
    """Shuffles blocks of one data set each."""

    def order(self) -> np.ndarray:
        blocks = np.arange(self.size).reshape(-1, 8 * self.num_replicas)
        return np.random.default_rng(self.epoch).permutation(blocks).ravel()


def numbers(arrays: Any) -> dict[str, Any]:
    """Key numbers of a picture by name."""
    return {number.name: number for number in arrays.facts.numbers}


def wrong(arrays: Any) -> set[str]:
    """Names of those in red."""
    return {number.name for number in arrays.facts.wrong}


def samples(plan: Any, epoch: int = 0, ranks: Any = None, steps: Any = None) -> list[int]:
    """Samples of all those batches."""
    return list(chain.from_iterable(batch for *_, batch in drawn(plan, epoch, ranks, steps)))


def drawn(plan: Any, epoch: int = 0, ranks: Any = None, steps: Any = None) -> Iterator[Any]:
    """Rank, step and samples of every batch, by asking the plan for each."""
    lengths = plan.steps_per_rank(epoch).tolist()
    for rank in range(plan.world_size) if ranks is None else ranks:
        for step in range(lengths[rank]) if steps is None else steps:
            yield rank, step, plan.batch(rank, step, epoch).tolist()
