"""Whether the order is a good shuffle: from epoch to epoch, and from one sample to the next."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from nvalchemi.data.datapipes.order import Indices
from nvalchemi.data.datapipes.weights import check_integer
from nvalchemi.notebook.plots.assignment_arrays import deviation
from nvalchemi.notebook.plots.facts import Facts, Number, compact, percent, plan_line
from nvalchemi.notebook.plots.looked_at import (
    QUICK,
    LookedAt,
    choose,
    everything,
    in_parts,
    part_of,
)
from nvalchemi.sharding.view import Chosen

if TYPE_CHECKING:
    from nvalchemi.sharding.plan import ShardPlan

POINTS = 3000  # pairs that are drawn one by one
TILES, A_TILE = 64, 16  # at most, and pairs that a tile should have
PLACES = 2**22  # draws of an epoch whose places are looked up in the next one
SIGMAS = 5.0


@dataclass(frozen=True)
class Pairs:
    """Pairs of numbers in [0, size), one by one and counted in tiles.

    Attributes
    ----------
    x, y : int64 arrays
        All pairs, where there are few; else empty.
    size : int
        End of both axes.
    counts : int64 array, shape (T, T)
        Pairs by tile of y and tile of x.
    expected : float array, shape (T, T)
        Of independent x and y with the same margins.
    """

    x: Indices
    y: Indices
    size: int
    counts: Indices
    expected: NDArray[np.float64]

    @property
    def number(self) -> int:
        return int(self.counts.sum())

    @property
    def z(self) -> NDArray[np.float64]:
        """Found minus expected, in square roots of the expected."""
        return deviation(self.counts, self.expected)

    @property
    def dependence(self) -> tuple[float, float] | None:
        """Chi-square of independence over its mean, and what chance keeps to; None for few."""
        rows, columns = (np.count_nonzero(self.counts.sum(axis)) - 1 for axis in (1, 0))
        free = rows * columns
        if free < 1 or self.number < 4 * free:
            return None
        known = self.expected > 0
        square = ((self.counts - self.expected)[known] ** 2 / self.expected[known]).sum()
        return float(square / free), 1 + SIGMAS * float(np.sqrt(2 / free))


@dataclass(frozen=True)
class OrderArrays:
    """The order of an epoch beside the next one, and each sample beside the next.

    Attributes
    ----------
    facts : Facts
    epochs : (int, int)
    kind : {"places", "samples"}
        What `between` compares: the places of a sample in both epochs, or, where looking these up
        takes long, the samples at a place.
    between : Pairs
    following : Pairs
        A sample of a rank and the next one of the same batch.
    """

    facts: Facts
    epochs: tuple[int, int]
    kind: Literal["places", "samples"]
    between: Pairs
    following: Pairs


class Tally:
    """Pairs of an order, as windows are added."""

    def __init__(self, plan: "ShardPlan", look: LookedAt, following_epoch: int) -> None:
        self.plan, self.look, self.other = plan, look, following_epoch
        self.size = len(plan.samples)
        steps = int(plan.source.steps(look.ranks, look.epoch).max())
        self.places = steps * plan.global_batch
        small = look.exact and look.whole and max(self.places, self.size) <= PLACES
        self.kind: Literal["places", "samples"] = "places" if small else "samples"
        # far fewer pairs than tiles would make a picture of noise
        pairs = len(look.steps) * len(look.ranks) * plan.batch_size
        tiles = min(TILES, max(4, int(np.sqrt(pairs / A_TILE))))
        self.between = Counts(self.places if small else self.size, tiles)
        self.following = Counts(self.size, tiles)
        self.same = self.compared = self.near = 0

    def add(self, at: Indices) -> None:
        look, source = self.look, self.plan.source
        window = source.window(look.steps[at], look.ranks, look.epoch)
        later = source.window(look.steps[at], look.ranks, self.other)
        if not (later >= 0).any():
            raise ValueError(
                f"an order needs an epoch after epoch {look.epoch} to compare with, and epoch "
                f"{self.other} of the plan has no batches there"
            )
        both = (window >= 0) & (later >= 0)
        self.same += int((window[both] == later[both]).sum())
        self.compared += int(both.sum())
        if self.kind == "places":
            self.between.add(*places_in_both(window, later, self.size))
        else:
            self.between.add(window[both], later[both])
        pair = (window[..., :-1] >= 0) & (window[..., 1:] >= 0)
        one, following = window[..., :-1][pair], window[..., 1:][pair]
        # ranks that are dealt to in turn have every R-th sample of a file in its order
        self.near += int(((following > one) & (following <= one + self.plan.world_size)).sum())
        self.following.add(one, following)

    def arrays(self, done: int) -> OrderArrays:
        look = part_of(self.look, done)
        between, following = self.between.pairs(), self.following.pairs()
        expected = float(following.expected.mean())
        error = (
            f"{compact(expected)} pairs expected in a tile, chance ± {compact(np.sqrt(expected))}"
        )
        facts = Facts(
            view="order",
            question=f"Is the order shuffled, and anew in epoch {self.other}?",
            look_for="A good shuffle is even, without any line. Left, a diagonal: set_epoch was "
            "forgotten. Right, a diagonal: samples follow each other as in the file.",
            exact=look.exact,
            truth=look.truth(error),
            numbers=self.numbers(between, following),
            plan=plan_line(self.plan, f"{look.epoch} and {self.other}"),
        )
        return OrderArrays(facts, (look.epoch, self.other), self.kind, between, following)

    def numbers(self, between: Pairs, following: Pairs) -> tuple[Number, ...]:
        again = f"at the same place in epoch {self.other}"
        near = f"followed by one of the next {self.plan.world_size}"
        numbers = [
            share_of(again, self.same, self.compared, 1 / self.size),
            share_of(near, self.near, following.number, self.plan.world_size / self.size),
        ]
        for name, pairs in (("epochs", between), ("next sample", following)):
            found = pairs.dependence
            if found is not None:
                ratio, highest = found
                numbers.append(
                    Number(f"pattern, {name} (random: 1)", compact(ratio), ratio > highest)
                )
        return tuple(numbers)


def share_of(name: str, found: int, pairs: int, chance: float) -> Number:
    """Part of the pairs, red where chance does not explain it."""
    expected = pairs * min(1.0, chance)
    wrong = found > expected + SIGMAS * np.sqrt(expected) + 2
    return Number(name, percent(found / max(1, pairs)), bool(wrong))


class Counts:
    """Pairs as they come: the first ones by themselves, all in tiles."""

    def __init__(self, size: int, tiles: int) -> None:
        self.size, self.number = size, 0
        self.tiles = min(tiles, size)
        self.counts = np.zeros((self.tiles, self.tiles), dtype=np.int64)
        self.few: list[tuple[Indices, Indices]] = []

    def add(self, x: Indices, y: Indices) -> None:
        self.number += x.size
        if self.number <= POINTS:
            self.few.append((x, y))
        cell = (y * self.tiles // self.size) * self.tiles + x * self.tiles // self.size
        self.counts += np.bincount(cell, minlength=self.counts.size).reshape(self.counts.shape)

    def pairs(self) -> Pairs:
        few = self.few if self.number <= POINTS else []
        x, y = (np.concatenate([pair[i] for pair in few] or [np.empty(0, int)]) for i in (0, 1))
        margins = self.counts.sum(1, keepdims=True) * self.counts.sum(0, keepdims=True)
        return Pairs(x, y, self.size, self.counts.copy(), margins / max(1, self.number))


def places_in_both(window: Indices, later: Indices, size: int) -> tuple[Indices, Indices]:
    """First places in both epochs of the samples that are in both."""
    places = np.full((2, size), -1, dtype=np.int64)
    for row, epoch in zip(places, (window, later)):
        flat = epoch.ravel()[::-1]  # of a sample that comes again the first place is kept
        drawn = flat >= 0
        row[flat[drawn]] = np.arange(flat.size)[::-1][drawn]
    both = (places >= 0).all(axis=0)
    return places[0, both], places[1, both]


def compute_order(
    plan: "ShardPlan",
    epoch: int = 0,
    *,
    following: int | None = None,
    ranks: Chosen = None,
    steps: Chosen = None,
    draws: int = QUICK,
) -> OrderArrays:
    """The order of an epoch beside another one, from at most about `draws` draws of both.

    Parameters
    ----------
    plan : ShardPlan
    epoch : int
    following : int, optional
        The epoch to compare with; by default the next one.
    ranks, steps : int, sequence of int or slice, optional
    draws : int

    Raises
    ------
    ValueError, TypeError
        For what the plan does not have, and an order that would take long to draw.
    """
    other = check_integer("following", epoch + 1 if following is None else following, 0)
    tally = Tally(plan, choose(plan, epoch, ranks, steps, draws=draws // 2), other)
    tally.add(np.arange(len(tally.look.steps)))
    return tally.arrays(len(tally.look.steps))


def refine_order(
    plan: "ShardPlan",
    epoch: int = 0,
    *,
    following: int | None = None,
    ranks: Chosen = None,
    steps: Chosen = None,
) -> Iterator[OrderArrays]:
    """As `compute_order`, of more and more draws; the last is exact."""
    other = check_integer("following", epoch + 1 if following is None else following, 0)
    look = everything(plan, epoch, ranks, steps)
    tally, done = Tally(plan, look, other), 0
    if tally.kind == "places":  # these need the epoch as a whole
        tally.add(np.arange(len(look.steps)))
        yield tally.arrays(len(look.steps))
        return
    for places, shown in in_parts(plan, look):
        tally.add(places)
        done += len(places)
        if shown:
            yield tally.arrays(done)
