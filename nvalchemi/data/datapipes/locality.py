"""Shuffling in windows of chunks: how much of a store is open at a time, and what that costs.

A global shuffle touches a chunk of the store for almost every sample. `WindowedOrder` shuffles the
chunks, takes a window of them at a time, and shuffles the samples inside the window: its chunks are
read once, and memory holds one window. Samples that lie in one chunk then meet in a batch more
often than by chance. `shuffle_price` and `measured_price` give both figures.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from nvalchemi.data.datapipes.order import (
    Indices,
    Key,
    Size,
    check_size,
    child_key,
    passes_of,
    shuffle,
)


class WindowedOrder:
    """Draws without repetition inside a pass, a window of chunks after the other.

    The chunks of a pass are permuted, `locality` of them in a row are a window, and the samples of
    a window are permuted: both by keys, so that any draw is reached directly. The last, short chunk
    of the data set has a random place among the others.

    Parameters
    ----------
    n : int, or int64 array of shape (m,)
        Number of samples; an array gives it for each of m draws.
    key : uint64 array, shape (8,) or (8, m)
    chunk_size : int, or int64 array of shape (m,)
        Consecutive samples that are read together.
    locality : int
        Chunks in a window, at least 1.
    """

    def __init__(self, n: Size, key: Key, chunk_size: Size, locality: int) -> None:
        check_size(n)
        self.n, self.key, self.chunk_size, self.locality = n, key, chunk_size, locality
        self.full, self.tail = n // chunk_size, n % chunk_size
        self.missing = chunk_size - self.tail  # rows that the last chunk falls short of

    def __call__(self, draws: Indices) -> Indices:
        number, slots = passes_of(draws, self.n)
        key = child_key(self.key, number)
        rows, missing = self.locality * self.chunk_size, self.missing
        tail_rank = self._tail_rank(key)
        tail_window = tail_rank // self.locality
        # after the window that has the short chunk everything begins earlier
        after = slots >= (tail_window + 1) * rows - missing
        window = (slots + missing * after) // rows
        begin = window * rows - missing * after
        size = np.minimum(rows - missing * (window == tail_window), self.n - begin)
        place = shuffle(slots - begin, size, child_key(key, 2 + window))
        # behind the short chunk, count as if it were whole; begin is exact up to its window
        place += missing * (~after & (begin + place >= tail_rank * self.chunk_size + self.tail))
        rank = window * self.locality + place // self.chunk_size
        return self._chunk(rank, tail_rank, key) * self.chunk_size + place % self.chunk_size

    def _tail_rank(self, key: Key) -> Indices:
        """Place of the short chunk among all; behind all others if there is none."""
        bits = child_key(key, 0)[0] >> np.uint64(11)
        drawn = (bits * ((self.full + 1) * 2.0**-53)).astype(np.int64)
        return np.where(self.tail == 0, self.full, drawn)

    def _chunk(self, rank: Indices, tail_rank: Indices, key: Key) -> Indices:
        others = np.where(rank == tail_rank, 0, rank - (rank > tail_rank))
        whole = max(self.full, 1) if isinstance(self.full, int) else np.maximum(self.full, 1)
        return np.where(rank == tail_rank, self.full, shuffle(others, whole, child_key(key, 1)))


@dataclass(frozen=True)
class LocalityPrice:
    """What an order costs in reads, and how far its batches are from those of a global shuffle.

    Attributes
    ----------
    distinct_chunks : float
        Mean number of different chunks in a batch.
    chunk_mates : float
        How often two samples of a batch come from one chunk, relative to a global shuffle (1).
    error : float
        Standard error of `distinct_chunks`, if the batches are a sample of more; 0 for a formula.
    batches : int
        Batches that were looked at; 0 for a formula.
    """

    distinct_chunks: float
    chunk_mates: float
    error: float
    batches: int


def shuffle_price(
    length: int, batch_size: int, chunk_size: int, locality: int = 0
) -> LocalityPrice:
    """Expected price of batches of one data set, exact but for batches that span two windows.

    A batch is drawn without repetition from the m samples of a window, and misses a given chunk of
    c with the hypergeometric probability C(m - c, B) / C(m, B). Two of its samples share a chunk
    with probability (c - 1) / (m - 1), in a global shuffle (c - 1) / (length - 1).
    """
    for name, value in (
        ("length", length), ("batch_size", batch_size), ("chunk_size", chunk_size)
    ):  # fmt: skip
        if value < 1:
            raise ValueError(f"{name} must be >= 1, got {value}")
    if locality < 0:
        raise ValueError(f"locality must be >= 0, got {locality}")
    m = min(length, locality * chunk_size) if locality else length
    if batch_size > m:
        raise ValueError(
            f"batch_size must be at most the samples of a window: {batch_size} > {m}; use a larger "
            "locality or chunk_size, or measured_price"
        )
    chunks, rest = divmod(m, chunk_size)
    distinct = chunks * (1 - _missed(m, chunk_size, batch_size))
    distinct += 1 - _missed(m, rest, batch_size)
    mates = (length - 1) / (m - 1) if m > 1 else 1.0
    return LocalityPrice(distinct, mates, 0.0, 0)


def _missed(m: int, c: int, batch_size: int) -> float:
    """Probability that a batch has none of c among m samples."""
    if m - c < batch_size:
        return 0.0
    drawn = np.arange(batch_size)
    return float(np.exp(np.log1p(-c / (m - drawn)).sum()))


def measured_price(
    batches: Iterable[Indices], lengths: Sequence[int], chunk_size: int | Sequence[int]
) -> LocalityPrice:
    """Price of given batches, for instance of some rows of a sampler's `window`.

    Parameters
    ----------
    batches : iterable of int64 arrays
        Sample indices; negative ones mark what is not there.
    lengths : sequence of int
        Lengths of the data sets behind the indices.
    chunk_size : int or sequence of int
        Samples in a chunk, of all data sets or of each.
    """
    per_set = np.broadcast_to(np.asarray(chunk_size, dtype=np.int64), (len(lengths),))
    sizes = np.asarray(lengths, dtype=np.int64)
    ends = np.cumsum(sizes)
    total = int(ends[-1])
    first_chunk = np.cumsum(-(-sizes // per_set)) - -(-sizes // per_set)
    distinct, mates, pairs = [], 0, 0
    for batch in batches:
        samples = batch[batch >= 0]
        sets = np.searchsorted(ends, samples, side="right")
        chunks = first_chunk[sets] + (samples - (ends - sizes)[sets]) // per_set[sets]
        counts = np.unique(chunks, return_counts=True)[1]
        distinct.append(len(counts))
        mates += int((counts * (counts - 1)).sum())
        pairs += len(samples) * (len(samples) - 1)
    if not distinct:
        raise ValueError("batches must hold at least one batch, got none")
    # in a global shuffle any two samples share a batch equally often
    whole, rest = np.divmod(sizes, per_set)
    same = float((whole * per_set * (per_set - 1.0) + rest * (rest - 1)).sum())
    ratio = mates / pairs * total * (total - 1) / same if pairs and same else 1.0
    error = float(np.std(distinct) / math.sqrt(len(distinct)))
    return LocalityPrice(float(np.mean(distinct)), ratio, error, len(distinct))
