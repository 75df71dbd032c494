"""Reference energies of the elements: a constant for each, fitted to total energies.

A potential learns what is left after ``sum over atoms of E0[Z]``. This is also the predictor that
a trained energy has to beat. All in float64 and by numpy: total energies are large, and their
differences small.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

MAX_ATOMIC_NUMBER = 118


def compositions(atomic_numbers: ArrayLike, num_nodes: ArrayLike) -> NDArray[np.float64]:
    """Count the atoms of each element in each structure.

    Parameters
    ----------
    atomic_numbers : array of int [V]
        Of all structures, one after the other.
    num_nodes : array of int [N]
        Atoms of each structure.

    Returns
    -------
    array [N, 119]
        Column Z counts the atoms of element Z; column 0 is empty.

    Raises
    ------
    ValueError
        If the counts do not add up, or an atomic number is outside 1..118.
    """
    numbers = np.asarray(atomic_numbers).astype(np.int64)
    counts = np.asarray(num_nodes).astype(np.int64)
    if counts.sum() != len(numbers):
        raise ValueError(
            f"num_nodes must sum to the number of atoms: {counts.sum()} != {len(numbers)}"
        )
    outside = (numbers < 1) | (numbers > MAX_ATOMIC_NUMBER)
    if outside.any():
        raise ValueError(
            f"atomic_numbers must lie in 1..{MAX_ATOMIC_NUMBER}: got {numbers[outside][0]}"
        )
    width = MAX_ATOMIC_NUMBER + 1
    slots = np.repeat(np.arange(len(counts)), counts) * width + numbers
    table = np.bincount(slots, minlength=len(counts) * width)
    return table.reshape(len(counts), width).astype(np.float64)


def fit_atomic_energies(compositions: ArrayLike, energies: ArrayLike) -> NDArray[np.float64]:
    """Fit a reference energy to each element by least squares.

    Parameters
    ----------
    compositions : array [N, 119]
        As from `compositions`.
    energies : array [N] or [N, 1]
        Total energies in eV.

    Returns
    -------
    array [119]
        E0 in eV; NaN for elements that no structure has. Where compositions can not tell elements
        apart (one only ever comes with another), the solution of smallest norm.

    Raises
    ------
    ValueError
        If the lengths differ, there are no structures, or an energy is not finite.
    """
    counts = np.asarray(compositions, dtype=np.float64)
    labels = np.asarray(energies, dtype=np.float64).reshape(-1)
    if counts.ndim != 2 or len(counts) != len(labels) or not len(labels):
        raise ValueError(
            "compositions [N, 119] and energies [N] must be of one length, at least 1: got "
            f"shapes {counts.shape} and {labels.shape}"
        )
    if not np.isfinite(labels).all():
        first = int(np.flatnonzero(~np.isfinite(labels))[0])
        raise ValueError(
            f"energies must be finite: structure {first} has {labels[first]}; leave it out"
        )
    present = counts.any(axis=0)
    atomic_energies = np.full(counts.shape[1], np.nan)
    atomic_energies[present] = np.linalg.lstsq(counts[:, present], labels, rcond=None)[0]
    return atomic_energies


def composition_energies(
    compositions: ArrayLike, atomic_energies: ArrayLike
) -> NDArray[np.float64]:
    """Energies [N] in eV that the elements alone predict: the sum of E0 over the atoms.

    Raises
    ------
    ValueError
        If a structure has an element whose reference energy is NaN (not fitted).
    """
    counts = np.asarray(compositions, dtype=np.float64)
    reference = np.asarray(atomic_energies, dtype=np.float64)
    unknown = np.flatnonzero(np.isnan(reference) & counts.any(axis=0))
    if len(unknown):
        raise ValueError(
            f"no reference energy for atomic numbers {unknown.tolist()}: fit on structures that "
            "have them"
        )
    return counts @ np.nan_to_num(reference)
