"""What the ranks did see beside what was planned; and a record as the source of a plan."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from nvalchemi.data.datapipes.order import Indices
from nvalchemi.sharding.continuity import find_breaks
from nvalchemi.sharding.iterated import Log, LoggedSource, check_inside
from nvalchemi.sharding.record import RankLog, Record, Session

if TYPE_CHECKING:
    from nvalchemi.sharding.plan import ShardPlan

SHOWN = 8  # indices of a batch in a sentence
AT_ONCE = 2**20  # samples compared at a time


@dataclass(frozen=True)
class Parting:
    """The first batch that was not as planned.

    Attributes
    ----------
    session, epoch, step, rank : int
    expected, got : int64 arrays
        Samples by plan and by record.
    hint : str
        What the samples are instead, where that can be told.
    """

    session: int
    epoch: int
    step: int
    rank: int
    expected: Indices
    got: Indices
    hint: str


@dataclass(frozen=True)
class Comparison:
    """A plan beside a record.

    Attributes
    ----------
    as_planned : bool
        Whether the batches are those of the plan, each once and none left out between.
    batches, ranks : int
        Batches compared, and ranks of the plan.
    parting : Parting or None
        The first batch that differs, by session, epoch, step, rank.
    uneven : str
        Which rank stopped before the others, if one did.
    breaks : list of str
        Steps that came again or are missing, also from a session to the next; epochs that the
        plan does not have; that nothing is recorded.
    skipped : list of int
        Sessions on other numbers of ranks, which are not compared.
    part : str
        Where the record begins and ends, if it is not the whole plan. That is no fault.
    """

    batches: int
    ranks: int
    parting: Parting | None
    uneven: str
    breaks: list[str]
    skipped: list[int]
    part: str

    @property
    def as_planned(self) -> bool:
        return self.parting is None and not self.uneven and not self.breaks

    def __str__(self) -> str:
        sentences = []
        if self.as_planned:
            sentences.append(f"as planned: {self.batches} batches on {self.ranks} ranks")
        if self.parting is not None:
            p = self.parting
            sentences.append(
                f"not as planned from epoch {p.epoch}, step {p.step}, rank {p.rank} on (session "
                f"{p.session}): expected {shorten(p.expected)}, got {shorten(p.got)}{p.hint}"
            )
        if self.breaks:
            sentences.append("not as planned: " + ", ".join(self.breaks))
        if self.uneven:
            sentences.append(self.uneven)
        if self.part:
            sentences.append(self.part)
        if self.skipped:
            sentences.append(f"not compared, on other numbers of ranks: sessions {self.skipped}")
        return "; ".join(sentences)


def shorten(indices: Indices) -> str:
    shown = ", ".join(str(i) for i in indices[:SHOWN].tolist())
    return f"[{shown}, ... {indices.size} in all]" if indices.size > SHOWN else f"[{shown}]"


def compare_record(plan: "ShardPlan", record: Record) -> Comparison:
    """Compare all sessions that ran on as many ranks as the plan has."""
    sizes = [session.world_size for session in record.sessions]
    if plan.world_size not in sizes:
        raise ValueError(
            f"a record must be of as many ranks as the plan: the plan has {plan.world_size}, the "
            f"record {sorted(set(sizes))}"
        )
    same = {n: s for n, s in enumerate(record.sessions) if s.world_size == plan.world_size}
    partings = (find_parting(plan, number, session) for number, session in same.items())
    unevens = (find_uneven(number, session) for number, session in same.items())
    return Comparison(
        batches=sum(len(log) for session in same.values() for log in session.ranks),
        ranks=plan.world_size,
        parting=next((parting for parting in partings if parting is not None), None),
        uneven=next(filter(None, unevens), ""),
        breaks=find_breaks(plan, same),
        skipped=[n for n in range(len(sizes)) if n not in same],
        part=find_part(plan, list(same.values()), len(same) < len(sizes)),
    )


def find_part(plan: "ShardPlan", sessions: list[Session], skipped: bool) -> str:
    """Where batches begin and end, unless those are the first and the last step of the plan."""
    logs = [log for session in sessions for log in session.ranks if len(log)]
    if not logs:
        return ""
    first, last = end_step(logs, 0), end_step(logs, -1)
    final = plan.epochs - 1, plan.num_steps(plan.epochs - 1) - 1
    ends = []
    if first > (0, 0):
        ends.append(f"begins at epoch {first[0]}, step {first[1]}")
    if last < final:
        ends.append(
            f"ends with epoch {last[0]}, step {last[1]}, of a plan up to epoch {final[0]}, step "
            f"{final[1]}"
        )
    what = "what is compared" if skipped else "the record"
    return f"{what} {' and '.join(ends)}" if ends else ""


def end_step(logs: list[RankLog], end: int) -> tuple[int, int]:
    """The first (0) or last (-1) epoch and step of all ranks."""
    steps = [np.lexsort((log.steps, log.epochs))[end] for log in logs]
    found = sorted((int(log.epochs[at]), int(log.steps[at])) for log, at in zip(logs, steps))
    return found[end]


def find_uneven(number: int, session: Session) -> str:
    lengths = [len(log) for log in session.ranks]
    if min(lengths) == max(lengths):
        return ""
    short = int(np.argmin(lengths))
    return (
        f"rank {short} has {lengths[short]} batches in session {number} and others up to "
        f"{max(lengths)} (a killed run may lack the last of each rank)"
    )


def find_parting(plan: "ShardPlan", number: int, session: Session) -> Parting | None:
    """The first batch by epoch, step and rank that differs from the plan."""
    found = [first_difference(plan, rank, log) for rank, log in enumerate(session.ranks)]
    differing = [
        (int(log.epochs[at]), int(log.steps[at]), rank, at)
        for rank, (log, at) in enumerate(zip(session.ranks, found))
        if at is not None
    ]
    if not differing:
        return None
    epoch, step, rank, at = min(differing)
    got = session.ranks[rank].batch(at)
    expected = planned_batch(plan, rank, step, epoch)
    return Parting(number, epoch, step, rank, expected, got, explain(plan, epoch, step, rank, got))


def first_difference(plan: "ShardPlan", rank: int, log: RankLog) -> int | None:
    """Number of the first batch of a rank that is not that of the plan."""
    at_once = max(1, AT_ONCE // plan.batch_size)
    for start in range(0, len(log), at_once):
        part = slice(start, start + at_once)
        differs = np.zeros(len(log.epochs[part]), dtype=bool)
        for epoch in np.unique(log.epochs[part]).tolist():
            here = np.flatnonzero(log.epochs[part] == epoch)
            differs[here] = compare_batches(plan, rank, epoch, log, start + here)
        if differs.any():
            return start + int(differs.argmax())
    return None


def compare_batches(
    plan: "ShardPlan", rank: int, epoch: int, log: RankLog, numbers: Indices
) -> Indices:
    """Which of the batches `numbers` of an epoch differ from the plan."""
    planned = plan.source.window(log.steps[numbers], np.array([rank]), epoch)[:, 0]
    slots = np.arange(planned.shape[1])
    sizes = log.offsets[numbers + 1] - log.offsets[numbers]
    filled = slots < sizes[:, None]
    got = np.full(planned.shape, -1, dtype=np.int64)
    got[filled] = log.indices[(log.offsets[numbers][:, None] + slots)[filled]]
    return (got != planned).any(axis=1) | (sizes > planned.shape[1])


def planned_batch(plan: "ShardPlan", rank: int, step: int, epoch: int) -> Indices:
    row = plan.source.window(np.array([step]), np.array([rank]), epoch)[0, 0]
    return row[row >= 0]


def explain(plan: "ShardPlan", epoch: int, step: int, rank: int, got: Indices) -> str:
    """Say what the samples are instead, for the faults that are seen most."""
    if step >= plan.num_steps(epoch):
        return f"; the plan has {plan.num_steps(epoch)} steps in an epoch"
    expected = planned_batch(plan, rank, step, epoch)
    if np.array_equal(np.sort(expected), np.sort(got)):
        return "; these are the same samples in another order"
    for earlier in {0, max(0, epoch - 1)} - {epoch}:
        if np.array_equal(planned_batch(plan, rank, step, earlier), got):
            return f"; that is what epoch {earlier} has there: set_epoch({epoch}) was not called"
    everyone = plan.source.window(np.array([step]), np.arange(plan.world_size), epoch)[0]
    for other, row in enumerate(everyone):
        if other != rank and np.array_equal(row[row >= 0], got):
            return f"; that is the batch of rank {other}: both ranks train on the same samples"
    return ""


class RecordedSource(LoggedSource):
    """A session of a record in the place of a sampler, so that a plan can say what was wrong."""

    def __init__(self, session: Session, number_of_samples: int) -> None:
        self.name = "record"
        self.world_size = session.world_size
        self._session = session
        self._logs: dict[tuple[int, int], Log] = {}
        for rank, ranks_log in enumerate(session.ranks):
            check_inside(ranks_log.indices, number_of_samples, f"the record of rank {rank}")
        self.batch_size = max(int(np.diff(log.offsets).max(initial=1)) for log in session.ranks)

    @property
    def epochs(self) -> Indices:
        """Epochs that the session has batches of."""
        return np.unique(np.concatenate([log.epochs for log in self._session.ranks]))

    def log(self, rank: int, epoch: int) -> Log:
        key = (rank, epoch)
        if key not in self._logs:
            whole = self._session.ranks[rank]
            batches = [whole.batch(int(n)) for n in np.flatnonzero(whole.epochs == epoch)]
            sizes = [batch.size for batch in batches]
            indices = np.concatenate(batches) if batches else np.empty(0, dtype=np.int64)
            self._logs[key] = (indices, np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64))
        return self._logs[key]

    def settings(self) -> str:
        return self.name
