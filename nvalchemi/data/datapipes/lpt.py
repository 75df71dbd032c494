"""Even loads: largest first to the least loaded, then exchanges between the fullest and emptiest.

The longest-processing-time rule (R. L. Graham, SIAM J. Appl. Math. 17, 416, 1969) gives one item at
a time. Here a whole run of items is given at once, as long as the rule would not come back to a bin
that has just been served, so that a deal costs some sorts of the bins and no loop over items. All
results follow from the input alone, so every rank that computes them gets the same.
"""

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from nvalchemi.data.datapipes.order import Indices

Costs: TypeAlias = NDArray[np.float64]
"""Shape (n,), or (n, 2) for two resources: then the larger of the two counts."""

EXCHANGES = 12  # rounds of exchanges at most; three or four suffice where there is room
TABLE_ENTRIES = 2**20  # exchanges weighed at a time


def deal(
    costs: Costs, bins: int, capacity: Indices | None = None, key: Costs | None = None
) -> tuple[Indices, Costs]:
    """Give each item to the least loaded bin, the largest first.

    Parameters
    ----------
    costs : float64 array, shape (n,) or (n, 2)
        At least 0.
    bins : int
    capacity : int64 array, shape (bins,), optional
        Items that each bin takes; together exactly n.
    key : float64 array, shape (n,), optional
        What "largest" means, instead of the costs.

    Returns
    -------
    members : int64 array, shape (bins, most items of a bin)
        Items of each bin, -1 after the last.
    loads : float64 array, shape (bins,) or (bins, 2)
    """
    order = np.argsort(-(level(costs) if key is None else key), kind="stable")
    sorted_costs = costs[order]
    loads = np.zeros((bins, *costs.shape[1:]))
    where = np.empty(len(order), dtype=np.int64)
    count = np.zeros(bins, dtype=np.int64)
    open_bins = np.arange(bins) if capacity is None else np.flatnonzero(capacity)
    done = 0
    while done < len(order):
        filled = level(loads[open_bins])
        by_load = np.argsort(filled, kind="stable")
        chosen, filled = open_bins[by_load], filled[by_load]
        wave = min(len(chosen), len(order) - done)
        after = loads[chosen[:wave]] + sorted_costs[done : done + wave]
        # the rule comes back to a bin as soon as its new load is below the next bin's
        returns = np.flatnonzero(filled[1:wave] > np.minimum.accumulate(level(after))[:-1])
        wave = int(returns[0]) + 1 if returns.size else wave
        served = chosen[:wave]
        where[done : done + wave] = served
        loads[served] = after[:wave]
        count[served] += 1
        done += wave
        if capacity is not None:
            open_bins = chosen[count[chosen] < capacity[chosen]]
    return member_table(order, where, count), loads


def level(loads: Costs) -> Costs:
    """Loads as one number each: the larger of two resources."""
    return loads if loads.ndim == 1 else np.maximum(loads[:, 0], loads[:, 1])


def member_table(items: Indices, where: Indices, count: Indices) -> Indices:
    """Items by bin, shape (bins, max(count)), -1 after the last of each."""
    by_bin = np.argsort(where, kind="stable")
    bins = where[by_bin]
    members = np.full((len(count), int(count.max())), -1, dtype=np.int64)
    members[bins, np.arange(len(items)) - (np.cumsum(count) - count)[bins]] = items[by_bin]
    return members


def exchange(members: Indices, loads: Costs, costs: Costs, limit: float, moves: bool) -> Costs:
    """Exchange items between the fullest and the emptiest bins until no load is above `limit`.

    Each round pairs the bins above the limit with the emptiest ones and makes in each pair the one
    exchange that leaves the lowest of the two larger loads. It ends early where none helps.

    Parameters
    ----------
    members, loads
        As from `deal`; `members` is changed in place.
    costs : float64 array, shape (n,) or (n, 2)
    limit : float
    moves : bool
        Whether an item may also change places with nothing.

    Returns
    -------
    float64 array
        The new loads.
    """
    padded = np.concatenate([costs, np.zeros((1, *costs.shape[1:]))])  # item -1 weighs nothing
    most = max(1, TABLE_ENTRIES // members.shape[1] ** 2)
    for _ in range(EXCHANGES):
        filled = level(loads)
        by_load = np.argsort(-filled, kind="stable")
        pairs = min(int((filled > limit).sum()), len(loads) // 2, most)
        full, empty = by_load[:pairs], by_load[::-1][:pairs]
        i, j, after = best_exchanges(members, loads, padded, full, empty, moves)
        helps = after < filled[full] * (1 - 1e-9)
        if not helps.any():
            break
        full, empty, i, j = full[helps], empty[helps], i[helps], j[helps]
        given, taken = members[full, i], members[empty, j]
        members[full, i], members[empty, j] = taken, given
        loads[full] -= padded[given] - padded[taken]
        loads[empty] += padded[given] - padded[taken]
    return loads


def best_exchanges(
    members: Indices, loads: Costs, padded: Costs, full: Indices, empty: Indices, moves: bool
) -> tuple[Indices, Indices, Costs]:
    """Columns of the best exchange of each pair of bins, and the larger load after it."""
    giving, taking = members[full], members[empty]
    after = np.zeros((*giving.shape, members.shape[1]))
    for load, cost in zip(loads.reshape(len(loads), -1).T, padded.reshape(len(padded), -1).T):
        shift = cost[giving][:, :, None] - cost[taking][:, None]
        np.maximum(after, load[full][:, None, None] - shift, out=after)
        np.maximum(after, load[empty][:, None, None] + shift, out=after)
    if not moves:
        after[(giving < 0)[:, :, None] | (taking < 0)[:, None]] = np.inf
    flat = after.reshape(len(full), members.shape[1] ** 2)
    best = flat.argmin(axis=1)
    i, j = np.divmod(best, members.shape[1])
    return i, j, np.take_along_axis(flat, best[:, None], axis=1)[:, 0]
