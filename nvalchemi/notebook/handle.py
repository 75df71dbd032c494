"""A launch that runs in the background: watched, waited for, stopped."""

from __future__ import annotations

import contextvars
import threading
import time
from contextlib import ExitStack

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
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimeoutError(
                f"the ranks are still running after {timeout:g} s of waiting: call wait() again, "
                "or stop()"
            )
        if self.error is not None:
            raise self.error
        assert self._results is not None
        return self._results

    def stop(self) -> None:
        """End the ranks as an interrupt does, and return when none is left."""
        self._group.stop()
        self._thread.join()

    def output(self, rank: int) -> str:
        """Return all that a rank has printed so far."""
        return self._output.text(rank)

    def last_lines(self) -> list[str]:
        """Return the last line of each rank."""
        return self._output.last_lines()

    def __repr__(self) -> str:
        ranks = f"{self.nprocs} rank{'s' if self.nprocs > 1 else ''}"
        return f"<launch of {ranks}: {self.state}, {self.seconds:.0f} s>"
