"""What is dealt out: lengths of the data sets, and sizes of the samples where they are known."""

from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nvalchemi.data.datapipes.order import MAX_SIZE, Indices
from nvalchemi.data.datapipes.weights import check_integer

HISTOGRAM_BLOCK = 2**20  # sizes counted at a time, so that 1e8 of them need no copy
LARGEST_COUNTED = 2**20  # integers below this are counted, others are partitioned


class OneSet:
    """Stands for a data set of which only the length is known, and perhaps sizes."""

    def __init__(self, samples: "SampleSet") -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def sizes(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """Atoms and edges of each sample, as data sets have; no edges where none are known."""
        atoms, edges = self._samples.atoms, self._samples.edges
        if atoms is None:
            raise TypeError(
                "the sampler needs the sizes of the samples and the plan knows none: give "
                "ShardPlan(sizes=atoms) or sizes=(atoms, edges)"
            )
        return atoms, np.zeros(len(self), dtype=np.uint8) if edges is None else edges


class SeveralSets(OneSet):
    """Stands for a MultiDataset."""

    def __init__(self, samples: "SampleSet") -> None:
        super().__init__(samples)
        self.datasets = tuple(range(length) for length in samples.lengths)


class SampleSet:
    """Lengths and sizes of what is planned.

    Attributes
    ----------
    lengths : list of int
        Samples of each data set.
    several : bool
        Whether they are several behind one index, be it only one of them.
    offsets : int64 array, shape (D + 1,)
        Index of the first sample of each data set, and the end.
    dataset
        What a sampler is built with: the data set that was given, or something with its length.
    """

    def __init__(self, source: Any, sizes: Any = None, costs: Any = None) -> None:
        self.lengths, self.several = read_lengths(source)
        self.offsets: Indices = np.concatenate([[0], np.cumsum(self.lengths)]).astype(np.int64)
        if not 1 <= len(self) <= MAX_SIZE:
            raise ValueError(f"a plan needs 1 to 2^40 samples, got lengths {self.lengths}")
        self._source: Any = None
        if isinstance(source, int | np.integer | list | tuple | np.ndarray):
            self.dataset: Any = SeveralSets(self) if self.several else OneSet(self)
        else:
            self._source = self.dataset = source
        self._given = None if sizes is None else check_pair(sizes, len(self))
        self._costs = None if costs is None else check_sizes("costs", costs, len(self))

    def __len__(self) -> int:
        return int(self.offsets[-1])

    @cached_property
    def _sizes(self) -> tuple[NDArray[Any] | None, NDArray[Any] | None]:
        if self._given is None:
            known = known_sizes(self._source)
            return (None, None) if known is None else check_pair(known, len(self))
        return self._given

    @property
    def atoms(self) -> NDArray[Any] | None:
        """Atoms of each sample, shape (N,); None where nobody knows."""
        return self._sizes[0]

    @property
    def edges(self) -> NDArray[Any] | None:
        """Edges of each sample, shape (N,); None where nobody knows."""
        return self._sizes[1]

    @property
    def costs(self) -> NDArray[Any] | None:
        """Cost of each sample, shape (N,): as given, else its atoms."""
        return self.atoms if self._costs is None else self._costs

    @property
    def unit(self) -> str:
        """What `costs` counts."""
        return "atoms" if self._costs is None else "cost"

    def dataset_of(self, indices: Indices) -> Indices:
        """Data set of each index."""
        return np.searchsorted(self.offsets[1:], indices, side="right")

    def count(self, indices: Indices) -> Indices:
        """How many of the indices belong to each data set, shape (D,); -1 counts nowhere."""
        flat = indices.ravel()
        return np.bincount(self.dataset_of(flat[flat >= 0]), minlength=len(self.lengths))

    @cached_property
    def ranked_costs(self) -> tuple[float, Callable[[int], float]] | None:
        """Mean cost, and the sum of the k largest costs as a function of k."""
        return None if self.costs is None else summarise(self.costs)


def read_lengths(source: Any) -> tuple[list[int], bool]:
    """Lengths of the data sets, and whether they are several behind one index."""
    wish = (
        "dataset_or_lengths must be a data set, its length, or a sequence of lengths, got "
        f"{source!r}"
    )
    if isinstance(source, bool) or isinstance(source, str | bytes) or source is None:
        raise TypeError(wish)
    if isinstance(source, int | np.integer):
        return [check_integer("the length of the data set", source, 1)], False
    if hasattr(source, "datasets") and not isinstance(source, np.ndarray):
        return [len(child) for child in source.datasets], True
    if isinstance(source, list | tuple | np.ndarray):
        if len(source) == 0:
            raise ValueError("a plan needs the length of at least one data set, got none")
        return [check_integer("the length of a data set", n, 0) for n in source], True
    if not hasattr(source, "__len__"):
        raise TypeError(wish)
    return [len(source)], False


def known_sizes(source: Any) -> Any:
    """Atoms and edges of each sample if the data set can say without reading samples, else None."""
    if not callable(getattr(source, "sizes", None)):
        return None
    try:
        return source.sizes()
    except TypeError:  # a reader that keeps no table of them
        return None


def check_pair(sizes: Any, length: int) -> tuple[NDArray[Any], NDArray[Any] | None]:
    """Atoms, and edges if both are given."""
    if isinstance(sizes, tuple):
        if len(sizes) != 2:
            raise ValueError(f"sizes must be atoms or (atoms, edges), got {len(sizes)} arrays")
        names = ("sizes[0]", "sizes[1]")
        atoms, edges = (check_sizes(n, part, length) for n, part in zip(names, sizes))
        return atoms, edges
    return check_sizes("sizes", sizes, length), None


def check_sizes(name: str, values: Any, length: int) -> NDArray[Any]:
    """One finite number >= 0 for each sample; memory-mapped arrays stay on disk."""
    array = np.asanyarray(values)
    if array.dtype.kind not in "iuf":
        raise TypeError(f"{name} must be numbers, got an array of {array.dtype}")
    if array.shape != (length,):
        raise ValueError(
            f"{name} must have one number for each of the {length} samples, got shape {array.shape}"
        )
    low, high = array.min(), array.max()
    if not (np.isfinite(low) and np.isfinite(high) and low >= 0):
        raise ValueError(f"{name} must be finite and >= 0, got values from {low} to {high}")
    return array


def summarise(costs: NDArray[Any]) -> tuple[float, Callable[[int], float]]:
    if costs.dtype.kind in "iu" and costs.max() < LARGEST_COUNTED:
        return summarise_counts(count_values(costs))
    mean = float(costs.mean(dtype=np.float64))
    return mean, lambda k: float(np.partition(costs, -min(k, costs.size))[-k:].sum())


def count_values(costs: NDArray[Any]) -> Indices:
    counts = np.zeros(int(costs.max()) + 1, dtype=np.int64)
    for start in range(0, costs.size, HISTOGRAM_BLOCK):
        counts += np.bincount(costs[start : start + HISTOGRAM_BLOCK], minlength=counts.size)
    return counts


def summarise_counts(counts: Indices) -> tuple[float, Callable[[int], float]]:
    values = np.arange(counts.size)
    taken = np.cumsum(counts[::-1])[::-1]  # samples at least so large
    above = np.concatenate([np.cumsum((values * counts)[::-1])[::-1], [0]])

    def largest(k: int) -> float:
        k = min(k, int(taken[0]))
        # the smallest value of which all larger ones together are not more than k
        edge = int(np.searchsorted(-np.append(taken, 0), -k, side="left"))
        rest = k - int(np.append(taken, 0)[edge])
        return float(above[edge] + rest * max(edge - 1, 0))

    return float((values * counts).sum() / taken[0]), largest
