"""BudgetBatchSampler: batches within a budget, every structure once, drawn anew each epoch."""

import pickle
from itertools import chain, combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipe_cases import numbered
from sampler_cases import per_rank
from size_cases import Sized, edges_of, heavy_tailed

from nvalchemi.data import Batch
from nvalchemi.data.datapipes import (
    BudgetBatchSampler,
    DataLoader,
    DistributedSamplerProtocol,
    InMemoryDataset,
    windows,
)

BUDGET = BudgetBatchSampler


def batches(number: int, epoch: int = 0, **options: Any) -> list[list[int]]:
    sampler = BUDGET(Sized(number), **options)
    sampler.set_epoch(epoch)
    return list(sampler)


# --- what a batch may hold ----------------------------------------------------------------------


@given(
    sizes=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 90)), min_size=1, max_size=80),
    max_atoms=st.none() | st.integers(1, 120),
    max_edges=st.none() | st.integers(1, 200),
    world_size=st.integers(1, 5),
    small_window=st.sampled_from([3, 10, 512]),
    attempts=st.sampled_from([0, 3]),
    epoch=st.integers(0, 3),
)
@settings(max_examples=200, deadline=None)
def test_every_structure_once_within_the_budget_and_equal_steps(
    sizes: list[tuple[int, int]],
    max_atoms: int | None,
    max_edges: int | None,
    world_size: int,
    small_window: int,
    attempts: int,
    epoch: int,
):
    """Also with many windows, and with the pattern kept for windows that do not come out."""
    atoms, edges = np.array(sizes).T
    if (max_atoms is None and max_edges is None) or (max_edges and not edges.any()):
        return
    options: dict[str, Any] = {
        "max_atoms": max_atoms, "max_edges": max_edges, "sizes": (atoms, edges),
        "oversize": "alone", "seed": 5,
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(windows, "SMALL_WINDOW", small_window)
        patch.setattr(windows, "ATTEMPTS", attempts)
        samplers = [
            BUDGET(Sized(len(sizes)), num_replicas=world_size, rank=rank, **options)
            for rank in range(world_size)
        ]
        for sampler in samplers:
            sampler.set_epoch(epoch)
        ranks = [list(sampler) for sampler in samplers]
    number, padded = samplers[0].num_batches, samplers[0].num_padded
    assert {len(own) for own in ranks} == {len(samplers[0])}
    dealt = [batch for step in zip(*ranks) for batch in step]
    assert sorted(chain(*dealt[:number])) == list(range(len(sizes)))
    assert len(dealt) == number + padded and padded == -number % world_size
    assert dealt[number:] == [dealt[i % number] for i in range(padded)]
    for batch in dealt:
        assert 1 <= len(batch) <= samplers[0].batch_size
        within = max_atoms is None or atoms[batch].sum() <= max_atoms
        within &= max_edges is None or edges[batch].sum() <= max_edges
        assert within or len(batch) == 1


@pytest.mark.parametrize("number", [1009, 20011, 50000])
@pytest.mark.parametrize("max_atoms", [600, 2400])
def test_batches_are_full_and_alike(number: int, max_atoms: int):
    atoms = heavy_tailed(number)
    sampler = BUDGET(Sized(number), max_atoms=max_atoms, sizes=atoms)
    found = list(sampler)
    loads = np.array([atoms[batch].sum(dtype=int) for batch in found])
    counts = np.array([len(batch) for batch in found])
    spare = 1 / (len(found) / sampler._strata.windows)  # one batch of each window may be half empty
    assert loads.max() <= max_atoms
    assert sampler.fill == pytest.approx(loads.mean() / max_atoms) and sampler.fill > 0.985 - spare
    assert loads.mean() / loads.max() > 0.985 - spare  # what it makes of DDP's efficiency
    assert counts.max() < 1.5 * counts.mean()


def test_two_budgets_are_kept_together():
    atoms = heavy_tailed(30000)
    edges = edges_of(atoms)
    sampler = BUDGET(
        Sized(30000), max_atoms=1200, max_edges=30000, sizes=(atoms, edges), oversize="error"
    )
    found = list(sampler)
    assert max(atoms[batch].sum(dtype=int) for batch in found) <= 1200
    assert max(edges[batch].sum(dtype=int) for batch in found) <= 30000
    assert sorted(chain(*found)) == list(range(30000)) and sampler.fill > 0.93


def test_structures_of_which_no_two_fit_get_batches_of_their_own():
    assert sorted(batches(70, max_atoms=600, sizes=[301] * 70)) == [[i] for i in range(70)]
    sampler = BUDGET(Sized(1500), max_atoms=600, sizes=[301] * 1500, num_replicas=7, rank=3)
    assert sampler.num_batches == 1500 and sampler.num_padded == 5


# --- too large ----------------------------------------------------------------------------------


def test_a_structure_that_does_not_fit_is_refused_by_name():
    atoms = np.full(50, 20)
    atoms[[7, 9, 30, 31]] = 812
    with pytest.raises(ValueError, match=r"7 \(812 atoms\), 9 .*, 30 .* and 1 more.*'alone'"):
        BUDGET(Sized(50), max_atoms=600, sizes=atoms)
    with pytest.raises(ValueError, match=r"max_edges=10: samples 1 \(11 edges\) do not"):
        BUDGET(Sized(2), max_edges=10, sizes=([1, 1], [10, 11]))
    found = batches(50, max_atoms=600, sizes=atoms, oversize="alone")
    assert sorted(batch for batch in found if len(batch) == 1)[:4] == [[7], [9], [30], [31]]
    assert max(atoms[batch].sum() for batch in found if len(batch) > 1) <= 600


# --- drawn anew ---------------------------------------------------------------------------------


def mates(found: list[list[int]]) -> set[tuple[int, int]]:
    return {pair for batch in found for pair in combinations(sorted(batch), 2)}


@pytest.mark.parametrize(("number", "same_size"), [(800, False), (12000, False), (12000, True)])
def test_partners_are_drawn_anew_each_epoch(number: int, same_size: bool):
    """Packing by size alone would put the same structures together again and again."""
    atoms = np.full(number, 36) if same_size else heavy_tailed(number)
    epochs = [
        mates(batches(number, epoch, max_atoms=600, sizes=atoms, seed=2)) for epoch in range(3)
    ]
    pairs = len(epochs[0])
    expected = pairs**2 / (number * (number - 1) / 2)
    for first, second in combinations(epochs, 2):
        again = len(first & second)
        assert abs(again - expected) < 6 * expected**0.5


def test_epochs_and_seeds_are_unrelated_and_without_shuffle_there_is_one_epoch():
    options: dict[str, Any] = {"max_atoms": 400, "sizes": heavy_tailed(500)}
    first = batches(500, **options)
    assert first == batches(500, **options)
    assert len({str(batches(500, e, seed=s, **options)) for e in (0, 1) for s in (0, 1)}) == 4
    assert batches(500, 3, shuffle=False, **options) == first


def test_large_and_small_structures_come_at_any_time():
    atoms = heavy_tailed(20000)
    largest = [atoms[batch].max() for batch in batches(20000, max_atoms=1000, sizes=atoms)]
    middle = len(largest) // 2
    first, second = np.mean(largest[:middle]), np.mean(largest[middle:])
    assert abs(first - second) < 6 * np.std(largest) / middle**0.5


def test_every_epoch_has_as_many_batches():
    sampler = BUDGET(Sized(3000), max_atoms=500, sizes=heavy_tailed(3000), oversize="alone")
    for epoch in range(5):
        sampler.set_epoch(epoch)
        assert len(list(sampler)) == len(sampler) == sampler.num_batches


# --- ranks, seeking, resuming -------------------------------------------------------------------


def test_batches_do_not_depend_on_the_ranks():
    options: dict[str, Any] = {"max_atoms": 500, "sizes": heavy_tailed(4000), "seed": 4}
    one = batches(4000, **options)
    for world_size in (3, 1024):
        ranks = per_rank(world_size, BUDGET, Sized(4000), **options)
        assert [batch for step in zip(*ranks) for batch in step][: len(one)] == one


def test_drop_last_leaves_out_what_does_not_fill_a_step():
    options: dict[str, Any] = {"max_atoms": 500, "sizes": heavy_tailed(1000)}
    one = batches(1000, **options)
    ranks = per_rank(7, BUDGET, Sized(1000), drop_last=True, **options)
    dealt = [batch for step in zip(*ranks) for batch in step]
    sampler = BUDGET(Sized(1000), drop_last=True, num_replicas=7, rank=0, **options)
    assert dealt == one[: len(one) // 7 * 7]
    assert (sampler.num_dropped, sampler.num_padded) == (len(one) % 7, 0)


@pytest.mark.parametrize(("before", "after"), [(1, 4), (4, 1), (3, 5)])
def test_resume_on_any_number_of_ranks_is_exact(before: int, after: int):
    options: dict[str, Any] = {"max_atoms": 500, "sizes": heavy_tailed(3000), "seed": 1}

    def sampler(world_size: int, rank: int) -> BudgetBatchSampler:
        return BUDGET(Sized(3000), num_replicas=world_size, rank=rank, **options)

    seen, states = [], []
    for rank in range(before):
        own = sampler(before, rank)
        own.set_epoch(2)
        running = iter(own)
        seen.append([next(running) for _ in range(20)])
        states.append(own.state_dict())
    assert all(state == states[0] for state in states)
    rest = []
    for rank in range(after):
        own = sampler(after, rank)
        own.load_state_dict(states[0])
        own.set_epoch(2)
        rest.append(list(own))
    dealt = list(chain(*zip(*seen))) + list(chain(*zip(*rest)))
    whole = batches(3000, 2, **options)
    assert dealt[: len(whole)] == whole and len(dealt) - len(whole) < after


def test_windows_seeking_and_pickles_agree_with_iterating():
    options: dict[str, Any] = {"max_atoms": 300, "sizes": heavy_tailed(2500), "oversize": "alone"}
    ranks = per_rank(4, BUDGET, Sized(2500), **options)
    sampler = BUDGET(Sized(2500), num_replicas=4, rank=2, **options)
    assert isinstance(sampler, DistributedSamplerProtocol)
    window = sampler.window(range(len(sampler)), range(4))
    assert window.shape == (len(sampler), 4, sampler.batch_size) and window.dtype == np.int64
    assert [[b[b >= 0].tolist() for b in window[:, r]] for r in range(4)] == ranks
    sampler.set_epoch_step(60)
    assert list(sampler) == ranks[2][60:]
    assert list(pickle.loads(pickle.dumps(sampler))) == ranks[2]
    with pytest.raises(ValueError, match="belongs to another order"):
        BUDGET(Sized(2500), **{**options, "max_atoms": 301}).load_state_dict(sampler.state_dict())


def test_a_loader_reads_what_it_says():
    data = InMemoryDataset(Batch.from_data_list(numbered(40)))
    sampler = BUDGET(data, max_atoms=9, max_edges=5, num_replicas=2, rank=1)
    read = list(DataLoader(data, batch_sampler=sampler))
    assert [batch.metadata["index"].tolist() for batch in read] == list(sampler)
    assert max(batch.num_nodes for batch in read) <= 9
    assert max(batch.num_edges for batch in read) <= 5


# --- mistakes -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({}, ValueError, "max_atoms, max_edges or both, got neither"),
        ({"max_atoms": 0}, ValueError, "max_atoms must be >= 1, got 0"),
        ({"max_atoms": 9.5}, TypeError, "max_atoms must be an integer"),
        ({"max_edges": -1}, ValueError, "max_edges must be >= 1"),
        ({"max_edges": 9}, ValueError, "limits edges, and only atoms are given"),
        ({"max_edges": 9, "sizes": ([1] * 4, [0] * 4)}, ValueError, "no structure has an edge"),
        ({"max_atoms": 9, "oversize": "skip"}, ValueError, "oversize must be .* got 'skip'"),
        ({"max_atoms": 9, "sizes": [1] * 5}, ValueError, "one entry for each of 4 samples"),
        ({"max_atoms": 9, "sizes": None}, TypeError, r"Sized has no sizes\(\)"),
        ({"max_atoms": 9, "rank": 1}, ValueError, r"rank must be in \[0, 1\)"),
        ({"max_atoms": 9, "num_replicas": 2, "drop_last": True}, ValueError, "1 batches for 2"),
        ({"max_atoms": 9, "shuffle": 0}, TypeError, "shuffle must be True or False, got 0"),
        ({"max_atoms": 9, "drop_last": "a"}, TypeError, "drop_last must be True or False"),
        ({"max_atoms": 9, "seed": 0.5}, TypeError, "seed must be an integer"),
    ],
)
def test_mistakes_are_named(options: dict[str, Any], error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        BUDGET(Sized(4), **{"sizes": [1] * 4, **options})


def test_data_sets_that_can_not_be_batched_are_refused():
    with pytest.raises(ValueError, match="must hold 1 to 2"):
        BUDGET(Sized(0), max_atoms=9, sizes=[])
    with pytest.raises(TypeError, match="must have a length, got generator"):
        BUDGET((i for i in range(3)), max_atoms=9)
    with pytest.raises(TypeError, match=r"no order of single samples: use window"):
        BUDGET(Sized(3), max_atoms=9, sizes=[1, 2, 3]).order(np.arange(3))


def test_a_state_of_other_sizes_is_refused_also_if_their_sum_is_the_same():
    atoms = heavy_tailed(300)
    sampler = BUDGET(Sized(300), max_atoms=500, sizes=atoms, oversize="alone")
    sampler.set_epoch_step(2)
    state = sampler.state_dict()
    with pytest.raises(ValueError, match="belongs to another order"):
        BUDGET(
            Sized(300), max_atoms=500, sizes=atoms[::-1].copy(), oversize="alone"
        ).load_state_dict(state)
    for kind in (np.uint32, np.int64):  # how they are stored is of no matter
        other = BUDGET(Sized(300), max_atoms=500, sizes=atoms.astype(kind), oversize="alone")
        other.load_state_dict(state)
        assert other.state_dict() == state
