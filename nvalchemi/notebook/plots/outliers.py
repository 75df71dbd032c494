"""How far a number is from the others of its kind, told so that the far ones do not blur it."""

import numpy as np
from numpy.typing import NDArray

from nvalchemi.data.datapipes.order import Indices

OUTLIER = 5.0  # robust z-scores beyond which a structure is named
NORMAL = 1.4826  # standard deviation of a normal distribution over its median absolute deviation
MEAN = 1.2533  # and over its mean absolute deviation
PASSES = 3  # fits; before each but the first the outliers are left out


def robust_z(values: NDArray[np.float64], groups: Indices) -> NDArray[np.float64]:
    """Distance from the median over the median absolute deviation, scaled to be a z-score.

    Groups are taken by themselves. Where half of a group has the same value, the mean absolute
    deviation takes the place of the median one; values that are no numbers have nan. After B.
    Iglewicz, D. C. Hoaglin, How to Detect and Handle Outliers (ASQC 1993).
    """
    z = np.full(values.shape, np.nan)
    for group in np.unique(groups).tolist():
        here = np.flatnonzero((groups == group) & np.isfinite(values))
        if not here.size:
            continue
        distance = values[here] - np.median(values[here])
        scale = NORMAL * float(np.median(np.abs(distance)))
        if scale == 0:
            scale = MEAN * float(np.abs(distance).mean())
        # what rounding leaves of an exact fit is no spread
        least = 1e-12 * max(1.0, float(np.abs(values[here]).max()))
        z[here] = 0.0 if scale < least else distance / scale
    return z


def fitted_residual(
    energy: NDArray[np.float64], counts: NDArray[np.uint16], groups: Indices
) -> NDArray[np.float64]:
    """What one energy for each element leaves of the energies per atom, each group by itself.

    Parameters
    ----------
    energy : array, shape (n,)
        eV/atom; nan where it is missing.
    counts : array, shape (n, elements)
        Atoms of each element.
    groups : int64 array, shape (n,)

    Returns
    -------
    array, shape (n,)
        eV/atom. Groups with fewer than two structures for each element are compared with their
        median instead.
    """
    residual = np.full(energy.shape, np.nan)
    for group in np.unique(groups).tolist():
        here = np.flatnonzero((groups == group) & np.isfinite(energy))
        if not here.size:
            continue
        own = counts[here][:, counts[here].any(axis=0)].astype(np.float64)
        parts = own / own.sum(axis=1, keepdims=True)
        if len(here) < 2 * parts.shape[1]:
            residual[here] = energy[here] - np.median(energy[here])
            continue
        kept = np.ones(len(here), dtype=bool)
        for _ in range(PASSES):
            fit = np.linalg.lstsq(parts[kept], energy[here][kept], rcond=None)[0]
            residual[here] = energy[here] - parts @ fit
            far = np.abs(robust_z(residual[here], np.zeros(len(here), dtype=np.int64))) > OUTLIER
            kept = ~far
    return residual
