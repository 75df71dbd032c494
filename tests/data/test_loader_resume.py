"""DataLoader: a state counts what the training loop got, and continues on any number of ranks."""

import json
import pickle
from itertools import chain, islice
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pipe_cases import numbered, numbers
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from nvalchemi.data import Batch
from nvalchemi.data.datapipes.dataloader import DataLoader
from nvalchemi.data.datapipes.in_memory_dataset import InMemoryDataset
from nvalchemi.data.datapipes.multidataset import MultiDataset
from nvalchemi.data.datapipes.samplers import (
    EpochSampler,
    MultiDatasetBatchSampler,
    MultiDatasetSampler,
)

HELD = InMemoryDataset(Batch.from_data_list(numbered(90)))
JOINED = MultiDataset(
    InMemoryDataset(Batch.from_data_list(numbered(60))),
    InMemoryDataset(Batch.from_data_list(numbered(30, 60))),
)
GLOBAL_BATCH = 12


def batches_of_ours(world_size: int, rank: int) -> DataLoader:
    sampler = MultiDatasetBatchSampler(
        JOINED, batch_size=GLOBAL_BATCH // world_size, num_replicas=world_size, rank=rank, seed=3
    )
    return DataLoader(JOINED, batch_sampler=sampler)


def samples_of_ours(world_size: int, rank: int) -> DataLoader:
    sampler = MultiDatasetSampler(JOINED, num_replicas=world_size, rank=rank, seed=3)
    return DataLoader(JOINED, sampler=sampler, batch_size=GLOBAL_BATCH // world_size)


def wrapped_in_batches(world_size: int, rank: int) -> DataLoader:
    sampler = EpochSampler(HELD, num_replicas=world_size, rank=rank, seed=3)
    return DataLoader(HELD, batch_sampler=BatchSampler(sampler, GLOBAL_BATCH // world_size, False))


def torchs(world_size: int, rank: int) -> DataLoader:
    sampler = DistributedSampler(HELD, num_replicas=world_size, rank=rank, seed=3)
    return DataLoader(HELD, batch_sampler=BatchSampler(sampler, GLOBAL_BATCH // world_size, False))


LOADERS = [batches_of_ours, samples_of_ours, wrapped_in_batches, torchs]


@pytest.mark.parametrize("make", LOADERS)
@given(
    before=st.sampled_from([1, 2, 3, 4, 6]),
    after=st.sampled_from([1, 2, 3, 4, 6]),
    step=st.integers(0, 8),
    epoch=st.integers(0, 3),
)
@settings(max_examples=25, deadline=None)
def test_a_state_continues_exactly_on_any_number_of_ranks(
    make: Any, before: int, after: int, step: int, epoch: int
):
    """What is seen before and after is the epoch: step for step what one rank sees."""
    whole = make(1, 0)
    whole.set_epoch(epoch)
    expected = [sorted(batch) for batch in numbers(list(whole))]
    assert len(expected) == 8
    step = min(step, len(expected) - 1)
    states, seen = [], []
    for rank in range(before):
        loader = make(before, rank)
        loader.set_epoch(epoch)
        seen.append(numbers(list(islice(loader, step))))
        states.append(json.dumps(loader.state_dict()))
    assert set(states) == {states[0]} and len(states[0]) < 200
    rest = []
    for rank in range(after):
        loader = make(after, rank)
        loader.load_state_dict(json.loads(states[0]))
        loader.set_epoch(epoch)  # a training loop does this before a pass
        rest.append(numbers(list(loader)))
    steps = [sorted(chain(*s)) for s in [*zip(*seen), *zip(*rest)]]
    assert steps[:-1] == expected[:-1]
    # the last one is padded, by as much as makes the ranks equal
    assert set(expected[-1]) <= set(steps[-1]) and len(steps) == len(expected)


@pytest.mark.parametrize("make", LOADERS)
def test_what_was_only_read_ahead_does_not_count(make: Any):
    loader = make(2, 1)
    loader.prefetch_factor = 3
    batches = iter(loader)
    head = [next(batches), next(batches)]
    state = loader.state_dict()
    assert state["position"] == 2 * GLOBAL_BATCH
    again = make(2, 1)
    again.load_state_dict(state)
    assert numbers(head) + numbers(list(again)) == numbers(list(make(2, 1)))


@pytest.mark.parametrize("make", LOADERS)
def test_a_loaded_state_is_the_state_until_the_pass_begins(make: Any):
    loader = make(2, 0)
    list(islice(loader, 3))
    state = loader.state_dict()
    other = make(3, 2)
    other.load_state_dict(state)
    assert other.state_dict() == state
    next(iter(other))
    assert other.state_dict() == {**state, "position": 4 * GLOBAL_BATCH}
    other.set_epoch(1)
    assert other.state_dict() == {**state, "epoch": 1, "position": 0}
    assert len(list(other)) == len(other) == 8, "a new epoch is whole"


@pytest.mark.parametrize("make", LOADERS)
def test_after_the_last_batch_comes_the_next_epoch(make: Any):
    loader = make(2, 0)
    list(loader)
    other = make(2, 0)
    other.load_state_dict(loader.state_dict())
    assert list(other) == []
    other.load_state_dict(loader.state_dict())
    for own in (loader, other):
        own.set_epoch(1)
    assert numbers(list(other)) == numbers(list(loader)) and len(loader) == 8


@pytest.mark.parametrize("make", LOADERS)
def test_a_step_of_the_epoch_is_a_state_too(make: Any):
    whole = numbers(list(make(2, 1)))
    loader = make(2, 1)
    loader.set_epoch_step(5)
    state = loader.state_dict()
    assert state["position"] == 5 * GLOBAL_BATCH
    loader.set_epoch(0)
    assert numbers(list(loader)) == whole[5:]
    assert numbers(list(loader)) == whole, "only the next pass is shortened"
    loader.set_epoch_step(99)
    assert list(loader) == []
    loader.load_state_dict(state)
    assert numbers(list(pickle.loads(pickle.dumps(loader)))) == whole[5:]


def test_our_samplers_are_asked_for_the_rest_alone():
    """A hundred million samples: a skip batch by batch would take minutes."""

    class Many:
        datasets = (range(6 * 10**7), range(4 * 10**7))

        def __len__(self) -> int:
            return 10**8

        def load_batches(self, index_lists: Any) -> Any:
            return list(index_lists)

    many = Many()
    sampler = MultiDatasetBatchSampler(many, batch_size=10, seed=1)
    loader = DataLoader(many, batch_sampler=sampler, prefetch_factor=0)
    loader.set_epoch_step(9_000_000)
    first = next(iter(loader))
    assert first == sampler.window([9_000_000], [0])[0, 0].tolist()
    assert loader.state_dict()["position"] == 90_000_010


# Orders that are drawn anew in each pass.


@pytest.mark.parametrize(
    "sampler",
    [
        None,
        RandomSampler(HELD, replacement=True, num_samples=50),
        SubsetRandomSampler(range(40)),
        WeightedRandomSampler([1.0] * 90, 60),
    ],
)
def test_a_random_order_is_kept_by_its_seed(sampler: Any):
    def loader() -> DataLoader:
        order: dict[str, Any] = {"shuffle": True} if sampler is None else {"sampler": sampler}
        return DataLoader(HELD, batch_size=8, **order)

    first = loader()
    batches = iter(first)
    head = numbers([next(batches), next(batches)])
    state = json.loads(json.dumps(first.state_dict()))
    rest = numbers(list(batches))
    torch.manual_seed(0)
    again = loader()
    again.load_state_dict(state)
    assert numbers(list(again)) == rest
    assert numbers(list(again)) != head + rest, "the next pass draws anew"
    assert len(json.dumps(state)) < 200


def test_shuffling_is_that_of_torch_for_the_same_global_seed():
    torch.manual_seed(5)
    theirs = [list(BatchSampler(RandomSampler(HELD), 8, False)) for _ in range(2)]
    after = torch.rand(())
    torch.manual_seed(5)
    loader = DataLoader(HELD, batch_size=8, shuffle=True)
    assert [numbers(list(loader)) for _ in range(2)] == theirs
    assert torch.rand(()) == after


def test_a_list_and_a_sampler_without_epochs_continue_by_counting():
    order = torch.randperm(90).tolist()
    loader = DataLoader(HELD, sampler=order, batch_size=7)
    loader.set_epoch(2)
    list(islice(loader, 4))
    other = DataLoader(HELD, sampler=order, batch_size=7)
    other.load_state_dict(loader.state_dict())
    other.set_epoch(2)
    assert numbers(list(other))[0] == order[28:35]
    other.load_state_dict(loader.state_dict())
    other.set_epoch(3)
    assert numbers(list(other))[0] == order[:7]


# Two passes, samplers that are exchanged, and mistakes.


def test_the_state_is_that_of_the_newest_pass():
    loader = batches_of_ours(1, 0)
    old, new = iter(loader), iter(loader)
    next(new)
    list(islice(old, 3))
    assert loader.state_dict()["position"] == GLOBAL_BATCH
    loader.batch_sampler = torchs(2, 0).batch_sampler
    assert loader.state_dict()["position"] == 0


def test_states_of_other_orders_and_positions_inside_a_step_are_refused():
    state = torchs(2, 0).state_dict()
    with pytest.raises(ValueError, match="belongs to another order"):
        DataLoader(HELD, batch_size=4, sampler=range(90)).load_state_dict(state)
    with pytest.raises(ValueError, match=r"'order', 'position'\], got \['epoch'\]"):
        torchs(2, 0).load_state_dict({"epoch": 0})
    with pytest.raises(ValueError, match="multiple of the samples in a step, 12, got 6"):
        torchs(2, 0).load_state_dict({**state, "position": 6})
    with pytest.raises(ValueError, match="epoch must be >= 0"):
        torchs(2, 0).load_state_dict({**state, "epoch": -1})
    with pytest.raises(ValueError, match="belongs to another order"):
        batches_of_ours(2, 0).load_state_dict({**state, "seed": 0})
    with pytest.raises(ValueError, match="'seed'"):
        DataLoader(HELD, shuffle=True).load_state_dict(state)


@pytest.mark.parametrize("kind", [batches_of_ours, torchs])
def test_a_state_that_is_no_dict_is_refused(kind: Any):
    with pytest.raises(TypeError, match="must be the dict that state_dict.. returned, got None"):
        kind(1, 0).load_state_dict(None)
