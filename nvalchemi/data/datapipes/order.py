"""Keyed orders of a data set: draw number -> sample index, evaluated anywhere, no list kept.

An order is a function of (seed, data set, epoch) alone. `PassOrder` hands out every sample once
before any comes again; `IndependentDraws` draws with replacement; `CyclicOrder` does not shuffle.
All take and return int64 arrays, so a block of draws costs a few dozen numpy calls and the data
set's size costs nothing. Sizes and keys may differ from draw to draw: one call serves any number
of data sets.
"""

import hashlib
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Indices: TypeAlias = NDArray[np.int64]
Size: TypeAlias = int | Indices
Key: TypeAlias = NDArray[np.uint64]
Order: TypeAlias = Callable[[Indices], Indices]

MAX_SIZE = 2**40
"""Largest data set: both Feistel halves must fit 32-bit arithmetic."""

SMALL = 64
"""Up to here a draw is ranked among hashes of all slots: a network of so few shows its structure
(its halves have 8 values), and above it the statistics of a true shuffle hold."""

ROUNDS = 8
RANK_BLOCK = 2**16  # hashes held at a time when draws are ranked

GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # odd, 2^64 / golden ratio: the step of splitmix64


def derive_key(*parts: int | str) -> Key:
    """Hash `parts` into eight independent 64-bit words.

    A hash, and not a sum such as seed + epoch, so that (seed 0, epoch 1) and (seed 1, epoch 0)
    have nothing in common.
    """
    text = "/".join(str(part) for part in parts)
    digest = hashlib.blake2b(text.encode(), digest_size=64, person=b"nvalchemi-order").digest()
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)


