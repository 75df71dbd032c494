"""Findings about the ranks of an epoch: whether all have steps, and samples of their own."""

from collections.abc import Iterator

import numpy as np

from nvalchemi.sharding.finding import Finding, counted
from nvalchemi.sharding.look import Look

SHARED = 0.01  # part of its samples that a rank may share with another one


def check_steps(look: Look) -> Iterator[Finding]:
    """Ranks without steps, ranks of different lengths, batches without samples."""
    steps = look.steps_of_rank
    data = {"check": "steps", "ranks": look.ranks, "steps": steps}
    if not steps.any():
        samples, ranks = len(look.plan.samples), look.plan.world_size
        each = f" on each of {ranks} ranks" if ranks > 1 else ""
        yield Finding(
            "error",
            f"No rank has a step: {counted(samples, 'sample')} {'does' if samples == 1 else 'do'} "
            f"not fill a batch of {look.plan.batch_size}{each}.",
            "Use a smaller batch_size, fewer ranks, or drop_last=False.",
            data,
        )
    elif steps.min() != steps.max():
        short, long = int(steps.argmin()), int(steps.argmax())
        yield Finding(
            "error",
            f"Ranks have different numbers of steps: rank {look.ranks[short]} has {steps[short]}, "
            f"rank {look.ranks[long]} has {steps[long]}; DDP waits for the shorter one for ever.",
            "Pad or cut the order to a multiple of the ranks before it is dealt out.",
            data,
        )
    if look.window is not None and look.window.size:
        empty = look.inside & (look.window < 0).all(axis=2)
        if empty.any():
            row, column = np.argwhere(empty)[0]
            last = int(look.steps_of_rank.max()) - 1
            yield Finding(
                "warning" if look.steps[row] == last else "error",
                f"A batch has no samples: step {look.steps[row]} of rank {look.ranks[column]}.",
                "No loader can read it: leave it out, so that no rank waits for another one.",
                {"check": "empty batch", "step": look.steps[row], "rank": look.ranks[column]},
            )


def check_identical(look: Look) -> Iterator[Finding]:
    """Ranks that get the same batches."""
    if look.window is None or not look.window.size or len(look.ranks) < 2:
        return
    rows = np.ascontiguousarray(np.moveaxis(look.window, 1, 0)).reshape(len(look.ranks), -1)
    groups: dict[bytes, list[int]] = {}
    for rank, row in zip(look.ranks.tolist(), rows):
        if (row >= 0).any():
            groups.setdefault(row.tobytes(), []).append(rank)
    same = max(groups.values(), key=len, default=[])
    if len(same) < 2:
        return
    named = f"{', '.join(map(str, same[:8]))}{', ...' if len(same) > 8 else ''}"
    data = {"check": "identical ranks", "ranks": same}
    if too_few_batches(look):
        yield Finding(
            "warning",
            f"Ranks {named} get the same batches: there are fewer batches than ranks, and those at "
            "the beginning come again to fill them.",
            "Use fewer ranks, smaller batches, or more data.",
            data,
        )
        return
    yield Finding(
        "error",
        f"Ranks {named} get the same batches in every step{look.looked_at}: the work of "
        f"{len(same)} ranks for one.",
        "Build the sampler with num_replicas and rank of each rank, or use more data.",
        data,
    )


def too_few_batches(look: Look) -> bool:
    """Whether ranks are alike only because the first batches come again to fill the others."""
    dealing = look.plan.source.dealing(look.epochs[0])
    if dealing is None:
        return look.padding > 0 and look.steps_of_rank.max() == 1
    units = getattr(getattr(look.plan.source, "sampler", None), "num_batches", None)
    if units is None:
        units = -(-dealing.positions // dealing.unit)
    return dealing.padded > 0 and units < look.plan.world_size


def check_overlap(look: Look) -> Iterator[Finding]:
    """Ranks that share samples in an epoch, where the sampler does not rule it out."""
    if look.plan.source.dealing() is not None or len(look.ranks) < 2 or not look.complete:
        return
    overlap = look.plan.overlap(look.epochs[0], ranks=look.ranks.tolist())
    a, b, part = overlap.most
    identical = (overlap.matrix == overlap.matrix[0, 0]).all()
    if part <= SHARED or (identical and part == 1):
        return
    if look.padding:
        again = "is of a sample" if look.padding == 1 else "are of samples"
        before = "was drawn before, as padding makes it"
        if look.padding > 1:
            before = "were drawn before, as padding makes them"
        yield Finding(
            "warning",
            f"{counted(look.padding, 'draw')} of an epoch {again} that {before}: ranks {a} and {b} "
            f"share {part:.0%} of their samples.",
            "Evaluate with ValidationConfig or ExactEvalSampler, which count each sample once.",
            {"check": "padding", "padded": look.padding, "overlap": overlap},
        )
    elif share_before_the_last(look):
        yield Finding(
            "error",
            f"Ranks {a} and {b} share {part:.0%} of the samples that they see in an epoch.",
            "Give all ranks the same seed, and let each take its own part of one order.",
            {"check": "overlapping ranks", "ranks": (a, b), "share": part, "overlap": overlap},
        )


def share_before_the_last(look: Look) -> bool:
    """Whether ranks share samples of which none is in a last batch, as those of padding are."""
    window = look.window
    if window is None or look.steps_of_rank.min() < 2:
        return True
    last = look.steps[:, None] == look.steps_of_rank - 1
    early = np.where((last | ~look.inside)[..., None], -1, window)
    rows = [np.unique(early[:, column]) for column in range(len(look.ranks))]
    samples = np.concatenate([row[row >= 0] for row in rows])
    return bool(np.unique(samples).size < (1 - SHARED) * samples.size)
