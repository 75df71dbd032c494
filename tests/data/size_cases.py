"""Sizes of structures for tests of samplers that look at them."""

import numpy as np
from numpy.typing import NDArray


class Sized:
    """A data set of which only the length matters."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length


def heavy_tailed(number: int, seed: int = 0) -> NDArray[np.uint16]:
    """Atoms of a mix of molecules and crystals: mean 36, 99th percentile 210, at most 400."""
    rng = np.random.default_rng(seed)
    spread = 0.953  # a log-normal with this mean and percentile
    atoms = 36 * np.exp(spread * rng.standard_normal(number) - spread**2 / 2)
    return np.clip(np.round(atoms), 2, 400).astype(np.uint16)


def edges_of(atoms: NDArray[np.uint16], seed: int = 1) -> NDArray[np.uint32]:
    """Edges of structures of different density."""
    density = np.random.default_rng(seed).normal(22, 8, len(atoms))
    return np.round(atoms * np.clip(density, 1, 60)).astype(np.uint32)
