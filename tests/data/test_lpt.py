"""Dealing by the longest-processing-time rule, and exchanges: each item once, loads as they are."""

import heapq

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvalchemi.data.datapipes.lpt import deal, exchange, level

COSTS = st.lists(st.integers(0, 50), min_size=1, max_size=60)


def one_at_a_time(costs: np.ndarray, bins: int, capacity: np.ndarray) -> list[float]:
    """The rule in its plain form, with a heap."""
    heap = [(0.0, b) for b in range(bins) if capacity[b]]
    count, loads = np.zeros(bins, int), np.zeros(bins)
    for cost in sorted(costs, reverse=True):
        _, b = heapq.heappop(heap)
        loads[b] += cost
        count[b] += 1
        if count[b] < capacity[b]:
            heapq.heappush(heap, (loads[b], b))
    return sorted(loads)


@given(costs=COSTS, bins=st.integers(1, 9))
@settings(max_examples=150, deadline=None)
def test_waves_give_the_loads_of_the_rule(costs: list[int], bins: int):
    items = np.array(costs, dtype=float)
    items += np.random.default_rng(0).random(len(items)) / 100  # ties might be broken differently
    each, more = divmod(len(items), bins)
    capacity = each + (np.arange(bins) < more)
    members, loads = deal(items, bins, capacity)
    assert sorted(members[members >= 0]) == list(range(len(items)))
    assert np.array_equal((members >= 0).sum(axis=1), capacity)
    assert np.allclose(loads, np.append(items, 0)[members].sum(axis=1))
    assert np.allclose(sorted(loads), one_at_a_time(items, bins, capacity))


@given(
    costs=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), min_size=4, max_size=60),
    bins=st.integers(1, 9),
    resources=st.sampled_from([1, 2]),
    moves=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_exchanges_lower_the_largest_load_and_lose_nothing(
    costs: list[tuple[int, int]], bins: int, resources: int, moves: bool
):
    items = np.array(costs, dtype=float)[:, : resources if resources == 2 else None]
    items = items if resources == 2 else items[:, 0]
    members, loads = deal(items, bins, key=np.arange(len(items), dtype=float))
    members = np.pad(members, ((0, 0), (0, 1)), constant_values=-1)
    before, count = level(loads).max(), (members >= 0).sum(axis=1)
    loads = exchange(members, loads, items, 0.0, moves)
    assert sorted(members[members >= 0]) == list(range(len(items)))
    padded = np.concatenate([items, np.zeros((1, *items.shape[1:]))])
    assert np.allclose(loads, padded[members].sum(axis=1))
    assert level(loads).max() <= before
    if not moves:
        assert np.array_equal((members >= 0).sum(axis=1), count)


def test_a_second_resource_counts_where_it_is_the_larger():
    items = np.array([[9.0, 1.0], [1.0, 9.0], [9.0, 1.0], [1.0, 9.0]])
    members, loads = deal(items, 2)
    assert level(exchange(members, loads, items, 0.0, moves=False)).tolist() == [10, 10]


@pytest.mark.parametrize("bins", [1, 5])
def test_as_many_items_as_bins_go_one_to_each(bins: int):
    members, _ = deal(np.arange(1.0, bins + 1), bins)
    assert members.shape == (bins, 1) and sorted(members[:, 0]) == list(range(bins))
