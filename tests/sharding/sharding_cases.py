"""Samplers as users wrote them, right and wrong, and what their ranks emit."""

from typing import Any

import numpy as np
import torch

from nvalchemi.sharding import ShardPlan


class Lengths:
    """The part of a MultiDataset that samplers look at."""

    def __init__(self, *lengths: int) -> None:
        self.datasets = [range(n) for n in lengths]

    def __len__(self) -> int:
        return sum(map(len, self.datasets))


class Strided:
    """Keeps DistributedSamplerProtocol and nothing else: a shuffle, dealt in turn."""

    def __init__(self, dataset: Any, num_replicas: int, rank: int, seed: int = 0) -> None:
        self.size, self.num_replicas, self.rank, self.seed = len(dataset), num_replicas, rank, seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def order(self) -> np.ndarray:
        return np.random.default_rng([self.seed, self.epoch]).permutation(self.size)

    def __iter__(self):
        return iter(self.order()[self.rank :: self.num_replicas].tolist())


class Padded(Strided):
    """Pads to equally many per rank."""

    def __iter__(self):
        size = -(-self.size // self.num_replicas) * self.num_replicas
        return iter(np.resize(self.order(), size)[self.rank :: self.num_replicas].tolist())


class NoSetEpoch(Padded):
    """set_epoch is there and does nothing."""

    def set_epoch(self, epoch: int) -> None:
        pass


class RankBlind(Padded):
    """Knows its rank and does not use it: every rank replays the same order."""

    def __iter__(self):
        return iter(self.order().tolist())


class SeedPerRank(Padded):
    """Each rank shuffles for itself, and takes its stride of another order than the others."""

    def order(self) -> np.ndarray:
        return np.random.default_rng([self.seed + self.rank, self.epoch]).permutation(self.size)


class GlobalRandom(Padded):
    """Draws from torch's global generator."""

    def order(self) -> np.ndarray:
        return torch.randperm(self.size).numpy()


class SplitThenInterleave:
    """Splits the first data set over the ranks and gives the second whole to each of them."""

    def __init__(self, dataset: Any, num_replicas: int, rank: int) -> None:
        first, second = (len(part) for part in dataset.datasets)
        own = range(rank, first, num_replicas)
        whole = range(first, first + second)
        self.indices = [i for pair in zip(own, whole, strict=True) for i in pair]
        self.num_replicas, self.rank = num_replicas, rank

    def set_epoch(self, epoch: int) -> None:
        pass

    def __iter__(self):
        return iter(self.indices)


class IgnoresWeights(Padded):
    """Takes weights and forgets them."""

    def __init__(self, dataset: Any, num_replicas: int, rank: int, weights: Any) -> None:
        super().__init__(dataset, num_replicas, rank)


class Blocks(Padded):
    """Shuffles batches that are blocks of one data set."""

    def order(self) -> np.ndarray:
        blocks = np.arange(self.size).reshape(-1, 8 * self.num_replicas)
        return np.random.default_rng(self.epoch).permutation(blocks).ravel()


def emitted(plan: ShardPlan, epoch: int = 0) -> list[list[list[int]]]:
    """All batches of all ranks by asking the plan for each."""
    return [
        [plan.batch(rank, step, epoch).tolist() for step in range(steps)]
        for rank, steps in enumerate(plan.steps_per_rank(epoch).tolist())
    ]


def found(plan: ShardPlan, **options: Any) -> dict[str, Any]:
    """Findings by what was checked."""
    findings = plan.check(**options)
    names = [finding.data["check"] for finding in findings]
    assert len(names) == len(set(names)), "each finding comes once"
    return dict(zip(names, findings, strict=True))
