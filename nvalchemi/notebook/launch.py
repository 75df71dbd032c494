"""launch(): a function of a notebook cell on several ranks, started by torch.multiprocessing."""

from __future__ import annotations

import difflib
import inspect
import io
import linecache
import os
import pickle
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from operator import index
from typing import Any, overload

import torch
from torch.distributed import TCPStore

from nvalchemi.distributed import origins, payload
from nvalchemi.distributed.environment import BACKEND_VARIABLE, BACKENDS, METHOD_VARIABLE
from nvalchemi.distributed.rank_process import is_worker
from nvalchemi.distributed.workers import RankError as RankError
from nvalchemi.distributed.workers import WorkerGroup

_LOOPBACK = "127.0.0.1"
_OURS = (
    "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK MASTER_ADDR MASTER_PORT "
    f"TORCHELASTIC_USE_AGENT_STORE {BACKEND_VARIABLE} {METHOD_VARIABLE}"
).split()


class RankResults(Sequence[Any]):
    """What each rank returned: ``results[r]`` is the value of rank r."""

    def __init__(self, values: Sequence[Any]) -> None:
        self._values = tuple(values)

    @property
    def rank0(self) -> Any:
        """The value of rank 0."""
        return self._values[0]

    @overload
    def __getitem__(self, rank: int) -> Any: ...
    @overload
    def __getitem__(self, rank: slice) -> Sequence[Any]: ...
    def __getitem__(self, rank: int | slice) -> Any:
        return self._values[rank]

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        lines = [f"  rank {rank}: {_short(repr(value))}" for rank, value in enumerate(self)]
        return "\n".join([f"{len(self)} rank{'s' if len(self) > 1 else ''} returned", *lines])


def launch(
    fn: Callable[..., Any],
    *args: Any,
    nprocs: int | None = None,
    backend: str | None = None,
    timeout: float | None = None,
    env: Mapping[str, str] | None = None,
    **kwargs: Any,
) -> RankResults:
    """Run ``fn(*args, **kwargs)`` on ``nprocs`` ranks and return what each returned.

    The ranks are fresh spawned processes with the variables that torchrun sets, so the function
    starts communication as it would there: ``DistributedManager.initialize()`` or
    ``torch.distributed.init_process_group()``. What they print appears here line by line, marked
    by rank. When this returns or raises, no rank is left.

    Parameters
    ----------
    fn
        Any callable: from a cell, a lambda, a closure, a method. It and what it captures travel
        by value; a rank that changes a captured tensor or a class changes its own copy. Modules
        that can be imported are, from their files as they are then. A rank has returned when its
        threads have ended (but for daemons) and its ``atexit`` functions have run.
    nprocs
        Number of ranks; by default one per GPU, or 2 where there is none.
    backend
        "nccl" or "gloo" (which trains on the CPU); by default nccl if each rank has a GPU of its
        own. Reaches ``DistributedManager.initialize()`` as NVALCHEMI_DISTRIBUTED_BACKEND.
    timeout
        Seconds after which the ranks are ended and TimeoutError is raised; by default never.
    env
        Further environment variables of the ranks. OMP_NUM_THREADS is the number of cores divided
        by ``nprocs`` unless set here or in this process.
    *args, **kwargs
        Arguments of ``fn``. For keywords with the names above use ``functools.partial``.

    Raises
    ------
    RankError
        If a rank fails: its text has the rank, the exception and the rank's own traceback, its
        ``__cause__`` is the original exception.
    TypeError, ValueError
        If an argument is wrong or cannot be sent; no process has been started then.
    KeyboardInterrupt
        When it comes; all ranks are ended.
    """
    _refuse_nesting()
    if not callable(fn):
        raise TypeError(f"launch() needs a function as its first argument: {_short(repr(fn))}")
    _check_arguments(fn, args, kwargs)
    count = _rank_count(nprocs)
    variables = _shared_variables(count, _backend(backend, count), _environment(env))
    _check_timeout(timeout)
    marker = origins.Marker()
    task = _pack(fn, args, kwargs, marker)
    try:
        with _meeting_point() as port, origins.known(marker.sent):
            variables["MASTER_PORT"] = str(port)
            environments = [_rank_variables(variables, rank) for rank in range(count)]
            return RankResults(WorkerGroup(task, environments, _show).run(timeout))
    except KeyboardInterrupt:
        print(f"launch() was interrupted: {count} rank{'s'[: count - 1]} ended")
        raise KeyboardInterrupt from None  # where we waited tells nothing
    finally:
        os.close(task)


