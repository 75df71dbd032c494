"""The binary tree of data sets by which a mixture passes its draws on.

Huffman's tree: its ancestors' shares grow at least like Fibonacci numbers, which keeps the drift of
`mixture.Mixture` small. Its top is chosen among all trees of the last nodes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from operator import itemgetter
from typing import TypeAlias

import numpy as np

from nvalchemi.data.datapipes.order import Indices

Nested: TypeAlias = "int | tuple[Nested, Nested]"

TOP = 4  # so many last nodes of Huffman's tree are arranged by trying all 15 trees


@dataclass(frozen=True)
class Tree:
    """Inner nodes of a binary tree as rows; a child is a row, or -1 - j for data set j.

    `max_drift` is the bound of `mixture`'s docstring, the worst over the data sets.
    """

    root: int
    share: Indices
    left_share: Indices
    left: Indices
    right: Indices
    max_drift: float


def arrange(shares: Sequence[int]) -> Tree:
    """Tree of the data sets with a positive share."""
    given = np.array(shares, dtype=np.int64)
    leaves = np.argsort(given, kind="stable")[np.count_nonzero(given == 0) :]
    forest = merge(given[leaves], TOP)
    worst, top = best_top(forest, len(leaves))
    weight, children = forest.weight.tolist(), forest.children.tolist()
    attach(top, weight, children)
    pairs = np.array(children[::-1], dtype=np.int64).reshape(-1, 2)
    row = np.concatenate([-1 - leaves, np.arange(len(children))[::-1]])  # the last node is row 0
    weights = np.array(weight, dtype=np.int64)
    return Tree(
        root=0 if children else -1 - int(leaves[0]),
        share=weights[len(leaves) :][::-1],
        left_share=weights[pairs[:, 0]],
        left=row[pairs[:, 0]],
        right=row[pairs[:, 1]],
        max_drift=worst,
    )


@dataclass(frozen=True)
class Forest:
    """What merging leaves: leaves are nodes 0, 1, ..., then come the nodes made, step by step.

    `children[i]` are those of node len(leaves) + i; `steps` are ranges of nodes made at once.
    """

    roots: list[int]
    weight: Indices
    children: Indices
    steps: list[range]


def merge(weight: Indices, keep: int) -> Forest:
    """Merge the two lightest nodes until `keep` are left; `weight` is ascending.

    A step merges all nodes up to the weight of the first new one: none of them can be merged with
    a new node, so they pair up as they lie.
    """
    alive, parts, pairs, steps = np.arange(len(weight)), weight, [], []
    while len(alive) > keep:
        own = parts[alive]
        ready = int(np.searchsorted(own, own[0] + own[1], side="right"))
        number = min(ready // 2, len(alive) - keep)
        pairs.append(alive[: 2 * number].reshape(-1, 2))
        made = np.arange(len(parts), len(parts) + number)
        steps.append(range(len(parts), len(parts) + number))
        parts = np.concatenate([parts, parts[pairs[-1]].sum(axis=1)])
        alive = np.concatenate([alive[2 * number :], made])
        alive = alive[np.argsort(parts[alive], kind="stable")]
    children = np.concatenate(pairs) if pairs else np.empty((0, 2), dtype=np.int64)
    return Forest(alive.tolist(), parts, children, steps)


def best_top(forest: Forest, leaves: int) -> tuple[float, Nested]:
    """Tree of the roots with the smallest bound, and the bound."""
    inverse = np.zeros(len(forest.weight))  # sum of 1 / weight over ancestors, up to the root
    under = np.zeros(len(forest.weight), dtype=np.int64)
    under[forest.roots] = np.arange(len(forest.roots))
    for step in reversed(forest.steps):
        nodes = np.array(step)
        for child in forest.children[nodes - leaves].T:
            inverse[child] = inverse[nodes] + 1 / forest.weight[nodes]
            under[child] = under[nodes]
    own, inverse, under = forest.weight[:leaves], inverse[:leaves], under[:leaves]
    weight = forest.weight.tolist()

    def bound(tree: Nested) -> float:
        above = inverse_above(tree, weight)
        total = inverse + np.array([above[node] for node in forest.roots])[under]
        return float((1 + own * total).max() / 2)

    if len(forest.roots) == 1:
        return 0.0, forest.roots[0]
    return min(((bound(tree), tree) for tree in nested_trees(forest.roots)), key=itemgetter(0))


def nested_trees(nodes: Sequence[int]) -> Iterator[Nested]:
    """All unordered binary trees over `nodes`."""
    if len(nodes) == 1:
        yield nodes[0]
        return
    first, rest = nodes[0], range(1, len(nodes))
    for size in range(len(nodes) - 1):
        for chosen in combinations(rest, size):
            others = [nodes[i] for i in rest if i not in chosen]
            for left in nested_trees([first, *(nodes[i] for i in chosen)]):
                for right in nested_trees(others):
                    yield (left, right)


def inverse_above(tree: Nested, weight: list[int]) -> dict[int, float]:
    """For each node of a nested tree the sum of 1 / weight over its ancestors below the root."""
    if isinstance(tree, int):
        return {tree: 0.0}
    out: dict[int, float] = {}
    for child in tree:
        below = inverse_above(child, weight)
        own = 0.0 if isinstance(child, int) else 1 / sum(weight[node] for node in below)
        out.update((node, total + own) for node, total in below.items())
    return out


def attach(tree: Nested, weight: list[int], children: list[list[int]]) -> int:
    """Add the inner nodes of a nested tree, children before parents; returns its root."""
    if isinstance(tree, int):
        return tree
    left, right = (attach(child, weight, children) for child in tree)
    children.append([left, right])
    weight.append(weight[left] + weight[right])
    return len(weight) - 1
