"""Jobs of one slot each, from a release to a due slot, by earliest due: many instances at once.

Which of the jobs the first K slots take is the greedy basis of a matroid: going through the jobs by
due slot, one is taken if it and those before it fit into the slots after their releases. How many
of the first t jobs fit is a minimum over the releases, so no slot has to wait for the one before.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nvalchemi.data.datapipes.order import Indices

Flags = NDArray[np.bool_]

SMALL = 63  # up to so many jobs every pair of them is looked at, and int8 holds the counts
LEAF = 32  # places of the ranges that are not halved any further
BLOCK = 64
"""Jobs and slots of `run`."""


def take_first(place: Indices, free: Flags, room: Indices) -> Flags:
    """Which jobs are taken, of any number of instances at once (rows).

    Parameters
    ----------
    place : int64 array, shape (rows, jobs)
        For each job in the order of due slots its place in the order of releases, latest first.
    free : bool array, shape (rows, jobs)
        Jobs that may be taken, in the same order.
    room : int64 array, shape (rows, jobs + 1)
        How many of the k latest released jobs may be taken, for k = 0, 1, ...; the last is the
        number of jobs wanted.

    Returns
    -------
    bool array, shape (rows, jobs)
        In the order of due slots.
    """
    if place.shape[1] > SMALL:
        return take_first_of_many(place, free, room)
    width = np.arange(place.shape[1] + 1, dtype=np.int8)
    places = np.where(free, place, -1).astype(np.int8)
    fit = (places[:, :, None] >= width).cumsum(axis=1, dtype=np.int8)
    fit += np.minimum(room, place.shape[1]).astype(np.int8)[:, None, :]
    return rises(fit.min(axis=2))


def rises(values: NDArray[Any]) -> Flags:
    """Where each row of numbers is above the number before it; before the first is 0."""
    out = np.empty(values.shape, dtype=bool)
    np.greater(values[:, 1:], values[:, :-1], out=out[:, 1:])
    np.greater(values[:, 0], 0, out=out[:, 0])
    return out


def take_first_of_many(place: Indices, free: Flags, room: Indices) -> Flags:
    """`take_first` of the free jobs alone, which are moved together."""
    rows, jobs = place.shape
    row, column = np.nonzero(free)
    number = np.count_nonzero(free, axis=1)
    width = int(number.max(initial=1))
    moved = np.arange(len(row)) - (number.cumsum() - number)[row]
    own = place[row, column]
    by_place = np.zeros((rows, jobs), dtype=np.int64)
    by_place[row, own] = 1
    near = by_place.cumsum(axis=1)[row, own]
    places = np.tile(np.arange(width), (rows, 1))
    places[row, moved] = near - 1
    rooms = np.tile(room[:, -1:], (1, width + 1))
    rooms[:, 0] = 0
    rooms[row, near] = room[row, own + 1]
    may = np.arange(width) < number[:, None]
    taken = np.zeros((rows, jobs), dtype=bool)
    found = take_first(places, may, rooms) if width <= SMALL else take_by_halves(places, may, rooms)
    taken[row, column] = found[row, moved]
    return taken


def take_by_halves(place: Indices, free: Flags, room: Indices) -> Flags:
    """`take_first` in n log n: minima over ranges of the order of releases, and over their halves.

    The jobs of a range lie by due slot. Entry t of a range is the least room over its places, with
    those of its first t jobs added that lie further on.
    """
    rows, jobs = place.shape
    size = 1 << (jobs - 1).bit_length()
    # the job's place and whether it is free, in the order of due slots within each range
    code = np.tile(np.arange(size, dtype=np.int32) << 1, (rows, 1))
    code[:, :jobs] = place << 1 | free
    code, width = code.ravel(), size
    halves = []
    while width > LEAF:
        ranges = code.reshape(-1, width)
        high = (ranges & width) != 0  # the bit of width / 2 in the place
        passed = np.zeros((len(ranges), width + 1), dtype=np.int32)
        high.cumsum(axis=1, out=passed[:, 1:])
        weight = np.zeros_like(passed)
        (high & ((ranges & 1) != 0)).cumsum(axis=1, out=weight[:, 1:])
        halves.append((passed, weight))
        # stable: places with the bit after those without
        column = np.arange(width, dtype=np.int32)
        split = np.where(high, passed[:, :-1] + width // 2, column - passed[:, :-1])
        split += (np.arange(len(ranges), dtype=np.int32) * width)[:, None]
        moved = np.empty_like(code)
        moved[split.ravel()] = code
        code, width = moved, width // 2
    least = leaves(code.reshape(-1, width), rows, room)
    for passed, weight in reversed(halves):
        each = passed.shape[1] // 2 + 1  # entries of a half
        first = np.arange(len(passed), dtype=np.int32)[:, None] * (2 * each)
        flat = least.ravel()
        low = flat.take(first + np.arange(passed.shape[1], dtype=np.int32) - passed) + weight
        least = np.minimum(low, flat.take(first + each + passed))
    return rises(np.minimum(least[:, 1 : jobs + 1], room[:, -1:]))


def leaves(code: NDArray[np.int32], rows: int, room: Indices) -> NDArray[np.int32]:
    """Entries of the smallest ranges, by looking at every pair of a place and a job."""
    ranges, width = code.shape
    rooms = np.tile(room[:, -1:].astype(np.int32), (1, ranges * width // rows))
    rooms[:, : room.shape[1] - 1] = room[:, :-1]
    offset = np.where(code & 1, code >> 1 & (width - 1), -1).astype(np.int8)
    further = offset[:, :, None] >= np.arange(width, dtype=np.int8)
    least = np.empty((ranges, width + 1), dtype=np.int32)
    rooms = rooms.reshape(ranges, 1, width)
    rooms[:, 0].min(axis=1, out=least[:, 0])
    (further.cumsum(axis=1, dtype=np.int8) + rooms).min(axis=2, out=least[:, 1:])
    return least


def run(release: Indices, due: Indices) -> Indices:
    """Which job runs in each slot, where jobs and slots are as many and a feasible order exists.

    By due slot, each job takes the first free slot from its release on; a job due later that could
    have had that slot could also have any later one. Free slots are the bits of one word.

    Parameters
    ----------
    release, due : int64 arrays, shape (rows, BLOCK)
        First and last slot of each job, from 0 to BLOCK - 1. Among jobs due alike the first is
        taken.

    Returns
    -------
    int64 array, shape (rows, BLOCK)
    """
    rows = np.arange(len(due))[:, None]
    order = np.sort(due * BLOCK + np.arange(BLOCK), axis=1) & (BLOCK - 1)
    from_release = ~np.uint64(0) << release[rows, order].T.astype(np.uint64)
    took = np.empty_like(from_release)  # a job for each row, a word for each instance
    free = np.full(len(due), ~np.uint64(0))
    usable, negative = np.empty_like(free), np.empty_like(free)
    for allowed, bit in zip(from_release, took):
        np.bitwise_and(free, allowed, out=usable)
        np.negative(usable, out=negative)
        np.bitwise_and(usable, negative, out=bit)  # the lowest
        np.bitwise_xor(free, bit, out=free)
    assert not free.any()
    slot = np.frexp(took.T.astype(np.float64))[1] - 1
    assert (slot <= due[rows, order]).all()
    jobs = np.empty_like(order)
    jobs[rows, slot] = order
    return jobs
