"""Shares of the data sets: asked for, and realised in batches and over an epoch."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from nvalchemi.data.datapipes.order import Indices
from nvalchemi.sharding.coverage import COUNT_LIMIT, blocks, counts_without_padding
from nvalchemi.sharding.sources import Dealing, Method

if TYPE_CHECKING:
    from nvalchemi.sharding.plan import ShardPlan

Shares = NDArray[np.float64]
SpreadKind = Literal["exact", "bound", "standard deviation"]

LONG = 2**24  # samples times ranks of a sampler that is iterated, some seconds

# A mixture is less than a sample off its share at any position (`datapipes.mixture`); a batch is
# the difference of two positions.
DRIFT = 2.0

SIGMAS = 5.0  # beyond so many standard deviations chance is no explanation
ROUNDING = 2.0  # samples that whole numbers may be off in an epoch


@dataclass(frozen=True)
class Composition:
    """Shares of D data sets in an epoch and in some of its batches.

    Attributes
    ----------
    epoch : int
    asked : float array, shape (D,)
        Shares that were asked for; the lengths where nothing was.
    counts : int64 array, shape (D,)
        Samples of each data set in the epoch, all ranks together, with padding.
    realised : float array, shape (D,)
        `counts` as shares.
    method : {"by construction", "counted", "sampled"}
        Where the counts come from.
    error : float array, shape (D,)
        Standard error of `realised` where it is sampled, else 0.
    steps, ranks : int64 arrays, shapes (S,) and (R,)
        The batches looked at.
    all_steps : bool
        Whether these are all steps of the epoch.
    per_batch : int64 array, shape (S, R, D)
        Samples of each data set in each of those batches.
    expected : float array, shape (D,)
        Samples in a usual batch (the median) by the shares asked for.
    spread : float array, shape (D,)
        How far from it a batch may be, in samples.
    spread_kind : {"exact", "bound", "standard deviation"}
        What `spread` is: zero, the most that the rule allows, or that of a random draw.
    """

    epoch: int
    asked: Shares
    counts: Indices
    realised: Shares
    method: Method
    error: Shares
    steps: Indices
    ranks: Indices
    all_steps: bool
    per_batch: Indices
    expected: Shares
    spread: Shares
    spread_kind: SpreadKind

    def __str__(self) -> str:
        lines = []
        for j, (asked, got) in enumerate(zip(self.asked, self.realised)):
            about = f" ± {self.error[j]:.2%}" if self.method == "sampled" else ""
            lines.append(
                f"data set {j}: asked {asked:.2%}, realised {got:.2%}{about}; "
                f"{self.expected[j]:.4g} ± {self.spread[j]:.3g} in a batch ({self.spread_kind})"
            )
        return "\n".join(lines)


def measure_composition(
    plan: "ShardPlan", epoch: int, steps: Indices, ranks: Indices, all_steps: bool
) -> Composition:
    window = plan.source.window(steps, ranks, epoch)
    per_batch = count_rows(plan, window)
    counts, method = epoch_counts(plan, epoch)
    error = np.zeros(len(counts))
    if counts is None or method == "sampled":
        counts = per_batch.sum(axis=(0, 1))
        share = counts / max(1, counts.sum())
        error = np.sqrt(share * (1 - share) / max(1, counts.sum()))
    sizes = per_batch.sum(axis=2)
    size = float(np.median(sizes)) if sizes.size else float(plan.batch_size)
    asked = asked_shares(plan)  # of this epoch: `epoch_counts` has told the sampler
    spread, kind = batch_spread(plan, asked, size)
    return Composition(
        epoch=epoch,
        asked=asked,
        counts=counts,
        realised=counts / max(1, counts.sum()),
        method=method,
        error=error,
        steps=steps,
        ranks=ranks,
        all_steps=all_steps,
        per_batch=per_batch,
        expected=asked * size,
        spread=spread,
        spread_kind=kind,
    )


def count_rows(plan: "ShardPlan", window: Indices) -> Indices:
    """Samples of each data set in each batch of a window (S, R, B): (S, R, D)."""
    number = len(plan.samples.lengths)
    batches = window.shape[0] * window.shape[1]
    filled = window >= 0
    owner = np.nonzero(filled.reshape(batches, -1))[0]
    cells = owner * number + plan.samples.dataset_of(window[filled])
    return np.bincount(cells, minlength=batches * number).reshape(*window.shape[:2], number)


def epoch_counts(plan: "ShardPlan", epoch: int) -> tuple[Any, Method]:
    """Samples of each data set in an epoch, exactly unless that would take long."""
    dealing = plan.source.dealing(epoch)
    if dealing is not None and (plan.source.cheap or len(dealing.draws) == 1):
        return counts_by_construction(plan, dealing, epoch), "by construction"
    # each rank of an iterated sampler may take as long as the whole order
    long = not plan.source.cheap and plan.world_size * len(plan.samples) > LONG
    if dealing is None and (long or plan.estimated_draws > COUNT_LIMIT):
        return np.zeros(len(plan.samples.lengths), dtype=np.int64), "sampled"
    total = np.zeros(len(plan.samples.lengths), dtype=np.int64)
    for block in blocks(plan, epoch):
        total += plan.samples.count(block)
    return total, "counted"


def counts_by_construction(plan: "ShardPlan", dealing: Dealing, epoch: int) -> Indices:
    if len(dealing.draws) == 1:
        return np.array([dealing.emitted])
    rounds, rest = divmod(dealing.emitted, dealing.positions)
    if rounds == 0:
        return counts_without_padding(plan, dealing, epoch)
    again = plan.source.order(np.arange(rest), epoch)
    return rounds * dealing.draws + plan.samples.count(again)


def asked_shares(plan: "ShardPlan") -> Shares:
    """Shares as the caller asked for them: by argument, by the sampler's own word, by length."""
    wished = wished_shares(plan)
    if wished is None:
        return np.array(plan.samples.lengths, dtype=np.float64) / len(plan.samples)
    return wished


