"""BalancedBatchSampler: the samples of a step as the order says, dealt for even cost."""

import pickle
from itertools import chain
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipe_cases import numbered
from sampler_cases import Lengths, per_rank
from size_cases import Sized, edges_of, heavy_tailed

from nvalchemi.data import Batch
from nvalchemi.data.datapipes import (
    BalancedBatchSampler,
    DataLoader,
    DistributedSamplerProtocol,
    EpochSampler,
    InMemoryDataset,
    MultiDataset,
    MultiDatasetBatchSampler,
)

BALANCED = BalancedBatchSampler


def steps(ranks: list[list[list[int]]]) -> list[list[int]]:
    """Samples of each step over all ranks, sorted."""
    return [sorted(chain(*batches)) for batches in zip(*ranks)]


# --- which samples ------------------------------------------------------------------------------


@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=4).filter(any),
    batch_size=st.integers(1, 6),
    world_size=st.integers(1, 6),
    options=st.fixed_dictionaries(
        {"shuffle": st.booleans(), "seed": st.integers(0, 9), "drop_last": st.booleans()}
    ),
)
@settings(max_examples=100, deadline=None)
def test_a_step_has_the_samples_that_it_has_without_balance(
    lengths: list[int], batch_size: int, world_size: int, options: dict[str, Any]
):
    data, sizes = Lengths(*lengths), heavy_tailed(sum(lengths))
    if options["drop_last"] and sum(lengths) < batch_size * world_size:
        return
    options["batch_size"] = batch_size
    plain = per_rank(world_size, MultiDatasetBatchSampler, data, **options)
    balanced = per_rank(world_size, BALANCED, data, sizes=sizes, **options)
    assert steps(balanced) == steps(plain)
    for number, step in enumerate(zip(*balanced)):
        counts = [len(batch) for batch in step]
        assert max(counts) - min(counts) <= 1 and min(counts) >= 1
        if number < len(balanced[0]) - 1:
            assert set(counts) == {batch_size}


def test_a_single_data_set_has_the_steps_of_epoch_sampler():
    data, sizes = Sized(1000), heavy_tailed(1000)
    single = EpochSampler(data, seed=3)
    single.set_epoch(2)
    flat = list(single)
    for world_size, batch_size in ((1, 20), (4, 5), (20, 1)):
        sampler = BALANCED(
            data, batch_size=batch_size, sizes=sizes, seed=3, num_replicas=world_size, rank=0
        )
        window = sampler.window(range(50), range(world_size), epoch=2)
        found = window.reshape(50, 20)
        assert np.array_equal(np.sort(found), np.sort(np.reshape(flat, (50, 20))))


def test_weights_and_counts_hold_for_the_step():
    options = {"samples_per_dataset": [3, 1], "batch_size": 4, "sizes": heavy_tailed(200)}
    window = BALANCED(Lengths(150, 50), num_replicas=6, rank=0, **options).window([0, 3], range(6))
    assert ((window >= 150).sum(axis=(1, 2)) == 6).all()


# --- how even -----------------------------------------------------------------------------------


def efficiency(loads: np.ndarray) -> float:
    """Mean load over the mean of the largest of each step, for loads of shape (steps, ranks)."""
    return float(loads.mean() / loads.max(axis=1).mean())


@pytest.mark.parametrize(("world_size", "number"), [(8, 40), (64, 20), (1024, 4)])
def test_ranks_are_even_for_heavy_tailed_sizes(world_size: int, number: int):
    """Dealing at random reaches 0.45 to 0.70 here, sorting and dealing back and forth 0.72."""
    atoms = heavy_tailed(16 * world_size * number)
    sampler = BALANCED(
        Sized(len(atoms)), batch_size=16, sizes=atoms, num_replicas=world_size, rank=0
    )
    window = sampler.window(range(number), range(world_size))
    assert efficiency(atoms[window].sum(axis=2, dtype=float)) > 0.985
    assert np.array_equal(np.sort(window, axis=None), np.arange(len(atoms)))


@pytest.mark.parametrize("cost", ["edges", (500.0, 1.0, 0.5), (0, 2, 0)])
def test_the_cost_that_was_asked_for_is_even(cost: Any):
    atoms = heavy_tailed(16 * 64)
    edges = edges_of(atoms)
    sampler = BALANCED(
        Sized(len(atoms)), batch_size=16, sizes=(atoms, edges), cost=cost, num_replicas=64, rank=0
    )
    a, b, c = (0, 0, 1) if cost == "edges" else cost
    expected = a + b * atoms.astype(float) + c * edges
    window = sampler.window([0], range(64))
    assert np.allclose(sampler.costs(window), expected[window])
    assert efficiency(expected[window].sum(axis=2)) > 0.985


