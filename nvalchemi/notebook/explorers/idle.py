"""Work of a widget: the urgent part soon, the rest while the kernel is idle."""

import asyncio
from collections.abc import Callable, Iterator

SOON = 0.02  # s until a change is drawn; those that come meanwhile are drawn with it
IDLE = 0.05  # s between two pieces, in which the kernel does what it is asked


class IdleWork:
    """Runs a piece of work step by step on the event loop of the kernel, without a thread.

    A change begins the work anew, wherever it was: of the values that a slider passes through, only
    those are drawn for which there is time. Without a running loop (a script, IPython in a
    terminal) the urgent part is done at once, and the rest when `finish` is called.

    Parameters
    ----------
    work : callable
        Gives the work as an iterator of its steps; each says whether the next one is urgent.
    """

    def __init__(self, work: Callable[[], Iterator[bool]]) -> None:
        self._work = work
        self._steps: Iterator[bool] | None = None
        self._urgent = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_is_soon = False

    def begin(self) -> None:
        """Begin anew, because something has changed."""
        self._steps, self._urgent = self._work(), True
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            self.settle()
            return
        if self._timer is None or not self._timer_is_soon:
            self._schedule(loop, SOON)

    def settle(self) -> None:
        """Do the urgent part now, if it is not done."""
        while self._urgent:
            self._step()

    def finish(self) -> None:
        """Do all that is left, however long it takes."""
        while self._steps is not None:
            self._step()

    def stop(self) -> None:
        """Leave it, because nothing is shown any more."""
        self._steps, self._urgent = None, False
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None

    @property
    def is_done(self) -> bool:
        return self._steps is None

    def _schedule(self, loop: asyncio.AbstractEventLoop, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = loop.call_later(seconds, self._on_time)
        self._timer_is_soon = seconds == SOON

    def _on_time(self) -> None:
        self._timer = None
        self._step()
        if self._steps is not None and self._timer is None:
            self._schedule(asyncio.get_running_loop(), IDLE)

    def _step(self) -> None:
        steps = self._steps
        if steps is None:
            self._urgent = False
            return
        following = next(steps, None)
        if steps is not self._steps:
            return  # the step itself has changed something
        self._urgent = bool(following)
        if following is None:
            self._steps = None
