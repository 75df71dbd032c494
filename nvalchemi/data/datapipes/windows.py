"""Windows for batches up to a budget: each a small copy of the data set, packed on its own.

The samples are sorted by size and cut into strata of `windows` neighbours each. Window w of an
epoch takes one sample from every stratum, by a keyed permutation of the stratum, so the windows of
all epochs have almost the same sizes and total, and any of them is known without the others. That
is what makes the number of batches a constant and seeking cheap.

The largest sizes of all strata, packed once, are a pattern that fits every window. A window is
packed anew, for batches that differ from epoch to epoch; the pattern is there for one that does not
come out.
"""

from dataclasses import dataclass

import numpy as np

from nvalchemi.data.datapipes.lpt import Costs, deal, exchange, level, member_table
from nvalchemi.data.datapipes.order import GOLDEN, Indices, Key, child_key, mix64, permute

WINDOW = 16384
"""Samples in a window. The more, the fuller the batches; the fewer, the quicker a window."""

SMALL_WINDOW = 512  # up to MANY windows of a small data set have so many samples
MANY = 8

COARSER = (1, 4, 16)  # how many strata are sorted a second time, by the ratio of two sizes

ATTEMPTS = 3


@dataclass(frozen=True)
class Strata:
    """A data set sorted by size: entry b * windows + k is member k of stratum b.

    Attributes
    ----------
    order : unsigned integer array, shape (N,)
        Samples by stratum.
    windows : int
        Members of a stratum; the last one may lack some.
    largest : float64 array, shape (strata,) or (strata, 2)
        Largest costs in each.
    """

    order: Indices
    windows: int
    largest: Costs

    def window(self, number: int, key: Key) -> tuple[Indices, Indices]:
        """Samples of a window, and the strata that they come from."""
        strata = np.arange(len(self.largest))
        members = np.zeros_like(strata)
        if self.windows > 1:
            slots = np.full(len(strata), number)
            members = permute(slots, self.windows, child_key(key, strata))
        entries = strata * self.windows + members
        inside = entries < len(self.order)
        return self.order[entries[inside]].astype(np.int64), strata[inside]


@dataclass(frozen=True)
class Pattern:
    """How strata are shared out among the batches of a window, so that every window fits.

    Attributes
    ----------
    batches : int
        Batches of each window.
    batch_of : int64 array, shape (strata,)
        Batch of the sample of each stratum.
    most : int
        Samples that a batch may have.
    """

    batches: int
    batch_of: Indices
    most: int


def number_of_windows(samples: int) -> int:
    return max(samples // WINDOW, min(samples // SMALL_WINDOW, MANY), 1)


def stratify(costs: Costs, windows: int) -> Strata:
    """Sort samples by their (larger) cost into strata of `windows` members.

    With two costs, blocks of some strata are sorted once more by the difference of the two, with
    the block size that makes the sum of largest costs smallest.
    """
    by_cost = largest_first(level(costs))
    if costs.ndim == 1:
        return Strata(narrow(by_cost), windows, largest(costs[by_cost], windows))
    found: list[tuple[float, Strata]] = []
    for strata in COARSER:
        block = np.arange(len(costs)) // (strata * windows)
        ratio = (costs[:, 0] - costs[:, 1])[by_cost]
        order = by_cost[np.lexsort((ratio, block))] if strata > 1 else by_cost
        tops = largest(costs[order], windows)
        found.append((float(tops.sum(axis=0).max()), Strata(narrow(order), windows, tops)))
    return min(found, key=lambda candidate: candidate[0])[1]


def largest_first(costs: Costs) -> Indices:
    """Positions of whole numbers, the largest first; equal ones stay in their order."""
    top = costs.max()
    if top < 2**16:  # numpy sorts 16-bit integers by radix, ten times as fast
        return np.argsort((top - costs).astype(np.uint16), kind="stable")
    return np.argsort(-costs, kind="stable")


def narrow(order: Indices) -> Indices:
    return order.astype(np.uint32) if len(order) < 2**32 else order


def largest(sorted_costs: Costs, windows: int) -> Costs:
    starts = np.arange(0, len(sorted_costs), windows)
    return np.maximum.reduceat(sorted_costs, starts, axis=0)


def find_pattern(costs: Costs, limit: float) -> Pattern:
    """The pattern with the fewest batches that is found, and a few to spare.

    The number of batches is raised by growing steps until the costs fit, then halved back.
    """
    most = len(costs)
    fails = int(np.ceil(costs.sum(axis=0).max() / limit)) - 1  # fewer than this can not hold all
    step, fits = 1, min(fails + 1, most)
    while pack(costs, fits, limit) is None:
        fails, fits, step = fits, min(fits + step, most), 2 * step
    while fits - fails > 1 + fails // 512:
        middle = (fits + fails) // 2
        if pack(costs, middle, limit) is None:
            fails = middle
        else:
            fits = middle
    spare = min(fits + fits // 512, most)  # so that windows come out at the first attempt
    members = pack(costs, spare, limit)
    if members is None:
        spare, members = fits, pack(costs, fits, limit)
    assert members is not None
    batch_of = np.empty(most, dtype=np.int64)
    batch, place = np.nonzero(members >= 0)
    batch_of[members[batch, place]] = batch
    return Pattern(spare, batch_of, members.shape[1] + members.shape[1] // 2)


def pack(costs: Costs, batches: int, limit: float, key: Costs | None = None) -> Indices | None:
    """Items of each batch, -1 after the last, with no total above `limit`; None if not found.

    No batch is empty if there are as many items.
    """
    members, loads = deal(costs, batches, key=key)
    if level(loads).max() > limit:
        members = np.pad(members, ((0, 0), (0, 1)), constant_values=-1)
        if level(exchange(members, loads, costs, limit, moves=True)).max() > limit:
            return None
        gaps_last = np.argsort(members < 0, axis=1, kind="stable")
        members = np.take_along_axis(members, gaps_last, axis=1)
    return members


def pack_window(costs: Costs, strata: Indices, pattern: Pattern, limit: float, key: Key) -> Indices:
    """Batches of a window: `pattern.most` positions in `costs`, -1 after the last of each.

    The order of sizes is blurred by up to a factor of two, so that the partners of a sample change
    from epoch to epoch.
    """
    for attempt in range(ATTEMPTS):
        blur = 1 + uniform(child_key(key, attempt), len(costs))
        members = pack(costs, pattern.batches, limit, level(costs) * blur)
        if members is not None and (members[:, pattern.most :] < 0).all():
            break
    else:
        batch_of = pattern.batch_of[strata]
        count = np.bincount(batch_of, minlength=pattern.batches)
        members = member_table(np.arange(len(costs)), batch_of, count)
    mixed = np.argsort(uniform(child_key(key, ATTEMPTS), pattern.batches), kind="stable")
    rows = np.full((pattern.batches, pattern.most), -1, dtype=np.int64)
    width = min(pattern.most, members.shape[1])
    rows[:, :width] = members[mixed, :width]
    return rows


def uniform(key: Key, number: int) -> Costs:
    """Numbers in [0, 1) from a key."""
    bits = mix64(mix64(np.arange(number, dtype=np.uint64) * GOLDEN + key[0]) ^ key[1])
    numbers: Costs = (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return numbers
