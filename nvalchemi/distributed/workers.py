"""A group of ranks that run one function once: started, listened to, and ended together.

The caller's thread does all of it, so nothing is left behind in the caller: no thread, no process,
no signal handler, no environment variable.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from nvalchemi.distributed import payload
from nvalchemi.distributed.process import Task
from nvalchemi.distributed.rank import Output, Rank, end_all, wait_for_any
from nvalchemi.distributed.rank_error import Call, find_first, make_error, make_receive_error
from nvalchemi.distributed.stacks import read_stacks
from nvalchemi.distributed.watch import Watch

_TICK = 0.1  # s; how often deaths are looked for that nothing announces
_PATIENCE = 1.0  # s; how long a rank that lost its peer waits for that peer's own story
_FAREWELL = 5.0  # s; how long a rank that has answered may take to flush and leave
INTERRUPT = [(signal.SIGINT, 0.5), (signal.SIGTERM, 0.5)]
"""How ranks are ended: signals, with the seconds to wait after each, before SIGKILL."""

_TERMINATE = [(signal.SIGTERM, 0.3)]  # after a failure: the others have nothing to save


class Stopped(RuntimeError):
    """The ranks were ended because somebody asked for it."""


class WorkerGroup:
    """Ranks that run one function once.

    Parameters
    ----------
    ranks
        Processes that wait for a task.
    tasks
        One for each of them.
    descriptor
        Of a payload: (function, args, kwargs, entries for linecache).
    output
        Takes what the ranks print.
    watch
        Looks for ranks that hang.

    Attributes
    ----------
    on_tick
        Called about ten times a second while they run.
    """

    def __init__(
        self,
        ranks: Sequence[Rank],
        tasks: Sequence[Task],
        descriptor: int,
        output: Output,
        watch: Watch,
    ) -> None:
        self.on_tick: Callable[[], None] = lambda: None
        self._output = output
        self._ranks = list(ranks)
        self._calls = [Call(rank) for rank in ranks]
        self._watch = watch
        self._stop = threading.Event()
        for number, (rank, task) in enumerate(zip(ranks, tasks)):
            rank.give(number, task, descriptor, self)

    def lines(self, rank: int, stream: str, lines: list[str]) -> None:
        """Pass on what a rank has printed."""
        self._watch.hear()
        self._output.lines(rank, stream, lines)

    def redraw(self, rank: int, stream: str, text: str) -> None:
        """Pass on the drawing of a line that is not finished."""
        self._watch.hear()
        self._output.redraw(rank, stream, text)

    def tick(self) -> None:
        """Do what is due."""
        self._output.tick()
        self.on_tick()

    def stop(self) -> None:
        """Let `run`, in another thread, end the ranks and raise `Stopped`."""
        self._stop.set()

    def run(self, timeout: float | None = None) -> list[Any]:
        """Wait for the ranks and return their values; afterwards none is left.

        Raises
        ------
        RankError
            As soon as a rank has failed; the others are ended.
        TimeoutError
            If a rank has not answered after ``timeout`` seconds; all are ended.
        Stopped
            After `stop`; all are ended.
        KeyboardInterrupt
            When it comes; all are ended, within a second and a half.
        """
        steps = INTERRUPT
        try:
            self._wait(timeout)
            first = find_first(self._calls)
            steps = _TERMINATE
            if first is not None:
                error = make_error(first, self._calls)
                raise error from error.__cause__
            return self._values()
        finally:
            end_all(self._ranks, steps)

    def _wait(self, timeout: float | None) -> None:
        """Wait until every rank has ended, or one has failed and its peers had time to explain."""
        deadline = None if timeout is None else time.monotonic() + timeout
        last_word: float | None = None
        while not all(rank.has_ended for rank in self._ranks):
            wait_for_any(self._ranks, _TICK)
            self._listen()
            self.tick()
            if self._stop.is_set():
                raise Stopped("the launch was stopped: its ranks were ended")
            now = time.monotonic()
            late = [c for c in self._calls if not (c.has_answered or c.rank.has_ended)]
            first = find_first(self._calls)
            if first is not None:
                last_word = last_word or now + _PATIENCE
                if not first.is_echo or now > last_word:
                    return
            elif not late:
                last_word = last_word or now + _FAREWELL
                if now > last_word:
                    return
            elif deadline is not None and now > deadline:
                names = ", ".join(str(call.rank.number) for call in late)
                places = (
                    f"rank {c.rank.number} stood at\n{stack}"
                    for c, stack in zip(late, read_stacks([call.rank for call in late]))
                )
                raise TimeoutError(
                    f"launch() ended the ranks after {timeout:g} s: "
                    f"rank{'s' if len(late) > 1 else ''} {names} had not returned\n"
                    + "\n".join(places)
                )
            else:
                self._look_at(late)

    def _listen(self) -> None:
        """Take the answers that there are, and note the ends that have come."""
        for call in self._calls:
            if call.rank.has_ended:
                continue
            has_ended = call.rank.exitcode is not None  # before its last words are read
            for message in call.rank.messages():
                self._watch.hear()
                call.take(message)
            if has_ended:
                call.rank.note_end()
                call.note_end()

    def _look_at(self, late: list[Call]) -> None:
        self._watch.tell_of_stopped([call.rank for call in late])
        returned = [call for call in self._calls if call.has_returned]
        started = all(call.is_calling for call in late)
        stacks = self._watch.look([call.rank for call in late], started, bool(returned))
        for call, stack in zip(late, stacks or ()):
            call.note_wait(stack, returned)

    def _values(self) -> list[Any]:
        values = []
        for rank in self._ranks:
            try:
                values.append(payload.load(rank.result))
            except (Exception, SystemExit) as error:
                raise make_receive_error(rank.number, error) from error
        return values
