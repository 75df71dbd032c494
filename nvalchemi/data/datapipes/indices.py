"""Indices of samples as users and samplers give them, turned into checked positions."""

import operator
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import numpy as np


def normalise_index(index: Any, size: int) -> int:
    """Turn an integer of any kind (Python, numpy, tensor), maybe negative, into a position.

    Raises
    ------
    TypeError
        If it is no integer.
    IndexError
        If it is outside the `size` samples.
    """
    position = _integer(index)
    if not -size <= position < size:
        raise IndexError(_outside(position, size))
    return position % size


def index_list(batch: Any) -> list[int]:
    """The indices of one batch (a list, an array, a tensor) as Python integers.

    Raises
    ------
    TypeError
        If it is no sequence of integers.
    """
    if not isinstance(batch, Iterable) or isinstance(batch, str) or getattr(batch, "ndim", 1) != 1:
        raise TypeError(f"a batch must be a list of sample indices: got {batch!r}")
    indices = batch.tolist() if hasattr(batch, "tolist") else list(batch)
    # most often they are plain integers, which need no look at each
    return indices if set(map(type, indices)) == {int} else [_integer(i) for i in indices]


def flat_indices(batches: Sequence[Any], size: int) -> tuple[np.ndarray, list[int]]:
    """Indices of several batches end to end, and how many each has.

    Returns
    -------
    positions : ndarray
        int64, in 0..size - 1.
    lengths : list of int
        Of each batch.

    Raises
    ------
    TypeError, IndexError
        As `normalise_index`.
    ValueError
        If there is no batch, or an empty one.
    """
    lists = [index_list(batch) for batch in batches]
    lengths = [len(indices) for indices in lists]
    if not lengths or min(lengths) < 1:
        raise ValueError(f"every batch needs at least one sample: got lengths {lengths}")
    flat = list(chain.from_iterable(lists))
    if min(flat) < -size or max(flat) >= size:
        wrong = next(i for i in flat if not -size <= i < size)
        raise IndexError(_outside(wrong, size))
    return np.array(flat, dtype=np.int64) % size, lengths


def _integer(index: Any) -> int:
    if isinstance(index, bool):
        raise TypeError(f"an index must be an integer: got {index}; a mask is no index of a sample")
    try:
        return operator.index(index)
    except TypeError:
        raise TypeError(
            f"an index must be an integer: got {index!r}; for several samples use "
            "get_batch(indices) or load_batches([indices])"
        ) from None


def _outside(index: int, size: int) -> str:
    if size == 0:
        return f"the data set is empty: there is no sample {index}"
    return f"index must lie in {-size}..{size - 1}: got {index}"
