"""Data sets of given lengths, and what all ranks of a sampler emit."""

from typing import Any


class Lengths:
    """The part of a MultiDataset that samplers look at."""

    def __init__(self, *lengths: int) -> None:
        self.datasets = [range(n) for n in lengths]

    def __len__(self) -> int:
        return sum(map(len, self.datasets))


def per_rank(world_size: int, cls: Any, *args: Any, **kwargs: Any) -> list[list[Any]]:
    return [list(cls(*args, num_replicas=world_size, rank=r, **kwargs)) for r in range(world_size)]
