"""Holes of a store: chunks whose file is lost, which Zarr reads as the fill value of the array."""

import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import zarr
from zarr.core.sync import sync

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


def fill_holes(array: zarr.Array, start: int, rows: np.ndarray) -> np.ndarray:
    """Refuse holes among rows that were read, from row `start` on.

    Only where all rows of a file are the fill value is there a look at the file, and a second read:
    the store may have been away for the first one.

    Returns
    -------
    ndarray
        `rows`; a copy where the second read had to correct them.

    Raises
    ------
    ValueError
        Naming array and rows whose file is lost.
    """
    if leaves_out_empty(array):
        return rows
    for place, low, high in _files(array, start, start + len(rows)):
        if not _is_fill(array, rows[(slice(low - start, high - start), *place[1:])]):
            continue
        if _has_file(array, place[0]):
            rows = rows if rows.flags.writeable else rows.copy()
            rows[low - start : high - start] = np.asarray(array[low:high])
        else:
            _report(array, low, high)
    return rows


def count_lost(array: zarr.Array, num_rows: int) -> tuple[int, int]:
    """Files that lack, and that there should be, for the first rows of an array of our writer.

    Others can not be judged by their files.
    """
    if array.metadata.attributes.get(WRITES_EMPTY) is not True or not array.size:
        return 0, 0
    keys = [place[0] for place, _, _ in _files(array, 0, num_rows)]
    return sum(not _has_file(array, key) for key in keys), len(keys)


def _files(array: zarr.Array, low: int, high: int) -> Iterator[tuple[tuple[Any, ...], int, int]]:
    """Of the files of rows low..high-1: (key, trailing slices...), first row, end."""
    unit = array.shards or array.chunks
    trailing = [range(-(-size // step)) for size, step in zip(array.shape[1:], unit[1:])]
    for i in range(low // unit[0], -(-high // unit[0])):
        rows = max(low, i * unit[0]), min(high, (i + 1) * unit[0])
        for rest in itertools.product(*trailing):
            cuts = (slice(j * step, (j + 1) * step) for j, step in zip(rest, unit[1:]))
            yield (array.metadata.encode_chunk_key((i, *rest)), *cuts), *rows


def _is_fill(array: zarr.Array, piece: np.ndarray) -> bool:
    fill = array.fill_value
    # most pieces are told by their first row
    return bool(_equal(piece[:1], fill).all() and _equal(piece, fill).all())


def _equal(values: np.ndarray, fill: Any) -> np.ndarray:
    return np.isnan(values) if fill != fill else np.asarray(values == fill)


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
