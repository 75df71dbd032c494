"""What a run folder shows to be wrong with a training, in sentences with remedies."""

from collections.abc import Iterator

import numpy as np

from nvalchemi.notebook.run import RankWork, Run
from nvalchemi.notebook.tail import Floats
from nvalchemi.sharding.finding import Finding

_PARTS, _LEAST_ROWS = 10, 30  # of a curve: medians of tenths are compared, where there are so many
_RISEN = 2.0  # times the lowest tenth
_WORSE, _LEAST_VALIDATIONS = 1.1, 6  # times the best validation, in all of the last third
_WAITING, _LEAST_SECONDS = 0.25, 1.0  # of a rank's time; the first steps of a run are others
_LATE = 5.0  # s
_HEAVIER = 1.2  # times the mean load of the ranks


def findings_of(run: Run) -> list[Finding]:
    """What should be looked at, the gravest first; of all sessions of the run."""
    ranks = [rank for rank in run.ranks if rank.rank < run.world_size and len(rank.steps)]
    return [*_losses(run), *_validation(run), *_waiting(ranks), *_load(ranks)]


def _losses(run: Run) -> Iterator[Finding]:
    losses, steps = run.losses["loss"], run.steps
    broken = ~np.isfinite(losses)
    if broken.any():
        first = int(steps[broken.argmax()])
        yield Finding(
            "error",
            f"The loss is not finite in {int(broken.sum()):,} of {len(steps):,} "
            f"line{'s' if len(steps) > 1 else ''}, first at step {first:,}.",
            "Try a learning rate of a tenth, and look for a label that is not finite.",
            {"check": "finite loss", "step": first},
        )
    good = losses[~broken]
    if len(good) < _LEAST_ROWS:
        return
    medians = np.array([np.median(part) for part in np.array_split(good, _PARTS)])
    if medians[-1] > _RISEN * medians.min() and medians.min() > 0:
        end = np.array_split(steps[~broken], _PARTS)[medians.argmin()][-1]
        yield Finding(
            "warning",
            f"The loss has risen to {medians[-1] / medians.min():.3g} times its lowest, "
            f"{medians.min():.3g}, which was around step {int(end):,}.",
            "Try a lower learning rate, a warm-up, or clipping of the gradient.",
            {"check": "rising loss", "step": int(end)},
        )


def _validation(run: Run) -> Iterator[Finding]:
    values = run.validations["loss"]
    good = np.isfinite(values)
    values, steps = values[good], run.validation_steps[good]
    if len(values) < _LEAST_VALIDATIONS or len(run.steps) < _LEAST_ROWS:
        return
    best = int(values.argmin())
    later = _between(run, steps[best], np.inf)
    before = _between(run, -np.inf, steps[best])
    falls = len(later) and len(before) and np.median(later) < np.median(before[-len(later) :])
    if values[-(len(values) // 3) :].min() > _WORSE * values[best] and falls:
        yield Finding(
            "warning",
            f"The validation is best, {values[best]:.3g}, at step {int(steps[best]):,}, and "
            f"{values[-1]:.3g} now, while the loss falls: structures are learnt by heart, or those "
            "of the validation are of another kind.",
            "Take the weights of that step, or more data, or a smaller model.",
            {"check": "rising validation", "step": int(steps[best])},
        )


def _between(run: Run, low: float, high: float) -> Floats:
    losses = run.losses["loss"]
    return losses[(run.steps > low) & (run.steps <= high) & np.isfinite(losses)]


def _waiting(ranks: list[RankWork]) -> Iterator[Finding]:
    """A step takes as long as that of the slowest rank."""
    if not ranks or min(rank.times[-1] - rank.times[0] for rank in ranks) < _LEAST_SECONDS:
        return
    parts = np.array([of_late(rank, rank.waiting) for rank in ranks])
    worst = int(np.nan_to_num(parts).argmax())
    if not parts[worst] > _WAITING:
        return
    who = f"Rank {ranks[worst].rank} waits"
    others = " and the others wait for it" if len(ranks) > 1 else ""
    if len(ranks) > 1 and np.nanmin(parts) > _WAITING:
        who, others = "All ranks wait", ""
    yield Finding(
        "warning",
        f"{who} for data {parts[worst]:.0%} of the time{others}.",
        "Let the loader have (more) workers, or look at the disk it reads from.",
        {"check": "waiting for data", "rank": ranks[worst].rank},
    )


def _load(ranks: list[RankWork]) -> Iterator[Finding]:
    if len(ranks) < 2:
        return
    atoms = np.array([of_late(rank, rank.atoms_per_batch) for rank in ranks])
    worst = int(np.nan_to_num(atoms).argmax())
    if not atoms[worst] > _HEAVIER * np.nanmean(atoms):
        return
    yield Finding(
        "warning",
        f"Rank {ranks[worst].rank} has {atoms[worst]:,.0f} atoms a batch of late, "
        f"{atoms[worst] / np.nanmean(atoms):.2g} times the mean of the ranks, which wait for it.",
        "Share the work out evenly with BalancedBatchSampler; ShardExplorer shows both.",
        {"check": "uneven load", "rank": ranks[worst].rank},
    )


def of_late(rank: RankWork, values: Floats) -> float:
    """Mean over the last seconds of training."""
    kept = (rank.times > rank.times[-1] - _LATE) & np.isfinite(values) & (rank.seconds > 0)
    if not kept.any():
        return np.nan
    return float(np.average(values[kept], weights=rank.seconds[kept]))
