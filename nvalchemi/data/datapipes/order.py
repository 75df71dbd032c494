"""Keyed orders of one data set: draw number -> sample index, evaluated anywhere, no list kept.

An order is a function of (seed, data set, epoch) alone. `PassOrder` hands out every sample once
before any comes again; `IndependentDraws` draws with replacement; `CyclicOrder` does not shuffle.
All take and return int64 arrays, so a block of draws costs a few dozen numpy calls and the data
set's size costs nothing.
"""

import hashlib
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Indices: TypeAlias = NDArray[np.int64]
Order: TypeAlias = Callable[[Indices], Indices]

MAX_SIZE = 2**40
"""Largest data set: both Feistel halves must fit 32-bit arithmetic."""

TABLE_SIZE = 2**10
"""Up to here a pass is a sorted table. Re-passing a small set on many ranks touches a new pass in
every step, where a longer table would cost more than the network."""

ROUNDS = 8
TABLE_BLOCK = 2**16

GOLDEN = 0x9E3779B97F4A7C15  # odd, 2^64 / golden ratio: the step of splitmix64


def derive_key(*parts: int | str) -> NDArray[np.uint64]:
    """Hash `parts` into eight independent 64-bit words.

    A hash, and not a sum such as seed + epoch, so that (seed 0, epoch 1) and (seed 1, epoch 0)
    have nothing in common.
    """
    text = "/".join(str(part) for part in parts)
    digest = hashlib.blake2b(text.encode(), digest_size=64, person=b"nvalchemi-order").digest()
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)


