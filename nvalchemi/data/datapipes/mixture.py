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
and `Mixture.max_drift` is the bound of the case at hand.
"""

import heapq
from collections.abc import Iterator, Sequence
from itertools import combinations, count
from typing import Protocol, TypeAlias

import numpy as np

from nvalchemi.data.datapipes.order import MAX_SIZE, Indices

Tree: TypeAlias = "int | tuple[Tree, Tree]"

TOP = 4  # so many last nodes of Huffman's tree are arranged by trying all 15 trees


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
        self.shares = [int(share) for share in shares]
        if min(self.shares, default=0) < 0 or not 1 <= sum(self.shares) <= MAX_SIZE:
            raise ValueError(f"shares must be >= 0 with a sum of 1 to 2^40, got {self.shares}")
        filled = [j for j, share in enumerate(self.shares) if share > 0]
        tree = arrange(self.shares, filled)
        self.max_drift = max(drift_bounds(self.shares, tree).values()) if len(filled) > 1 else 0.0
        # Children of inner node i; a data set j is written as -1 - j.
        self._left: list[int] = []
        self._right: list[int] = []
        self._share: list[int] = []
        self._left_share: list[int] = []
        self._root = self._add(tree)
        self._arrays = [
            np.array(column, dtype=np.int64)
            for column in (self._share, self._left_share, self._left, self._right)
        ]

    def _add(self, root: Tree) -> int:
        """Lay the inner nodes out as rows, parents before children; no recursion, for depth."""
        if isinstance(root, int):
            return -1 - root
        weights = tree_weights(self.shares, root)
        queue: list[tuple[Tree, Tree]] = [root]
        for left, right in queue:  # grows while it is walked
            self._share.append(weights[id(left)] + weights[id(right)])
            self._left_share.append(weights[id(left)])
            for child, column in ((left, self._left), (right, self._right)):
                if isinstance(child, int):
                    column.append(-1 - child)
                else:
                    queue.append(child)
                    column.append(len(queue) - 1)
        return 0

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
        out = [0] * len(self.shares)
        draws = {self._root: int(positions)}
        if self._root < 0:
            out[-1 - self._root] = int(positions)
        for i, (part, whole) in enumerate(zip(self._left_share, self._share)):
            k = draws[i]
            passed = (k * part + whole // 2) // whole
            for child, number in ((self._left[i], passed), (self._right[i], k - passed)):
                if child < 0:
                    out[-1 - child] = number
                else:
                    draws[child] = number
        return out


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

    A float64 quotient is right to within one; the remainder modulo 2^64 is exact and mends it.
    """
    quotient = ((k.astype(np.float64) * part + whole // 2) / whole).astype(np.int64)
    remainder = k * part + whole // 2 - quotient * whole
    off = (remainder >= whole).astype(np.int64) - (remainder < 0).astype(np.int64)
    return quotient + off, remainder - off * whole


def arrange(shares: Sequence[int], filled: Sequence[int]) -> Tree:
    """Huffman's tree of the data sets `filled`, its top rearranged for the smallest drift."""
    number = count()
    heap: list[tuple[int, int, Tree]] = [(shares[j], next(number), j) for j in filled]
    heapq.heapify(heap)
    while len(heap) > TOP:
        a, b = heapq.heappop(heap), heapq.heappop(heap)
        heapq.heappush(heap, (a[0] + b[0], next(number), (a[2], b[2])))
    nodes = [entry[2] for entry in sorted(heap)]
    if len(nodes) <= 2:
        return nodes[0] if len(nodes) == 1 else (nodes[0], nodes[1])
    return min(binary_trees(nodes), key=lambda tree: max(drift_bounds(shares, tree).values()))


def binary_trees(nodes: Sequence[Tree]) -> Iterator[Tree]:
    """All unordered binary trees over `nodes`."""
    if len(nodes) == 1:
        yield nodes[0]
        return
    first, rest = nodes[0], range(1, len(nodes))
    for size in range(len(nodes) - 1):
        for chosen in combinations(rest, size):
            others = [nodes[i] for i in rest if i not in chosen]
            for left in binary_trees([first, *(nodes[i] for i in chosen)]):
                for right in binary_trees(others):
                    yield (left, right)


def tree_weights(shares: Sequence[int], root: Tree) -> dict[int, int]:
    """Share of each node of a tree, by id(node)."""
    order: list[Tree] = [root]
    for node in order:  # grows while it is walked
        if not isinstance(node, int):
            order.extend(node)
    weights: dict[int, int] = {}
    for node in reversed(order):
        if isinstance(node, int):
            weights[id(node)] = shares[node]
        else:
            weights[id(node)] = weights[id(node[0])] + weights[id(node[1])]
    return weights


def drift_bounds(shares: Sequence[int], root: Tree) -> dict[int, float]:
    """The bound of the module's docstring for each data set of a tree with two or more."""
    weights = tree_weights(shares, root)
    bounds: dict[int, float] = {}
    stack: list[tuple[Tree, float]] = [(root, 0.0)]  # sum over ancestors of 1 / share
    while stack:
        node, inverse = stack.pop()
        if isinstance(node, int):
            bounds[node] = (1 + shares[node] * inverse) / 2
        else:
            below = 0.0 if node is root else inverse + 1 / weights[id(node)]
            stack.extend((child, below) for child in node)
    return bounds
