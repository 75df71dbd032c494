"""Reading ahead in the background: windows of batches, and single samples."""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from itertools import islice
from typing import Any, Self
from weakref import WeakSet

import torch

from nvalchemi.data.atomic_data import AtomicData
from nvalchemi.data.batch import Batch
from nvalchemi.data.datapipes.indices import normalise_index

MAX_PENDING_WINDOWS = 2

Sample = tuple[AtomicData, dict[str, Any]]


class Prefetch:
    """What a data set needs to read ahead; it brings `load_batches`, `_load_one`, len and close.

    Threads, not processes: reading a store is decompression and copies, which release the GIL.
    """

    _num_workers: int
    _windows: deque[Future[list[Batch]]]
    _singles: dict[int, Future[Sample]]

    def _start_prefetch(self, num_workers: int) -> None:
        if isinstance(num_workers, bool) or not isinstance(num_workers, int):
            raise TypeError(f"num_workers must be an integer: got {num_workers!r}")
        if num_workers < 1:
            raise ValueError(f"num_workers must be at least 1: got {num_workers}")
        self._num_workers = num_workers
        self._forget_threads()
        _alive.add(self)

    def _forget_threads(self) -> None:
        self.__dict__.pop("_pool", None)
        self._windows = deque()
        self._singles = {}

    def load_batches(self, index_lists: Sequence[Sequence[int]], stream: Any = None) -> list[Batch]:
        """Read several batches at once; the data set says how."""
        raise NotImplementedError(f"{type(self).__name__} must have load_batches")

    def _load_one(self, index: int) -> Sample:
        raise NotImplementedError(f"{type(self).__name__} must have _load_one")

    def __len__(self) -> int:
        raise NotImplementedError(f"{type(self).__name__} must have a length")

    def close(self) -> None:
        """Stop reading ahead."""
        self._stop_prefetch()

    def _threads(self) -> ThreadPoolExecutor:
        pool: ThreadPoolExecutor | None = self.__dict__.get("_pool")
        if pool is None:
            new = ThreadPoolExecutor(self._num_workers, thread_name_prefix="nvalchemi-read")
            # one step, so that two foreground threads end up with the same pool
            pool = self.__dict__.setdefault("_pool", new)
        return pool

    # Windows of batches, for a loader.

    def read_windows(
        self, windows: Iterable[Sequence[Sequence[int]]], stream: Any = None
    ) -> Iterator[list[Batch]]:
        """Batches of one window after the other, while the next two are read.

        What is pending belongs to this pass alone, so several passes may run side by side. When
        the pass ends or is dropped, none of its reads is left running.

        Parameters
        ----------
        windows : iterable of lists of batches of indices
            Consumed as far as is read ahead.
        stream : optional
            As in `load_batches`.

        Raises
        ------
        RuntimeError
            If the data set is closed meanwhile. Errors of the reading are raised as they are.
        """
        pool, ahead = self._threads(), iter(windows)
        pending: deque[Future[list[Batch]]] = deque()

        def request(count: int) -> None:
            for window in islice(ahead, count):
                if self.__dict__.get("_pool") is not pool:
                    raise RuntimeError(_CLOSED)
                pending.append(pool.submit(_as_here(self.load_batches), window))

        try:
            request(MAX_PENDING_WINDOWS)
            while pending:
                batches = _result(pending[0])
                pending.popleft()
                request(1)
                yield batches
        finally:
            _drop(pending)

    def prefetch_fused_batches(
        self, index_lists: Sequence[Sequence[int]], stream: Any = None
    ) -> None:
        """Begin to read a window of batches, which `get_fused_batches` then yields.

        Raises
        ------
        RuntimeError
            If two windows are pending already.
        """
        if len(self._windows) >= MAX_PENDING_WINDOWS:
            raise RuntimeError(
                f"Fused batch prefetch queue is full: {MAX_PENDING_WINDOWS} windows are pending; "
                "take one with get_fused_batches() or drop them with cancel_prefetch()"
            )
        self._windows.append(self._threads().submit(_as_here(self.load_batches), index_lists))

    def get_fused_batches(self) -> Iterator[Batch]:
        """Batches of the oldest pending window; an error of the reading is raised here.

        Raises
        ------
        RuntimeError
            If none is pending.
        """
        if not self._windows:
            raise RuntimeError("no fused batches are pending: call prefetch_fused_batches first")
        return iter(_result(self._windows.popleft()))

    def has_pending_fused_batches(self) -> bool:
        """Whether a window of `prefetch_fused_batches` is pending."""
        return bool(self._windows)

    # Single samples.

    def __getitem__(self, index: int) -> Sample:
        index = normalise_index(index, len(self))
        pending = self._singles.pop(index, None)
        return self._load_one(index) if pending is None else _result(pending)

    def __iter__(self) -> Iterator[Sample]:
        return (self[i] for i in range(len(self)))

    def prefetch(self, index: int, stream: Any = None) -> None:
        """Begin to read one sample, which ``dataset[index]`` then returns."""
        index = normalise_index(index, len(self))
        if index not in self._singles:
            self._singles[index] = self._threads().submit(_as_here(self._load_one), index)

    def prefetch_many(self, indices: Iterable[int], stream: Any = None) -> None:
        """Begin to read samples."""
        for index in indices:
            self.prefetch(index)

    def prefetch_batch(self, indices: Iterable[int], streams: Any = None) -> None:
        """As `prefetch_many`, by the name that scripts of the peer use."""
        self.prefetch_many(indices)

    # Stopping.

    @property
    def prefetch_count(self) -> int:
        """Pending windows and samples."""
        return len(self._windows) + len(self._singles)

    def cancel_prefetch(self, index: int | None = None) -> None:
        """Drop what is pending (all, or one sample) and wait until no read of it is running."""
        if index is not None:
            single = self._singles.pop(normalise_index(index, len(self)), None)
            if single is not None:
                _drop([single])
            return
        dropped: list[Future[Any]] = [*self._windows, *self._singles.values()]
        self._windows.clear()
        self._singles.clear()
        _drop(dropped)

    def _stop_prefetch(self) -> None:
        self.cancel_prefetch()
        pool: ThreadPoolExecutor | None = self.__dict__.pop("_pool", None)
        if pool is not None:
            pool.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        # threads do not travel to another process
        local = ("_pool", "_windows", "_singles")
        return {name: value for name, value in self.__dict__.items() if name not in local}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start_prefetch(self._num_workers)


_CLOSED = "the data set was closed while it was read ahead: keep it open for the whole pass"

_alive: WeakSet[Prefetch] = WeakSet()


def _forget_threads_of_parent() -> None:
    # they stay behind in a fork; waiting for them would never end
    for dataset in _alive:
        dataset._forget_threads()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_threads_of_parent)


def _as_here(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as if it ran here: a new thread would begin on GPU 0 and its default stream."""
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return function
    stream = torch.cuda.current_stream()

    def run(*args: Any) -> Any:
        with torch.cuda.stream(stream):
            return function(*args)

    return run


def _result(future: Future[Any]) -> Any:
    try:
        return future.result()
    except CancelledError:
        raise RuntimeError(_CLOSED) from None


def _drop(futures: Iterable[Future[Any]]) -> None:
    """Cancel reads that have not begun and wait for those that have; their errors go unheard."""
    futures = list(futures)
    begun = [future for future in futures if not future.cancel()]
    for future in begun:
        future.exception()
