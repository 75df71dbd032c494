"""Mixtures of any number of data sets that stay within a sample of each share, at any position.

With the share w of a data set, its draw number i (from 0) must lie in the window of positions
(counted from 1) from floor(i / w) + 1 to ceil((i + 1) / w). Then after n positions it has had
floor(w n) or ceil(w n) draws. The state at a boundary p says which of the draws under way there,
those of data sets whose w p is no integer, are done. It is chosen so that there is room for all:

    of the draws under way that were released within h positions before p, at most
    ceil(h - sum of max(0, w h - r)) are done, with r the fractional part of w p,

since all earlier draws need at most that sum; and forward alike, for draws that are due within h
positions and not done, with 1 - r for r (0 where w p is an integer).

*Boundaries far apart.* No window reaches over two multiples of `_far`: each is chosen on its own.
Done by the fraction r, the draws under way meet the bounds (one that was released within h
positions has r <= w h). The bounds are on two chains of sets, so a choice of whole draws meets them
too, and earliest due first finds one.

*Between them* the interval is halved. What either end says was done before, or comes after, is not
free in the middle; the others are chosen by the same bounds, for h below half the interval. They
can be met: by Hall's theorem for intervals that needs room for the draws with both ends nearby,
which is there as above, and for those with one end nearby and all of the other side. The latter
room, with h positions before the middle, is at least what the state at the end left with h plus
half the interval, as a sum over the data sets shows; and so the other way round.

*Blocks* are run earliest due first: by the bounds at both ends the draws fit into every part of
them. Everything is exact in integers, by remainders modulo the sum of the shares and differences of
products that wrap but are small.
"""

import math
from collections.abc import Sequence

import numpy as np

from nvalchemi.data.datapipes.earliest_due import BLOCK, SMALL, run, take_first
from nvalchemi.data.datapipes.order import Indices

CELLS = 2**16  # blocks times data sets computed at a time
LINES = 1024  # blocks that are kept; so many hold the whole period of simple shares
NEVER = 2**42  # positions, more than any window has


