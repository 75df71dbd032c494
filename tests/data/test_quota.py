"""Mixtures that stay within a sample: floor or ceil of share * n draws after every n positions."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvalchemi.data.datapipes import earliest_due, quota
from nvalchemi.data.datapipes.earliest_due import BLOCK
from nvalchemi.data.datapipes.quota import Quota

primes = st.sampled_from([2, 3, 5, 7, 11, 13, 101, 997, 7919, 104_729, 1_299_709])
any_shares = st.lists(st.integers(0, 5000), min_size=2, max_size=40)
one_huge = st.tuples(
    st.lists(st.integers(1, 9), min_size=1, max_size=39), st.integers(10**3, 10**7)
).map(lambda given: [*given[0], given[1]])
nearly_equal = st.lists(st.integers(10**6, 10**6 + 99), min_size=2, max_size=40)
of_all_sizes = st.lists(st.floats(0, 34).map(lambda power: int(2**power)), min_size=2, max_size=40)
shares_of_any_kind = st.one_of(
    any_shares, one_huge, nearly_equal, of_all_sizes, st.lists(primes, min_size=2, max_size=40)
).filter(any)


def assert_in_quota(shares: list[int], first: int, sets: np.ndarray, draws: np.ndarray) -> None:
    """After every position n each set has floor or ceil of share * n draws, in exact integers."""
    whole = sum(shares)
    for j, share in enumerate(shares):
        at = np.flatnonzero(sets == j)
        begun = share * first // whole
        if not share or not at.size:
            assert not at.size
            assert -(-share * (first + len(sets)) // whole) - begun <= 2
            continue
        own = draws[at]
        assert np.array_equal(own, np.arange(own[0], own[0] + len(own)))
        assert own[0] in (begun, begun + 1)  # what came before left the set in its quota
        for position, draw in zip((first + at + 1).tolist(), own.tolist()):
            assert draw + 1 <= -(-share * position // whole)  # not too soon
            assert draw >= share * (position - 1) // whole  # not too late
        end = first + len(sets)
        assert own[-1] + 1 >= share * end // whole


@given(shares=shares_of_any_kind, data=st.data())
@settings(max_examples=200, deadline=None)
def test_every_position_of_some_blocks_is_in_quota(shares: list[int], data: st.DataObject):
    first = data.draw(st.integers(0, 3 * sum(shares)))
    sets, draws = Quota(shares).locate(np.arange(first, first + 5 * BLOCK + 7))
    assert_in_quota(shares, first, sets, draws)


@given(shares=shares_of_any_kind, data=st.data())
@settings(max_examples=100, deadline=None)
def test_any_access_equals_going_through(shares: list[int], data: st.DataObject):
    first = data.draw(st.integers(0, 2 * sum(shares)))
    positions = np.arange(first, first + 4 * BLOCK)
    sets, draws = Quota(shares).locate(positions)
    chosen = np.array(data.draw(st.lists(st.integers(0, 4 * BLOCK - 1), min_size=1, max_size=30)))
    again = Quota(shares)
    for part in (chosen[:1], chosen, chosen[::-1]):
        found = again.locate(positions[part])
        assert np.array_equal(found[0], sets[part]) and np.array_equal(found[1], draws[part])


@given(shares=shares_of_any_kind, data=st.data())
@settings(max_examples=100, deadline=None)
def test_counts_are_what_locate_gives(shares: list[int], data: st.DataObject):
    mixture = Quota(shares)
    whole, number = sum(shares), data.draw(st.integers(0, 300))
    first = data.draw(st.integers(0, 3 * whole))
    sets, _ = mixture.locate(np.arange(first, first + number))
    between = np.subtract(mixture.counts(first + number), mixture.counts(first))
    assert np.array_equal(between, np.bincount(sets, minlength=len(shares)))
    assert mixture.counts(0) == [0] * len(shares)
    assert mixture.counts(whole) == shares
    assert sum(mixture.counts(first)) == first


@pytest.mark.parametrize("shares", [[7], [0, 3, 0], [1] * 17, [4, 4, 4, 4, 4, 4], [5, 3, 1, 1, 1]])
def test_a_period_is_exact_and_comes_again(shares: list[int]):
    whole = sum(shares)
    mixture = Quota(shares)
    sets, draws = mixture.locate(np.arange(3 * whole))
    assert np.bincount(sets[:whole], minlength=len(shares)).tolist() == shares
    assert np.array_equal(sets[:whole], sets[whole : 2 * whole])
    assert_in_quota(shares, 0, sets, draws)
    assert mixture.locate(np.arange(0))[0].shape == (0,)


@pytest.mark.parametrize("far", [0, 3 * 2**38, 5 * 2**40])
@pytest.mark.parametrize("number", [5, 33, 70])
def test_the_largest_sums_are_exact_far_out(number: int, far: int):
    rng = np.random.default_rng(number)
    shares = [1, *(2 ** rng.uniform(0, 34, number - 2)).astype(np.int64).tolist()]
    shares.append(2**40 - sum(shares))
    sets, draws = Quota(shares).locate(np.arange(far, far + 3 * BLOCK))
    assert_in_quota(shares, far, sets, draws)


@pytest.mark.parametrize("number", [64, 300, 2000])
def test_very_many_data_sets(number: int):
    """Of so many, those without a draw nearby are left out, which must make no difference."""
    rng = np.random.default_rng(number)
    shares = (2 ** rng.uniform(0, 20, number)).astype(np.int64).tolist()
    for first in (0, sum(shares) // 3 * 2):
        mixture = Quota(shares)
        positions = np.arange(first, first + 8192)
        sets, draws = mixture.locate(positions)
        assert_in_quota(shares, first, sets, draws)
        for scattered in (rng.permutation(8192)[:100], rng.permutation(8192)[:1]):
            again = Quota(shares).locate(positions[scattered])
            assert np.array_equal(again[0], sets[scattered])
            assert np.array_equal(again[1], draws[scattered])
        for number_of in (1, 777, 8192):
            between = np.subtract(mixture.counts(first + number_of), mixture.counts(first))
            assert np.array_equal(between, np.bincount(sets[:number_of], minlength=number))


def test_scattered_positions_beyond_what_is_kept():
    shares = [10**6 + j for j in range(7)]
    positions = np.arange(1500) * 4099
    sets, draws = Quota(shares).locate(positions)
    again = Quota(shares)
    one_by_one = [again.locate(positions[i : i + 1]) for i in range(0, 1500, 97)]
    assert [int(found[0][0]) for found in one_by_one] == sets[::97].tolist()
    assert [int(found[1][0]) for found in one_by_one] == draws[::97].tolist()


@given(jobs=st.integers(1, 150), data=st.data())
@settings(max_examples=150, deadline=None)
def test_the_first_jobs_are_those_of_a_simulation(jobs: int, data: st.DataObject):
    """Greedily by due slot: a job is taken if no bound of a set that holds it is used up."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    rows = 3
    place = np.array([rng.permutation(jobs) for _ in range(rows)])
    free = rng.random((rows, jobs)) < data.draw(st.sampled_from([0.2, 0.8, 1.0]))
    steps = rng.random((rows, jobs)) < data.draw(st.sampled_from([0.3, 0.6, 1.0]))
    room = np.concatenate([np.zeros((rows, 1), int), np.cumsum(steps, axis=1)], axis=1)
    taken = earliest_due.take_first(place, free, room)
    for row in range(rows):
        used = np.zeros(jobs + 1, dtype=int)
        for column in range(jobs):
            after = used.copy()
            after[place[row, column] + 1 :] += 1
            fits = free[row, column] and bool((after <= room[row]).all())
            assert taken[row, column] == fits
            used = after if fits else used


