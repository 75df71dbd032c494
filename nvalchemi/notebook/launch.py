"""launch(): a function of a notebook cell on several ranks, started by torch.multiprocessing."""

from __future__ import annotations

import difflib
import inspect
import multiprocessing
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from numbers import Real
from operator import index
from types import ModuleType
from typing import Any, Literal

from nvalchemi.distributed import origins
from nvalchemi.distributed import standby as standby_ranks
from nvalchemi.distributed.rank import end_all
from nvalchemi.distributed.rank_error import RankError as RankError
from nvalchemi.distributed.rank_process import is_worker
from nvalchemi.distributed.watch import Watch
from nvalchemi.distributed.workers import INTERRUPT, WorkerGroup
from nvalchemi.notebook.cell_names import with_cell_numbers
from nvalchemi.notebook.devices import PER_LAUNCH, Layout, lay_out
from nvalchemi.notebook.handle import LaunchHandle
from nvalchemi.notebook.meeting import meeting_point
from nvalchemi.notebook.packing import pack
from nvalchemi.notebook.results import RankResults, shortened
from nvalchemi.notebook.show import RankOutput
from nvalchemi.notebook.threads import most_ranks

_OUTPUTS = ("stream", "rank0", "quiet")


def launch(
    fn: Callable[..., Any],
    *args: Any,
    nprocs: int | None = None,
    devices: Any = None,
    backend: str | None = None,
    timeout: float | None = None,
    stall: float | None = None,
    env: Mapping[str, str] | None = None,
    block: bool = True,
    output: Literal["stream", "rank0", "quiet"] = "stream",
    threads: int | None = None,
    standby: int | None = None,
    by_value: Sequence[ModuleType | str] = (),
    **kwargs: Any,
) -> Any:
    """Run ``fn(*args, **kwargs)`` on ``nprocs`` ranks and return what each returned.

    The ranks are fresh spawned processes with the variables that torchrun sets, so the function
    starts communication as it would there: ``DistributedManager.initialize()`` or
    ``torch.distributed.init_process_group()``. What they print appears here line by line, marked
    by rank, and is kept in a log file per rank. When this returns or raises, no rank is left.

    Parameters
    ----------
    fn
        Any callable: from a cell, a lambda, a closure, a method. It and what it captures travel
        by value; a rank that changes a captured tensor or a class changes its own copy. Modules
        that can be imported are, from their files as they are then. A rank has returned when its
        threads have ended (but for daemons) and its ``atexit`` functions have run.
    nprocs
        Number of ranks; by default one per device, or 2 where there is no GPU.
    devices
        Where they run: "cpu", "cuda", or CUDA devices such as ``[0, 2]``, one for each rank; by
        default the GPUs if there are any. ``[0, 0]`` with ``backend="gloo"`` shares a GPU.
    backend
        "nccl" or "gloo" (which trains on the CPU, unless devices are given); by default nccl if
        each rank has a GPU of its own. Reaches ``DistributedManager.initialize()`` as
        NVALCHEMI_DISTRIBUTED_BACKEND.
    timeout
        Seconds after which the ranks are ended and TimeoutError is raised; by default never.
    stall
        Seconds after which the Python stack of every rank is shown if no rank has printed or moved
        meanwhile; nothing is ended. By default never.
    env
        Further environment variables of the ranks.
    block
        If False, return a :class:`LaunchHandle` at once, and let the ranks run in the background.
    output
        What of their output is shown: of all ranks, of rank 0, or nothing. The logs have all.
    threads
        CPU threads of each rank (OMP_NUM_THREADS); by default the cores divided by ``nprocs``,
        unless OMP_NUM_THREADS is set in ``env`` or in this process.
    standby
        How many ranks to spawn ahead for the next launch, which then starts in a tenth of a second
        instead of some; each launch has fresh ranks all the same, and one that waits leaves after
        an hour. By default as many as this launch has in a Jupyter kernel, and none elsewhere.
    by_value
        Modules that are to travel as they are in this process, instead of being imported from
        their files by the ranks.
    *args, **kwargs
        Arguments of ``fn``. For keywords with the names above use ``functools.partial``.

    Returns
    -------
    RankResults or LaunchHandle

    Raises
    ------
    RankError
        If a rank fails: its text has the rank, the exception and the rank's own traceback, its
        ``__cause__`` is the original exception. Also if a rank waits in a collective for one that
        has returned.
    TypeError, ValueError
        If an argument is wrong or cannot be sent; no process has been started then.
    KeyboardInterrupt
        When it comes; all ranks are ended.
    """
    __tracebackhide__ = True  # of an error the user's frames are those on the rank
    _refuse_nesting()
    if not callable(fn):
        raise TypeError(f"launch() needs a function as its first argument: {shortened(repr(fn))}")
    _check_arguments(fn, args, kwargs)
    layout = lay_out(nprocs, devices, backend, threads, env)
    _check_seconds("timeout", timeout)
    _check_seconds("stall", stall)
    _check_choices(block, output)
    ahead = _standby_count(standby, layout)
    call = (fn, args, kwargs, by_value)
    try:
        with ExitStack() as resources:
            group, shown = _start(resources, layout, call, output, stall, ahead, block)
            if not block:
                return LaunchHandle(group, shown, layout.nprocs, timeout, resources.pop_all())
            return RankResults(group.run(timeout))
    except RankError as error:
        error.args = (with_cell_numbers(str(error)), error.rank)
        raise error.with_traceback(None) from error.__cause__  # where we waited tells nothing
    except TimeoutError as error:
        raise TimeoutError(with_cell_numbers(str(error))) from None
    except KeyboardInterrupt:
        count = layout.nprocs
        print(f"launch() was interrupted: {count} rank{'s' if count > 1 else ''} ended")
        raise KeyboardInterrupt from None  # where we waited tells nothing


