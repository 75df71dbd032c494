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
and `Mixture.max_drift` is the bound of the case at hand. `Periodic` stays below one sample for any
number of data sets, from a table; `spread` takes it where that bound is not met and the shares
repeat within a few thousand positions.
"""

import heapq
import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from nvalchemi.data.datapipes.order import MAX_SIZE, Indices
from nvalchemi.data.datapipes.share_tree import arrange

MAX_PERIOD = 2**12
"""Longest table of a `Periodic`: it takes some milliseconds to make."""


class Allocation(Protocol):
    """Which data set each position of an epoch belongs to."""

    def locate(self, positions: Indices) -> tuple[Indices, Indices]:
        """Data set of each position, and the number of the draw from it, counted from 0."""
        ...

    def counts(self, positions: int) -> list[int]:
        """Draws of each data set among the first `positions` positions."""
        ...


class Mixture:
    """Data sets by exact shares, spread evenly: within about a sample of the share at any position.

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


class Periodic:
    """A mixture from a table of one period, within a sample of each share for any data sets.

    The table is Tijdeman's schedule ("The chairman assignment problem", Discrete Mathematics 32,
    1980): with m data sets and the share w of one, its draw number i may come from position n on
    where w * n - i >= 1 / (2m - 2), and of those that may the one comes that soonest would lag by
    more than 1 - 1 / (2m - 2); no data set ever lags or leads by more than that.
    """

    def __init__(self, shares: Sequence[int]) -> None:
        self.shares = check_shares(shares)
        self._shares = np.array(self.shares, dtype=np.int64)
        self._set = schedule(self._shares)
        filled = int(np.count_nonzero(self._shares))
        self.max_drift = 1 - 1 / (2 * filled - 2) if filled > 1 else 0.0
        by_set = np.argsort(self._set, kind="stable")
        self._draw = np.empty_like(self._set)
        first = np.repeat(np.cumsum(self._shares) - self._shares, self._shares)
        self._draw[by_set] = np.arange(len(self._set)) - first

    def locate(self, positions: Indices) -> tuple[Indices, Indices]:
        period, place = np.divmod(positions, len(self._set))
        sets = self._set[place]
        return sets, period * self._shares[sets] + self._draw[place]

    def counts(self, positions: int) -> list[int]:
        periods, rest = divmod(positions, len(self._set))
        begun = np.bincount(self._set[:rest], minlength=len(self._shares))
        return (periods * self._shares + begun).tolist()


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
    """floor((k * part + whole // 2) / whole) and its remainder, exact although k * part may wrap.

    Where it wraps, a float64 quotient is right to within one, and the remainder modulo 2^64 is
    exact and mends it.
    """
    numerator = k * part + (whole >> 1)
    if int(k.max(initial=0)) * int(part.max(initial=0)) < 2**62:
        return np.divmod(numerator, whole)
    quotient = ((k.astype(np.float64) * part + whole // 2) / whole).astype(np.int64)
    remainder = numerator - quotient * whole
    off = (remainder >= whole).astype(np.int64) - (remainder < 0).astype(np.int64)
    return quotient + off, remainder - off * whole


def spread(shares: Sequence[int]) -> Mixture | Periodic:
    """The mixture of data sets by shares whose drift is below one sample, where there is one.

    A `Mixture`, unless its bound is a sample or more and the shares repeat soon enough for a table.
    """
    mixture = Mixture(shares)
    divisor = math.gcd(*mixture.shares)
    if mixture.max_drift < 1 or sum(mixture.shares) // divisor > MAX_PERIOD:
        return mixture
    return Periodic([share // divisor for share in mixture.shares])


def schedule(shares: Indices) -> Indices:
    """Data set of each position of a period, by the rule that `Periodic` states, in integers."""
    period, slack = int(shares.sum()), max(2 * int(np.count_nonzero(shares)) - 2, 1)
    sets = np.repeat(np.arange(len(shares)), shares)
    draw = np.arange(period) - np.repeat(np.cumsum(shares) - shares, shares)
    scaled = slack * shares[sets]
    first = -(-period * (1 + draw * slack) // scaled)  # positions counted from 1
    last = period * (draw * slack + slack - 1) // scaled
    waiting = np.argsort(first, kind="stable")[::-1].tolist()
    jobs = list(zip(first.tolist(), last.tolist(), sets.tolist()))
    ready: list[tuple[int, int]] = []
    out = np.empty(period, dtype=np.int64)
    for position in range(1, period + 1):
        while waiting and jobs[waiting[-1]][0] <= position:
            _, due, j = jobs[waiting.pop()]
            heapq.heappush(ready, (due, j))
        out[position - 1] = heapq.heappop(ready)[1]
    return out


def check_shares(shares: Sequence[int]) -> list[int]:
    checked = [int(share) for share in shares]
    if min(checked, default=0) < 0 or not 1 <= sum(checked) <= MAX_SIZE:
        raise ValueError(f"shares must be >= 0 with a sum of 1 to 2^40, got {checked}")
    return checked
