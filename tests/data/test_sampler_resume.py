"""Samplers: epochs, seeds, seeking, and resuming on any number of ranks."""

import pickle
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampler_cases import Lengths

from nvalchemi.data.datapipes.samplers import (
    EpochSampler,
    MultiDatasetBatchSampler,
    MultiDatasetSampler,
)

BATCHES = MultiDatasetBatchSampler


def test_epochs_and_seeds_are_unrelated():
    def order(seed: int, epoch: int) -> list[int]:
        sampler = BATCHES(Lengths(300, 200), batch_size=10, seed=seed)
        sampler.set_epoch(epoch)
        return list(chain(*sampler))

    orders = [order(0, 0), order(0, 1), order(1, 0), order(1, 1), order(-1, 2)]
    assert len({tuple(o) for o in orders}) == 5
    assert order(0, 1) == orders[1]
    matches = np.mean(np.array(orders[1]) == np.array(orders[2]))
    assert matches < 0.02


def test_data_sets_of_equal_length_have_different_orders():
    flat = np.array(list(chain(*BATCHES.balanced(Lengths(500, 500), batch_size=10))))
    first, second = flat[flat < 500], flat[flat >= 500] - 500
    assert np.mean(first == second) < 0.02


@given(
    before=st.sampled_from([1, 2, 3, 4, 6, 12]),
    after=st.sampled_from([1, 2, 3, 4, 6, 12]),
    step=st.integers(0, 30),
    weighted=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_resume_on_any_number_of_ranks_is_exact(before: int, after: int, step: int, weighted: bool):
    """A global batch of 12: what is seen before and after is the whole epoch, once."""
    options: dict[str, Any] = {"seed": 9, **({"weights": [5, 1]} if weighted else {})}

    def sampler(world_size: int, rank: int) -> MultiDatasetBatchSampler:
        return BATCHES(
            Lengths(200, 77), batch_size=12 // world_size, num_replicas=world_size, rank=rank,
            **options,
        )  # fmt: skip

    whole = sampler(1, 0)
    whole.set_epoch(3)
    expected = [sorted(batch) for batch in whole]
    step = min(step, len(expected) - 2)
    states, seen = [], []
    for rank in range(before):
        own = sampler(before, rank)
        own.set_epoch(3)
        running = iter(own)
        seen.append([next(running) for _ in range(step)])
        states.append(own.state_dict())
    assert all(state == states[0] for state in states)
    assert len(str(states[0])) < 200
    rest = []
    for rank in range(after):
        own = sampler(after, rank)
        own.load_state_dict(states[rank % before])
        own.set_epoch(3)  # a training loop does this at the start of the pass
        rest.append(list(own))
    steps = [sorted(chain(*s)) for s in zip(*seen)] + [sorted(chain(*s)) for s in zip(*rest)]
    assert steps[:-1] == expected[:-1]
    if weighted:
        assert steps[-1] == expected[-1]
    else:  # there the last step is whole batches, whose size differs with the ranks
        assert set(expected[-1]) <= set(steps[-1])


def test_set_epoch_step_skips_once_and_a_new_epoch_starts_at_its_beginning():
    sampler = BATCHES(Lengths(50, 20), batch_size=4, num_replicas=2, rank=1)
    whole = list(sampler)
    sampler.set_epoch_step(5)
    assert len(sampler) == len(whole)
    assert list(sampler) == whole[5:]
    assert list(sampler) == whole
    sampler.set_epoch_step(len(whole))
    assert list(sampler) == []
    sampler.set_epoch_step(3)
    sampler.set_epoch(1)
    assert len(list(sampler)) == len(whole)
    with pytest.raises(ValueError, match="step must be <= 9"):
        sampler.set_epoch_step(10)


def test_a_second_iterator_does_not_disturb_the_first():
    sampler = BATCHES(Lengths(400, 100), batch_size=4)
    first = iter(sampler)
    head = [next(first) for _ in range(3)]
    sampler.set_epoch(1)
    other = list(sampler)
    sampler.set_epoch(0)
    assert head + list(first) == list(sampler)
    assert other != head + list(sampler)[3:]


def test_a_sampler_in_use_can_be_pickled():
    sampler = BATCHES(Lengths(40, 9), batch_size=4, num_replicas=2, rank=1)
    whole = list(sampler)
    assert list(pickle.loads(pickle.dumps(sampler))) == whole


def test_a_state_of_another_order_is_refused():
    sampler = BATCHES(Lengths(40, 40), batch_size=4)
    state = sampler.state_dict()
    with pytest.raises(ValueError, match="belongs to another order"):
        BATCHES(Lengths(40, 41), batch_size=4).load_state_dict(state)
    with pytest.raises(ValueError, match=r"must have \['order', 'position'\]"):
        sampler.load_state_dict({"seed": 0, "epoch": 0})
    with pytest.raises(ValueError, match="multiple of the batch size 4"):
        sampler.load_state_dict({**state, "position": 6})
    with pytest.raises(ValueError, match="at most 80"):
        sampler.set_position(84)


def test_window_is_what_the_ranks_emit():
    samplers = [BATCHES(Lengths(70, 21), batch_size=4, num_replicas=3, rank=r) for r in range(3)]
    for sampler in samplers:
        sampler.set_epoch(2)
    steps = range(len(samplers[0]))
    window = samplers[0].window(steps, range(3))
    assert window.shape == (8, 3, 4)
    for rank, sampler in enumerate(samplers):
        assert [[i for i in row if i >= 0] for row in window[:, rank].tolist()] == list(sampler)


def test_a_hundred_million_samples_are_reached_anywhere():
    dataset = Lengths(6 * 10**7, 3 * 10**7, 10**7)
    sampler = BATCHES(dataset, batch_size=64, num_replicas=1024, rank=1023)
    assert len(sampler) == 1526
    sampler.set_epoch_step(1500)
    rest = np.array(list(sampler)[:-1])
    assert len(np.unique(rest)) == rest.size and rest.max() < 10**8
    assert np.array_equal(rest, sampler.window(range(1500, 1525), [1023])[:, 0])


def test_the_largest_data_sets_and_thousands_of_them_are_reached_anywhere():
    class OfLengths:
        def __init__(self, *lengths: int) -> None:
            self.lengths = lengths

    lengths = [2**39 + 7, 2**38 - 7, 2**38]
    whole = BATCHES(OfLengths(*lengths), batch_size=64, num_replicas=1024, rank=7)
    assert sum(whole.draws_per_dataset) == 2**40 and whole.draws_per_dataset == lengths
    assert len(whole) * 1024 * 64 == 2**40
    whole.set_epoch_step(len(whole) - 2)
    rest = np.array(list(iter(whole)))
    assert rest.shape == (2, 64) and 0 <= rest.min() and rest.max() < 2**40
    single = MultiDatasetSampler(OfLengths(*lengths), num_replicas=3, rank=2)
    single.set_position(2**40 - 3)
    assert len(list(iter(single))) == 1  # a list of the sampler would ask for its length
    one = EpochSampler(range(2**40), num_replicas=1024, rank=1023)
    one.set_epoch_step(len(one) - 1)
    assert len(list(iter(one))) == 1
    many = [2**40 // 3000] * 3000
    sampler = BATCHES(OfLengths(*many), batch_size=8, weights=range(1, 3001), num_batches=2**20)
    shares = np.arange(1, 3001) / sum(range(1, 3001)) * 2**23
    assert np.abs(np.array(sampler.draws_per_dataset) - shares).max() < 1.7
    with pytest.raises(ValueError, match="1 to 2\\^40 samples"):
        BATCHES(OfLengths(2**40, 1), batch_size=8)
    with pytest.raises(ValueError, match="1 to 2\\^40 samples"):
        EpochSampler(range(2**40 + 1))


def test_a_generator_gives_the_seed_once():
    def draw() -> list[list[int]]:
        generator = torch.Generator().manual_seed(3)
        return list(BATCHES(Lengths(50), batch_size=5, generator=generator))

    assert draw() == draw() != list(BATCHES(Lengths(50), batch_size=5))
    with pytest.raises(ValueError, match="seed or generator, not both"):
        BATCHES(Lengths(50), batch_size=5, seed=1, generator=torch.Generator())


def test_the_order_of_a_sampler_never_changes_between_versions():
    """A change here breaks resumed runs: then it must be announced, not only the numbers edited."""
    sampler = BATCHES(Lengths(60, 2000, 10**8), batch_size=6, seed=1234)
    sampler.set_epoch(7)
    assert next(iter(sampler)) == [37581227, 7852302, 3133319, 82489644, 55961246, 55036250]
    assert sampler.window([16_000_000], [0])[0, 0].tolist() == [
        58829617,
        2808697,
        40201887,
        75492672,
        56744528,
        40697839,
    ]
    single = MultiDatasetSampler(Lengths(60, 2000), num_replicas=4, rank=1, seed=1234)
    assert list(single)[:6] == [1390, 1858, 682, 1691, 1380, 1737]
    mixed = BATCHES(Lengths(60, 2000, 10**8), batch_size=6, seed=1234, weights=[1, 2, 3])
    assert next(iter(mixed)) == [81293413, 269, 50, 61509424, 1390, 60809951]
    local = BATCHES(Lengths(60, 2000), batch_size=6, seed=1, locality=4, chunk_size=16)
    assert next(iter(local)) == [1945, 384, 395, 157, 1896, 390]
    assert mixed.state_dict()["order"] == "ef2b675a76c9517d"
