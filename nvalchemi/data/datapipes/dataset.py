"""Data sets of structures: what they must offer, and the one behind a reader."""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, Protocol, Self, runtime_checkable

import torch

from nvalchemi.data.atomic_data import AtomicData
from nvalchemi.data.batch import Batch
from nvalchemi.data.datapipes.prefetch import Prefetch

SampleTransform = Callable[[AtomicData, dict[str, Any]], tuple[AtomicData, dict[str, Any]]]


@runtime_checkable
class BatchDatasetProtocol(Protocol):
    """What MultiDataset and DataLoader ask of a data set."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> tuple[AtomicData, dict[str, Any]]: ...

    def load_batches(
        self, index_lists: Sequence[Sequence[int]], stream: Any = None
    ) -> list[Batch]: ...

    @property
    def field_names(self) -> Any: ...

    def close(self) -> None: ...


def resolve_device(device: str | torch.device | None) -> torch.device:
    """Turn None or "auto" into CUDA where there is one, else the CPU.

    Raises
    ------
    TypeError
        If it is nothing that names a device.
    """
    if device is None or device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not isinstance(device, str | torch.device):
        raise TypeError(f"device must be a string, a torch.device or None: got {device!r}")
    return torch.device(device)


def check_transforms(name: str, transforms: Any) -> tuple[Any, ...]:
    """Turn None or a sequence of callables into a tuple.

    Raises
    ------
    TypeError
        If it is no sequence or holds something that can not be called.
    """
    if transforms is None:
        return ()
    if not isinstance(transforms, Sequence):
        raise TypeError(f"{name} must be a sequence of functions: got {type(transforms).__name__}")
    for i, transform in enumerate(transforms):
        if not callable(transform):
            raise TypeError(f"{name}[{i}] must be callable: got {transform!r}")
    return tuple(transforms)


def normalise_index(index: int, size: int) -> int:
    """Turn a negative index into a position.

    Raises
    ------
    IndexError
        If it is outside the `size` samples.
    """
    if not -size <= index < size:
        raise IndexError(f"index must lie in {-size}..{size - 1}: got {index}")
    return int(index) % size


class Dataset(Prefetch):
    """Structures behind a reader, given out as AtomicData or as whole batches.

    Parameters
    ----------
    reader : AtomicDataZarrReader, Reader, or anything with read_many(indices), len and close()
        Where they come from. One that has ``read_batch(indices) -> Batch`` is read without a
        Python object per structure.
    device : str or torch.device, optional
        Where batches go; None or "auto" is CUDA where there is one, else the CPU.
    num_workers : int
        Threads that read ahead.
    skip_validation : bool
        Whether to leave out the check of values (elements, neighbour indices) of what was read.
    transforms : sequence of callables, optional
        ``(data, metadata) -> (data, metadata)`` for each structure, on the device; applied to
        single samples and to batches alike.

    Raises
    ------
    TypeError
        For an argument of the wrong kind.
    """

    def __init__(
        self,
        reader: Any,
        *,
        device: str | torch.device | None = None,
        num_workers: int = 2,
        skip_validation: bool = False,
        transforms: Sequence[SampleTransform] | None = None,
    ) -> None:
        lacking = [name for name in ("read_many", "__len__", "close") if not hasattr(reader, name)]
        if lacking:
            raise TypeError(
                "reader must implement Reader interface (read_many, __len__, close): "
                f"{type(reader).__name__} lacks {', '.join(lacking)}"
            )
        self.reader = reader
        self.device = resolve_device(device)
        self.skip_validation = skip_validation
        self.transforms: tuple[SampleTransform, ...] = check_transforms("transforms", transforms)
        self._start_prefetch(num_workers)

    def __len__(self) -> int:
        return len(self.reader)

    def __getitem__(self, index: int) -> tuple[AtomicData, dict[str, Any]]:
        index = normalise_index(index, len(self))
        pending = self._singles.pop(index, None)
        sample: tuple[AtomicData, dict[str, Any]]
        sample = self._load_one(index) if pending is None else pending.result()
        return sample

    def __iter__(self) -> Iterator[tuple[AtomicData, dict[str, Any]]]:
        return (self[i] for i in range(len(self)))

    def read_many(self, indices: Sequence[int]) -> list[tuple[AtomicData, dict[str, Any]]]:
        """Samples with their metadata, in the order of the indices."""
        levels = getattr(self.reader, "field_levels", {}) or {}
        samples = []
        for raw, metadata in self.reader.read_many(indices):
            batch = Batch.from_raw_dicts([raw], field_levels=_custom(levels, raw))
            if not self.skip_validation:
                batch.validate()
            data = batch.to(self.device)[0]
            samples.append(self._transform(data, metadata))
        return samples

    def _load_one(self, index: int) -> tuple[AtomicData, dict[str, Any]]:
        return self.read_many([index])[0]

    def _transform(
        self, data: AtomicData, metadata: dict[str, Any]
    ) -> tuple[AtomicData, dict[str, Any]]:
        for i, transform in enumerate(self.transforms):
            try:
                data, metadata = transform(data, metadata)
            except Exception as error:
                name = getattr(transform, "__name__", type(transform).__name__)
                raise RuntimeError(f"transform[{i}] ({name}) failed: {error}") from error
        return data, metadata

    def _read(self, indices: list[int]) -> Batch:
        if hasattr(self.reader, "read_batch"):
            batch: Batch = self.reader.read_batch(indices)
        else:
            raws = [raw for raw, _ in self.reader.read_many(indices)]
            levels = getattr(self.reader, "field_levels", {}) or {}
            batch = Batch.from_raw_dicts(raws, field_levels=_custom(levels, raws[0]))
        batch.metadata.setdefault("index", torch.tensor(indices))
        return batch

    def load_batches(self, index_lists: Sequence[Sequence[int]], stream: Any = None) -> list[Batch]:
        """Read several batches at once, each field of the store once for all of them.

        Parameters
        ----------
        index_lists : sequence of sequences of int
            The samples of each batch.
        stream : optional
            Accepted for scripts of the peer; copies go to the current stream.

        Returns
        -------
        list of Batch
            On the device, ``metadata["index"]`` set.
        """
        sizes = [len(indices) for indices in index_lists]
        if not sizes or min(sizes) < 1:
            raise ValueError(f"every batch needs at least one sample: got sizes {sizes}")
        whole = self._read([int(i) for i in chain.from_iterable(index_lists)])
        if not self.skip_validation:
            whole.validate()
        pinned = self.pin_memory and self.device.type == "cuda" and torch.cuda.is_available()
        if pinned:
            whole = whole.pin_memory()
        whole = whole.to(self.device, non_blocking=pinned)
        if self.transforms:
            whole = self._transform_batch(whole)
        return whole.split(sizes)

    def _transform_batch(self, batch: Batch) -> Batch:
        index = batch.metadata["index"].tolist()
        samples = [
            self._transform(data, {"index": i})[0]
            for data, i in zip(batch.to_data_list(), index, strict=True)
        ]
        new = Batch.from_data_list(samples)
        new.metadata.update(batch.metadata)
        return new

    def get_batch(self, indices: Sequence[int]) -> Batch:
        """One batch of the chosen samples."""
        return self.load_batches([indices])[0]

    @property
    def field_names(self) -> Any:
        """Names of the fields that samples carry."""
        if hasattr(self.reader, "field_names"):
            return self.reader.field_names
        return sorted(self.reader.read_many([0])[0][0]) if len(self) else []

    def get_metadata(self, index: int) -> tuple[int, int]:
        """Atoms and edges of one sample."""
        if hasattr(self.reader, "get_metadata"):
            atoms, edges = self.reader.get_metadata(index)
            return int(atoms), int(edges)
        data, _ = self[index]
        return data.num_nodes, data.num_edges

    @property
    def pin_memory(self) -> bool:
        """Whether batches are read into page-locked memory on their way to a GPU."""
        return bool(getattr(self.reader, "pin_memory", False))

    @pin_memory.setter
    def pin_memory(self, value: bool) -> None:
        self.reader.pin_memory = bool(value)

    def close(self) -> None:
        """Stop reading ahead and close the reader."""
        self._stop_prefetch()
        self.reader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Dataset({len(self)} structures, {', '.join(sorted(self.field_names))})"


def _custom(levels: Any, raw: Any) -> dict[str, str]:
    """Levels that a reader tells of fields which these samples carry."""
    return {name: level for name, level in levels.items() if name in raw}
