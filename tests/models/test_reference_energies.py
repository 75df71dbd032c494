"""Reference energies of the elements: the fit, the predictor, unseen elements."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvalchemi.models.reference_energies import (
    composition_energies,
    compositions,
    fit_atomic_energies,
)


def test_compositions_count_elements():
    table = compositions([8, 1, 1, 6, 1, 1, 1, 1], [3, 5])
    assert table.shape == (2, 119) and table.sum() == 8
    assert table[0, 8] == 1 and table[0, 1] == 2 and table[1, 6] == 1 and table[1, 1] == 4


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=25, deadline=None)
def test_fit_finds_the_energies_that_made_the_labels(seed):
    rng = np.random.default_rng(seed)
    counts = rng.integers(1, 8, 40)
    numbers = rng.choice([1, 6, 8, 29], counts.sum())
    table = compositions(numbers, counts)
    truth = np.full(119, np.nan)
    truth[[1, 6, 8, 29]] = rng.uniform(-3000, 0, 4)
    labels = composition_energies(table, truth)
    fitted = fit_atomic_energies(table, labels[:, None])
    np.testing.assert_allclose(fitted[[1, 6, 8, 29]], truth[[1, 6, 8, 29]], rtol=1e-9)
    assert np.isnan(np.delete(fitted, [1, 6, 8, 29])).all()


def test_elements_that_were_not_fitted_are_refused():
    fitted = fit_atomic_energies(compositions([1, 1], [2]), [-31.7])
    with pytest.raises(ValueError, match=r"no reference energy for atomic numbers \[8\]"):
        composition_energies(compositions([8, 1, 1], [3]), fitted)


def test_wrong_arrays_are_refused():
    with pytest.raises(ValueError, match="must sum to the number of atoms: 3 != 2"):
        compositions([1, 1], [3])
    with pytest.raises(ValueError, match=r"1\.\.118: got 0"):
        compositions([0], [1])
    with pytest.raises(ValueError, match="energies must be finite: structure 1"):
        fit_atomic_energies(compositions([1, 1], [1, 1]), [1.0, np.nan])
    with pytest.raises(ValueError, match="one length"):
        fit_atomic_energies(compositions([1], [1]), [1.0, 2.0])
