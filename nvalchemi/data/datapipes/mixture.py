"""Exact mixtures: position in an epoch -> (data set, which draw of it), at any position, no state.

`Mixture` spreads shares evenly by a binary tree. A node that has been drawn k times has passed
round(k * c_left / c_node) of the draws to its left child and the others to its right child. Both
numbers grow by at most one a draw, so every position belongs to exactly one data set, and in exact
integers the whole period of sum(shares) positions gives each data set exactly its share.

How far a data set can be from share * positions: a node's rounding is off by at most half a draw,
and a data set inherits its parent's error in proportion, so by at most

    (1 + sum over the ancestors between data set and root of share / ancestor's share) / 2.

Up to four data sets lie at most two levels deep and stay below one sample, whatever the shares. For
more, the tree is Huffman's, whose ancestors grow at least like Fibonacci numbers: always below 1.7,
and `Mixture.max_drift` is the bound of the case at hand. Where it is not below one sample, `spread`
takes a `Quota`, which always is, and takes longer.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from nvalchemi.data.datapipes.order import MAX_SIZE, Indices
from nvalchemi.data.datapipes.quota import Quota, divide
from nvalchemi.data.datapipes.share_tree import arrange


class Allocation(Protocol):
    """Which data set each position of an epoch belongs to."""

    def locate(self, positions: Indices) -> tuple[Indices, Indices]:
        """Data set of each position, and the number of the draw from it, counted from 0."""
        ...

    def counts(self, positions: int) -> list[int]:
        """Draws of each data set among the first `positions` positions."""
        ...


class Mixture:
    """Data sets by exact shares, spread evenly, by a tree: within `max_drift` of each share.

    Parameters
    ----------
    shares : sequence of int
        Integer weights >= 0 with a sum of 1 to 2^40. Position p and draw numbers may exceed the
        sum: the pattern repeats.

    Attributes
    ----------
    max_drift : float
        Bound on abs(draws - share * positions) over all data sets and positions.
    """

    def __init__(self, shares: Sequence[int]) -> None:
        self.shares = check_shares(shares)
        tree = arrange(self.shares)
        self.max_drift = tree.max_drift
        self._root = tree.root
        self._arrays = (tree.share, tree.left_share, tree.left, tree.right)

    def locate(self, positions: Indices) -> tuple[Indices, Indices]:
        node = np.full(positions.shape, self._root, dtype=np.int64)
        draw = positions.astype(np.int64)
        share, left_share, left, right = self._arrays
        inner = np.flatnonzero(node >= 0)
        while inner.size:
            at, k = node[inner], draw[inner]
            whole, part = share[at], left_share[at]
            passed, remainder = rounded_share(k, part, whole)
            goes_left = remainder + part >= whole  # then rounding up comes with this draw
            node[inner] = np.where(goes_left, left[at], right[at])
            draw[inner] = np.where(goes_left, passed, k - passed)
            inner = inner[node[inner] >= 0]
        return -1 - node, draw

    def counts(self, positions: int) -> list[int]:
        out = np.zeros(len(self.shares), dtype=np.int64)
        share, left_share, left, right = self._arrays
        node, draws = np.array([self._root]), np.array([positions], dtype=np.int64)
        while node.size:
            leaf = node < 0
            out[-1 - node[leaf]] = draws[leaf]
            at, k = node[~leaf], draws[~leaf]
            passed = rounded_share(k, left_share[at], share[at])[0]
            node = np.concatenate([left[at], right[at]])
            draws = np.concatenate([passed, k - passed])
        return out.tolist()


class FixedBatches:
    """The same number of samples of each data set in every batch, data set after data set."""

    def __init__(self, per_batch: Sequence[int]) -> None:
        self.per_batch = np.array(per_batch, dtype=np.int64)
        self.batch_size = int(self.per_batch.sum())
        self._set = np.repeat(np.arange(len(self.per_batch)), self.per_batch)
        self._first = np.cumsum(self.per_batch) - self.per_batch

    def locate(self, positions: Indices) -> tuple[Indices, Indices]:
        batch, slot = np.divmod(positions, self.batch_size)
        sets = self._set[slot]
        return sets, batch * self.per_batch[sets] + slot - self._first[sets]

    def counts(self, positions: int) -> list[int]:
        batches, rest = divmod(positions, self.batch_size)
        return (batches * self.per_batch + np.clip(rest - self._first, 0, self.per_batch)).tolist()


class Contiguous:
    """All draws of data set 0, then all of data set 1, ...: the order without shuffling."""

    def __init__(self, counts: Sequence[int]) -> None:
        self._counts = np.array(counts, dtype=np.int64)
        self._end = np.cumsum(self._counts)

    def locate(self, positions: Indices) -> tuple[Indices, Indices]:
        sets = np.searchsorted(self._end, positions, side="right")
        return sets, positions - (self._end - self._counts)[sets]

    def counts(self, positions: int) -> list[int]:
        return np.clip(positions - (self._end - self._counts), 0, self._counts).tolist()


def rounded_share(k: Indices, part: Indices, whole: Indices) -> tuple[Indices, Indices]:
    """k * part / whole, rounded, halves up, and what that leaves of (k * part + whole // 2)."""
    return divide(k, part, whole, whole >> 1)


def spread(shares: Sequence[int]) -> Mixture | Quota:
    """The mixture of data sets by shares that stays below one sample off at any position."""
    mixture = Mixture(shares)
    return mixture if mixture.max_drift < 1 else Quota(mixture.shares)


def check_shares(shares: Sequence[int]) -> list[int]:
    checked = [int(share) for share in shares]
    if min(checked, default=0) < 0 or not 1 <= sum(checked) <= MAX_SIZE:
        raise ValueError(f"shares must be >= 0 with a sum of 1 to 2^40, got {checked}")
    return checked