def wished_shares(plan: "ShardPlan") -> Shares | None:
    """None where nobody named any: then the lengths are only what one would expect."""
    number = len(plan.samples.lengths)
    sampler = getattr(plan.source, "sampler", None)
    candidates = [
        plan.sampler_kwargs.get("weights"),
        plan.sampler_kwargs.get("samples_per_dataset"),
        getattr(sampler, "samples_per_dataset", None),
        getattr(sampler, "draws_per_dataset", None),
    ]
    for values in candidates:
        if values is not None and np.shape(values) == (number,) and sum(values) > 0:
            shares = np.asarray(values, dtype=np.float64)
            wished: Shares = shares / shares.sum()
            return wished
    return None


def batch_spread(plan: "ShardPlan", asked: Shares, size: float) -> tuple[Shares, SpreadKind]:
    sampler = getattr(plan.source, "sampler", None)
    in_batch = getattr(sampler, "samples_per_dataset", None)
    if len(asked) == 1 or (
        in_batch is not None and all(float(number).is_integer() for number in in_batch)
    ):
        return np.zeros(len(asked)), "exact"
    if in_batch is not None:
        return np.where(asked > 0, DRIFT, 0.0), "bound"
    return random_spread(plan, asked, size), "standard deviation"


def random_spread(plan: "ShardPlan", asked: Shares, size: float) -> Shares:
    """Standard deviation of the samples of a data set in a random batch of that size."""
    total = len(plan.samples)
    # without replacement a batch of a finite set varies less (hypergeometric)
    finite = (total - size) / max(1, total - 1) if total > size else 0.0
    spread: Shares = np.sqrt(size * asked * (1 - asked) * finite)
    return spread


def variance_ratio(per_batch: Indices, shares: Shares) -> float:
    """Variance of the batches (..., D) around the shares, over that of a random order."""
    sizes = per_batch.sum(axis=-1, keepdims=True)
    variance = (sizes * shares * (1 - shares)).sum()
    return float(((per_batch - sizes * shares) ** 2).sum() / variance) if variance > 0 else 0.0


def explained_gap(
    plan: "ShardPlan", epoch: int, asked: Shares, counts: Indices, whole: bool, ratio: float
) -> Shares:
    """Samples that chance and rounding may put between what was asked for and `counts`, (D,).

    `whole` says whether these are of the whole epoch. Chance has the binomial standard deviation,
    and `ratio` (that of `variance_ratio`) times the variance where batches keep to one data set.
    """
    loose = loose_draws(plan, epoch, counts) if whole else int(counts.sum())
    chance = SIGMAS * np.sqrt(loose * asked * (1 - asked) * max(1.0, ratio))
    if plan.source.shuffled is not True and loose <= plan.global_batch:
        chance = np.full(len(asked), float(loose))  # a beginning or an end may be of one data set
    gap: Shares = ROUNDING + np.minimum(loose, chance)
    return gap


def loose_draws(plan: "ShardPlan", epoch: int, counts: Indices) -> int:
    """Draws of an epoch that are left to chance: of a whole pass over an order there is none."""
    dealing = plan.source.dealing(epoch)
    if dealing is not None:
        return min(dealing.emitted % dealing.positions, -dealing.emitted % dealing.positions)
    more = counts - np.array(plan.samples.lengths)
    off = abs(int(more.sum()))
    one_pass = (more >= 0).all() or (more <= 0).all()  # but for padding, or for what is dropped
    return off if one_pass and off <= plan.global_batch else int(counts.sum())
