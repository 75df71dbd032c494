"""How far a training goes and where it goes on: counters against the length of the loader."""

import math
from collections.abc import Iterator
from itertools import islice
from typing import Any


def loader_length(loader: Any) -> int | None:
    """Batches of one pass, None where the loader does not know.

    Raises
    ------
    ValueError
        If it knows and there is none.
    """
    try:
        length = len(loader)
    except TypeError:
        return None
    if length == 0:
        raise ValueError(
            "the dataloader is empty: it has no batches (drop_last with fewer samples than "
            "batch_size x ranks?)"
        )
    return length


def target_steps(
    num_epochs: int | None, num_steps: int | None, modifier: float, length: int | None
) -> int:
    """Optimizer steps to reach.

    Raises
    ------
    ValueError
        If epochs are asked for and the loader has no length.
    """
    if num_steps is not None:
        return num_steps
    if length is None:
        raise ValueError(
            "num_epochs requires a sized dataloader: this one has no length; set num_steps instead"
        )
    assert num_epochs is not None
    return math.ceil(num_epochs * length * modifier)


def restart_point(
    batch_count: int, step_count: int, epoch_count: int, epoch_step_count: int, length: int | None
) -> tuple[int, int]:
    """Epochs that are done, and batches of the current one, from counters that were set by hand.

    A count of batches (or steps) alone is enough. With epoch_step_count as long as an epoch that
    epoch is still to be closed.

    Raises
    ------
    ValueError
        If the counters contradict each other for a loader of this length.
    """
    done = batch_count or step_count
    if length is None or not (done or epoch_count or epoch_step_count):
        return epoch_count, epoch_step_count
    if epoch_step_count:
        epochs, rest = epoch_count, epoch_step_count
    else:
        epochs, rest = divmod(done, length)
    if done != epochs * length + rest or rest > length or epoch_count not in (0, epochs):
        raise ValueError(
            "restart counters are inconsistent: batch_count (or step_count) is "
            f"{done}, but epoch_count={epoch_count} epochs of {length} batches and "
            f"epoch_step_count={epoch_step_count} make {epoch_count * length + epoch_step_count}; "
            "set batch_count or step_count alone, or all of them to 0"
        )
    return epochs, rest


def rest_of_pass(loader: Any, done: int, length: int | None) -> Iterator[Any]:
    """Batches of the current epoch after the first `done`, which are not read where avoidable."""
    if not done:
        return iter(loader)
    if length is not None and done >= length:
        return iter(())
    if hasattr(loader, "set_epoch_step"):
        loader.set_epoch_step(done)
        return iter(loader)
    return islice(iter(loader), done, None)


def set_epoch(loader: Any, epoch: int) -> None:
    """Tell the epoch to the loader, its samplers and the samplers inside, each that asks for it."""
    batch_sampler: Any = getattr(loader, "batch_sampler", None)
    nested = getattr(batch_sampler, "sampler", None)
    targets = (getattr(loader, "sampler", None), batch_sampler, nested, loader)
    told: list[Any] = []
    for target in targets:
        tell = getattr(target, "set_epoch", None)
        if callable(tell) and all(target is not other for other in told):
            tell(epoch)
            told.append(target)
