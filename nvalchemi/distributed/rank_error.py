"""Whose fault it was: the one error that explains what all ranks of a call have told."""

from __future__ import annotations

import pickle
import re
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass

from nvalchemi.distributed.rank import Rank
from nvalchemi.distributed.rank_process import Failure
from nvalchemi.distributed.stacks import Stack

# what torch says on a rank whose peer has gone: never the root cause
_LOST_PEER = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|socket ?timeout|timed out"
    r"|failed to recv|remote process exited|ncclremoteerror|communicator was aborted",
    re.IGNORECASE,
)
_STAGES = {
    "load": "the function could not be loaded: ",
    "call": "",
    "return": "the value could not be sent back: ",
    "receive": "the value could not be read back: ",
    "end": "",
    "wait": "",
}


class RankError(RuntimeError):
    """A rank failed. The text starts with the rank and ends with that rank's own traceback.

    The original exception is the ``__cause__`` where it could be sent. Failures of other ranks,
    and peers that had returned already, are in the notes.

    Attributes
    ----------
    rank
        The rank that failed first; ranks that only lost their peer do not count.
    """

    def __init__(self, text: str, rank: int) -> None:
        super().__init__(text, rank)
        self.rank = rank

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass
class Call:
    """What one rank has told of the function that it was given. No failure while all is well."""

    rank: Rank
    is_calling: bool = False
    has_answered: bool = False
    answered_at: float = 0.0
    failure: Failure | None = None

    @property
    def has_returned(self) -> bool:
        """Whether the function came to its end."""
        return self.has_answered and self.failure is None

    def take(self, message: Failure | str) -> None:
        """Take what the rank has sent."""
        if message == "calling":
            self.is_calling = True
            return
        self.has_answered, self.answered_at = True, time.monotonic()
        self.failure = message if isinstance(message, Failure) else None

    def note_end(self) -> None:
        """Take the end of the process for a failure, if it had not answered."""
        if not self.has_answered:
            where = "" if self.is_calling else " while the function was being loaded"
            text = death(self.rank.exitcode) + where
            self.failure = Failure("end", text, "", time.monotonic())

    def note_wait(self, stack: Stack, gone: Sequence[Call]) -> None:
        """Take a wait for ranks that have returned for a failure."""
        names = ", ".join(str(call.rank.number) for call in gone)
        ago = time.monotonic() - max(call.answered_at for call in gone)
        text = (
            f"waits in {stack.meets} for rank{'s'[: len(gone) - 1]} {names}, which returned "
            f"{ago:.0f} s ago: a collective needs every rank, and must be called equally often on "
            "each"
        )
        self.failure = Failure("wait", text, f"{stack}\n", time.monotonic())

    @property
    def is_echo(self) -> bool:
        """Whether its failure only tells that a peer has gone."""
        return (
            self.failure is not None
            and self.failure.stage == "call"
            and bool(_LOST_PEER.search(self.failure.summary))
        )


def find_first(calls: Sequence[Call]) -> Call | None:
    """Return the call whose failure explains the others."""
    failed = [call for call in calls if call.failure is not None]
    return min(failed, key=lambda c: (c.is_echo, c.failure.time), default=None)  # type: ignore[union-attr]


def make_error(first: Call, calls: Sequence[Call]) -> RankError:
    """Return the error to raise for the first failure, with its cause and notes of the others."""
    failure, number = first.failure, first.rank.number
    assert failure is not None
    summary = failure.summary
    gone = [str(call.rank.number) for call in calls if call.has_returned]
    if gone and first.is_echo:
        summary = (
            f"lost its peer: rank{'s'[: len(gone) - 1]} {', '.join(gone)} had returned already. A "
            "collective needs every rank, and must be called equally often on each"
            f"\n\n{summary}"
        )
    text = f"rank {number}: {_STAGES[failure.stage]}{summary}"
    if failure.traceback:
        text += f"\n\nOn rank {number}:\n{failure.traceback.rstrip()}"
    error = RankError(text, number)
    error.__cause__ = _original(failure)
    for other in calls:
        if other is not first:
            error.add_note(f"rank {other.rank.number}: {_story(other)}")
    return error


def make_receive_error(number: int, trouble: BaseException) -> RankError:
    """Return the error to raise where a value arrived that can not be made again here."""
    text = f"rank {number}: {_STAGES['receive']}{type(trouble).__name__}: {trouble}"
    error = RankError(text, number)
    error.__cause__ = trouble
    return error


def death(code: int | None) -> str:
    """Say how a process ended that told nothing itself."""
    assert code is not None
    if code < 0:
        name = signal.Signals(-code).name
        return f"killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
    return f"ended with exit code {code} without returning"


def _story(call: Call) -> str:
    if call.failure is None:
        return "had returned" if call.has_answered else "was still running, and was ended"
    lines = call.failure.summary.splitlines()
    return lines[0] + (" (it lost its peer)" if call.is_echo else "")


def _original(failure: Failure) -> BaseException | None:
    if failure.exception is None:
        return None
    try:
        return pickle.loads(failure.exception)
    except Exception:
        return None  # its class lives on the rank only; its text is in ours