def _start(
    resources: ExitStack,
    layout: Layout,
    call: tuple[Callable[..., Any], tuple, dict[str, Any], Sequence[ModuleType | str]],
    mode: Literal["stream", "rank0", "quiet"],
    stall: float | None,
    ahead: int,
    blocks: bool,
) -> tuple[WorkerGroup, RankOutput]:
    """Start the ranks and give them their task; what is to be undone goes to ``resources``."""
    fn, args, kwargs, modules = call
    marker = origins.Marker()
    task = pack(fn, args, kwargs, marker, modules)
    resources.callback(os.close, task)
    environments = layout.environments()
    # undone last: ranks of the next launch do not compete with those of this one
    resources.callback(standby_ranks.keep, ahead, environments[0], PER_LAUNCH)
    port = resources.enter_context(meeting_point())
    resources.enter_context(origins.known(marker.sent))
    for variables in environments:
        variables["MASTER_PORT"] = str(port)
    shown = RankOutput(layout.nprocs, mode, live=blocks)
    resources.callback(shown.close)
    if mode != "quiet":
        shown.say(str(layout))
    ranks = standby_ranks.take(environments, PER_LAUNCH)
    resources.callback(end_all, ranks, INTERRUPT)
    tasks = [standby_ranks.make_task(variables, PER_LAUNCH) for variables in environments]
    watch = Watch(stall, lambda text: shown.say(with_cell_numbers(text), "stderr"))
    return WorkerGroup(ranks, tasks, task, shown, watch), shown


def _refuse_nesting() -> None:
    if sys.platform == "win32":
        raise RuntimeError("launch() needs Linux or macOS; under Windows run it in WSL")
    if "TORCHELASTIC_RUN_ID" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise RuntimeError(
            f"launch() was called by torchrun's rank {os.environ.get('RANK')} of "
            f"{os.environ['WORLD_SIZE']}: every one of them would start ranks of its own. Call "
            "the function itself under torchrun"
        )
    if multiprocessing.current_process().daemon:
        raise RuntimeError(
            "launch() was called in a worker process, of a DataLoader or a Pool, which may start "
            "no processes: call it where that was made"
        )
    if is_worker():
        raise RuntimeError(
            "launch() was called on a rank, or while a child process imports this module: ranks "
            "cannot launch ranks. In a file, put the call under if __name__ == '__main__':"
        )


def _check_arguments(fn: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> None:
    """Find out before any rank starts that the function does not take these arguments."""
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        return  # a builtin does not tell
    ours = _own_keywords()
    for name in kwargs:
        close = difflib.get_close_matches(name, ours, n=1, cutoff=0.75)
        if close and name not in signature.parameters:
            raise TypeError(
                f"launch() has no argument {name!r}, and {_name(fn)} does not name it; did you "
                f"mean {close[0]!r}?"
            )
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{_name(fn)}{signature} can not be called so: {error}") from None


def _name(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__name__", type(fn).__name__)


def _own_keywords() -> list[str]:
    parameters = inspect.signature(launch).parameters.values()
    return [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]


def _check_seconds(name: str, seconds: Any) -> None:
    if seconds is None:
        return
    if isinstance(seconds, bool) or not isinstance(seconds, Real):
        raise TypeError(f"{name} must be a number of seconds or None: {seconds!r}")
    if not float(seconds) > 0:
        raise ValueError(f"{name} must be positive: {seconds!r}")


def _check_choices(block: Any, output: Any) -> None:
    if not isinstance(block, bool):
        raise TypeError(f"block must be True or False: {block!r}")
    if output not in _OUTPUTS:
        raise ValueError(f"output must be one of {', '.join(map(repr, _OUTPUTS))}: {output!r}")


def _standby_count(standby: Any, layout: Layout) -> int:
    if standby is None:
        return layout.nprocs if _is_kernel() else 0
    try:
        count = index(standby)
    except TypeError:
        count = None
    if count is None or isinstance(standby, bool):
        raise TypeError(f"standby must be a number of ranks or None: {standby!r}")
    if count < 0:
        raise ValueError(f"standby must not be negative: {count}")
    most = max(most_ranks(), layout.nprocs)
    if count > most:
        raise ValueError(f"standby must be at most {most}: {count} ranks would wait; give fewer")
    return count


def _is_kernel() -> bool:
    """Return whether this is a Jupyter kernel, where one launch is seldom the last."""
    if "IPython" not in sys.modules:
        return False
    from IPython import get_ipython

    return getattr(get_ipython(), "kernel", None) is not None
