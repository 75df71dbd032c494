"""Reader: what a source of structures has to offer, and a base class for a user's own."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, Self, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from nvalchemi.data.batch import Batch
from nvalchemi.data.fields import FIELDS, Level

Sample = dict[str, Tensor]
Metadata = dict[str, Any]


@runtime_checkable
class ReaderProtocol(Protocol):
    """The least that a `Dataset` needs of a reader."""

    def __len__(self) -> int: ...

    def read_many(self, indices: Sequence[int]) -> list[tuple[Sample, Metadata]]: ...

    def close(self) -> None: ...


class Reader(ABC):
    """Base for readers of a file format of one's own.

    Implement `__len__` and either `_load_sample` or `_load_many_samples`; everything else follows.
    `_get_sample_metadata`, `_get_field_names`, `field_levels`, `get_metadata` and `read_batch` may
    be overridden where the format knows a quicker way.

    Parameters
    ----------
    pin_memory : bool
        Put tensors in page-locked memory; without an accelerator this does nothing.
    include_index_in_metadata : bool
        Whether the metadata of a sample holds its "index".
    """

    def __init__(self, *, pin_memory: bool = False, include_index_in_metadata: bool = True) -> None:
        self.pin_memory = pin_memory
        self.include_index_in_metadata = include_index_in_metadata

    # To be implemented.

    @abstractmethod
    def __len__(self) -> int:
        """Number of samples."""

    def _load_sample(self, index: int) -> Sample:
        """Load one sample, 0 <= index < len: tensors by field name, as `AtomicData` takes them."""
        if type(self)._load_many_samples is Reader._load_many_samples:
            raise NotImplementedError(
                f"{type(self).__name__} must implement _load_sample(index) or "
                "_load_many_samples(indices)"
            )
        return self._load_many_samples([index])[0]

    def _load_many_samples(self, indices: Sequence[int]) -> list[Sample]:
        """Load several samples, in the order of the indices."""
        return [self._load_sample(index) for index in indices]

    def _get_sample_metadata(self, index: int) -> Metadata:
        return {}

    def _get_field_names(self) -> list[str]:
        return list(self._load_sample(0)) if len(self) else []

    @property
    def field_levels(self) -> Mapping[str, Level]:
        """Level of each field by name; a field that is not named here is one of the structure."""
        return {name: FIELDS[name].level for name in self.field_names if name in FIELDS}

    def close(self) -> None:
        """Release what the reader holds."""
        return None

    # What follows from them.

    @property
    def field_names(self) -> list[str]:
        """Names of the fields that a sample carries."""
        return self._get_field_names()

    def get_metadata(self, index: int) -> tuple[int, int]:
        """Atoms and edges of one sample."""
        sample = self._load_sample(int(self._resolve([index])[0]))
        edges = next((v for k, v in sample.items() if self.field_levels.get(k) == "edge"), None)
        return sample["atomic_numbers"].shape[0], 0 if edges is None else edges.shape[0]

    def read(self, index: int) -> tuple[Sample, Metadata]:
        """One sample and its metadata."""
        return self.read_many([index])[0]

    def read_many(self, indices: Sequence[int]) -> list[tuple[Sample, Metadata]]:
        """Samples and their metadata, in the order of the indices.

        Raises
        ------
        IndexError
            If an index lies outside; negative ones count from the end.
        RuntimeError
            If `_load_many_samples` returned another number of samples than was asked for.
        """
        chosen = self._resolve(indices).tolist()
        samples = self._load_many_samples(chosen)
        if len(samples) != len(chosen):
            raise RuntimeError(
                f"{type(self).__name__}._load_many_samples must return one sample per index: "
                f"got {len(samples)} for {len(chosen)}"
            )
        return [(self._pinned(s), self._metadata(i)) for s, i in zip(samples, chosen)]

    def read_batch(self, indices: Sequence[int]) -> Batch:
        """Samples as one batch on the CPU, in the order of the indices.

        Raises
        ------
        ValueError
            If there is no index, or the samples do not carry the same fields.
        """
        chosen = self._resolve(indices)
        if not len(chosen):
            raise ValueError("read_batch needs at least one index: got none")
        batch = Batch.from_raw_dicts(
            self._load_many_samples(chosen.tolist()), field_levels=self.field_levels
        )
        batch.metadata["index"] = torch.from_numpy(chosen)
        return batch.pin_memory() if self._pins() else batch

    def __getitem__(self, index: int) -> tuple[Sample, Metadata]:
        return self.read(index)

    def __iter__(self) -> Iterator[tuple[Sample, Metadata]]:
        for index in range(len(self)):
            try:
                sample = self.read(index)
            except Exception as error:
                raise RuntimeError(
                    f"sample {index} of {type(self).__name__} could not be read: {error}"
                ) from error
            yield sample

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _pins(self) -> bool:
        return self.pin_memory and torch.cuda.is_available()

    def _pinned(self, sample: Sample) -> Sample:
        return {k: v.pin_memory() for k, v in sample.items()} if self._pins() else sample

    def _metadata(self, index: int) -> Metadata:
        extra = self._get_sample_metadata(index)
        return {"index": index, **extra} if self.include_index_in_metadata else extra

    def _resolve(self, indices: Sequence[int]) -> np.ndarray:
        """Check indices and count negative ones from the end: int64 [B]."""
        return resolve_indices(indices, len(self), f"a reader of {len(self)} samples")


def resolve_indices(indices: Any, size: int, what: str) -> np.ndarray:
    """Indices as int64 [B] in 0..size-1; `what` names the indexed thing in the error.

    Raises
    ------
    TypeError
        If they are no integers.
    IndexError
        If one lies outside.
    """
    given = np.atleast_1d(np.asarray(indices))
    if not given.size:
        return np.zeros(0, np.int64)
    if given.dtype.kind not in "iu" or given.ndim != 1:
        raise TypeError(f"indices must be integers: got {indices!r}")
    chosen = given.astype(np.int64)
    outside = (chosen < -size) | (chosen >= size)
    if outside.any():
        raise IndexError(f"index {chosen[outside][0]} is out of range for {what}")
    return np.where(chosen < 0, chosen + size, chosen)
