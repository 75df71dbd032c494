"""Whether the recorded steps follow one another: none again, none missing, none after the plan."""

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from nvalchemi.data.datapipes.order import Indices
from nvalchemi.sharding.record import Session

if TYPE_CHECKING:
    from nvalchemi.sharding.plan import ShardPlan


def find_breaks(plan: "ShardPlan", sessions: dict[int, Session]) -> list[str]:
    """Sentences about steps that came again or are missing, by the numbers of the sessions.

    Steps of an epoch follow one another, and the first of an epoch the last of the one before,
    within a session and from each to the next. What sessions on other numbers of ranks may have
    done in between is not called missing.
    """
    epochs = [log.epochs for session in sessions.values() for log in session.ranks if len(log)]
    if not epochs:
        return ["no batches are recorded"]
    first, last = min(int(e.min()) for e in epochs), max(int(e.max()) for e in epochs)
    sentences = []
    if last >= plan.epochs:
        sentences.append(f"epoch {last} is recorded and the plan has {plan.epochs} (epochs=)")
    lengths = [plan.num_steps(epoch) for epoch in range(first, last + 1)]
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    told: dict[str, list[int]] = {}
    for rank in range(plan.world_size):
        for sentence in breaks_of_rank(sessions, rank, starts, first):
            told.setdefault(sentence, []).append(rank)
    for sentence, ranks in told.items():
        whose = "" if len(ranks) == plan.world_size else f" of rank {ranks[0]}"
        more = f" and {len(ranks) - 1} more" if whose and len(ranks) > 1 else ""
        sentences.append(sentence + whose + more)
    return sentences


def breaks_of_rank(
    sessions: dict[int, Session], rank: int, starts: Indices, first_epoch: int
) -> list[str]:
    logs = [session.ranks[rank] for session in sessions.values()]
    numbers = np.repeat(list(sessions), [len(log) for log in logs])
    epochs = np.concatenate([log.epochs for log in logs])
    steps = np.concatenate([log.steps for log in logs])
    places = starts[epochs - first_epoch] + steps
    if not places.size:
        return []
    different, at = np.unique(places, return_index=True)
    sentences = []
    if different.size < places.size:
        repeats = np.ones(places.size, dtype=bool)
        repeats[at] = False
        i = int(repeats.argmax())
        sentences.append(
            f"{count(places.size - different.size)} again, the first in session {numbers[i]} at "
            f"epoch {epochs[i]}, step {steps[i]}"
        )
    gaps = np.diff(different) - 1
    # sessions that are not compared may have filled a gap between those that are
    gaps[skips_session(numbers[at], sessions)] = 0
    if gaps.any():
        i = at[int((gaps > 0).argmax())]
        sentences.append(
            f"{count(int(gaps.sum()))} missing, the first after epoch {epochs[i]}, step "
            f"{steps[i]} in session {numbers[i]}"
        )
    backwards = np.diff(places) < 0
    if not sentences and backwards.any():
        i = int(backwards.argmax()) + 1
        sentences.append(
            f"steps out of their order, the first in session {numbers[i]} at epoch {epochs[i]}, "
            f"step {steps[i]}"
        )
    return sentences


def skips_session(numbers: Indices, sessions: dict[int, Session]) -> NDArray[np.bool_]:
    """Whether between each two of the session numbers lies one that is not in `sessions`."""
    skipped = np.setdiff1d(np.arange(max(sessions) + 1), list(sessions))
    before = np.searchsorted(skipped, numbers)
    filled: NDArray[np.bool_] = np.diff(before) > 0
    return filled


def count(steps: int) -> str:
    return f"{steps} step{'s' if steps != 1 else ''}"
