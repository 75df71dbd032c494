"""ShardedSampler: a user's own torch sampler (a subset, weights), dealt out to the ranks."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import RandomSampler, Sampler, SubsetRandomSampler, WeightedRandomSampler

from nvalchemi.data.datapipes.order import derive_key

# These draw from `self.generator` alone, so that all ranks can draw the same order.
_SEEDED = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


def can_shard(sampler: Any) -> bool:
    """Whether every rank can draw the same order of this sampler.

    True for torch's samplers that draw from a generator, and for a fixed sequence of indices. A
    subclass may draw from anywhere, so it is not trusted.
    """
    return type(sampler) in _SEEDED or (
        isinstance(sampler, Sequence) and not isinstance(sampler, str | bytes)
    )


class ShardedSampler(Sampler[int]):
    """The order of another sampler, each rank taking every num_replicas-th index.

    All ranks draw the same order, from a generator seeded by (seed, epoch). Its length and its
    memory are those of the inner sampler.

    Parameters
    ----------
    sampler : RandomSampler, SubsetRandomSampler, WeightedRandomSampler or sequence of int
        The order.
    num_replicas, rank : int
        How many ranks, and which this is.
    seed : int
        Seed of the order.
    drop_last : bool
        Whether to leave out the tail that does not divide by the ranks, instead of padding it with
        the first indices.

    Raises
    ------
    TypeError
        For a sampler that could draw another order on each rank.
    ValueError
        If the rank is outside, or a rank would get nothing.
    """

    def __init__(
        self, sampler: Any, *, num_replicas: int, rank: int, seed: int = 0, drop_last: bool = False
    ) -> None:
        if not can_shard(sampler):
            raise TypeError(
                f"{type(sampler).__name__} can not be dealt out: only torch's RandomSampler, "
                "SubsetRandomSampler, WeightedRandomSampler and fixed sequences draw the same "
                "order on every rank"
            )
        if not 0 <= rank < num_replicas:
            raise ValueError(f"rank must lie in 0..{num_replicas - 1}: got {rank}")
        if len(sampler) == 0 or (drop_last and len(sampler) < num_replicas):
            raise ValueError(
                f"{len(sampler)} indices are too few: some of {num_replicas} ranks would get none"
            )
        self.sampler = sampler
        self.num_replicas = num_replicas
        self.rank = rank
        self.seed = seed
        self.drop_last = drop_last
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of an epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        size = len(self.sampler)
        return size // self.num_replicas if self.drop_last else -(-size // self.num_replicas)

    def __iter__(self) -> Iterator[int]:
        order = self._draw()
        total = len(self) * self.num_replicas
        while len(order) < total:
            order += order[: total - len(order)]
        return iter(order[self.rank : total : self.num_replicas])

    def _draw(self) -> list[int]:
        if not hasattr(self.sampler, "generator"):
            return [int(i) for i in self.sampler]
        word = int(derive_key("sharded", self.seed, self.epoch)[0]) >> 1
        own = self.sampler.generator
        self.sampler.generator = torch.Generator().manual_seed(word)
        try:
            return [int(i) for i in self.sampler]
        finally:
            self.sampler.generator = own
