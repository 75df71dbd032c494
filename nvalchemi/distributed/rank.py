"""One worker process as its parent sees it: spawned, given a task, listened to, ended."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from multiprocessing import connection, reduction
from typing import Any, Protocol

from nvalchemi.distributed import payload
from nvalchemi.distributed.output import LineReader
from nvalchemi.distributed.process import Ends, Task, WorkerProcess
from nvalchemi.distributed.rank_group import kill_group
from nvalchemi.distributed.rank_process import STACK_SIGNAL, live


class Output(Protocol):
    """Where the lines of ranks go."""

    def lines(self, rank: int, stream: str, lines: list[str]) -> None:
        """Take whole lines of "stdout" or "stderr"."""

    def redraw(self, rank: int, stream: str, text: str) -> None:
        """Take the present drawing of a line that is being redrawn."""

    def tick(self) -> None:
        """Do what is due; called about ten times a second."""


class Rank:
    """A spawned process that waits for a task.

    Parameters
    ----------
    environment
        Variables over this process's own.
    ahead
        Whether it is spawned before there is a task: it then imports what most functions need, and
        leaves by itself if none comes for an hour.

    Attributes
    ----------
    number : int
        Its rank; -1 until it has a task.
    control : Connection
        The pipe on which tasks go and answers come.
    result : int
        Descriptor of the payload that the rank writes its value into.
    has_ended : bool
        Whether its process has been seen to be gone.
    """

    def __init__(self, environment: dict[str, str], ahead: bool = False) -> None:
        self.number = -1
        self.has_ended = False
        self.output: Output | None = None
        self.control, control = multiprocessing.Pipe()
        self.result = payload.new_file()
        self._is_closed = False
        self._stacks, stacks = socket.socketpair()
        (out, err), (child_out, child_err) = zip(*(os.pipe() for _ in range(2)))
        theirs = (child_out, child_err, stacks.detach())
        self.readers = [self._reader(out, "stdout"), self._reader(err, "stderr")]
        self._stacks.setblocking(False)
        # Linux tells a process of the end of the thread that spawned it: only the main one stays
        parent_thread = threading.current_thread() is threading.main_thread()
        self._folder = tempfile.mkdtemp(prefix="nvalchemi-")
        ends = Ends(control, self.result, *theirs, self._folder)
        arguments = (ends, os.getpid(), parent_thread, _start_method(), ahead)
        self._process = WorkerProcess(environment, target=live, args=arguments, name="rank")
        # until the rank can answer: a Ctrl-C would print a traceback, a stack's signal would kill
        early = {signal.SIGINT, STACK_SIGNAL}
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, early)
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            control.close()
            for descriptor in theirs:
                os.close(descriptor)

    def _reader(self, descriptor: int, stream: str) -> LineReader:
        def on_lines(lines: list[str]) -> None:
            if self.output is not None:
                self.output.lines(self.number, stream, lines)

        def on_redraw(text: str) -> None:
            if self.output is not None:
                self.output.redraw(self.number, stream, text)

        return LineReader(descriptor, on_lines, on_redraw)

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def exitcode(self) -> int | None:
        """Of the process: negative for the signal that killed it, None while it lives."""
        return self._process.exitcode

    def cpu_seconds(self) -> float | None:
        """Processor time of the process so far, of all its threads; None where nobody tells."""
        fields = self._status()
        if fields is None:
            return None
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")  # utime, stime

    def is_stopped(self) -> bool:
        """Whether a signal (SIGSTOP) has stopped the process, as far as the system tells."""
        fields = self._status()
        return fields is not None and fields[0] == "T"

    def _status(self) -> list[str] | None:
        try:
            with open(f"/proc/{self.pid}/stat") as file:
                return file.read().rpartition(")")[2].split()
        except OSError:
            return None

    def give(self, number: int, task: Task, descriptor: int, output: Output) -> None:
        """Hand over the task and its payload; what the rank prints goes to ``output``."""
        self.number, self.output = number, output
        with suppress(BrokenPipeError, ConnectionResetError):  # its end will be noticed
            self.control.send(task)
            reduction.send_handle(self.control, descriptor, self.pid)

    def sources(self) -> list[Any]:
        """What ``connection.wait`` can wait on for this rank."""
        if self.has_ended:
            return []
        return [self.control, *(reader for reader in self.readers if not reader.at_end)]

    def messages(self) -> Iterator[Any]:
        """Take what the rank has sent; none when it ended in silence."""
        with suppress(EOFError, OSError):
            while self.control.poll():
                yield self.control.recv()

    def signal(self, number: int) -> None:
        """Send a signal to the rank and to all that it started."""
        try:
            if number == signal.SIGKILL:
                kill_group(self.pid)
            else:
                os.killpg(self.pid, number)
        except (ProcessLookupError, PermissionError):
            if self.exitcode is None:  # too young to have a group of its own
                os.kill(self.pid, number)

    def ask_for_stack(self, by_signal: bool = False) -> None:
        """Let the rank write its Python stack; `take_stack` reads it a moment later.

        The signal reaches one whose threads all wait for the GIL; see STACK_SIGNAL.
        """
        with suppress(OSError):
            if not by_signal:
                self._stacks.send(b"?")
            elif not self.has_ended and self.exitcode is None:
                os.kill(self.pid, STACK_SIGNAL)

    def take_stack(self) -> str:
        """Return what the rank has written of its stack, as faulthandler formats it."""
        parts = []
        with suppress(BlockingIOError, OSError):
            while part := self._stacks.recv(1 << 16):
                parts.append(part)
        return b"".join(parts).decode(errors="replace")

    def note_end(self) -> None:
        """Take the tail of what a rank that has ended had printed; end what it had started."""
        self.has_ended = True
        self.signal(signal.SIGKILL)
        for reader in self.readers:
            reader.close()

    def close(self) -> None:
        """Reap the process, which has been killed or has ended, and close what belongs to it."""
        if self._is_closed:
            return
        self._is_closed = True
        self._process.join()
        if not self.has_ended:
            self.note_end()
        self._process.close()
        self.control.close()
        self._stacks.close()
        os.close(self.result)
        shutil.rmtree(self._folder, ignore_errors=True)


def wait_for_any(ranks: Sequence[Rank], seconds: float) -> None:
    """Pass on what ranks have printed, waiting for news of any up to ``seconds``."""
    for source in connection.wait([s for rank in ranks for s in rank.sources()], seconds):
        if isinstance(source, LineReader):
            source.read()


def end_all(ranks: Sequence[Rank], steps: Sequence[tuple[int, float]]) -> None:
    """End ranks, harder and harder: signals with the seconds to wait after each, then SIGKILL."""
    living = [rank for rank in ranks if not rank.has_ended]
    try:
        for number, patience in steps:
            deadline = time.monotonic() + patience
            for rank in living:
                rank.signal(number)
            while living and time.monotonic() < deadline:
                wait_for_any(living, 0.01)
                for rank in [rank for rank in living if rank.exitcode is not None]:
                    rank.note_end()
                    living.remove(rank)
    finally:
        for rank in living:
            rank.signal(signal.SIGKILL)
        for rank in ranks:
            rank.close()


def _start_method() -> str:
    """Return how ranks start their children: as this process does, which asking does not fix."""
    chosen = multiprocessing.get_start_method(allow_none=True)
    method = chosen or multiprocessing.get_all_start_methods()[0]
    # a fork server (the default of Python 3.14 on Linux) knows none of the classes of a cell
    return "fork" if method == "forkserver" and sys.platform == "linux" else method
