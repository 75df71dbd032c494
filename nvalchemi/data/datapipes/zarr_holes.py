"""Holes of a store: chunks whose file is lost, which Zarr reads as the fill value of the array."""

import itertools
import warnings
from typing import Any

import numpy as np
import zarr
from zarr.abc.store import ByteRequest, Store
from zarr.core.buffer import Buffer, BufferPrototype
from zarr.core.sync import sync
from zarr.storage import StorePath, WrapperStore

# Attribute of our arrays: whether chunks that hold only the fill value have files all the same.
# Zarr does not keep this, and other tools may leave such chunks out.
WRITES_EMPTY = "write_empty_chunks"
# In arrays of other tools an absent chunk may be meant as zeros; of these a user wants to hear.
_LABELS = ("energy", "forces", "stress", "virial", "dipole", "charges")


def impossible_fill(dtype: np.dtype[Any]) -> Any:
    """What no field holds, to be read from a hole by whatever tool; None where there is nothing."""
    if dtype.kind == "f":
        return dtype.type(np.nan)
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        return dtype.type(info.min if dtype.kind == "i" else info.max)
    return None


def leaves_out_empty(array: zarr.Array) -> bool:
    """Whether the writer of an array of ours was told to leave out chunks of zeros."""
    return array.metadata.attributes.get(WRITES_EMPTY) is False


def fill_holes(array: zarr.Array, numbers: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Refuse holes among rows that were read.

    Only where all rows of a file are the fill value are they read again, by a read that notices
    what is not there. A look at the file would not do: the store may go and come between the two.

    Parameters
    ----------
    array : zarr.Array
        What was read.
    numbers : ndarray
        Which rows, rising, int64 [n].
    rows : ndarray
        What they were read as, [n, ...].

    Returns
    -------
    ndarray
        `rows`, corrected where the second read found other ones.

    Raises
    ------
    ValueError
        Naming array and rows whose file is lost.
    """
    if leaves_out_empty(array) or not len(numbers):
        return rows
    size = _file_shape(array)[0]
    edges = np.arange(numbers[0] // size, numbers[-1] // size + 2) * size
    for begin, end in itertools.pairwise(np.searchsorted(numbers, edges).tolist()):
        if begin < end and _may_be_hole(array, rows[begin:end]):
            low, high = int(numbers[begin]), int(numbers[end - 1]) + 1
            again, complete = _read_noticing(array, low, high)
            if not complete:
                _report(array, low, high)
            rows = rows if rows.flags.writeable else rows.copy()
            rows[begin:end] = again[numbers[begin:end] - low]
    return rows


def count_lost(array: zarr.Array, num_rows: int) -> tuple[int, int]:
    """Files that lack, and that there should be, for the first rows of an array of our writer.

    Others can not be judged by their files.
    """
    if array.metadata.attributes.get(WRITES_EMPTY) is not True or not array.size:
        return 0, 0
    sizes = (num_rows, *array.shape[1:])
    counts = (range(-(-size // step)) for size, step in zip(sizes, _file_shape(array)))
    keys = [array.metadata.encode_chunk_key(place) for place in itertools.product(*counts)]
    return sum(not _has_file(array, key) for key in keys), len(keys)


def _file_shape(array: zarr.Array) -> tuple[int, ...]:
    return array.shards or array.chunks


def _may_be_hole(array: zarr.Array, rows: np.ndarray) -> bool:
    """Whether one of the files side by side that hold these rows may lack."""
    fill = array.fill_value
    cuts = (
        [slice(low, low + step) for low in range(0, size, step)]
        for size, step in zip(array.shape[1:], _file_shape(array)[1:])
    )
    # most are told by their first row
    return any(
        _equal(rows[(slice(1), *cut)], fill).all() and _equal(rows[(slice(None), *cut)], fill).all()
        for cut in itertools.product(*cuts)
    )


def _equal(values: np.ndarray, fill: Any) -> np.ndarray:
    return np.isnan(values) if fill != fill else np.asarray(values == fill)


class _NoticingStore(WrapperStore[Store]):
    """Store that notes whether something was asked for that is not there."""

    complete = True

    async def get(
        self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        found = await super().get(key, prototype, byte_range)
        self.complete = self.complete and found is not None
        return found


def _read_noticing(array: zarr.Array, low: int, high: int) -> tuple[np.ndarray, bool]:
    """Rows of an array, and whether all of their files were there when they were read."""
    store = _NoticingStore(array.store_path.store)
    place = StorePath(store, array.store_path.path)
    same = zarr.Array(zarr.AsyncArray(array.metadata, place))  # type: ignore[type-var]
    return np.asarray(same[low:high]), store.complete


def _has_file(array: zarr.Array, key: str) -> bool:
    return bool(sync((array.store_path / key).exists()))


def _report(array: zarr.Array, low: int, high: int) -> None:
    where = f"of rows {low}..{high - 1} of {array.path}"
    ours = array.metadata.attributes.get(WRITES_EMPTY) is True
    name = array.path.rpartition("/")[2]
    if ours or name == "atomic_numbers":
        raise ValueError(
            f"the file {where} in {array.store_path.store} is missing: restore it, or make the "
            "store again from its source"
        )
    if name in _LABELS:
        warnings.warn(
            f"there is no file {where}: the tool that wrote the store may leave out zeros, so they "
            "are read as zeros; if it does not, the file is lost",
            UserWarning,
            stacklevel=2,
        )
