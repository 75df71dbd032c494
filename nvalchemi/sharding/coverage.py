"""Which samples are seen, how often, and which never: exact by arithmetic, or by counting."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from nvalchemi.data.datapipes.order import Indices
from nvalchemi.sharding.sources import Dealing, Method, as_indices

if TYPE_CHECKING:
    from nvalchemi.sharding.plan import ShardPlan

COUNT_LIMIT = 2**22  # draws that are counted unasked, about half a second
BLOCK = 2**20  # draws enumerated at a time


@dataclass(frozen=True)
class Coverage:
    """What becomes of the samples over some epochs, all ranks together.

    drawn = seen + repeated + padded, and seen + never = samples.

    Attributes
    ----------
    epochs : list of int
    samples : int
        Samples of the data set.
    drawn : int
        Samples that the ranks get, with all repetitions.
    seen : int
        Different samples among them.
    padded : int
        Draws that only make the ranks equally long, where the sampler's rule is known; elsewhere
        they are among `repeated`.
    repeated : int
        Other draws of a sample that was drawn before; over several epochs also the later ones.
    dropped : int
        Samples of the orders that no rank gets, so that ranks or batches are equally long.
    never : int
        Samples that are in none of the epochs.
    seen_of, never_of : array, shape (D,)
        The same for each data set.
    method : {"by construction", "counted", "expected"}
        "expected": mean over all seeds.
    error : float
        Standard deviation of `seen` and `never` if they are expected, for a global shuffle; else 0.
    """

    epochs: list[int]
    samples: int
    drawn: int
    seen: int
    padded: int
    repeated: int
    dropped: int
    never: int
    seen_of: Indices
    never_of: Indices
    method: Method
    error: float

    def __str__(self) -> str:
        about = "" if self.method != "expected" else f" (expected, ± {self.error:.3g})"
        return (
            f"{self.seen} of {self.samples} samples seen{about}, {self.never} never, "
            f"{self.drawn} drawn: {self.padded} as padding, {self.repeated} repeated; "
            f"{self.dropped} dropped"
        )


def measure_coverage(plan: "ShardPlan", epochs: list[int], exact: bool) -> Coverage:
    dealings = [dealing for e in epochs if (dealing := plan.source.dealing(e)) is not None]
    if len(dealings) < len(epochs):
        return counted(plan, epochs, [])
    known = seen_by_construction(plan, epochs, dealings)
    drawn = sum(dealing.emitted for dealing in dealings)
    if known is not None:
        return assemble(plan, epochs, dealings, drawn, known, "by construction")
    if exact or drawn <= COUNT_LIMIT:
        return counted(plan, epochs, dealings)
    seen, variance = expected_seen(plan, dealings)
    return assemble(plan, epochs, dealings, drawn, seen, "expected", math.sqrt(variance))


def assemble(
    plan: "ShardPlan",
    epochs: list[int],
    dealings: list[Dealing],
    drawn: int,
    seen_of: Indices,
    method: Method,
    error: float = 0.0,
) -> Coverage:
    samples, seen = len(plan.samples), int(seen_of.sum())
    padded = sum(dealing.padded for dealing in dealings)
    return Coverage(
        epochs=epochs,
        samples=samples,
        drawn=drawn,
        seen=seen,
        padded=padded,
        repeated=drawn - seen - padded,
        dropped=sum(dealing.dropped + short_batch(plan, dealing) for dealing in dealings),
        never=samples - seen,
        seen_of=seen_of,
        never_of=np.array(plan.samples.lengths) - seen_of,
        method=method,
        error=error,
    )


def short_batch(plan: "ShardPlan", dealing: Dealing) -> int:
    """Samples of a last batch that the sampler itself left out of its order."""
    short = len(plan.samples) - dealing.positions
    drops = getattr(getattr(plan.source, "sampler", None), "drop_last", False)
    return short if drops and 0 < short < dealing.unit else 0


def counts_without_padding(plan: "ShardPlan", dealing: Dealing, epoch: int) -> Indices:
    """Draws of each data set in one epoch, without what padding adds."""
    if not dealing.dropped:
        return dealing.draws
    if len(dealing.draws) == 1:
        return dealing.draws - dealing.dropped
    tail = np.arange(dealing.emitted, dealing.positions)
    return dealing.draws - plan.samples.count(plan.source.order(tail, epoch))


def seen_by_construction(
    plan: "ShardPlan", epochs: list[int], dealings: list[Dealing]
) -> Indices | None:
    """Different samples of each data set, if they follow from the lengths alone."""
    lengths = np.array(plan.samples.lengths)
    if not epochs:
        return np.zeros_like(lengths)
    if dealings[0].independent:
        return None
    if dealings[0].dropped and len(lengths) > 1 and not plan.source.cheap:
        return None
    counts: dict[tuple[bytes, int], Indices] = {}  # of epochs with the same numbers one is enough
    for epoch, dealing in zip(epochs, dealings):
        # which data sets a tail is of depends on the epoch
        key = (dealing.draws.tobytes(), epoch if dealing.dropped else 0)
        if key not in counts:
            counts[key] = counts_without_padding(plan, dealing, epoch)
    seen: Indices = np.minimum(list(counts.values()), lengths).max(axis=0)
    # of a data set that no epoch shows whole, a shuffled epoch shows other samples than another
    if len(set(epochs)) > 1 and plan.source.shuffled is not False:
        drawn_from = np.any([dealing.draws for dealing in dealings], axis=0)
        if (seen < lengths)[drawn_from].any():
            return None
    return seen


def expected_seen(plan: "ShardPlan", dealings: list[Dealing]) -> tuple[Indices, float]:
    """Mean and variance of the numbers of different samples, over random global shuffles."""
    seen, variance = [], 0.0
    for j, length in enumerate(plan.samples.lengths):
        # padding repeats what is drawn anyway
        drawn = [d.draws[j] * min(1.0, d.emitted / d.positions) for d in dealings]
        never, spread = expected_never(length, drawn, dealings[0].independent)
        seen.append(length - round(never))
        variance += spread
    return np.array(seen, dtype=np.int64), variance


def expected_never(n: int, drawn: list[float], independent: bool) -> tuple[float, float]:
    """Mean and variance of the samples out of n that are in none of the epochs.

    One sample is missed with probability p, two with q: by independent draws ((1 - 1/n)^d and
    (1 - 2/n)^d for d of them), or by a random subset of that size (hypergeometric).
    """
    p = q = 1.0
    for d in drawn:
        if n > 2 and independent:
            p *= math.exp(d * math.log1p(-1 / n))
            q *= math.exp(d * math.log1p(-2 / n))
        elif n > 1:
            left = max(0.0, n - d)
            p *= left / n
            q *= left * max(0.0, left - 1) / (n * (n - 1))
        elif d >= 1:
            p = q = 0.0
    return n * p, max(0.0, n * p * (1 - p) + n * (n - 1) * (q - p * p))


def blocks(plan: "ShardPlan", epoch: int, ranks: Iterable[int] | None = None) -> Iterator[Indices]:
    """All samples of an epoch, some at a time, without the gaps."""
    chosen = as_indices("ranks", ranks, plan.world_size)
    # sources that keep whole ranks are asked rank by rank
    groups = [chosen] if plan.source.cheap else np.split(chosen, len(chosen))
    for group in groups:
        steps = int(plan.source.steps(group, epoch).max(initial=0))
        at_once = max(1, BLOCK // max(1, plan.source.batch_size * len(group)))
        for start in range(0, steps, at_once):
            rows = np.arange(start, min(start + at_once, steps))
            block = plan.source.window(rows, group, epoch)
            yield block[block >= 0]


def counted(plan: "ShardPlan", epochs: list[int], dealings: list[Dealing]) -> Coverage:
    seen = np.zeros(len(plan.samples), dtype=bool)
    drawn = 0
    for epoch in epochs:
        for block in blocks(plan, epoch):
            seen[block] = True
            drawn += block.size
    seen_of = np.add.reduceat(np.append(seen, False), plan.samples.offsets[:-1], dtype=np.int64)
    seen_of[np.array(plan.samples.lengths) == 0] = 0  # reduceat gives an empty part its next entry
    return assemble(plan, epochs, dealings, drawn, seen_of, "counted")
