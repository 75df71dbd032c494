"""A launch that runs in the background: watched, waited for, stopped."""

from __future__ import annotations

import contextvars
import threading
import time
from contextlib import ExitStack
from numbers import Integral, Real

from nvalchemi.distributed.workers import Stopped, WorkerGroup
from nvalchemi.notebook.cell_names import cells_by_number
from nvalchemi.notebook.results import RankResults
from nvalchemi.notebook.show import RankOutput
from nvalchemi.notebook.status import LaunchStatus


class LaunchHandle:
    """What ``launch(..., block=False)`` returns while the ranks run.

    A rank that fails is shown at once; :meth:`wait` raises its error.
    """

    def __init__(
        self,
        group: WorkerGroup,
        output: RankOutput,
        nprocs: int,
        timeout: float | None,
        resources: ExitStack,
    ) -> None:
        self.nprocs = nprocs
        self.error: BaseException | None = None
        self._results: RankResults | None = None
        self._group, self._output, self._resources = group, output, resources
        self._began = time.monotonic()
        self._ended: float | None = None
        self._status = LaunchStatus(self)
        group.on_tick = self._status.update
        # a daemon: a kernel that closes does not wait for a training, whose ranks end with it
        # in this context, so that what is shown appears under this cell, whatever runs meanwhile
        run = contextvars.copy_context().run
        self._thread = threading.Thread(
            target=run, args=(self._run, timeout), name="launch", daemon=True
        )
        self._done = threading.Event()  # an interrupted join() takes a thread for ended
        self._thread.start()

    def _run(self, timeout: float | None) -> None:
        try:
            with self._resources, cells_by_number():
                self._results = RankResults(self._group.run(timeout))
        except BaseException as error:
            self.error = error
        finally:
            self._ended = time.monotonic()
            self._status.finish()
            self._done.set()

    @property
    def running(self) -> bool:
        """Whether ranks are alive."""
        return self._ended is None

    @property
    def state(self) -> str:
        """One of "running", "done", "failed" and "stopped"."""
        if self.running:
            return "running"
        if self.error is None:
            return "done"
        return "stopped" if isinstance(self.error, Stopped) else "failed"

    @property
    def seconds(self) -> float:
        """How long it has run, or ran."""
        return (self._ended or time.monotonic()) - self._began

    def wait(self, timeout: float | None = None) -> RankResults:
        """Wait for the end and return what each rank returned.

        Parameters
        ----------
        timeout
            Seconds to wait at most; the ranks go on after it.

        Raises
        ------
        RankError, TimeoutError
            As ``launch`` does. TimeoutError also if the ranks are still running after ``timeout``.
        Stopped
            If they were stopped.
        KeyboardInterrupt
            When it comes; the ranks go on.
        """
        if timeout is not None and (
            isinstance(timeout, bool) or not isinstance(timeout, Real) or not float(timeout) >= 0
        ):
            raise ValueError(f"timeout must be a number of seconds >= 0, or None: {timeout!r}")
        if not self._done.wait(None if timeout is None else float(timeout)):
            raise TimeoutError(
                f"the ranks are still running after {timeout} s of waiting: call wait() again, "
                "or stop()"
            )
        if self.error is not None:
            raise self.error.with_traceback(None)  # where the ranks were awaited tells nothing
        assert self._results is not None
        return self._results

    def stop(self) -> None:
        """End the ranks as an interrupt does, and return when none is left."""
        self._group.stop()
        self._done.wait()

    def output(self, rank: int) -> str:
        """Return all that a rank has printed so far."""
        if isinstance(rank, bool) or not isinstance(rank, Integral):
            raise TypeError(f"rank must be an integer: {rank!r}")
        if not 0 <= rank < self.nprocs:
            raise ValueError(f"rank must be in 0..{self.nprocs - 1}: {rank}")
        return self._output.text(rank)

    def last_lines(self) -> list[str]:
        """Return the last line of each rank."""
        return self._output.last_lines()

    def __repr__(self) -> str:
        ranks = f"{self.nprocs} rank{'s' if self.nprocs > 1 else ''}"
        return f"<launch of {ranks}: {self.state}, {self.seconds:.0f} s>"
