"""Keyed orders: bijections, shuffle quality as good as numpy's, and an order that never changes."""

import math
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvalchemi.data.datapipes.order import (
    MAX_SIZE,
    CyclicOrder,
    IndependentDraws,
    PassOrder,
    child_key,
    derive_key,
    permute,
)

BATCH = 64
LARGE = [2**16 + 1, 2**20 + 1, 2**20, 999_983, 10**6, 2**33 + 1, 10**12 + 39, 2**40 - 1, 2**40]


def epochs(n: int, number: int, seed: int = 0) -> np.ndarray:
    return np.stack([PassOrder(n, derive_key(seed, 0, e))(np.arange(n)) for e in range(number)])


def test_every_small_size_is_a_bijection_by_ranking_and_by_network():
    for n in range(1, 301):
        assert np.array_equal(np.sort(PassOrder(n, derive_key(n))(np.arange(n))), np.arange(n))
        if n > 1:
            image = permute(np.arange(n), n, derive_key(n))
            assert np.array_equal(np.sort(image), np.arange(n))


@pytest.mark.parametrize("n", [63, 64, 65, 1024, 65_536, 65_537, 99_991, 262_145])
def test_awkward_sizes_are_bijections(n: int):
    image = PassOrder(n, derive_key(1, 2, 3))(np.arange(n))
    assert np.array_equal(np.bincount(image, minlength=n), np.ones(n))


@pytest.mark.parametrize("n", LARGE)
def test_large_sizes_stay_in_range_and_never_collide(n: int):
    rng = np.random.default_rng(0)
    slots = np.unique(np.concatenate([rng.integers(0, n, 50_000), [0, n - 1]]))
    image = PassOrder(n, derive_key(7))(slots)
    assert image.min() >= 0 and image.max() < n
    assert len(np.unique(image)) == len(slots)
    # a true shuffle would show this: the mean of 50,000 of them is n / 2
    assert abs(image.mean() / n - 0.5) < 5 / np.sqrt(12 * len(slots))


@given(n=st.integers(1, 3000), passes=st.integers(1, 5), seed=st.integers(-5, 2**70))
@settings(max_examples=50, deadline=None)
def test_no_sample_comes_again_before_all_have_come(n: int, passes: int, seed: int):
    draws = PassOrder(n, derive_key(seed))(np.arange(n * passes)).reshape(passes, n)
    assert np.array_equal(np.sort(draws, axis=1), np.tile(np.arange(n), (passes, 1)))


@given(n=st.integers(1, MAX_SIZE), data=st.data())
@settings(max_examples=50, deadline=None)
def test_a_draw_does_not_depend_on_what_is_drawn_with_it(n: int, data: st.DataObject):
    draws = np.array(data.draw(st.lists(st.integers(0, min(4 * n, 2**41)), min_size=1)))
    for order in (PassOrder(n, derive_key(3)), IndependentDraws(n, derive_key(3)), CyclicOrder(n)):
        alone = [int(order(np.array([k]))[0]) for k in draws]
        assert order(draws).tolist() == alone
        assert all(0 <= index < n for index in alone)


def test_passes_and_epochs_and_seeds_have_orders_of_their_own():
    first, second = PassOrder(5000, derive_key(0, 0, 0))(np.arange(10_000)).reshape(2, 5000)
    assert (first == second).mean() < 0.01
    later = PassOrder(5000, derive_key(0, 0, 1))(np.arange(5000))
    # a key of seed + epoch would make these two equal
    other = PassOrder(5000, derive_key(1, 0, 0))(np.arange(5000))
    assert (later == other).mean() < 0.01
    assert derive_key(1, 23).tolist() != derive_key(12, 3).tolist()


