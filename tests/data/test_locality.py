"""Windowed shuffles: bijections that open a few chunks at a time, at a price that is stated."""

from itertools import chain
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sampler_cases import Lengths, per_rank

from nvalchemi.data.datapipes.locality import WindowedOrder, measured_price, shuffle_price
from nvalchemi.data.datapipes.order import PassOrder, child_key, derive_key
from nvalchemi.data.datapipes.samplers import (
    EpochSampler,
    MultiDatasetBatchSampler,
    MultiDatasetSampler,
)


@given(
    n=st.integers(1, 2000),
    chunk_size=st.integers(1, 300),
    locality=st.integers(1, 12),
    seed=st.integers(0, 99),
)
@settings(max_examples=200, deadline=None)
def test_every_sample_comes_once_a_pass_and_chunks_are_read_once(
    n: int, chunk_size: int, locality: int, seed: int
):
    order = WindowedOrder(n, derive_key(seed), chunk_size, locality)
    passes = order(np.arange(2 * n)).reshape(2, n)
    assert np.array_equal(np.sort(passes, axis=1), np.tile(np.arange(n), (2, 1)))
    chunks = passes[0] // chunk_size
    number = -(-n // chunk_size)
    first = np.array([np.flatnonzero(chunks == c)[0] for c in range(number)])
    last = np.array([np.flatnonzero(chunks == c)[-1] for c in range(number)])
    # at no time are more chunks begun and unfinished than a window has
    opened = (first[:, None] <= np.arange(n)) & (np.arange(n) <= last[:, None])
    assert opened.sum(axis=0).max() <= locality
    # and windows follow each other: locality chunks are finished before the next is begun
    by_begin = np.argsort(first)
    for begin in range(0, number, locality):
        before, after = by_begin[begin : begin + locality], by_begin[begin + locality :]
        assert after.size == 0 or last[before].max() < first[after].min()


@given(data=st.data(), locality=st.integers(1, 9))
@settings(max_examples=60, deadline=None)
def test_any_draw_of_any_data_set_is_reached_alone(data: st.DataObject, locality: int):
    sizes = data.draw(
        st.lists(st.integers(1, 5000) | st.integers(1, 2**40), min_size=1, max_size=4)
    )
    chunks = data.draw(st.lists(st.integers(1, 4096), min_size=len(sizes), max_size=len(sizes)))
    sets = np.array(data.draw(st.lists(st.integers(0, len(sizes) - 1), min_size=1, max_size=20)))
    draws = np.array(
        data.draw(st.lists(st.integers(0, 2**41), min_size=len(sets), max_size=len(sets)))
    )
    key = child_key(derive_key(2), sets)
    together = WindowedOrder(np.array(sizes)[sets], key, np.array(chunks)[sets], locality)(draws)
    alone = [
        int(WindowedOrder(sizes[j], key[:, i], chunks[j], locality)(draws[i : i + 1])[0])
        for i, j in enumerate(sets.tolist())
    ]
    assert together.tolist() == alone
    assert all(0 <= index < sizes[j] for index, j in zip(alone, sets))


def test_the_order_of_chunks_and_samples_is_uniform():
    n, epochs = 20, 4000
    orders = np.stack(
        [WindowedOrder(n, derive_key(0, epoch), 5, 2)(np.arange(n)) for epoch in range(epochs)]
    )
    places = np.bincount((orders * n + np.arange(n)).ravel())
    freedom, expected = (n - 1) ** 2, epochs / n
    z = (((places - expected) ** 2 / expected).sum() - freedom) / np.sqrt(2 * freedom)
    # samples of a chunk move together, which widens the distribution about sqrt(rows) times
    assert abs(z) < 4 * np.sqrt(5)


def test_the_short_chunk_has_any_place():
    """22 samples in chunks of 5, the last of 2: windows of 2, 2 and 1 of the 5 chunks."""
    epochs = 4000
    slots = np.array(
        [
            np.flatnonzero(WindowedOrder(22, derive_key(1, epoch), 5, 2)(np.arange(22)) == 21)[0]
            for epoch in range(epochs)
        ]
    )
    counts = np.histogram(slots, bins=[0, 10, 20, 22])[0]
    expected = epochs * np.array([0.4, 0.4, 0.2])
    assert ((counts - expected) ** 2 / expected).sum() < 16


def test_prices_are_those_of_the_formula():
    """Figures for chunks of 1024 and batches of 64 out of 1e8: windows of 16, 64, 256 and 1024."""
    prices = [shuffle_price(10**8, 64, 1024, w) for w in (16, 64, 256, 1024)]
    expected = [15.7, 40.6, 56.7, 62.1]
    assert [p.distinct_chunks for p in prices] == pytest.approx(expected, abs=0.06)
    assert [round(p.chunk_mates) for p in prices] == [6104, 1526, 381, 95]
    everywhere = shuffle_price(10**8, 64, 1024)
    assert round(everywhere.distinct_chunks, 2) == 63.98 and everywhere.chunk_mates == 1
    assert shuffle_price(10**8, 64, 1024, 10**6) == everywhere
    assert shuffle_price(100, 100, 30).distinct_chunks == pytest.approx(4)


@pytest.mark.parametrize("locality", [0, 4, 16])
def test_measured_prices_agree_with_the_formula(locality: int):
    n, size, chunk = 2**20, 64, 256
    options: dict[str, Any] = {"locality": locality, "chunk_size": chunk} if locality else {}
    sampler = EpochSampler(range(n), **options)
    batches = sampler.order(np.arange(n)).reshape(-1, size)
    measured = measured_price(batches, [n], chunk)
    expected = shuffle_price(n, size, chunk, locality)
    assert measured.batches == n // size
    off = abs(measured.distinct_chunks - expected.distinct_chunks)
    assert off < max(5 * measured.error, 1e-3)
    assert measured.chunk_mates == pytest.approx(expected.chunk_mates, rel=0.02, abs=0.05)


def test_measured_prices_count_the_chunks_of_each_data_set():
    price = measured_price([np.array([0, 1, 10, 11, -1])], [10, 10], [2, 1])
    assert (price.distinct_chunks, price.batches) == (3, 1)
    # 1 of 6 pairs, where 5 of 190 pairs of the samples are chunk mates
    assert price.chunk_mates == pytest.approx((1 / 6) / (5 / 190))
    with pytest.raises(ValueError, match="at least one batch"):
        measured_price([], [10], 2)


@pytest.mark.parametrize("cls", [MultiDatasetBatchSampler, MultiDatasetSampler])
def test_samplers_over_data_sets_open_a_window_of_each(cls: Any):
    options = {"batch_size": 8} if cls is MultiDatasetBatchSampler else {}
    ranks = per_rank(2, cls, Lengths(400, 100), locality=2, chunk_size=[20, 10], **options)
    units = [unit for step in zip(*ranks) for unit in step]
    flat = np.array([index for unit in units for index in np.atleast_1d(unit)])[:500]
    assert sorted(flat) == list(range(500))
    for low, high, chunk, rows in ((0, 400, 20, 40), (400, 500, 10, 20)):
        own = flat[(low <= flat) & (flat < high)] - low
        assert all(
            len(np.unique(own[k : k + rows] // chunk)) == 2
            for k in range(0, len(own) - rows + 1, rows)
        )


def test_the_dial_at_zero_is_the_global_shuffle_and_a_wide_window_mixes_all():
    n = 5000
    plain = list(EpochSampler(range(n), seed=3))
    assert list(EpochSampler(range(n), seed=3, locality=0, chunk_size=64)) == plain
    key = child_key(derive_key(3, 0), 0)
    assert plain == PassOrder(n, key)(np.arange(n)).tolist()
    wide = EpochSampler(range(n), seed=3, locality=1000, chunk_size=64)
    assert sorted(wide) == list(range(n))
    price = measured_price(wide.order(np.arange(n)).reshape(-1, 50), [n], 64)
    assert price.chunk_mates == pytest.approx(1, abs=0.2)


def test_a_windowed_order_resumes_and_its_state_belongs_to_it():
    def sampler(world_size: int, rank: int, locality: int = 3) -> MultiDatasetBatchSampler:
        return MultiDatasetBatchSampler(
            Lengths(500, 100), batch_size=12 // world_size, num_replicas=world_size, rank=rank,
            locality=locality, chunk_size=16,
        )  # fmt: skip

    whole = [sorted(batch) for batch in sampler(1, 0)]
    first = sampler(2, 1)
    first.set_epoch_step(20)
    state = first.state_dict()
    rest = []
    for rank in range(4):
        own = sampler(4, rank)
        own.load_state_dict(state)
        rest.append(list(own))
    assert [sorted(chain(*step)) for step in zip(*rest)] == whole[20:]
    with pytest.raises(ValueError, match="belongs to another order"):
        sampler(2, 1, locality=4).load_state_dict(state)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"locality": -1, "chunk_size": 4}, ValueError, "locality must be >= 0, got -1"),
        ({"locality": 1.5, "chunk_size": 4}, TypeError, "locality must be an integer"),
        ({"locality": 2}, ValueError, "locality needs chunk_size"),
        ({"locality": 2, "chunk_size": 0}, ValueError, "chunk_size must be >= 1, got 0"),
        ({"locality": 2, "chunk_size": [4]}, ValueError, "one for each of 2 data sets"),
        ({"locality": 2, "chunk_size": 4, "shuffle": False}, ValueError, "needs shuffle=True"),
        ({"locality": 2, "chunk_size": 4, "replacement": True}, ValueError, "replacement=True"),
    ],
)
def test_mistakes_are_named(options: dict[str, Any], error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        MultiDatasetBatchSampler(Lengths(10, 10), batch_size=4, **options)


def test_mistakes_about_prices_are_named():
    with pytest.raises(ValueError, match="chunk_size must be >= 1, got 0"):
        shuffle_price(10, 2, 0)
    with pytest.raises(ValueError, match="locality must be >= 0"):
        shuffle_price(10, 2, 3, -1)
    with pytest.raises(ValueError, match="samples of a window: 64 > 32"):
        shuffle_price(1000, 64, 16, 2)
