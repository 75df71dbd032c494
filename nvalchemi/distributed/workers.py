"""Worker processes: spawn them, give them a function by value, drain their output, end them.

The caller's thread does all of it, so nothing is left behind in the caller: no thread, no process,
no signal handler, no environment variable.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing import connection
from typing import Any

from nvalchemi.distributed import payload
from nvalchemi.distributed.output import LineReader
from nvalchemi.distributed.process import Ends, WorkerProcess
from nvalchemi.distributed.rank_process import Failure, live

OnLine = Callable[[int, str, str], None]
"""Called with (rank, "stdout" or "stderr", line)."""

_TICK = 0.1  # s; how often deaths are looked for that nothing announces
_PATIENCE = 1.0  # s; how long a rank that lost its peer waits for that peer's own story
_FAREWELL = 5.0  # s; how long a rank that has answered may take to flush and leave
_INTERRUPT = ((signal.SIGINT, 0.5), (signal.SIGTERM, 0.5))
_TERMINATE = ((signal.SIGTERM, 0.3),)

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
class _Worker:
    """One worker as its parent sees it. ``failure`` is None while all is well."""

    rank: int
    process: WorkerProcess
    control: connection.Connection
    result: int
    readers: list[LineReader]
    has_answered: bool = False
    has_ended: bool = False
    is_closed: bool = False
    failure: Failure | None = None

    def signal(self, number: int) -> None:
        """Send a signal to the worker and to all that it started."""
        pid = self.process.pid
        if pid is None:
            return
        try:
            os.killpg(pid, number)
        except (ProcessLookupError, PermissionError):
            if self.process.exitcode is None:  # too young to have a group of its own
                os.kill(pid, number)

    def notice(self) -> None:
        """Take the answer if there is one, and note the end if it has come."""
        if self.has_ended:
            return
        ended = self.process.exitcode is not None
        self._take_answer()
        if not ended:
            return
        self.has_ended = True
        self.signal(signal.SIGKILL)  # what it started and did not wait for
        if not self.has_answered:
            self.failure = Failure("end", _death(self.process.exitcode), "", time.monotonic())
        for reader in self.readers:
            reader.close()

    def _take_answer(self) -> None:
        try:
            while not self.has_answered and self.control.poll():
                self.failure = self.control.recv()
                self.has_answered = True
        except (EOFError, OSError):
            pass  # it ended in silence

    def close(self) -> None:
        """Reap the process, which has been killed or has ended, and close what belongs to it."""
        if self.is_closed:
            return
        self.is_closed = True
        if self.process.pid is not None:
            self.process.join()
            self.notice()
            self.process.close()
        self.control.close()
        for reader in self.readers:
            reader.close()


@dataclass
class WorkerGroup:
    """Ranks that run one function once.

    Parameters
    ----------
    task
        Descriptor of a payload: (function, args, kwargs, entries for linecache).
    environments
        The variables to set on each rank; one rank is started for each.
    on_line
        Called from :meth:`run` with each line that a rank prints.
    """

    task: int
    environments: Sequence[dict[str, str]]
    on_line: OnLine
    _workers: list[_Worker] = field(default_factory=list)
    _first: _Worker | None = None

    def run(self, timeout: float | None = None) -> list[Any]:
        """Start the ranks, wait for them and return their values; afterwards none is left.

        Raises
        ------
        RankError
            As soon as a rank has failed; the others are ended.
        TimeoutError
            If a rank has not answered after ``timeout`` seconds; all are ended.
        KeyboardInterrupt
            When it comes; all are ended, within a second and a half.
        """
        try:
            for rank in range(len(self.environments)):
                self._start(rank)
            self._wait(timeout)
            self._end(_TERMINATE)
            return self._values()
        finally:
            self._end(_INTERRUPT)
            for worker in self._workers:
                os.close(worker.result)

    def _start(self, rank: int) -> None:
        here, there = multiprocessing.Pipe()
        out, child_out = os.pipe()
        err, child_err = os.pipe()
        result = payload.new_file()
        ends = Ends(there, self.task, result, child_out, child_err)
        arguments = (ends, os.getpid(), _start_method())
        process = WorkerProcess(
            self.environments[rank], target=live, args=arguments, name=f"rank {rank}"
        )
        readers = [
            LineReader(out, lambda line: self.on_line(rank, "stdout", line)),
            LineReader(err, lambda line: self.on_line(rank, "stderr", line)),
        ]
        self._workers.append(_Worker(rank, process, here, result, readers))
        # a Ctrl-C while Python starts would only print a traceback; the rank unblocks it
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            there.close()
            os.close(child_out)
            os.close(child_err)

    def _wait(self, timeout: float | None) -> None:
        """Wait until every rank has ended, or one has failed and its peers had time to explain."""
        deadline = None if timeout is None else time.monotonic() + timeout
        last_word: float | None = None
        while not all(worker.has_ended for worker in self._workers):
            self._pump(_TICK)
            now = time.monotonic()
            late = [str(w.rank) for w in self._workers if not (w.has_answered or w.has_ended)]
            self._first = self._find_first()
            if self._first is not None:
                last_word = last_word or now + _PATIENCE
                if not _is_echo(self._first) or now > last_word:
                    return
            elif not late:
                last_word = last_word or now + _FAREWELL
                if now > last_word:
                    return
            elif deadline is not None and now > deadline:
                raise TimeoutError(
                    f"launch() ended the ranks after {timeout:g} s: "
                    f"rank{'s' if len(late) > 1 else ''} {', '.join(late)} had not returned"
                )

    def _find_first(self) -> _Worker | None:
        """Return the worker whose failure explains the others."""
        failed = [w for w in self._workers if w.failure is not None]
        return min(failed, key=lambda w: (_is_echo(w), w.failure.time), default=None)  # type: ignore[union-attr]

    def _pump(self, seconds: float) -> None:
        """Pass on what has come, waiting for it up to ``seconds``."""
        living = [worker for worker in self._workers if not worker.has_ended]
        sources: list[Any] = [r for w in living for r in w.readers if not r.at_end]
        sources += [worker.control for worker in living if not worker.has_answered]
        for source in connection.wait(sources, seconds):
            if isinstance(source, LineReader):
                source.read()
        for worker in living:
            worker.notice()

    def _end(self, steps: Sequence[tuple[int, float]]) -> None:
        """End every rank that lives, harder and harder, and close all that belongs to them."""
        try:
            for number, patience in steps:
                self._signal(number)
                deadline = time.monotonic() + patience
                while self._are_alive() and time.monotonic() < deadline:
                    self._pump(0.01)
        finally:
            self._signal(signal.SIGKILL)
            for worker in self._workers:
                worker.close()

    def _are_alive(self) -> bool:
        return any(not w.is_closed and w.process.pid and not w.has_ended for w in self._workers)

    def _signal(self, number: int) -> None:
        for worker in self._workers:
            if not (worker.is_closed or worker.has_ended):
                worker.signal(number)

    def _values(self) -> list[Any]:
        if self._first is not None:
            raise self._error(self._first) from _original(self._first)
        values = []
        for worker in self._workers:
            try:
                values.append(payload.load(worker.result))
            except Exception as error:
                text = f"rank {worker.rank}: {_STAGES['receive']}{type(error).__name__}: {error}"
                raise RankError(text, worker.rank) from error
        return values

    def _error(self, worker: _Worker) -> RankError:
        failure = worker.failure
        assert failure is not None
        text = f"rank {worker.rank}: {_STAGES[failure.stage]}{failure.summary}"
        gone = [str(w.rank) for w in self._workers if w.has_answered and w.failure is None]
        if gone and _is_echo(worker):
            text += (
                f"\n\nrank{'s'[: len(gone) - 1]} {', '.join(gone)} had returned already: a "
                "collective needs every rank, and must be called equally often on each"
            )
        if failure.traceback:
            text += f"\n\nOn rank {worker.rank}:\n{failure.traceback.rstrip()}"
        error = RankError(text, worker.rank)
        for other in self._workers:
            if other is not worker and other.has_answered:
                story = "had returned" if other.failure is None else other.failure.summary
                error.add_note(f"rank {other.rank}: {story.splitlines()[0]}")
        return error


def _start_method() -> str:
    """Return how ranks start their children: as this process does, which asking does not fix."""
    chosen = multiprocessing.get_start_method(allow_none=True)
    method = chosen or multiprocessing.get_all_start_methods()[0]
    # a fork server (the default of Python 3.14 on Linux) knows none of the classes of a cell
    return "fork" if method == "forkserver" and sys.platform == "linux" else method


def _death(code: int | None) -> str:
    assert code is not None
    if code < 0:
        name = signal.Signals(-code).name
        return f"killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
    return f"ended with exit code {code} without returning"


def _is_echo(worker: _Worker) -> bool:
    failure = worker.failure
    return (
        failure is not None and failure.stage == "call" and bool(_LOST_PEER.search(failure.summary))
    )


def _original(worker: _Worker) -> BaseException | None:
    assert worker.failure is not None
    if worker.failure.exception is None:
        return None
    try:
        return pickle.loads(worker.failure.exception)
    except Exception:
        return None  # its class lives on the rank only; its text is in ours