@given(seed=st.integers(0, 2**32), width=st.integers(1, BLOCK))
@settings(max_examples=100, deadline=None)
def test_jobs_run_within_their_windows(seed: int, width: int):
    rng = np.random.default_rng(seed)
    slots = np.array([rng.permutation(BLOCK) for _ in range(4)])  # where each job could run
    release = np.maximum(slots - rng.integers(0, width, slots.shape), 0)
    due = np.minimum(slots + rng.integers(0, width, slots.shape), BLOCK - 1)
    jobs = earliest_due.run(release, due)
    assert np.array_equal(np.sort(jobs, axis=1), np.tile(np.arange(BLOCK), (4, 1)))
    slot = np.arange(BLOCK)
    assert (np.take_along_axis(release, jobs, axis=1) <= slot).all()
    assert (np.take_along_axis(due, jobs, axis=1) >= slot).all()


def test_division_is_exact_beyond_64_bits():
    k, part = np.array([2**40 - 1, 2**40, 0]), np.array([2**40 - 3, 1, 5])
    quotient, remainder = quota.divide(k, part, 2**40 - 5)
    expected = [divmod(int(a) * int(b), 2**40 - 5) for a, b in zip(k, part)]
    assert list(zip(quotient.tolist(), remainder.tolist())) == expected
