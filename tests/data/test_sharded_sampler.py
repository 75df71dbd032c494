import pickle
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from nvalchemi.data.datapipes import DistributedSamplerProtocol
from nvalchemi.data.datapipes.sharded_sampler import ShardedSampler, can_shard


def shards(sampler, ranks: int, epoch: int = 0, **kwargs) -> list[list[int]]:
    result = []
    for rank in range(ranks):
        shard = ShardedSampler(sampler, num_replicas=ranks, rank=rank, **kwargs)
        shard.set_epoch(epoch)
        result.append(list(shard))
        assert len(result[-1]) == len(shard)
    return result


def joint(parts: list[list[int]]) -> list[int]:
    """The order that the ranks share, position by position."""
    return [index for step in zip(*parts) for index in step]


@given(st.lists(st.integers(0, 99), min_size=1, max_size=40), st.integers(1, 9))
def test_a_fixed_order_is_dealt_out_in_turn_and_padded_from_its_start(order, ranks):
    parts = shards(order, ranks)
    assert len({len(part) for part in parts}) == 1, "every rank gets as many"
    whole = joint(parts)
    assert whole[: len(order)] == order and len(whole) - len(order) < ranks
    assert whole[len(order) :] == (order * ranks)[: len(whole) - len(order)]
    if len(order) >= ranks:
        dropped = joint(shards(order, ranks, drop_last=True))
        assert dropped == order[: len(order) // ranks * ranks]


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 30), st.integers(1, 4), st.integers(0, 5), st.integers(0, 2**40))
def test_the_ranks_share_one_random_order(size, ranks, epoch, seed):
    subset = list(range(100, 100 + size))
    whole = joint(shards(SubsetRandomSampler(subset), ranks, epoch, seed=seed))
    assert sorted(whole[:size]) == subset, "each index once before any padding"
    assert joint(shards(SubsetRandomSampler(subset), 1, epoch, seed=seed)) == whole[:size], (
        "the order does not depend on the number of ranks"
    )


def test_orders_differ_between_epochs_and_seeds_only():
    sampler = RandomSampler(range(64))
    first = shards(sampler, 2)
    torch.manual_seed(123)
    assert shards(sampler, 2) == first, "torch's global generator has no part in it"
    assert shards(sampler, 2, epoch=1) != first and shards(sampler, 2, seed=1) != first
    assert shards(sampler, 2, epoch=1) != shards(sampler, 2, seed=1), "never seed + epoch"


def test_weights_are_kept():
    weights = torch.zeros(10)
    weights[2], weights[7] = 1.0, 3.0
    sampler = WeightedRandomSampler(weights, 2000)
    counts = Counter(joint(shards(sampler, 4)))
    assert set(counts) == {2, 7} and 0.2 < counts[2] / 2000 < 0.3


def test_the_users_sampler_is_left_as_it_was():
    generator = torch.Generator().manual_seed(5)
    state = generator.get_state()
    sampler = RandomSampler(range(10), generator=generator)
    list(ShardedSampler(sampler, num_replicas=2, rank=0))
    assert sampler.generator is generator and torch.equal(generator.get_state(), state)


def test_it_counts_as_distributed_and_travels():
    shard = ShardedSampler(SubsetRandomSampler(range(9)), num_replicas=3, rank=1, seed=4)
    assert isinstance(shard, DistributedSamplerProtocol)
    shard.set_epoch(7)
    assert list(pickle.loads(pickle.dumps(shard))) == list(shard) == list(shard)


def test_what_can_be_dealt_out():
    class Mine(RandomSampler):
        pass

    for good in (
        RandomSampler(range(3)),
        SubsetRandomSampler([1]),
        WeightedRandomSampler([1.0], 1),
        [1, 2],
        (1, 2),
        range(3),
    ):
        assert can_shard(good)
    for bad in (Mine(range(3)), "abc", {1, 2}, iter([1]), SequentialSampler(range(3)), None):
        assert not can_shard(bad)
    with pytest.raises(TypeError, match="Mine can not be dealt out: only torch's RandomSampler"):
        ShardedSampler(Mine(range(3)), num_replicas=2, rank=0)


@pytest.mark.parametrize("rank", [-1, 2])
def test_ranks_outside(rank):
    with pytest.raises(ValueError, match=f"rank must lie in 0..1: got {rank}"):
        ShardedSampler([1, 2, 3], num_replicas=2, rank=rank)


def test_ranks_that_would_get_nothing():
    with pytest.raises(ValueError, match="0 indices are too few"):
        ShardedSampler([], num_replicas=2, rank=0)
    with pytest.raises(ValueError, match="1 indices are too few: some of 2 ranks would get none"):
        ShardedSampler([5], num_replicas=2, rank=0, drop_last=True)
    assert shards([5], 3) == [[5], [5], [5]]
