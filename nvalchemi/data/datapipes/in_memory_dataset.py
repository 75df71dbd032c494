"""A data set that is held in memory as one batch."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from nvalchemi.data.atomic_data import AtomicData
from nvalchemi.data.batch import Batch
from nvalchemi.data.datapipes.dataset import Dataset, check_transforms, resolve_device
from nvalchemi.data.datapipes.indices import flat_indices, normalise_index
from nvalchemi.data.datapipes.order import Indices
from nvalchemi.data.datapipes.prefetch import Prefetch

BatchTransform = Callable[[Batch], Batch]


class InMemoryDataset(Prefetch):
    """Structures held as one batch; giving out batches is an index_select.

    Parameters
    ----------
    in_memory_batch : Batch, optional
        The structures. Give this or `reader`.
    reader : optional
        A reader that is read once, in chunks, and closed.
    chunk_size : int
        Structures read at a time.
    device : str or torch.device, optional
        Where batches go; None leaves them where the structures are, "auto" is CUDA if there is.
    skip_validation : bool
        As in `Dataset`.
    batch_transforms : sequence of callables, optional
        ``batch -> batch``, applied once to everything when the data set is built.

    Raises
    ------
    ValueError
        If both or none of the sources is given, the reader is empty, or chunk_size < 1.
    TypeError
        If in_memory_batch or what a transform returns is no Batch.
    """

    def __init__(
        self,
        in_memory_batch: Batch | None = None,
        *,
        reader: Any = None,
        chunk_size: int = 4096,
        device: str | torch.device | None = None,
        skip_validation: bool = False,
        batch_transforms: Sequence[BatchTransform] | None = None,
    ) -> None:
        if (in_memory_batch is None) == (reader is None):
            raise ValueError("exactly one of in_memory_batch and reader must be given")
        if chunk_size < 1:
            raise ValueError(f"chunk_size must be at least 1: got {chunk_size}")
        transforms = check_transforms("batch_transforms", batch_transforms)
        self.device = None if device is None else resolve_device(device)
        batch: Any = in_memory_batch
        if batch is None:
            batch = _read_all(reader, chunk_size, skip_validation)
        elif not isinstance(batch, Batch):
            raise TypeError(
                f"in_memory_batch must be a Batch: got {type(batch).__name__}; join structures "
                "with Batch.from_data_list"
            )
        elif not skip_validation:
            batch.validate()
        for i, transform in enumerate(transforms):
            batch = transform(batch)
            if not isinstance(batch, Batch):
                raise TypeError(
                    f"batch_transforms[{i}] must return a Batch: got {type(batch).__name__}"
                )
        self.batch: Batch = batch
        self._start_prefetch(1)

    def __len__(self) -> int:
        return self.batch.num_graphs

    def _load_one(self, index: int) -> tuple[AtomicData, dict[str, Any]]:
        # a copy, as batches are: changing a sample must not change what is held
        data: AtomicData = self.batch[index].clone()
        return (data if self.device is None else data.to(self.device)), {}

    def load_batches(self, index_lists: Sequence[Sequence[int]], stream: Any = None) -> list[Batch]:
        """Batches of the chosen samples, as `Dataset.load_batches`."""
        positions, lengths = flat_indices(index_lists, len(self))
        rows = torch.from_numpy(positions)
        whole = self.batch.index_select(rows)
        whole.metadata["index"] = rows
        if self.device is not None:
            whole = whole.to(self.device, non_blocking=True)
        return whole.split(lengths)

    def get_batch(self, indices: Sequence[int]) -> Batch:
        """One batch of the chosen samples."""
        return self.load_batches([indices])[0]

    @property
    def field_names(self) -> list[str]:
        """Names of the fields that samples carry."""
        return sorted(self.batch.model_dump())

    def get_metadata(self, index: int) -> tuple[int, int]:
        """Atoms and edges of one sample."""
        index = normalise_index(index, len(self))
        return self.batch.num_nodes_list[index], self.batch.num_edges_list[index]

    def sizes(self) -> tuple[Indices, Indices]:
        """Atoms and edges of every sample, int64 [len] each."""
        counts = (self.batch.num_nodes_per_graph, self.batch.num_edges_per_graph)
        atoms, edges = (count.cpu().numpy().astype(np.int64) for count in counts)
        return atoms, edges

    @property
    def pin_memory(self) -> bool:
        """Whether the structures lie in page-locked memory."""
        return bool(self.batch.positions.is_pinned())

    @pin_memory.setter
    def pin_memory(self, value: bool) -> None:
        if value and torch.cuda.is_available() and self.batch.device.type == "cpu":
            self.batch = self.batch.pin_memory()

    def __repr__(self) -> str:
        return f"InMemoryDataset({len(self)} structures, {', '.join(self.field_names)})"


def _read_all(reader: Any, chunk_size: int, skip_validation: bool) -> Batch:
    """Everything behind a reader as one batch on the CPU; the reader is closed."""
    source = Dataset(reader, device="cpu", skip_validation=skip_validation)
    try:
        size = len(source)
        if not size:
            raise ValueError("the reader is empty: an InMemoryDataset needs at least one structure")
        starts = range(0, size, chunk_size)
        chunks = [source.get_batch(range(s, min(s + chunk_size, size))) for s in starts]
    finally:
        source.close()
    return Batch.concat(chunks)
