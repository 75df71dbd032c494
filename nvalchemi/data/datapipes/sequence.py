"""The order of one epoch: position -> data set and draw of it -> sample."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nvalchemi.data.datapipes.locality import WindowedOrder
from nvalchemi.data.datapipes.mixture import Allocation
from nvalchemi.data.datapipes.order import (
    CyclicOrder,
    IndependentDraws,
    Indices,
    Key,
    Order,
    PassOrder,
    child_key,
)
from nvalchemi.data.datapipes.weights import check_flag, check_integer

DRAWS_PER_SET = 500
"""With so many draws from each data set, one call for each costs less than a key for each draw."""


@dataclass(frozen=True)
class Drawing:
    """How samples are drawn from data sets.

    Attributes
    ----------
    lengths : int64 array
    shuffle, replacement : bool
        Not shuffled: in order and cyclically. With replacement: independently.
    chunk_sizes : int64 array or None
        Samples in a chunk of each data set, if the shuffle is windowed.
    locality : int
        Chunks in a window; 0 shuffles globally.
    """

    lengths: Indices
    shuffle: bool = True
    replacement: bool = False
    chunk_sizes: Indices | None = None
    locality: int = 0

    def order(self, sets: int | Indices, epoch_key: Key) -> Order:
        """Order of one data set, or for draws of which each belongs to a data set of its own."""
        n = int(self.lengths[sets]) if isinstance(sets, int) else self.lengths[sets]
        if not self.shuffle:
            return CyclicOrder(n)
        key = child_key(epoch_key, sets)
        if self.replacement:
            return IndependentDraws(n, key)
        if self.chunk_sizes is None:
            return PassOrder(n, key)
        own = self.chunk_sizes[sets]
        return WindowedOrder(n, key, int(own) if isinstance(sets, int) else own, self.locality)

    def __str__(self) -> str:
        """All that the order depends on beside the key."""
        drawn = "replacement" if self.replacement else "passes"
        text = f"{self.lengths.tolist()} {drawn} shuffle={self.shuffle}"
        if self.chunk_sizes is None:
            return text
        return f"{text} locality={self.locality} of {self.chunk_sizes.tolist()}"


def choose_drawing(
    lengths: list[int],
    *,
    shuffle: bool,
    replacement: bool | None = None,
    locality: int = 0,
    chunk_size: int | Sequence[int] | None = None,
) -> Drawing:
    """A `Drawing` from a caller's arguments, checked.

    Raises
    ------
    TypeError, ValueError
        For a windowed shuffle without chunks, without shuffling, or with replacement.
    """
    sizes = np.array(lengths, dtype=np.int64)
    shuffle = check_flag("shuffle", shuffle)
    replacement = None if replacement is None else check_flag("replacement", replacement)
    locality = check_integer("locality", locality, 0)
    chunks = None if chunk_size is None else chunk_sizes(chunk_size, len(lengths))
    if locality == 0:
        return Drawing(sizes, shuffle, bool(replacement))
    if chunks is None:
        raise ValueError(
            f"locality needs chunk_size, the consecutive samples that are read together: got "
            f"locality={locality} and none"
        )
    if not shuffle or replacement:
        raise ValueError(
            "locality shuffles within windows, so it needs shuffle=True and replacement=None or "
            f"False: got locality={locality}, shuffle={shuffle}, replacement={replacement}"
        )
    return Drawing(sizes, True, False, chunks, locality)


def chunk_sizes(chunk_size: Any, number: int) -> Indices:
    """Samples in a chunk of each data set."""
    per_set = list(chunk_size) if hasattr(chunk_size, "__iter__") else [chunk_size] * number
    if len(per_set) != number:
        raise ValueError(
            f"chunk_size must be one number or one for each of {number} data sets, got {per_set}"
        )
    return np.array([check_integer("chunk_size", size, 1) for size in per_set], dtype=np.int64)


class EpochOrder:
    """The global order of one epoch: position -> sample index."""

    def __init__(self, drawing: Drawing, key: Key, allocation: Allocation | None) -> None:
        self._drawing, self._key, self._allocation = drawing, key, allocation
        self._offsets = np.cumsum(drawing.lengths) - drawing.lengths
        self._orders: dict[int, Order] = {}

    def __call__(self, positions: Indices) -> Indices:
        if self._allocation is None:
            return self._order(0)(positions)
        sets, draws = self._allocation.locate(positions)
        present = np.flatnonzero(np.bincount(sets, minlength=len(self._offsets)))
        if draws.size < DRAWS_PER_SET * len(present):
            return self._drawing.order(sets, self._key)(draws) + self._offsets[sets]
        out = np.empty(positions.shape, dtype=np.int64)
        for j in present.tolist():
            rows = np.flatnonzero(sets == j)
            out[rows] = self._order(j)(draws[rows]) + self._offsets[j]
        return out

    def _order(self, j: int) -> Order:
        if j not in self._orders:
            self._orders[j] = self._drawing.order(j, self._key)
        return self._orders[j]
