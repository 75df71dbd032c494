"""ExactEvalSampler: every sample once over all ranks, equal steps, a marked tail."""

from itertools import chain
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipe_cases import numbered
from sampler_cases import per_rank
from size_cases import Sized

from nvalchemi.data import Batch
from nvalchemi.data.datapipes import (
    DataLoader,
    DistributedSamplerProtocol,
    ExactEvalSampler,
    InMemoryDataset,
)

EXACT = ExactEvalSampler


@pytest.mark.parametrize("world_size", [1, 2, 3, 7, 1024])
@pytest.mark.parametrize("length", [1, 5, 64, 1000, 4099])
def test_sums_over_ranks_are_those_of_one_process(world_size: int, length: int):
    errors = np.random.default_rng(length).integers(0, 1000, length)
    ranks = per_rank(world_size, EXACT, Sized(length), batch_size=4)
    assert len({len(batches) for batches in ranks}) == 1
    assert len(ranks[0]) == -(-length // (4 * world_size)) == len(EXACT(
        Sized(length), batch_size=4, num_replicas=world_size, rank=world_size - 1
    ))  # fmt: skip
    flat = list(chain(*chain(*zip(*ranks))))
    assert flat == list(range(length))
    partial = [(int(errors[list(chain(*b))].sum()), len(list(chain(*b)))) for b in ranks if any(b)]
    assert tuple(map(sum, zip(*partial))) == (errors.sum(), length)


@given(length=st.integers(1, 200), batch_size=st.integers(1, 9), world_size=st.integers(1, 12))
@settings(max_examples=150, deadline=None)
def test_only_the_last_step_is_short_and_it_is_even(length: int, batch_size: int, world_size: int):
    ranks = per_rank(world_size, EXACT, Sized(length), batch_size=batch_size)
    for step in list(zip(*ranks))[:-1]:
        assert {len(batch) for batch in step} == {batch_size}
    last = [len(batches[-1]) for batches in ranks]
    assert max(last) - min(last) <= 1
    sampler = EXACT(Sized(length), batch_size=batch_size, num_replicas=world_size, rank=0)
    assert sampler.tail.tolist() == [count > 0 for count in last]
    window = sampler.window(range(len(sampler)), range(world_size))
    assert [[b[b >= 0].tolist() for b in window[:, r]] for r in range(world_size)] == ranks


def test_the_order_is_that_of_the_data_in_every_epoch():
    sampler = EXACT(Sized(10), batch_size=2, num_replicas=2, rank=1)
    assert isinstance(sampler, DistributedSamplerProtocol)
    first = list(sampler)
    sampler.set_epoch(4)
    assert first == list(sampler) == [[2, 3], [6, 7], [9]]
    sampler.set_epoch_step(1)
    assert list(sampler) == first[1:]


@pytest.mark.parametrize("after", [1, 2, 3, 6])
def test_an_interrupted_evaluation_goes_on_with_other_ranks(after: int):
    running = EXACT(Sized(50), batch_size=3, num_replicas=2, rank=0)
    taken = iter(running)
    for _ in range(4):
        next(taken)
    rest = []
    for rank in range(after):
        own = EXACT(Sized(50), batch_size=6 // after, num_replicas=after, rank=rank)
        own.load_state_dict(running.state_dict())
        rest.append(list(own))
    assert list(chain(*chain(*zip(*rest)))) == list(range(24, 50))


def test_a_loader_leaves_out_the_ranks_that_have_nothing():
    data = InMemoryDataset(Batch.from_data_list(numbered(9)))
    seen, read = [], []
    for rank in range(4):
        sampler = EXACT(data, batch_size=2, num_replicas=4, rank=rank)
        loader = DataLoader(data, batch_sampler=sampler)
        assert len(loader) == 2
        batches = list(loader.read(filter(None, loader.index_batches())))
        seen += list(chain(*(batch.metadata["index"].tolist() for batch in batches)))
        read.append(len(batches))
    assert sorted(seen) == list(range(9)) and read == [2, 1, 1, 1]
    assert EXACT(data, batch_size=2, num_replicas=4, rank=0).tail.tolist() == [True] + [False] * 3


@pytest.mark.parametrize(
    ("dataset", "options", "error", "message"),
    [
        (Sized(0), {}, ValueError, "must hold 1 to 2"),
        ((i for i in range(2)), {}, TypeError, "must have a length, got generator"),
        (Sized(3), {"batch_size": 0}, ValueError, "batch_size must be >= 1, got 0"),
        (Sized(3), {"batch_size": 1.5}, TypeError, "batch_size must be an integer"),
        (Sized(3), {"num_replicas": 2, "rank": 5}, ValueError, r"rank must be in \[0, 2\), got 5"),
    ],
)
def test_mistakes_are_named(
    dataset: Any, options: dict[str, Any], error: type[Exception], message: str
):
    with pytest.raises(error, match=message):
        EXACT(dataset, **{"batch_size": 2, **options})
