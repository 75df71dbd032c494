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
half the interval, as a sum over the data sets shows; and so the other way round. Data sets without
a draw in the interval need no room in it, and of very many they are left out.

*Blocks* are run earliest due first: by the bounds at both ends the draws fit into every part of
them. Everything is exact in integers, by remainders modulo the sum of the shares and differences of
products that wrap but are small.
"""

import math
from collections.abc import Iterator, Sequence

import numpy as np

from nvalchemi.data.datapipes.earliest_due import BLOCK, SMALL, Flags, run, take_first
from nvalchemi.data.datapipes.order import Indices

TOGETHER = 512  # blocks that are computed at a time
CELLS = 2**14  # and their far intervals times data sets
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
        self._many = len(self._share) > SMALL
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
        drawn = self._boundaries(block, idle=True)[1][0] + period * self._share
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
        for rows in self._chunks(missing, wanted[missing]):
            found[0][rows], found[1][rows] = self._run(wanted[rows])
        # of several blocks with the same line the last is kept, in all three arrays alike
        last = dict(zip(line[missing].tolist(), missing.tolist()))
        lines, rows = np.array(list(last)), np.array(list(last.values()))
        number[lines], sets[lines], draws[lines] = wanted[rows], found[0][rows], found[1][rows]
        return found

    def _chunks(self, places: Indices, blocks: Indices) -> Iterator[Indices]:
        """Parts of `places` whose blocks are computed at a time, neighbours together."""
        far = runs(blocks >> self._depth)[1]
        most = max(1, CELLS // len(self._share))
        start = 0
        while start < len(places):
            stop = min(int(np.searchsorted(far, far[start] + most)), start + TOGETHER)
            yield places[start:stop]
            start = stop

    def _run(self, blocks: Indices) -> tuple[Indices, Indices]:
        sets, before, after = self._boundaries(blocks)
        drawn = (after - before).ravel()
        cell = np.repeat(np.arange(len(drawn)), drawn)
        ahead = np.arange(len(cell)) - np.repeat(np.cumsum(drawn) - drawn, drawn)
        draw = (before.ravel()[cell] + ahead).reshape(-1, BLOCK)
        sets = sets.ravel()[cell].reshape(-1, BLOCK)
        own = self._share[sets]
        # draws * whole - positions * share: the products may wrap, the difference is small
        lead = draw * self._whole - (blocks * BLOCK)[:, None] * own
        release = np.maximum(lead // own, 0)
        due = np.minimum(-(-(lead + self._whole) // own), BLOCK) - 1
        order = run(release, due)
        rows = np.arange(len(order))[:, None]
        return sets[rows, order], draw[rows, order]

    def _boundaries(self, blocks: Indices, idle: bool = False) -> tuple[Indices, Indices, Indices]:
        """Data sets, and draws of each before and after a block: three arrays (blocks, data sets).

        Of very many those without a draw in the block may be left out, unless `idle`.
        """
        number = np.arange(len(self._share))
        first, node_of = runs(blocks >> self._depth)
        node = blocks[first] >> self._depth
        ends, place = np.unique(np.concatenate([node, node + 1]), return_inverse=True)
        states = self._far_apart(ends * self._far)
        before, after = states[place[: len(node)]], states[place[len(node) :]]
        sets = np.broadcast_to(number, before.shape)
        for depth in range(self._depth - 1, -1, -1):
            middle = self._between(node, BLOCK << depth, sets, before, after)
            parent, (first, node_of) = node_of, runs(blocks >> depth)
            node, parent = blocks[first] >> depth, parent[first]
            right = (node & 1).astype(bool)[:, None]
            sets, middle = sets[parent], middle[parent]
            before = np.where(right, middle, before[parent])
            after = np.where(right, after[parent], middle)
            if self._many and not idle:
                sets, before, after = without_idle(sets, before, after)
        return sets[node_of], before[node_of], after[node_of]

    def _far_apart(self, positions: Indices) -> Indices:
        """Draws of each data set in the first so many positions: (positions, data sets)."""
        drawn, part = self._shared(positions, self._share)
        wanted = part.sum(axis=1) // self._whole
        return drawn + self._choose(part, self._share, part > 0, wanted, NEVER)

    def _between(
        self, node: Indices, half: int, sets: Indices, before: Indices, after: Indices
    ) -> Indices:
        """Draws at the middle of intervals of two halves, number `node`, by those at their ends."""
        share = self._share[sets]
        drawn, part = self._shared((2 * node + 1) * half, share)
        done = (part > 0) & (before > drawn)
        free = (part > 0) & ~done & (after > drawn)
        drawn += done
        wanted = half - (drawn - before).sum(axis=1)
        room_for = share
        if self._many:  # always, so that what is left out makes no difference
            busy = after > before
            part, room_for = np.where(busy, part, 0), np.where(busy, share, 0)
        return drawn + self._choose(part, share, free, wanted, half, room_for)

    def _shared(self, positions: Indices, share: Indices) -> tuple[Indices, Indices]:
        """Floor of share * positions, and the part that it leaves of a draw under way."""
        period, rest = positions // self._whole, positions % self._whole
        drawn, part = divide(rest[:, None], share, self._whole)
        return drawn + period[:, None] * share, part

    def _choose(
        self,
        part: Indices,
        share: Indices,
        free: Flags,
        wanted: Indices,
        half: int,
        room_for: Indices | None = None,
    ) -> Flags:
        """Which of the free draws under way are done, so many of each row."""
        rows = np.arange(len(part))[:, None]
        released, back = self._nearest(part, share)
        due, _ = self._nearest(np.where(part, self._whole - part, 0), share)
        own = share if room_for is None else room_for
        own = np.broadcast_to(own, part.shape)[rows, released]
        # no product exceeds 2 * data sets * whole
        need = back * (self._whole - own.cumsum(axis=1)) + part[rows, released].cumsum(axis=1)
        room = np.zeros((len(part), back.shape[1] + 1), dtype=np.int64)
        room[:, 1:] = np.where(back < half, -(-need // self._whole), NEVER)
        np.minimum(room, wanted[:, None], out=room)
        room[:, -1] = wanted
        place = np.empty_like(released)
        place[rows, released] = np.arange(place.shape[1])
        first = take_first(place[rows, due], free[rows, due], room)
        assert (first.sum(axis=1) == wanted).all()
        done = np.empty_like(first)
        done[rows, due] = first
        return done

    def _nearest(self, part: Indices, share: Indices) -> tuple[Indices, Indices]:
        """Columns in the order of how many positions their draw reaches to one side, and that.

        `part` is what lies there of each draw under way, in units of 1 / sum of shares.
        """
        keys = np.sort((-(-part // share) << self._bits) | np.arange(part.shape[1]), axis=1)
        return keys & ((1 << self._bits) - 1), keys >> self._bits  # an argsort is much slower


def without_idle(sets: Indices, before: Indices, after: Indices) -> tuple[Indices, ...]:
    """The columns of each row that have a draw, and others up to the same number in all rows."""
    idle = before == after
    width = int((~idle).sum(axis=1).max())
    if 2 * width > idle.shape[1]:
        return sets, before, after
    order = np.argsort(idle, axis=1, kind="stable")[:, :width]
    rows = np.arange(len(sets))[:, None]
    return sets[rows, order], before[rows, order], after[rows, order]


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