def _refuse_nesting() -> None:
    if sys.platform == "win32":
        raise RuntimeError("launch() needs Linux or macOS; under Windows run it in WSL")
    if "TORCHELASTIC_RUN_ID" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise RuntimeError(
            f"launch() was called by torchrun's rank {os.environ.get('RANK')} of "
            f"{os.environ['WORLD_SIZE']}: every one of them would start ranks of its own. Call "
            "the function itself under torchrun"
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
    ours = ("nprocs", "backend", "timeout", "env")
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


def _rank_count(nprocs: Any) -> int:
    if nprocs is None:
        return torch.cuda.device_count() or 2
    try:
        count = index(nprocs)
    except TypeError:
        count = None
    if count is None or isinstance(nprocs, bool):
        raise TypeError(f"nprocs must be an integer or None: {nprocs!r}")
    if count < 1:
        raise ValueError(f"nprocs must be at least 1: {count}")
    return count


def _backend(backend: str | None, nprocs: int) -> str:
    devices = torch.cuda.device_count()
    if backend is None:
        return "nccl" if nprocs <= devices and torch.distributed.is_nccl_available() else "gloo"
    if backend not in BACKENDS:
        raise ValueError(f"backend must be 'gloo', 'nccl' or None: {backend!r}")
    if backend == "nccl" and nprocs > devices:
        raise ValueError(
            f"backend 'nccl' needs one GPU per rank: {nprocs} ranks, {devices} GPUs; use fewer "
            "ranks, or backend='gloo' to train on the CPU"
        )
    return backend


def _check_timeout(timeout: Any) -> None:
    if timeout is None:
        return
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
        raise TypeError(f"timeout must be a number of seconds or None: {timeout!r}")
    if not timeout > 0:
        raise ValueError(f"timeout must be positive: {timeout!r}")


def _environment(env: Mapping[str, str] | None) -> dict[str, str]:
    for name, value in (env or {}).items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise TypeError(f"env must map names to strings: {name!r}: {value!r}")
        if name in _OURS:
            raise ValueError(f"env must not set {name}: launch() sets it for each rank")
    return dict(env or {})


def _shared_variables(nprocs: int, backend: str, env: dict[str, str]) -> dict[str, str]:
    loopback = "lo" if sys.platform == "linux" else "lo0"
    polite = {
        "OMP_NUM_THREADS": str(max(1, _cores() // nprocs)),
        # ranks of one machine talk over no other interface
        "GLOO_SOCKET_IFNAME": loopback,
        "NCCL_SOCKET_IFNAME": loopback,
    }
    return {
        **{name: value for name, value in polite.items() if name not in os.environ},
        **env,
        "WORLD_SIZE": str(nprocs),
        "LOCAL_WORLD_SIZE": str(nprocs),
        "GROUP_RANK": "0",
        "MASTER_ADDR": _LOOPBACK,
        # torch's own switch for "the launcher holds the store": rank 0 opens none
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        BACKEND_VARIABLE: backend,
        METHOD_VARIABLE: "ENV",
    }


def _rank_variables(shared: dict[str, str], rank: int) -> dict[str, str]:
    return {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _pack(
    fn: Callable[..., Any], args: tuple, kwargs: dict[str, Any], marker: origins.Marker
) -> int:
    """Write the task into a new payload; the caller closes it."""
    task = payload.new_file()
    try:
        with payload.by_value(fn):
            payload.dump((fn, args, kwargs, _cell_sources()), task, marker)
    except (TypeError, pickle.PicklingError, AttributeError, ValueError, RuntimeError) as error:
        os.close(task)
        with payload.by_value(fn):
            name = payload.find_unsendable(fn, args, kwargs) or "the function"
        raise TypeError(
            f"{name} cannot be sent to the ranks ({type(error).__name__}: {error}); make it inside "
            "the function, or pass what it is made from"
        ) from error
    return task


def _cell_sources() -> dict[str, tuple[int, None, list[str], str]]:
    """Return linecache's entries for code that is in no file, so that tracebacks can show it."""
    sources = {}
    for name, entry in list(linecache.cache.items()):
        if len(entry) == 4 and not os.path.exists(name):
            sources[name] = (entry[0], None, entry[2], name)  # no time: never checked on disk
    return sources


@contextmanager
def _meeting_point() -> Iterator[int]:
    """Hold the store where the ranks meet, on a port of the loopback interface that is free."""
    listener = socket.create_server((_LOOPBACK, 0))
    port = listener.getsockname()[1]
    store = TCPStore(
        _LOOPBACK,
        port,
        is_master=True,
        timeout=timedelta(seconds=30),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    try:
        yield port
    finally:
        del store


def _show(rank: int, stream: str, line: str) -> None:
    target = sys.stdout if stream == "stdout" else sys.stderr
    text = f"[rank {rank}] {line}\n"
    try:
        target.write(text)
    except UnicodeEncodeError as error:  # a terminal or log file that is not utf-8
        target.write(text.encode(error.encoding, "backslashreplace").decode(error.encoding))
    if isinstance(target, io.TextIOWrapper):  # a kernel's streams go out by themselves
        target.flush()


def _short(text: str) -> str:
    return text if len(text) <= 100 else text[:97] + "..."