def test_a_structure_that_no_batch_can_outweigh_gets_the_smallest_partners():
    atoms = np.array([400] + [10] * 7 + [1] * 8)
    sampler = BALANCED(Sized(16), batch_size=4, sizes=atoms, num_replicas=4, rank=0)
    (step,) = sampler.window([0], range(4))
    (heavy,) = [batch for batch in step if 0 in batch]
    assert sorted(atoms[heavy]) == [1, 1, 1, 400]


# --- where it stands ----------------------------------------------------------------------------


@given(
    before=st.sampled_from([1, 2, 3, 4, 6, 12]),
    after=st.sampled_from([1, 2, 3, 4, 6, 12]),
    step=st.integers(0, 22),
)
@settings(max_examples=40, deadline=None)
def test_resume_on_any_number_of_ranks_is_exact(before: int, after: int, step: int):
    def sampler(world_size: int, rank: int) -> BalancedBatchSampler:
        return BALANCED(
            Lengths(200, 77), batch_size=12 // world_size, num_replicas=world_size, rank=rank,
            seed=9, sizes=heavy_tailed(277),
        )  # fmt: skip

    whole = sampler(1, 0)
    whole.set_epoch(3)
    expected = [sorted(batch) for batch in whole][:-1]  # the last has one sample, and is padded
    states, seen, rest = [], [], []
    for rank in range(before):
        own = sampler(before, rank)
        own.set_epoch(3)
        running = iter(own)
        seen.append([next(running) for _ in range(step)])
        states.append(own.state_dict())
    assert all(state == states[0] for state in states)
    for rank in range(after):
        own = sampler(after, rank)
        own.load_state_dict(states[0])
        own.set_epoch(3)  # a training loop does this at the start of the pass
        rest.append(list(own))
    assert steps(seen) + steps(rest)[:-1] == expected


def test_windows_seeking_and_pickles_agree_with_iterating():
    options: dict[str, Any] = {"batch_size": 3, "sizes": heavy_tailed(100), "seed": 1}
    ranks = per_rank(4, BALANCED, Sized(100), **options)
    sampler = BALANCED(Sized(100), num_replicas=4, rank=2, **options)
    assert isinstance(sampler, DistributedSamplerProtocol)
    window = sampler.window(range(len(sampler)), range(4))
    assert [[b[b >= 0].tolist() for b in window[:, r]] for r in range(4)] == ranks
    sampler.set_epoch_step(5)
    assert list(sampler) == ranks[2][5:]
    assert list(pickle.loads(pickle.dumps(sampler))) == ranks[2]
    sampler.set_epoch(1)
    assert list(sampler) != ranks[2]


def test_a_loader_reads_what_it_says():
    data = MultiDataset(*(InMemoryDataset(Batch.from_data_list(numbered(n))) for n in (13, 11)))
    sampler = BALANCED(data, batch_size=4, num_replicas=3, rank=1, cost="edges")
    batches = list(DataLoader(data, batch_sampler=sampler))
    assert [batch.metadata["index"].tolist() for batch in batches] == list(sampler)
    assert [batch.num_edges for batch in batches] == [
        int(sampler.costs(np.array(indices)).sum()) for indices in sampler
    ]


# --- mistakes -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"cost": "mass"}, ValueError, "cost must be 'atoms', 'edges' or three numbers.*'mass'"),
        ({"cost": 3}, ValueError, "three finite numbers >= 0"),
        ({"cost": (1, 2)}, ValueError, r"three finite numbers >= 0.*got \(1, 2\)"),
        ({"cost": (1, -1, 0)}, ValueError, "three finite numbers >= 0"),
        ({"cost": (1, float("inf"), 0)}, ValueError, "three finite numbers >= 0"),
        ({"cost": (1, "x", 0)}, TypeError, "three numbers"),
        ({"cost": (1, 0, 0)}, ValueError, "must depend on atoms or edges"),
        ({"cost": "edges"}, ValueError, "counts edges, and only atoms are given"),
        ({"cost": "edges", "sizes": ([1] * 20, [0] * 20)}, ValueError, "no structure has an edge"),
        ({"sizes": [1] * 19}, ValueError, "one entry for each of 20 samples"),
        ({"sizes": None}, TypeError, r"Lengths has no sizes\(\)"),
        ({"batch_size": 0}, ValueError, "batch_size must be >= 1"),
        ({"num_replicas": 2, "rank": 2}, ValueError, r"rank must be in \[0, 2\)"),
        ({"weights": [1]}, ValueError, "Expected 2 dataset weights"),
    ],
)
def test_mistakes_are_named(options: dict[str, Any], error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        BALANCED(Lengths(10, 10), **{"batch_size": 4, "sizes": [1] * 20, **options})


def test_a_data_set_without_a_length_is_refused():
    with pytest.raises(TypeError, match="dataset must have a length, got generator"):
        BALANCED((i for i in range(3)), batch_size=1)