def child_key(key: Key, number: Size) -> Key:
    """Key number `number` below `key`: of a data set below an epoch's, of a pass below its set's.

    Parameters
    ----------
    key : uint64 array, shape (8,) or (8, m)
    number : int or int64 array, shape (m,)

    Returns
    -------
    uint64 array, shape (8,) if both are single, else (8, m)
    """
    step = np.array(number, ndmin=1).astype(np.uint64) * GOLDEN  # numpy warns of single overflows
    words = mix64(step + key.reshape(ROUNDS, -1))
    return words if key.ndim == 2 or np.ndim(number) else words[:, 0]


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
    n : int, or int64 array of shape (m,)
        Number of samples, 1 to 2^40; an array gives it for each of m draws.
    key : uint64 array, shape (8,) or (8, m)
        From `derive_key` or `child_key`.
    """

    def __init__(self, n: Size, key: Key) -> None:
        check_size(n)
        self.n = n
        self.key = key

    def __call__(self, draws: Indices) -> Indices:
        number, slots = passes_of(draws, self.n)
        return shuffle(slots, self.n, child_key(self.key, number))


class IndependentDraws:
    """Uniform draws with replacement: draw k is a hash of (key, k), so there is no state."""

    def __init__(self, n: Size, key: Key) -> None:
        check_size(n)
        self.n = n
        self.key = key

    def __call__(self, draws: Indices) -> Indices:
        bits = mix64(mix64(draws.astype(np.uint64) * GOLDEN + self.key[0]) ^ self.key[1])
        # 53 bits fill a float64 exactly; times n <= 2^40 it stays below n after rounding
        return ((bits >> np.uint64(11)) * (self.n * 2.0**-53)).astype(np.int64)


class CyclicOrder:
    """No shuffle: 0, 1, ..., n - 1, and again from 0."""

    def __init__(self, n: Size) -> None:
        check_size(n)
        self.n = n

    def __call__(self, draws: Indices) -> Indices:
        return draws % self.n


def check_size(n: Size) -> None:
    low, high = (n, n) if isinstance(n, int) else (n.min(initial=1), n.max(initial=1))
    if low < 1 or high > MAX_SIZE:
        raise ValueError(f"an order needs data sets of 1 to 2^40 samples, got {n}")


def passes_of(draws: Indices, n: Size) -> tuple[Size, Indices]:
    """Pass and slot of each draw; the pass is one number where all draws share it."""
    if isinstance(n, int) and draws.size:
        first, last = int(draws.min()) // n, int(draws.max()) // n
        if first == last:
            return first, draws - first * n
    number, slots = np.divmod(draws, n)
    return number, slots


def shuffle(slots: Indices, n: Size, key: Key) -> Indices:
    """Permute range(n) at `slots`, by the permutation that `key` names.

    Parameters
    ----------
    slots : int64 array, shape (m,)
        Values in range(n).
    n : int or int64 array, shape (m,)
        Size of the domain, 1 to 2^40.
    key : uint64 array, shape (8,) or (8, m)
        The same for all slots or one for each.
    """
    if isinstance(n, int):
        return rank_hashes(slots, n, key) if n <= SMALL else permute(slots, n, key)
    out = np.empty(slots.shape, dtype=np.int64)
    small = n <= SMALL
    for chosen, method in ((small, rank_hashes), (~small, permute)):
        rows = np.flatnonzero(chosen)
        if rows.size:
            out[rows] = method(slots[rows], n[rows], key[:, rows] if key.ndim == 2 else key)
    return out


def rank_hashes(slots: Indices, n: Size, key: Key) -> Indices:
    """Rank of each slot's hash among the hashes of range(n): a uniform permutation, without ties.

    It costs n hashes a draw, but no table of a pass, most of which other ranks would use.
    """
    width = int(np.max(n))
    if width == 1 or slots.size == 0:
        return np.zeros(slots.shape, dtype=np.int64)
    columns = np.arange(width, dtype=np.uint64)
    seeds = np.broadcast_to(key[0], slots.shape)
    out = np.empty(slots.shape, dtype=np.int64)
    step = RANK_BLOCK // width
    for start in range(0, len(slots), step):
        part = slice(start, start + step)
        hashes = mix64(seeds[part, None] + columns * GOLDEN)
        # the slot number instead of the lowest bits decides between equal hashes
        hashes = (hashes & ~np.uint64(SMALL - 1)) | columns
        below = hashes < np.take_along_axis(hashes, slots[part, None], axis=1)
        if not isinstance(n, int):
            below &= columns < n[part, None]
        out[part] = below.sum(axis=1)
    return out


def round_keys(key: Key) -> NDArray[np.uint32]:
    """Two 32-bit keys for each Feistel round, shape (ROUNDS, 2) + key.shape[1:]."""
    low = (key & np.uint64(0xFFFFFFFF)).astype(np.uint32)
    return np.stack([low, (key >> np.uint64(32)).astype(np.uint32)], axis=1)


def permute(slots: Indices, n: Size, key: Key) -> Indices:
    """Permute range(n) at `slots` by a Feistel network with cycle walking.

    The domain is a x b with a * b - n < a, so that hardly a slot has to walk (Black and Rogaway,
    CT-RSA 2002: generalised Feistel and cycle walking).

    Parameters
    ----------
    slots : int64 array, shape (m,)
        Values in range(n).
    n : int or int64 array, shape (m,)
        Size of the domain, 2 to 2^40.
    key : uint64 array, shape (8,) or (8, m)
        Two 32-bit keys for each round, the same for all slots or one set for each.
    """
    keys = round_keys(key)
    a = np.ceil(np.sqrt(n)).astype(np.int64)
    b = -(-n // a)
    out = feistel(slots, a, b, keys)
    outside = np.flatnonzero(out >= n)
    while outside.size:
        sizes = [np.broadcast_to(size, slots.shape)[outside] for size in (a, b, n)]
        own = keys if keys.ndim == 2 else keys[..., outside]
        out[outside] = feistel(out[outside], sizes[0], sizes[1], own)
        outside = outside[out[outside] >= sizes[2]]
    return out


def feistel(values: Indices, a: Indices, b: Indices, keys: NDArray[np.uint32]) -> Indices:
    """One encryption of values in range(a * b) = (left in range(a)) * b + (right in range(b))."""
    quotient = values // b
    left, right = quotient.astype(np.uint32), (values - quotient * b).astype(np.uint32)
    sizes = [(size.astype(np.uint32), size.astype(np.uint64)) for size in (a, b)]
    for round_number in range(0, ROUNDS, 2):
        left = add_hash(left, right, *sizes[0], keys[round_number])
        right = add_hash(right, left, *sizes[1], keys[round_number + 1])
    return left.astype(np.int64) * b + right


def add_hash(
    half: NDArray[np.uint32],
    other: NDArray[np.uint32],
    modulus: NDArray[np.uint32],
    wide_modulus: NDArray[np.uint64],
    key: NDArray[np.uint32],
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
    shift = ((x.astype(np.uint64) * wide_modulus) >> np.uint64(32)).astype(np.uint32)
    total = half + shift
    # a wrapped difference is huge, so the minimum is the value reduced into range(modulus)
    return np.minimum(total, total - modulus)