class Quota:
    """Data sets by exact shares: after n positions each has had floor or ceil of share * n draws.

    Parameters
    ----------
    shares : sequence of int
        Integer weights >= 0 with a sum of 1 to 2^40. Positions and draw numbers may exceed the sum:
        the pattern repeats.
    """

    def __init__(self, shares: Sequence[int]) -> None:
        self.shares = list(shares)
        divisor = math.gcd(*self.shares)
        given = np.array(self.shares, dtype=np.int64) // divisor
        self._sets = np.flatnonzero(given)
        self._share = given[self._sets]
        self._whole = int(self._share.sum())
        self._bits = len(self._share).bit_length()
        longest = -(-self._whole // int(self._share.min())) + 1
        self._depth = max(0, (-(-longest // BLOCK) - 1).bit_length())
        self._far = BLOCK << self._depth
        pairs = len(self._share) * min(len(self._share), SMALL)
        self._chunk = max(1, min(CELLS // len(self._share), 16 * CELLS // pairs))
        self._kept: tuple[Indices, Indices, Indices] | None = None

    def locate(self, positions: Indices) -> tuple[Indices, Indices]:
        period, rest = positions // self._whole, positions % self._whole
        block, place = rest // BLOCK, rest % BLOCK
        first, which = runs(block)
        wanted, again = np.unique(block[first], return_inverse=True)
        which = again[which]
        sets = np.empty(positions.shape, dtype=np.int64)
        draws = np.empty_like(sets)
        for start in range(0, len(wanted), LINES):  # scattered positions have a block each
            part = wanted[start : start + LINES]
            rows = np.flatnonzero((which >= start) & (which < start + len(part)))
            found = self._blocks(part)
            at = (which[rows] - start, place[rows])
            sets[rows], draws[rows] = found[0][at], found[1][at]
        return self._sets[sets], draws + period * self._share[sets]

    def counts(self, positions: int) -> list[int]:
        period, rest = divmod(positions, self._whole)
        block, place = np.array([rest // BLOCK]), rest % BLOCK
        drawn = self._boundaries(block)[0][0] + period * self._share
        drawn += np.bincount(self._blocks(block)[0][0, :place], minlength=len(drawn))
        out = np.zeros(len(self.shares), dtype=np.int64)
        out[self._sets] = drawn
        return out.tolist()

    def _blocks(self, wanted: Indices) -> tuple[Indices, Indices]:
        """Data set (of those with a share) and draw at each position of blocks: (blocks, BLOCK)."""
        if self._kept is None:
            self._kept = (
                np.full(LINES, -1),
                np.empty((LINES, BLOCK), dtype=np.int32),
                np.empty((LINES, BLOCK), dtype=np.int64),
            )
        number, sets, draws = self._kept
        line = wanted % LINES
        missing = np.flatnonzero(number[line] != wanted)
        if not missing.size:
            return sets[line], draws[line]
        found = sets[line], draws[line]
        for start in range(0, len(missing), self._chunk):
            rows = missing[start : start + self._chunk]
            found[0][rows], found[1][rows] = self._run(wanted[rows])
        # of several blocks with the same line the last is kept, in all three arrays alike
        last = dict(zip(line[missing].tolist(), missing.tolist()))
        lines, rows = np.array(list(last)), np.array(list(last.values()))
        number[lines], sets[lines], draws[lines] = wanted[rows], found[0][rows], found[1][rows]
        return found

    def _run(self, blocks: Indices) -> tuple[Indices, Indices]:
        before, after = self._boundaries(blocks)
        drawn = (after - before).ravel()
        cell = np.repeat(np.arange(len(drawn)), drawn)
        ahead = np.arange(len(cell)) - np.repeat(np.cumsum(drawn) - drawn, drawn)
        draw = (before.ravel()[cell] + ahead).reshape(-1, BLOCK)
        sets = (cell % len(self._share)).reshape(-1, BLOCK)
        own = self._share[sets]
        # draws * whole - positions * share: the products may wrap, the difference is small
        lead = draw * self._whole - (blocks * BLOCK)[:, None] * own
        release = np.maximum(lead // own, 0)
        due = np.minimum(-(-(lead + self._whole) // own), BLOCK) - 1
        order = run(release, due)
        rows = np.arange(len(order))[:, None]
        return sets[rows, order], draw[rows, order]

    def _boundaries(self, blocks: Indices) -> tuple[Indices, Indices]:
        """Draws of each data set before and after each block: two arrays (blocks, data sets)."""
        first, node_of = runs(blocks >> self._depth)
        node = blocks[first] >> self._depth
        ends, place = np.unique(np.concatenate([node, node + 1]), return_inverse=True)
        states = self._choose(ends * self._far, None)
        before, after = states[place[: len(node)]], states[place[len(node) :]]
        for depth in range(self._depth - 1, -1, -1):
            half = BLOCK << depth
            middle = self._choose((2 * node + 1) * half, (before, after, half))
            parent, (first, node_of) = node_of, runs(blocks >> depth)
            node, parent = blocks[first] >> depth, parent[first]
            right = (node & 1).astype(bool)[:, None]
            before = np.where(right, middle[parent], before[parent])
            after = np.where(right, after[parent], middle[parent])
        return before[node_of], after[node_of]

    def _choose(self, positions: Indices, between: tuple[Indices, Indices, int] | None) -> Indices:
        """Draws of each data set in the first so many positions: (positions, data sets).

        `between` are the states before and after, each so many positions away.
        """
        period, rest = positions // self._whole, positions % self._whole
        drawn, part = divide(rest[:, None], self._share, self._whole)
        drawn += period[:, None] * self._share
        free = part > 0
        wanted = part.sum(axis=1) // self._whole
        half = NEVER
        if between is not None:
            before, after, half = between
            done = free & (before > drawn)
            free &= ~done & (after > drawn)
            wanted -= done.sum(axis=1)
            drawn += done
        rows = np.arange(len(part))[:, None]
        released, back = self._nearest(part)
        due, _ = self._nearest(np.where(part, self._whole - part, 0))
        room = np.zeros((len(part), back.shape[1] + 1), dtype=np.int64)
        room[:, 1:] = np.where(back < half, self._room(released, back, part), NEVER)
        np.minimum(room, wanted[:, None], out=room)
        room[:, -1] = wanted
        place = np.empty_like(released)
        place[rows, released] = np.arange(place.shape[1])
        taken = take_first(place[rows, due], free[rows, due], room)
        assert (taken.sum(axis=1) == wanted).all()
        drawn[rows, due] += taken
        return drawn

    def _nearest(self, part: Indices) -> tuple[Indices, Indices]:
        """Data sets in the order of how many positions their draw reaches to one side, and that.

        `part` is what lies there of each draw under way, in units of 1 / sum of shares.
        """
        number = np.arange(part.shape[1])
        keys = np.sort((-(-part // self._share) << self._bits) | number, axis=1)
        return keys & ((1 << self._bits) - 1), keys >> self._bits  # an argsort is much slower

    def _room(self, sets: Indices, distance: Indices, part: Indices) -> Indices:
        """The bound on draws done within each distance; no product exceeds 2 * sets * whole."""
        own, part = self._share[sets], part[np.arange(len(part))[:, None], sets]
        room = distance * (self._whole - own.cumsum(axis=1)) + part.cumsum(axis=1)
        return -(-room // self._whole)


def runs(values: Indices) -> tuple[Indices, Indices]:
    """First place of each run of equal values, and the run of each place."""
    begins = np.ones(len(values), dtype=bool)
    np.not_equal(values[1:], values[:-1], out=begins[1:])
    return np.flatnonzero(begins), np.cumsum(begins) - 1


def divide(
    k: Indices, part: Indices, whole: Indices | int, plus: Indices | int = 0
) -> tuple[Indices, Indices]:
    """floor((k * part + plus) / whole) and its remainder, exact although k * part may wrap.

    Where it wraps, a float64 quotient is right to within one, and the remainder modulo 2^64 is
    exact and mends it.
    """
    numerator = k * part + plus
    if int(k.max(initial=0)) * int(part.max(initial=0)) < 2**62:
        return np.divmod(numerator, whole)
    quotient = ((k.astype(np.float64) * part + plus) / whole).astype(np.int64)
    remainder = numerator - quotient * whole
    off = (remainder >= whole).astype(np.int64) - (remainder < 0).astype(np.int64)
    return quotient + off, remainder - off * whole
