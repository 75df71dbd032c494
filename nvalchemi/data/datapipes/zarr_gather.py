"""Rows of many structures from an array, each chunk decoded once and kept while memory allows."""

import math
import threading
from collections import OrderedDict

import numpy as np
import zarr

from nvalchemi.data.datapipes.zarr_config import default_chunk_rows
from nvalchemi.data.datapipes.zarr_holes import fill_holes


class BlockCache:
    """Decoded pieces of arrays, the least used ones dropped beyond a budget. Thread-safe.

    Parameters
    ----------
    budget : int
        Bytes.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self._used = 0
        self._blocks: OrderedDict[tuple[str, int], np.ndarray] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: tuple[str, int]) -> np.ndarray | None:
        """A piece, if it is there."""
        with self._lock:
            block = self._blocks.get(key)
            if block is not None:
                self._blocks.move_to_end(key)
            return block

    def put(self, key: tuple[str, int], block: np.ndarray) -> None:
        """Keep a piece, and drop others for it. It must be known to be right: see `Staged`."""
        if block.nbytes > self.budget:
            return
        with self._lock:
            if key not in self._blocks:
                self._blocks[key] = block
                self._used += block.nbytes
            while self._used > self.budget:
                self._used -= self._blocks.popitem(last=False)[1].nbytes


class Staged:
    """New pieces of one reading, for the cache once it is known that the store was there.

    Each reading has its own, so a thread never sees pieces that another one has not checked.

    Parameters
    ----------
    cache : BlockCache
        Where they go by `commit`.
    """

    def __init__(self, cache: BlockCache) -> None:
        self._cache = cache
        self.budget = cache.budget
        self._new: dict[tuple[str, int], np.ndarray] = {}
        self._used = 0

    def get(self, key: tuple[str, int]) -> np.ndarray | None:
        """A piece, if it is there."""
        found = self._new.get(key)
        return self._cache.get(key) if found is None else found

    def put(self, key: tuple[str, int], block: np.ndarray) -> None:
        """Remember a piece while there is room."""
        if self._used + block.nbytes <= self.budget:
            self._new[key] = block
            self._used += block.nbytes

    def commit(self) -> None:
        """Hand all pieces to the cache."""
        for key, block in self._new.items():
            self._cache.put(key, block)


class RowPlan:
    """Which rows of a level are wanted: for each structure a range, in the order of the request.

    Parameters
    ----------
    starts, counts : ndarray
        First row and number of rows of each structure, int64 [B]; repeats are fine.
    num_rows : int
        Rows that count; what an unfinished append has left behind them is not looked at.
    """

    def __init__(self, starts: np.ndarray, counts: np.ndarray, num_rows: int) -> None:
        self.counts = counts
        self.num_rows = num_rows
        self.total = int(counts.sum())
        order = np.argsort(starts, kind="stable")
        self.rows = expand(starts[order], counts[order])
        self._restore: np.ndarray | None = None
        if (order[1:] < order[:-1]).any():
            where = np.empty(len(order), np.int64)
            where[order] = offsets(counts[order])
            self._restore = expand(where, counts)
        self._cuts: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def read(self, name: str, array: zarr.Array, cache: BlockCache | Staged) -> np.ndarray:
        """The rows of one array, [total, ...], in a buffer of their own.

        Raises
        ------
        ValueError
            If the file of a chunk is lost.
        """
        if not self.total:
            return np.empty((0, *array.shape[1:]), array.dtype)
        block = _block_rows(array)
        if block * _row_bytes(array) > cache.budget:
            found = _read_few(array, self.rows)
        else:
            found = self._read_blocks(name, array, cache, block)
        return found if self._restore is None else found[self._restore]

    def _read_blocks(
        self, name: str, array: zarr.Array, cache: BlockCache | Staged, block: int
    ) -> np.ndarray:
        ids, bounds = self._cut(block)
        blocks = {i: cache.get((name, i)) for i in ids.tolist()}
        missing = np.array([i for i, piece in blocks.items() if piece is None], np.int64)
        for run in np.split(missing, np.flatnonzero(np.diff(missing) > 1) + 1):
            if len(run):
                for i, piece in _load_run(array, int(run[0]), len(run), block, self.num_rows):
                    blocks[i] = piece
                    cache.put((name, i), piece)
        out = np.empty((self.total, *array.shape[1:]), array.dtype)
        for i, low, high in zip(ids.tolist(), bounds[:-1].tolist(), bounds[1:].tolist()):
            found = blocks[i]
            assert found is not None and self.rows[high - 1] - i * block < len(found)
            np.take(found, self.rows[low:high] - i * block, axis=0, out=out[low:high], mode="clip")
        return out

    def _cut(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """Blocks that hold the rows, and where the rows of each begin and end."""
        if block not in self._cuts:
            owner = self.rows // block
            starts = np.flatnonzero(np.diff(owner, prepend=-1))
            self._cuts[block] = owner[starts], np.append(starts, self.total)
        return self._cuts[block]


def offsets(counts: np.ndarray) -> np.ndarray:
    """Sum of the counts before each, int64 [B]."""
    return np.cumsum(counts) - counts


def expand(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Concatenate the ranges [start, start + count), int64."""
    return np.repeat(starts - offsets(counts), counts) + np.arange(int(counts.sum()))


def _row_bytes(array: zarr.Array) -> int:
    return max(1, array.dtype.itemsize * math.prod(array.shape[1:]))


def _block_rows(array: zarr.Array) -> int:
    """Rows read and kept together: whole chunks, at least as many as we would chunk ourselves."""
    chunk = array.chunks[0]
    return chunk * max(1, default_chunk_rows(_row_bytes(array)) // chunk)


def _load_run(
    array: zarr.Array, first: int, count: int, block: int, num_rows: int
) -> list[tuple[int, np.ndarray]]:
    """Adjacent blocks in one read."""
    data = _load(array, first * block, min((first + count) * block, num_rows))
    if count == 1:
        return [(first, data)]
    # copies: a view would keep the whole run alive after its neighbours were dropped
    return [(first + k, data[k * block : (k + 1) * block].copy()) for k in range(count)]


def _read_few(array: zarr.Array, rows: np.ndarray) -> np.ndarray:
    """Sorted rows of an array whose chunks are too large to keep."""
    first, last = int(rows[0]), int(rows[-1]) + 1
    if last - first <= 4 * len(rows):
        return _load(array, first, last)[rows - first]
    wanted, back = np.unique(rows, return_inverse=True)
    return fill_holes(array, wanted, np.asarray(array.oindex[wanted]))[back]


def _load(array: zarr.Array, start: int, stop: int) -> np.ndarray:
    return fill_holes(array, np.arange(start, stop), np.asarray(array[start:stop]))
