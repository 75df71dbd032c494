"""Data sets of structures: what they must offer, and the one behind a reader."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from nvalchemi.data.atomic_data import AtomicData
from nvalchemi.data.batch import Batch
from nvalchemi.data.checks import NEIGHBOR_CUTOFF
from nvalchemi.data.datapipes.indices import flat_indices, normalise_index
from nvalchemi.data.datapipes.order import Indices
from nvalchemi.data.datapipes.prefetch import Prefetch
from nvalchemi.data.datapipes.sample_sizes import reader_sizes

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
        If it is no string or torch.device.
    ValueError
        If the string names none.
    """
    if device is None or device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not isinstance(device, str | torch.device):
        raise TypeError(f"device must be a string, a torch.device or None: got {device!r}")
    try:
        return torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device {device!r} is none that torch knows: {error}") from None


def check_transforms(name: str, transforms: Any) -> tuple[Any, ...]:
    """Turn None or a sequence of callables into a tuple.

    Raises
    ------
    TypeError
        If it is no sequence or holds something that can not be called.
    """
    if transforms is None:
        return ()
    if not isinstance(transforms, Sequence) or isinstance(transforms, str):
        raise TypeError(f"{name} must be a sequence of functions: got {type(transforms).__name__}")
    for i, transform in enumerate(transforms):
        if not callable(transform):
            raise TypeError(f"{name}[{i}] must be callable: got {transform!r}")
    return tuple(transforms)


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
        Threads that read ahead; 1 for a reader that can not serve two at a time.
    skip_validation : bool
        Whether to leave out the check of values (elements, neighbour indices) of what was read.
    transforms : sequence of callables, optional
        ``(data, metadata) -> (data, metadata)`` for each structure, on the device, with the
        metadata that the reader gives; applied to single samples and to batches alike. One that
        builds another neighbour list may say its cutoff as ``metadata["neighbor_cutoff"]``.

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

    def read_many(self, indices: Sequence[int]) -> list[tuple[AtomicData, dict[str, Any]]]:
        """Samples with their metadata, in the order of the indices."""
        samples = []
        for raw, metadata in self._read_raw([normalise_index(i, len(self)) for i in indices]):
            batch = Batch.from_raw_dicts([raw], field_levels=self._field_levels())
            if not self.skip_validation:
                batch.validate()
            samples.append(self._transform(batch.to(self.device)[0], metadata))
        return samples

    def _load_one(self, index: int) -> tuple[AtomicData, dict[str, Any]]:
        return self.read_many([index])[0]

    def _read_raw(self, indices: list[int]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        samples = list(self.reader.read_many(indices))
        if len(samples) != len(indices):
            raise RuntimeError(
                f"{type(self.reader).__name__}.read_many must return one sample per index: got "
                f"{len(samples)} for {len(indices)}"
            )
        return samples

    def _field_levels(self) -> Any:
        return getattr(self.reader, "field_levels", None)

    def _transform(
        self, data: AtomicData, metadata: dict[str, Any]
    ) -> tuple[AtomicData, dict[str, Any]]:
        before, reach = data, metadata.get(NEIGHBOR_CUTOFF)
        for i, transform in enumerate(self.transforms):
            name = getattr(transform, "__name__", type(transform).__name__)
            try:
                result = transform(data, metadata)
            except Exception as error:
                raise RuntimeError(f"transform[{i}] ({name}) failed: {error}") from error
            if not (isinstance(result, tuple) and len(result) == 2):
                raise TypeError(
                    f"transform[{i}] ({name}) must return (data, metadata): "
                    f"got {type(result).__name__}"
                )
            data, metadata = result
        untold = reach is not None and metadata.get(NEIGHBOR_CUTOFF) == reach
        if untold and not _same_list(before, data):
            metadata = {key: value for key, value in metadata.items() if key != NEIGHBOR_CUTOFF}
        return data, metadata

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

        Raises
        ------
        TypeError, IndexError, ValueError
            If an index is no integer or outside, or a batch is empty.
        """
        positions, lengths = flat_indices(index_lists, len(self))
        whole, metadata = self._read(positions.tolist())
        if not self.skip_validation:
            whole.validate()
        pinned = self.pin_memory and self.device.type == "cuda" and torch.cuda.is_available()
        if pinned:
            whole = whole.pin_memory()
        whole = whole.to(self.device, non_blocking=pinned)
        if self.transforms:
            pairs = zip(whole.to_data_list(), metadata, strict=True)
            whole = _joined([self._transform(data, known) for data, known in pairs])
        whole.metadata["index"] = torch.from_numpy(positions)
        return whole.split(lengths)

    def _read(self, indices: list[int]) -> tuple[Batch, list[dict[str, Any]]]:
        """Samples as a batch, and the metadata that transforms need."""
        if hasattr(self.reader, "read_batch") and not self.transforms:
            return self.reader.read_batch(indices), []
        samples = self._read_raw(indices)
        raws = [raw for raw, _ in samples]
        batch = Batch.from_raw_dicts(raws, field_levels=self._field_levels())
        return batch, [metadata for _, metadata in samples]

    def get_batch(self, indices: Sequence[int]) -> Batch:
        """One batch of the chosen samples."""
        return self.load_batches([indices])[0]

    @property
    def field_names(self) -> Any:
        """Names of the fields that samples carry."""
        if hasattr(self.reader, "field_names"):
            return self.reader.field_names
        return sorted(self._read_raw([0])[0][0]) if len(self) else []

    def get_metadata(self, index: int) -> tuple[int, int]:
        """Atoms and edges of one sample."""
        index = normalise_index(index, len(self))
        if hasattr(self.reader, "get_metadata"):
            atoms, edges = self.reader.get_metadata(index)
            return int(atoms), int(edges)
        data, _ = self[index]
        return data.num_nodes, data.num_edges

    def sizes(self) -> tuple[Indices, Indices]:
        """Atoms and edges of every sample, int64 [len] each; nothing is read.

        Raises
        ------
        TypeError
            If the reader keeps no table of them.
        """
        return reader_sizes(self.reader)

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

    def __repr__(self) -> str:
        return f"Dataset({self.reader!r}, device={str(self.device)!r})"


def _same_list(before: AtomicData, after: AtomicData) -> bool:
    """Whether a structure still has its neighbour list; a copy on a GPU is not waited for."""
    old, new = before.neighbor_list, after.neighbor_list
    if old is None or new is None or old is new:
        return old is new
    return old.device.type == new.device.type == "cpu" and torch.equal(old, new)


def _joined(samples: Sequence[tuple[AtomicData, dict[str, Any]]]) -> Batch:
    """Samples as a batch that remembers the cutoff of their neighbour lists."""
    batch = Batch.from_data_list([data for data, _ in samples])
    reaches = [metadata.get(NEIGHBOR_CUTOFF) for _, metadata in samples]
    if "neighbor_list" in batch and None not in reaches:
        batch.metadata[NEIGHBOR_CUTOFF] = torch.tensor(reaches, dtype=torch.float64)
    return batch
