"""Which samples two ranks both see in an epoch: a matrix, rank by rank."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from nvalchemi.data.datapipes.order import Indices
from nvalchemi.sharding.coverage import blocks
from nvalchemi.sharding.sources import Dealing, Method

if TYPE_CHECKING:
    from nvalchemi.sharding.plan import ShardPlan

MANY = 16  # samples that more ranks see than this are counted by a matrix product
COLUMNS = 4096


@dataclass(frozen=True)
class Overlap:
    """Samples that ranks share in an epoch.

    Attributes
    ----------
    epoch : int
    ranks : int64 array, shape (R,)
        The ranks looked at.
    matrix : int64 array, shape (R, R)
        Different samples that both ranks see; on the diagonal those that one sees.
    all_ranks : bool
        Whether these are all ranks of the plan.
    method : {"by construction", "counted"}
    """

    epoch: int
    ranks: Indices
    matrix: Indices
    all_ranks: bool
    method: Method

    @property
    def share(self) -> NDArray[np.float64]:
        """The matrix as parts of the smaller of both ranks: 1 where one contains the other."""
        own = np.diagonal(self.matrix)
        return self.matrix / np.maximum(1, np.minimum(own[:, None], own[None, :]))

    @property
    def most(self) -> tuple[int, int, float]:
        """The two ranks that share most, and how large a part of their samples."""
        if len(self.ranks) < 2:
            return int(self.ranks[0]), int(self.ranks[0]), 0.0
        share = self.share - np.eye(len(self.ranks)) * 2
        a, b = np.unravel_index(int(share.argmax()), share.shape)
        return int(self.ranks[min(a, b)]), int(self.ranks[max(a, b)]), float(share[a, b])

    def __str__(self) -> str:
        a, b, part = self.most
        which = "all" if self.all_ranks else f"{len(self.ranks)} of the"
        return f"{which} ranks: at most {part:.1%} of the samples shared, by ranks {a} and {b}"


def measure_overlap(plan: "ShardPlan", epoch: int, ranks: Indices) -> Overlap:
    dealing = plan.source.dealing(epoch)
    method: Method = "counted"
    matrix = None
    if dealing is not None and dealing.even and dealt_once(dealing, plan.samples.lengths):
        matrix, method = overlap_of_padding(plan, epoch, ranks, dealing), "by construction"
    if matrix is None:
        matrix, method = count_pairs([seen_by(plan, epoch, int(r)) for r in ranks]), "counted"
    return Overlap(epoch, ranks, matrix, len(ranks) == plan.world_size, method)


def dealt_once(dealing: Dealing, lengths: list[int]) -> bool:
    """Whether no sample comes twice but by padding, and padding comes but once."""
    once = not dealing.independent and all(d <= n for d, n in zip(dealing.draws.tolist(), lengths))
    return once and dealing.emitted <= 2 * dealing.positions


def seen_by(plan: "ShardPlan", epoch: int, rank: int) -> Indices:
    parts = list(blocks(plan, epoch, [rank]))
    return np.unique(np.concatenate(parts)) if parts else np.empty(0, dtype=np.int64)


def overlap_of_padding(
    plan: "ShardPlan", epoch: int, ranks: Indices, dealing: Dealing
) -> Indices | None:
    """Only the padding is seen twice: at the end, and where the order begins."""
    if dealing.unit == 1 and not plan.source.cheap:
        return overlap_by_position(plan.world_size, ranks, dealing)
    steps = plan.num_steps(epoch)
    rows = -(-dealing.padded // (dealing.unit * plan.world_size * row_units(plan, dealing))) + 1
    if 2 * rows >= steps:
        return None
    ends = np.concatenate([np.arange(rows), np.arange(steps - rows, steps)])
    window = plan.source.window(ends, ranks, epoch)
    matrix = count_pairs([np.unique(window[:, i][window[:, i] >= 0]) for i in range(len(ranks))])
    middle = (steps - 2 * rows) * plan.source.batch_size
    matrix[np.arange(len(ranks)), np.arange(len(ranks))] += middle
    return matrix


def overlap_by_position(world_size: int, ranks: Indices, dealing: Dealing) -> Indices:
    """Of single samples dealt in turn: rank p % R has position p, and the padding begins anew."""
    everyone = np.arange(world_size)
    own = dealing.emitted // world_size + (everyone < dealing.emitted % world_size)
    matrix = np.diag(own.astype(np.int64))
    again = np.arange(dealing.padded)
    first, second = again % world_size, (dealing.positions + again) % world_size
    np.subtract.at(matrix, (first, second), (first == second).astype(np.int64))
    other = first != second
    np.add.at(matrix, (first[other], second[other]), 1)
    np.add.at(matrix, (second[other], first[other]), 1)
    return matrix[np.ix_(ranks, ranks)]


def row_units(plan: "ShardPlan", dealing: Dealing) -> int:
    """Units of a rank in one of its steps."""
    return max(1, plan.source.batch_size // dealing.unit)


def count_pairs(sets: list[Indices]) -> Indices:
    """Sizes of all intersections of sorted sets of samples, shape (len(sets), len(sets))."""
    number = len(sets)
    matrix = np.zeros((number, number), dtype=np.int64)
    samples = np.concatenate(sets) if sets else np.empty(0, dtype=np.int64)
    owners = np.repeat(np.arange(number), [part.size for part in sets])
    order = np.argsort(samples, kind="stable")
    samples, owners = samples[order], owners[order]
    new = np.append(True, samples[1:] != samples[:-1])[: samples.size]
    start = np.flatnonzero(new)
    sizes = np.diff(np.append(start, samples.size)).astype(np.int64)
    per_draw = np.repeat(sizes, sizes)
    add_few(matrix, samples[per_draw <= MANY], owners[per_draw <= MANY])
    add_many(matrix, samples[per_draw > MANY], owners[per_draw > MANY])
    return matrix


def add_few(matrix: Indices, samples: Indices, owners: Indices) -> None:
    """Add pairs of neighbours in the sorted list, then of next neighbours, and so on."""
    np.add.at(matrix, (owners, owners), 1)
    for distance in range(1, MANY):
        same = np.flatnonzero(samples[distance:] == samples[: samples.size - distance])
        if not same.size:
            return
        a, b = owners[same], owners[same + distance]
        np.add.at(matrix, (a, b), 1)
        np.add.at(matrix, (b, a), 1)


def add_many(matrix: Indices, samples: Indices, owners: Indices) -> None:
    """Add all pairs of samples that many ranks see, by products of 0/1 matrices."""
    if not samples.size:
        return
    names, column = np.unique(samples, return_inverse=True)
    for start in range(0, len(names), COLUMNS):
        here = (column >= start) & (column < start + COLUMNS)
        seen = np.zeros((len(matrix), COLUMNS), dtype=np.float32)
        seen[owners[here], column[here] - start] = 1
        matrix += np.rint(seen @ seen.T).astype(np.int64)
