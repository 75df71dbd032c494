"""Sizes of samples for samplers that look at them: of the data set, or as the caller gives them."""

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from nvalchemi.data.datapipes.order import Indices

Sizes: TypeAlias = NDArray[Any]


def reader_sizes(reader: Any) -> tuple[Indices, Indices]:
    """Atoms and edges of every sample of a reader, without reading one.

    Raises
    ------
    TypeError
        If the reader keeps no table of them.
    """
    try:
        return (
            np.asarray(reader.num_nodes_per_sample, dtype=np.int64),
            np.asarray(reader.num_edges_per_sample, dtype=np.int64),
        )
    except AttributeError:
        raise TypeError(
            f"{type(reader).__name__} has no num_nodes_per_sample and num_edges_per_sample, so "
            "sizes could be had only by reading every sample; write the data to a store with "
            "AtomicDataZarrWriter, or give the sampler sizes=(atoms, edges)"
        ) from None


def dataset_sizes(dataset: Any) -> tuple[Indices, Indices]:
    """What `dataset.sizes()` gives.

    Raises
    ------
    TypeError
        If it has no such method.
    """
    if not hasattr(dataset, "sizes"):
        raise TypeError(
            f"{type(dataset).__name__} has no sizes() -> (atoms, edges); give the sampler "
            "sizes=(atoms, edges), arrays with an integer for each sample"
        )
    atoms, edges = dataset.sizes()
    return atoms, edges


def sample_sizes(dataset: Any, sizes: Any, length: int) -> tuple[Sizes, Sizes | None]:
    """Atoms and edges of each sample in the smallest type that holds them.

    Parameters
    ----------
    dataset : Any
        Asked for its `sizes()` if none are given.
    sizes : array of shape (length,), or a pair of them, or None
        Atoms, or atoms and edges. Arrays of unsigned integers, a memory map too, stay as they are.
    length : int

    Returns
    -------
    atoms, edges : arrays, shape (length,)
        `edges` is None where only atoms were given.

    Raises
    ------
    TypeError, ValueError
        For sizes that are no integers >= 0 or not as many as there are samples.
    """
    if sizes is None:
        sizes = dataset_sizes(dataset)
    if not isinstance(sizes, tuple | list) or not all(np.ndim(part) == 1 for part in sizes):
        return check_sizes("sizes", sizes, length), None
    if len(sizes) != 2:
        raise ValueError(f"sizes must be atoms or the pair (atoms, edges), got {len(sizes)} arrays")
    return check_sizes("sizes[0]", sizes[0], length), check_sizes("sizes[1]", sizes[1], length)


def check_sizes(name: str, values: Any, length: int) -> Sizes:
    """`values` as unsigned integers, one for each sample."""
    array = np.asanyarray(values)
    if array.shape != (length,):
        raise ValueError(
            f"{name} must have one entry for each of {length} samples, got shape {array.shape}"
        )
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} must be integers, got {array.dtype}")
    if array.dtype.kind == "u":
        return array
    if array.min() < 0:
        raise ValueError(f"{name} must be >= 0, got {array.min()} at {int(array.argmin())}")
    return array.astype(np.min_scalar_type(array.max()))