def mix64(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Avalanche hash of 64-bit words (finaliser of splitmix64: Steele, Lea, Flood, OOPSLA 2014)."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


class PassOrder:
    """Draws without repetition inside a pass: draw k is slot k mod n of pass k div n.

    Each pass is a permutation of range(n) with a key of its own.

    Parameters
    ----------
    n : int
        Number of samples, 1 to 2^40.
    key : array of uint64, shape (8,)
        From `derive_key`.
    """

    def __init__(self, n: int, key: NDArray[np.uint64]) -> None:
        check_size(n)
        self.n = n
        self.key = key
        self._stored: tuple[int, Indices] | None = None

    def __call__(self, draws: Indices) -> Indices:
        if self.n == 1 or draws.size == 0:
            return np.zeros(draws.shape, dtype=np.int64)
        first, last = int(draws.min()) // self.n, int(draws.max()) // self.n
        if first == last:
            slots = draws - first * self.n
            if self.n <= TABLE_SIZE:
                return self._table(first)[slots]
            keys = round_keys(self.key, np.array([first]))[..., 0]
            return permute(slots, self.n, keys)
        number, slots = np.divmod(draws, self.n)
        passes, which = np.unique(number, return_inverse=True)
        if self.n <= TABLE_SIZE:
            return self._gather_tables(passes, which, slots)
        return permute(slots, self.n, round_keys(self.key, passes)[..., which])

    def _table(self, number: int) -> Indices:
        if self._stored is None or self._stored[0] != number:
            self._stored = (number, sorted_tables(self.n, self.key, np.array([number]))[0])
        return self._stored[1]

    def _gather_tables(self, passes: Indices, which: Indices, slots: Indices) -> Indices:
        """Look up slots of many passes, a bounded number of table entries at a time."""
        out = np.empty(slots.shape, dtype=np.int64)
        rows = max(1, TABLE_BLOCK // self.n)
        for start in range(0, len(passes), rows):
            tables = sorted_tables(self.n, self.key, passes[start : start + rows])
            here = (which >= start) & (which < start + rows)
            out[here] = tables[which[here] - start, slots[here]]
        return out


class IndependentDraws:
    """Uniform draws with replacement: draw k is a hash of (key, k), so there is no state."""

    def __init__(self, n: int, key: NDArray[np.uint64]) -> None:
        check_size(n)
        self.n = n
        self.key = key

    def __call__(self, draws: Indices) -> Indices:
        bits = mix64(mix64(draws.astype(np.uint64) * np.uint64(GOLDEN) + self.key[0]) ^ self.key[1])
        # 53 bits fill a float64 exactly; times n <= 2^40 it stays below n after rounding
        return ((bits >> np.uint64(11)) * (self.n * 2.0**-53)).astype(np.int64)


class CyclicOrder:
    """No shuffle: 0, 1, ..., n - 1, and again from 0."""

    def __init__(self, n: int) -> None:
        check_size(n)
        self.n = n

    def __call__(self, draws: Indices) -> Indices:
        return draws % self.n


def check_size(n: int) -> None:
    if not 1 <= n <= MAX_SIZE:
        raise ValueError(f"an order needs a data set of 1 to 2^40 samples, got {n}")


def sorted_tables(n: int, key: NDArray[np.uint64], passes: Indices) -> Indices:
    """Permutations of range(n) for several passes, shape (len(passes), n): argsort of hashes."""
    seeds = mix64(passes.astype(np.uint64) * np.uint64(GOLDEN) + key[0]) ^ key[1]
    counters = np.arange(n, dtype=np.uint64) * np.uint64(GOLDEN)
    return np.argsort(mix64(seeds[:, None] + counters), axis=1, kind="stable")


def round_keys(key: NDArray[np.uint64], passes: Indices) -> NDArray[np.uint32]:
    """Two 32-bit keys for each Feistel round of each pass, shape (ROUNDS, 2, len(passes))."""
    words = mix64(passes.astype(np.uint64) * np.uint64(GOLDEN) + key[:ROUNDS, None])
    low = (words & np.uint64(0xFFFFFFFF)).astype(np.uint32)
    return np.stack([low, (words >> np.uint64(32)).astype(np.uint32)], axis=1)


def permute(slots: Indices, n: int, keys: NDArray[np.uint32]) -> Indices:
    """Permute range(n) at `slots` by a Feistel network with cycle walking.

    The domain is a x b with a * b - n < a, so that hardly a slot has to walk (Black and Rogaway,
    CT-RSA 2002: generalised Feistel and cycle walking).

    Parameters
    ----------
    slots : int64 array, shape (m,)
        Values in range(n).
    n : int
        Size of the domain, 2 to 2^40.
    keys : uint32 array, shape (ROUNDS, 2) or (ROUNDS, 2, m)
        Round keys, the same for all slots or one set for each.
    """
    a = int(np.ceil(np.sqrt(n)))
    b = -(-n // a)
    out = feistel(slots, a, b, keys)
    outside = np.flatnonzero(out >= n)
    while outside.size:
        own = keys if keys.ndim == 2 else keys[..., outside]
        out[outside] = feistel(out[outside], a, b, own)
        outside = outside[out[outside] >= n]
    return out


def feistel(values: Indices, a: int, b: int, keys: NDArray[np.uint32]) -> Indices:
    """One encryption of values in range(a * b) = (left in range(a)) * b + (right in range(b))."""
    quotient = values // b
    left, right = quotient.astype(np.uint32), (values - quotient * b).astype(np.uint32)
    for round_number in range(0, ROUNDS, 2):
        left = add_hash(left, right, a, keys[round_number])
        right = add_hash(right, left, b, keys[round_number + 1])
    return left.astype(np.int64) * b + right


def add_hash(
    half: NDArray[np.uint32], other: NDArray[np.uint32], modulus: int, key: NDArray[np.uint32]
) -> NDArray[np.uint32]:
    """(half + hash(other, key)) mod modulus.

    The hash is a keyed form of lowbias32 (C. Wellons, "hash prospector", 2018). A round function
    that is linear modulo a power of two leaves all batches even or all odd; this one does not.
    """
    x = other ^ key[0]
    x ^= x >> np.uint32(16)
    x *= np.uint32(0x7FEB352D)
    x += key[1]
    x ^= x >> np.uint32(15)
    x *= np.uint32(0x846CA68B)
    x ^= x >> np.uint32(16)
    shift = ((x.astype(np.uint64) * np.uint64(modulus)) >> np.uint64(32)).astype(np.uint32)
    total = half + shift
    # a wrapped difference is huge, so the minimum is the value reduced into range(modulus)
    return np.minimum(total, total - np.uint32(modulus))
