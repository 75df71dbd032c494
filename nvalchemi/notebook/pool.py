"""WorkerPool: ranks that stay alive from call to call, with what they have loaded."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from types import TracebackType
from typing import Any, Literal, overload

from nvalchemi.distributed import origins, rank_pool, standby
from nvalchemi.distributed.rank_error import RankError, death
from nvalchemi.distributed.rank_process import is_worker
from nvalchemi.distributed.serving import ServingRanks
from nvalchemi.notebook.cell_code import (
    check_code,
    check_expression,
    check_names,
    choose_ranks,
)
from nvalchemi.notebook.cell_names import cells_by_number
from nvalchemi.notebook.devices import PER_LAUNCH, lay_out
from nvalchemi.notebook.meeting import meeting_point
from nvalchemi.notebook.packing import pack
from nvalchemi.notebook.pool_status import PoolStatus, RankStatus
from nvalchemi.notebook.results import RankResults
from nvalchemi.notebook.show import RankOutput

Mode = Literal["stream", "rank0", "quiet"]
_newest: weakref.ref[WorkerPool] | None = None


def newest_pool() -> WorkerPool | None:
    """Return the pool that was made last, if it is open."""
    pool = None if _newest is None else _newest()
    return None if pool is None or pool.closed else pool


class WorkerPool:
    """Ranks that stay alive from call to call, until the pool is closed, deleted or out of scope.

    Each rank keeps a namespace of its own, and all share one process group, which
    ``DistributedManager.initialize()`` adopts. They start in the background: the first call waits
    for them. What a call prints is shown while it runs, marked by rank.

    A rank that raises leaves all of them as they are, as long as they can still communicate. If
    one has died, or stands in a collective that nobody will complete, all are restarted, which the
    error says: their namespaces are empty then. So does an interrupt of a call.

    Parameters
    ----------
    nprocs, devices, backend, env, threads
        As for `launch`: by default a rank per GPU, or 2 on the CPU.
    output
        Show what every rank prints ("stream"), rank 0 only ("rank0"), or nothing ("quiet").

    Raises
    ------
    TypeError, ValueError
        If an argument is wrong; no process has been started then.

    Examples
    --------
    >>> with WorkerPool(nprocs=2) as pool:
    ...     pool.push(rate=0.1)
    ...     pool.execute("import os; scaled = rate * int(os.environ['RANK'])")
    ...     print(list(pool.pull("scaled")))
    [0.0, 0.1]
    """

    def __init__(
        self,
        nprocs: int | None = None,
        devices: Any = None,
        backend: str | None = None,
        env: Mapping[str, str] | None = None,
        threads: int | None = None,
        output: Mode = "stream",
    ) -> None:
        global _newest
        if is_worker():
            raise RuntimeError(
                "WorkerPool() was called on a rank, or while a child process imports this module: "
                "ranks cannot start ranks. In a file, put it under if __name__ == '__main__':"
            )
        if output not in ("stream", "rank0", "quiet"):
            raise ValueError(f"output must be 'stream', 'rank0' or 'quiet': {output!r}")
        self._layout = lay_out(nprocs, devices, backend, threads, env)
        self._mode = output
        self._lock = threading.RLock()
        self._classes: dict[int, tuple[str, type]] = {}  # by id: what ranks may send back
        self._cells = 0
        self._doing = ""
        self._ranks: ServingRanks | None = None
        self.closed = False
        self._resources = ExitStack()  # the ranks, then the store where they met
        self._finalizer = weakref.finalize(self, self._resources.close)
        self._start()
        _newest = weakref.ref(self)
        if output != "quiet":
            print(self._layout)

    @property
    def nprocs(self) -> int:
        """Number of ranks."""
        return self._layout.nprocs

    def run(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> RankResults:
        """Run ``fn(*args, **kwargs)`` on every rank and return what each returned.

        The function travels by value each time, so an edited cell needs nothing. Names that it
        does not bring along it finds in the ranks' namespaces, and what it declares ``global``
        stays there.

        Raises
        ------
        RankError
            If a rank fails: its text has the rank, the exception and the rank's own traceback, its
            ``__cause__`` is the original exception.
        TypeError
            If ``fn`` is no function, or something in the call cannot be sent.
        KeyboardInterrupt
            When it comes; the ranks are interrupted, too.
        """
        __tracebackhide__ = True  # the user's frames are those on the rank
        if not callable(fn):
            raise TypeError(f"run() needs a function as its first argument: {fn!r}")
        name = getattr(fn, "__qualname__", type(fn).__qualname__)
        return RankResults(self._ask(f"{name}()", fn, args, kwargs))

    def execute(
        self, code: str, ranks: Sequence[int] | None = None, filename: str | None = None
    ) -> None:
        """Run source text in the namespaces, and show the value of its last expression.

        Parameters
        ----------
        code
            Plain Python.
        ranks
            On which ranks; by default on all. A collective needs all of them.
        filename
            What tracebacks call the text.

        Raises
        ------
        TypeError, SyntaxError, ValueError
            If the text is no plain Python, or a rank is not there; nothing has run then.
        RankError, KeyboardInterrupt
            As from `run`.
        """
        __tracebackhide__ = True
        chosen = choose_ranks(ranks, self.nprocs)
        filename = f"<ranks {self._cells + 1}>" if filename is None else filename
        check_code(code, filename)
        self._cells += 1
        self._ask(filename.strip("<>"), rank_pool.execute, (code, filename), {}, chosen)

    @overload
    def pull(self, name: str, ranks: None = None) -> RankResults: ...
    @overload
    def pull(self, name: str, ranks: Sequence[int]) -> dict[int, Any]: ...
    def pull(self, name: str, ranks: Sequence[int] | None = None) -> RankResults | dict[int, Any]:
        """Return what a name, or an expression of names, is in each rank's namespace.

        With ``ranks`` only those are asked, and the values are in a dictionary by rank. CUDA
        tensors arrive on the CPU.
        """
        __tracebackhide__ = True
        check_expression(name)
        chosen = choose_ranks(ranks, self.nprocs)
        values = self._ask(f"pull({name!r})", rank_pool.pull, (name,), {}, chosen)
        return RankResults(values) if ranks is None else dict(zip(chosen, values))

    def push(self, /, **values: Any) -> None:
        """Put values into the namespace of every rank, each under its name."""
        __tracebackhide__ = True
        check_names(values)
        self._ask("push()", rank_pool.push, (), values)

    def status(self) -> PoolStatus:
        """Say of each rank whether it lives, what it does and since when, and what it takes."""
        ranks, now = self._ranks, time.monotonic()
        if ranks is None:
            return PoolStatus(())
        found = []
        for rank in ranks.ranks:
            since = ranks.busy.get(rank.number)
            code = rank.exitcode
            if code is not None:
                state = "dead: " + death(code)
            elif rank.is_stopped():
                state = f"stopped by a signal (SIGSTOP): kill -CONT {rank.pid} lets it go on"
            elif not ranks.devices[rank.number]:
                state = "starting"
            elif since is None:
                state = "idle"
            else:
                state = f"busy for {now - since:.1f} s: {self._doing}"
            device = self._layout.devices[rank.number]
            found.append(RankStatus(rank.number, rank.pid, code is None, state, device))
        return PoolStatus(tuple(found))

    def interrupt(self) -> None:
        """Interrupt the call that another thread is in, which raises KeyboardInterrupt there."""
        ranks = self._ranks
        if ranks is not None and ranks.busy:
            ranks.stop()

    def restart(self) -> None:
        """Start all ranks anew, with empty namespaces."""
        self._refuse_closed()
        if not self._lock.acquire(blocking=False):
            # the call of another thread fails, and restarts them
            self._kill("restart() was called")
            return
        try:
            self._classes.clear()
            self._start()
        finally:
            self._lock.release()

    def close(self) -> None:
        """End the ranks; harmless when they have ended already."""
        self.closed = True  # first: the call of another thread fails, and starts no new ranks
        if not self._lock.acquire(blocking=False):
            self._kill("close() was called")
            self._lock.acquire()
        try:
            self._ranks = None
            self._finalizer()
        finally:
            self._lock.release()

    def _kill(self, reason: str) -> None:
        ranks = self._ranks
        if ranks is not None:
            ranks.kill(reason)

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"WorkerPool({self._layout}{', closed' if self.closed else ''})"

    def _start(self) -> None:
        """Start the ranks, after those that there are have been ended."""
        self._ranks = None
        self._resources.close()
        port = self._resources.enter_context(meeting_point())
        environments = [
            {**variables, "MASTER_PORT": str(port)} for variables in self._layout.environments()
        ]
        tasks = [standby.make_task(each, PER_LAUNCH, serves=True) for each in environments]
        output = _LazyOutput(self.nprocs, self._mode)
        ranks = ServingRanks.start(standby.take(environments, PER_LAUNCH), tasks, output)
        self._resources.callback(ranks.end)
        self._ranks = ranks

    def _ask(
        self,
        what: str,
        fn: Callable[..., Any],
        args: tuple,
        kwargs: dict[str, Any],
        chosen: Sequence[int] | None = None,
    ) -> list[Any]:
        """Let ranks run a function, and see to it afterwards that there are ranks to ask again."""
        __tracebackhide__ = True
        self._refuse_closed()
        marker = origins.Marker()
        descriptor = pack(fn, args, kwargs, marker, pool=True)
        with ExitStack() as stack:
            stack.callback(os.close, descriptor)
            stack.enter_context(self._lock)
            self._refuse_closed()  # while another thread's call ran
            ranks = self._get_ranks()
            self._doing = what
            self._classes.update(
                {id(obj): (mark, obj) for mark, obj in marker.sent.items() if isinstance(obj, type)}
            )
            known = marker.sent | dict(self._classes.values())
            output = _LazyOutput(self.nprocs, self._mode)
            try:
                _refuse_dead(ranks)
                with origins.known(known), closing(output), cells_by_number():
                    return ranks.ask(descriptor, chosen or range(self.nprocs), output)
            except RankError as error:
                if story := self._recover(ranks):
                    error.args = (f"{error}\n\n{story}", *error.args[1:])
                # where we waited tells nothing
                raise error.with_traceback(None) from error.__cause__
            except KeyboardInterrupt:
                story = self._recover(ranks)
                print(story or "The ranks were interrupted: they and their namespaces live on.")
                raise KeyboardInterrupt from None

    def _get_ranks(self) -> ServingRanks:
        """Return ranks that can be asked: an interrupt may have come while others were started."""
        if self._ranks is None:
            self._start()
        elif self._ranks.loss is not None:
            print(self._recover(self._ranks))
        assert self._ranks is not None
        return self._ranks

    def _recover(self, ranks: ServingRanks) -> str:
        """Restart the ranks if they can not be asked again; return what to say of it."""
        if ranks.loss is None:
            ranks.check()
        if ranks.loss is None:
            return ""
        if self.closed:
            return "The pool was closed: its ranks were ended."
        self._classes.clear()
        self._start()
        return f"The ranks were restarted, because {ranks.loss}: their namespaces are lost."

    def _refuse_closed(self) -> None:
        if self.closed:
            raise ValueError("the pool is closed: make a new one")


class _LazyOutput:
    """Where the lines of a call go: a call that prints nothing makes no log files."""

    def __init__(self, nprocs: int, mode: Mode) -> None:
        self._nprocs, self._mode = nprocs, mode
        self._output: RankOutput | None = None

    def _get(self) -> RankOutput:
        if self._output is None:
            self._output = RankOutput(self._nprocs, self._mode)
        return self._output

    def lines(self, rank: int, stream: str, lines: list[str]) -> None:
        self._get().lines(rank, stream, lines)

    def redraw(self, rank: int, stream: str, text: str) -> None:
        self._get().redraw(rank, stream, text)

    def say(self, text: str) -> None:
        self._get().say(text, "stderr")

    def tick(self) -> None:
        if self._output is not None:
            self._output.tick()

    def close(self) -> None:
        if self._output is not None:
            self._output.close()


def _refuse_dead(ranks: ServingRanks) -> None:
    dead = ranks.find_death()
    if dead is not None:
        ranks.loss = f"rank {dead.number} is gone"
        number, story = dead.number, death(dead.exitcode)
        raise RankError(f"rank {number}: {story} between two calls; nothing was run", number)