@given(
    sizes=st.lists(st.integers(1, 200) | st.integers(1, MAX_SIZE), min_size=1, max_size=6),
    data=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_one_call_for_many_data_sets_is_one_call_for_each(sizes: list[int], data: st.DataObject):
    number = st.integers(0, len(sizes) - 1)
    sets = np.array(data.draw(st.lists(number, min_size=1, max_size=30)))
    draws = np.array(
        data.draw(st.lists(st.integers(0, 2**41), min_size=len(sets), max_size=len(sets)))
    )
    lengths, epoch_key = np.array(sizes), derive_key(5)
    key = child_key(epoch_key, sets)
    for kind in (PassOrder, IndependentDraws):
        together = kind(lengths[sets], key)(draws)
        alone = [
            int(kind(sizes[j], child_key(epoch_key, j))(np.array([k]))[0])
            for j, k in zip(sets.tolist(), draws.tolist())
        ]
        assert together.tolist() == alone
    assert CyclicOrder(lengths[sets])(draws).tolist() == (draws % lengths[sets]).tolist()


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_all_orders_of_a_tiny_data_set_come_equally_often(n: int):
    passes = 24_000
    orders = PassOrder(n, derive_key(11))(np.arange(n * passes)).reshape(passes, n)
    counts = np.unique(orders, axis=0, return_counts=True)[1]
    assert len(counts) == math.factorial(n)
    expected = passes / len(counts)
    z = (((counts - expected) ** 2 / expected).sum() - (len(counts) - 1)) / np.sqrt(2 * len(counts))
    assert abs(z) < 4


@pytest.mark.parametrize("n", [64, 65, 100, 129])
def test_orders_of_small_data_sets_have_the_statistics_of_a_true_shuffle(n: int):
    """On both sides of the size where ranked hashes give way to the network."""
    passes = 8000
    orders = PassOrder(n, derive_key(n))(np.arange(n * passes)).reshape(passes, n)
    places = np.bincount((orders * n + np.arange(n)).ravel(), minlength=n * n)
    expected = passes / n
    freedom = (n - 1) ** 2
    inversions = sum((orders[:, i : i + 1] > orders[:, i + 1 :]).sum(axis=1) for i in range(n - 1))
    variance = n * (n - 1) * (2 * n + 5) / 72
    steps = np.bincount((np.diff(orders, axis=1) % n).ravel(), minlength=n)[1:]
    mean_step = steps.mean()
    scores = {
        "slot and sample": (((places - expected) ** 2 / expected).sum() - freedom)
        / np.sqrt(2 * freedom),
        "inversions": (inversions.mean() - n * (n - 1) / 4) / np.sqrt(variance / passes),
        "spread of inversions": (inversions.var() / variance - 1) * np.sqrt(passes / 2),
        "next sample": (((steps - mean_step) ** 2 / mean_step).sum() - (n - 2)) / np.sqrt(2 * n),
        "fixed points": ((orders == np.arange(n)).sum(axis=1).mean() - 1) * np.sqrt(passes),
    }
    assert all(abs(z) < 4 for z in scores.values()), scores


def test_keys_of_data_sets_and_passes_are_unrelated():
    key = derive_key(0)
    words = np.concatenate(
        [child_key(key, np.arange(1000)), child_key(child_key(key, 1), np.arange(1000))]
    )
    assert len(np.unique(words)) == words.size
    assert np.array_equal(child_key(key, np.array([7]))[:, 0], child_key(key, 7))


def z_of_variance(counts: np.ndarray, share: float, n: int) -> float:
    """Counts per batch against the hypergeometric variance of a true shuffle."""
    expected = BATCH * share * (1 - share) * (n - BATCH) / (n - 1)
    ratio = np.mean((counts - BATCH * share) ** 2) / expected
    return float((ratio - 1) / np.sqrt(2 / counts.size))


def z_of_uniform(values: np.ndarray, n: int, bins: int = 64) -> float:
    """chi-squared of values in range(n) against the uniform distribution, as a normal score."""
    edges = np.bincount(np.arange(n) * bins // n, minlength=bins) / n * values.size
    counts = np.bincount(values * bins // n, minlength=bins)
    freedom = bins - 1
    return float((((counts - edges) ** 2 / edges).sum() - freedom) / np.sqrt(2 * freedom))


def z_of_batch_mates(orders: np.ndarray, n: int) -> float:
    """Pairs that share a batch in two epochs in a row, against Poisson."""
    batch = np.arange(n) // BATCH
    found, expected = 0, 0.0
    for one, next_one in pairwise(orders):
        here, there = np.empty(n, dtype=np.int64), np.empty(n, dtype=np.int64)
        here[one], there[next_one] = batch, batch
        together = np.unique(here * n + there, return_counts=True)[1]
        found += int((together * (together - 1) // 2).sum())
        sizes = np.bincount(batch)
        pairs = float((sizes * (sizes - 1) / 2).sum())
        expected += pairs * pairs / (n * (n - 1) / 2)
    return (found - expected) / np.sqrt(expected)


def numpys(n: int, number: int) -> np.ndarray:
    return np.stack([np.random.default_rng([0, epoch]).permutation(n) for epoch in range(number)])


@pytest.mark.parametrize("n", [2**20, 200_000])
@pytest.mark.parametrize("draw", [epochs, numpys], ids=["ours", "numpy's"])
def test_shuffle_quality_is_that_of_a_true_shuffle(draw: Callable[..., np.ndarray], n: int):
    """numpy's own shuffle beside ours: what is asked of one holds for the other."""
    orders = draw(n, 4)
    batches = orders[:, : n // BATCH * BATCH].reshape(-1, BATCH)
    tenth = n // 10
    scores = {
        "parity per batch": z_of_variance((batches % 2).sum(axis=1), (n // 2) / n, n),
        "first tenth per batch": z_of_variance((batches < tenth).sum(axis=1), tenth / n, n),
        "next index": z_of_uniform((np.diff(orders, axis=1) % n).ravel(), n),
        "epoch to epoch": z_of_uniform((np.diff(orders, axis=0) % n).ravel(), n),
        "batch mates again": z_of_batch_mates(orders, n),
    }
    assert all(abs(z) < 4 for z in scores.values()), scores


def test_independent_draws_repeat_as_chance_says():
    n = 100_000
    draws = IndependentDraws(n, derive_key(0))(np.arange(n))
    assert abs(len(np.unique(draws)) / n - (1 - np.exp(-1))) < 0.01
    assert abs(z_of_uniform(draws, n)) < 4


@pytest.mark.parametrize("n", [0, -1, MAX_SIZE + 1])
def test_sizes_outside_the_range_are_refused(n: int):
    with pytest.raises(ValueError, match="1 to 2\\^40"):
        PassOrder(n, derive_key(0))


def test_the_order_never_changes_between_versions():
    """A change here breaks resumed runs: then it must be announced, not only the numbers edited."""
    key = derive_key(1234, 2, 7)
    start = np.arange(6)
    assert PassOrder(10, key)(start).tolist() == [4, 5, 2, 7, 1, 0]
    assert PassOrder(1024, key)(start).tolist() == [569, 16, 714, 32, 371, 650]
    assert PassOrder(100000000, key)(start).tolist() == [
        42001980,
        13212430,
        6602406,
        26963745,
        65329344,
        31296849,
    ]
    assert PassOrder(1099511627776, key)(start).tolist() == [
        5134293909,
        712686166072,
        1028191564946,
        189385088556,
        85089751453,
        944454494336,
    ]
    assert PassOrder(5, key)(start + 4 * 10**9).tolist() == [2, 3, 0, 1, 4, 0]
    assert PassOrder(3000, key)(start + 2997).tolist() == [764, 1281, 666, 1124, 2047, 1753]
    assert IndependentDraws(10**8, key)(start).tolist() == [
        72996425,
        85690601,
        70170739,
        76816142,
        94692294,
        52232170,
    ]
