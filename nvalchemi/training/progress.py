"""How far a training goes and where it goes on: counters against the length of the loader."""

import math
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
) -> int:
    """Batches of the current epoch that are done, from counters that were set by hand or restored.

    Raises
    ------
    ValueError
        If the counters contradict each other for a loader of this length.
    """
    done = batch_count or step_count
    if length is None or not (done or epoch_count or epoch_step_count):
        return epoch_step_count
    expected = epoch_count * length
    consistent = done == expected + epoch_step_count if epoch_step_count > 0 else done >= expected
    if not consistent:
        raise ValueError(
            "restart counters are inconsistent: batch_count (or step_count) is "
            f"{done}, but epoch_count={epoch_count} epochs of {length} batches and "
            f"epoch_step_count={epoch_step_count} make {expected + epoch_step_count}"
        )
    return done - expected
