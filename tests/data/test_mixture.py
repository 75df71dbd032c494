"""Exact mixtures: each position belongs to one data set, which stays within its share."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvalchemi.data.datapipes.mixture import (
    Contiguous,
    FixedBatches,
    Mixture,
    rounded_share,
    spread,
)
from nvalchemi.data.datapipes.quota import Quota
from nvalchemi.data.datapipes.weights import exact_shares


def largest_drift(shares: list[int], sets: np.ndarray) -> float:
    positions = np.arange(1, len(sets) + 1)
    return max(
        float(np.abs(np.cumsum(sets == j) - share / sum(shares) * positions).max())
        for j, share in enumerate(shares)
    )


def assert_draws_count_up(sets: np.ndarray, draws: np.ndarray) -> None:
    """Each data set's draws are 0, 1, 2, ... in the order of the positions."""
    for j in np.unique(sets):
        own = draws[sets == j]
        assert np.array_equal(own, np.arange(len(own)))


def test_drift_stays_below_one_sample_for_a_million_positions():
    shares = exact_shares([0.9, 0.099, 0.001])
    assert shares == [900, 99, 1]
    sets, draws = Mixture(shares).locate(np.arange(10**6))
    assert_draws_count_up(sets, draws)
    assert largest_drift(shares, sets) < 1
    assert np.bincount(sets).tolist() == [900_000, 99_000, 1_000]


@given(shares=st.lists(st.integers(0, 300), min_size=1, max_size=12).filter(any))
@settings(max_examples=150, deadline=None)
def test_a_period_is_exact_and_drift_is_below_its_bound(shares: list[int]):
    mixture = Mixture(shares)
    total = sum(shares)
    sets, draws = mixture.locate(np.arange(2 * total))
    assert_draws_count_up(sets, draws)
    assert np.bincount(sets[:total], minlength=len(shares)).tolist() == shares
    assert np.array_equal(sets[total:], sets[:total])
    assert largest_drift(shares, sets) <= mixture.max_drift + 1e-9
    assert mixture.max_drift < 1.7
    for positions in (0, 1, total // 2, total, total + 1):
        assert (
            mixture.counts(positions)
            == np.bincount(sets[:positions], minlength=len(shares)).tolist()
        )


def test_a_quota_is_taken_where_the_tree_would_drift_by_a_sample():
    shares = exact_shares([0.5, 0.3, 0.1, 0.05, 0.025, 0.015, 0.005, 0.003, 0.002])
    assert sum(shares) == 1000 and Mixture(shares).max_drift > 1
    chosen = spread(shares)
    assert isinstance(chosen, Quota)
    assert largest_drift(shares, chosen.locate(np.arange(10**6))[0]) < 1
    assert isinstance(spread([9, 1]), Mixture)


@given(shares=st.lists(st.integers(0, 10**6), min_size=1, max_size=30).filter(any))
@settings(max_examples=50, deadline=None)
def test_what_is_taken_stays_below_one_sample_for_any_number_of_data_sets(shares: list[int]):
    sets, draws = spread(shares).locate(np.arange(4000))
    assert_draws_count_up(sets, draws)
    assert largest_drift(shares, sets) < 1


@given(shares=st.lists(st.integers(1, 2**38), min_size=1, max_size=4))
@settings(max_examples=200, deadline=None)
def test_up_to_four_data_sets_stay_below_one_sample_whatever_their_shares(shares: list[int]):
    assert Mixture(shares).max_drift < 1


@pytest.mark.parametrize("number", [5, 6, 7, 8, 11, 24, 48, 64])
def test_equal_shares_of_many_data_sets_stay_below_one_sample(number: int):
    assert Mixture([1] * number).max_drift < 1


def test_thousands_of_data_sets_are_exact_too():
    shares = np.random.default_rng(0).integers(0, 50, 3000).tolist()
    sets, draws = Mixture(shares).locate(np.arange(sum(shares)))
    assert np.bincount(sets, minlength=3000).tolist() == shares
    assert_draws_count_up(sets, draws)


def test_shares_of_very_different_sizes_do_not_need_deep_recursion():
    shares = [2 ** min(j, 29) for j in range(200)]
    assert sum(Mixture(shares).counts(10**9)) == 10**9


@given(k=st.integers(0, 2**40), whole=st.integers(1, 2**40), data=st.data())
@settings(max_examples=300, deadline=None)
def test_rounding_is_exact_beyond_64_bits(k: int, whole: int, data: st.DataObject):
    part = data.draw(st.integers(0, whole))
    quotient, rest = rounded_share(np.array([k]), np.array([part]), np.array([whole]))
    assert (int(quotient[0]), int(rest[0])) == divmod(k * part + whole // 2, whole)


def test_any_position_of_a_huge_epoch_is_reached_directly():
    shares = [2**39 - 1, 2**38 + 3, 2**38 - 2]
    mixture = Mixture(shares)
    assert mixture.counts(2**40) == shares
    sets, draws = mixture.locate(np.array([2**40 - 1]))
    before = mixture.counts(2**40 - 1)
    assert draws[0] == before[sets[0]] == shares[sets[0]] - 1


def test_fixed_batches_hold_the_same_counts_in_each():
    fixed = FixedBatches([2, 0, 3])
    sets, draws = fixed.locate(np.arange(15))
    assert sets.reshape(3, 5).tolist() == [[0, 0, 2, 2, 2]] * 3
    assert_draws_count_up(sets, draws)
    assert [fixed.counts(n) for n in (0, 1, 4, 5, 9)] == [
        [0, 0, 0], [1, 0, 0], [2, 0, 2], [2, 0, 3], [4, 0, 5],
    ]  # fmt: skip


def test_contiguous_takes_data_set_after_data_set():
    contiguous = Contiguous([2, 0, 3])
    sets, draws = contiguous.locate(np.arange(5))
    assert sets.tolist() == [0, 0, 2, 2, 2]
    assert draws.tolist() == [0, 1, 0, 1, 2]
    assert contiguous.counts(4) == [2, 0, 2]


@pytest.mark.parametrize("shares", [[], [0, 0], [1, -1], [2**40, 1]])
def test_shares_without_meaning_are_refused(shares: list[int]):
    with pytest.raises(ValueError, match="shares must be"):
        Mixture(shares)


def test_weights_become_the_fractions_they_stand_for():
    assert exact_shares([1, 1, 1]) == [1, 1, 1]
    assert exact_shares([0.2, 0.8]) == [1, 4]
    assert exact_shares([1 / 3, 2 / 3]) == [1, 2]
    assert exact_shares([4.0, 0.0, 1.0]) == [4, 0, 1]
    shares = exact_shares([2**0.5, 1.0, 1e-15])
    assert sum(shares) <= 2**40 and min(shares) == 1
    assert abs(shares[0] / shares[1] - 2**0.5) < 1e-10


@given(weights=st.lists(st.floats(0, 1e300), min_size=1, max_size=9).filter(any))
@settings(max_examples=200, deadline=None)
def test_any_finite_weights_become_shares(weights: list[float]):
    shares = exact_shares(weights)
    assert sum(shares) <= 2**40
    assert [share > 0 for share in shares] == [weight > 0 for weight in weights]
