"""Reading ahead in the background: at most two windows of batches, and single samples."""

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from nvalchemi.data.batch import Batch

MAX_PENDING_WINDOWS = 2


class Prefetch:
    """What a data set needs to read ahead; the set itself brings `load_batches` and `_load_one`.

    Threads, not processes: reading a store is decompression and copies, which release the GIL.
    """

    _num_workers: int = 2
    _pool: ThreadPoolExecutor | None = None
    _windows: deque[Future[list[Batch]]]
    _singles: dict[int, Future[Any]]

    def _start_prefetch(self, num_workers: int) -> None:
        if isinstance(num_workers, bool) or not isinstance(num_workers, int):
            raise TypeError(f"num_workers must be an integer: got {num_workers!r}")
        if num_workers < 1:
            raise ValueError(f"num_workers must be at least 1: got {num_workers}")
        self._num_workers = num_workers
        self._pool = None
        self._windows = deque()
        self._singles = {}

    def load_batches(self, index_lists: Sequence[Sequence[int]], stream: Any = None) -> list[Batch]:
        """Read several batches at once; the data set says how."""
        raise NotImplementedError(f"{type(self).__name__} must have load_batches")

    def _load_one(self, index: int) -> Any:
        raise NotImplementedError(f"{type(self).__name__} must have _load_one")

    def _submit(self, function: Any, *args: Any) -> Future[Any]:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._num_workers, thread_name_prefix="nvalchemi-read")
        return self._pool.submit(function, *args)

    def prefetch(self, index: int, stream: Any = None) -> None:
        """Begin to read one sample, which ``dataset[index]`` then returns."""
        if index not in self._singles:
            self._singles[index] = self._submit(self._load_one, index)

    def prefetch_many(self, indices: Sequence[int], stream: Any = None) -> None:
        """Begin to read samples."""
        for index in indices:
            self.prefetch(index)

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
        self._windows.append(self._submit(self.load_batches, index_lists))

    def get_fused_batches(self) -> Iterator[Batch]:
        """Batches of the oldest pending window; an error of the reading is raised here.

        Raises
        ------
        RuntimeError
            If none is pending.
        """
        if not self._windows:
            raise RuntimeError("no fused batches are pending: call prefetch_fused_batches first")
        return iter(self._windows.popleft().result())

    def has_pending_fused_batches(self) -> bool:
        """Whether a window is pending."""
        return bool(self._windows)

    @property
    def prefetch_count(self) -> int:
        """Pending windows and samples."""
        return len(self._windows) + len(self._singles)

    def cancel_prefetch(self, index: int | None = None) -> None:
        """Drop what is pending (all, or one sample) and wait until no read of it is running."""
        if index is not None:
            dropped: list[Future[Any]] = (
                [self._singles.pop(index)] if index in self._singles else []
            )
        else:
            dropped = [*self._windows, *self._singles.values()]
            self._windows.clear()
            self._singles.clear()
        for future in dropped:
            if not future.cancel():
                future.exception()

    def _stop_prefetch(self) -> None:
        self.cancel_prefetch()
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None

    def __getstate__(self) -> dict[str, Any]:
        # threads do not travel to another process; pending reads are begun anew there
        return {**self.__dict__, "_pool": None, "_windows": deque(), "_singles": {}}
