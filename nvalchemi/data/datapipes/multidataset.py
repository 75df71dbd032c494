"""MultiDataset: several data sets behind one index."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from nvalchemi.data.atomic_data import AtomicData
from nvalchemi.data.batch import Batch
from nvalchemi.data.datapipes.child_fields import common_fields, describe, fields_of, widened
from nvalchemi.data.datapipes.dataset import BatchDatasetProtocol
from nvalchemi.data.datapipes.indices import flat_indices, normalise_index
from nvalchemi.data.datapipes.order import Indices
from nvalchemi.data.datapipes.prefetch import Prefetch
from nvalchemi.data.datapipes.sample_sizes import dataset_sizes
from nvalchemi.data.join import Template

DATASET_INDEX_METADATA_KEY = "dataset_index"


class MultiDataset(Prefetch):
    """Data sets in a row: sample k of data set j has the index ``offsets[j] + k``.

    Parameters
    ----------
    *datasets : Dataset, InMemoryDataset, or anything that keeps BatchDatasetProtocol
        At least one.
    output_strict : bool
        Whether all data sets must carry the same fields. If not, a floating-point field that a
        data set lacks is NaN for its structures in every batch (never zero: losses with
        ``ignore_nonfinite=True`` leave them out). cell and pbc may differ in any case: a structure
        without them is given out with a zero cell and pbc False. Integers that are narrower in
        one data set than in another (int32 beside int64) are given out in the wider type;
        floating-point numbers are not converted. All this is checked here, by the schema of a
        store, the structures in memory, or else by the first sample of each data set.
    num_workers : int
        Threads that read ahead; each may ask any of the data sets for batches.

    Attributes
    ----------
    datasets : tuple
        The data sets.
    offsets : list of int
        First index of each, and the length of all, n + 1 numbers.

    Raises
    ------
    ValueError
        If there is none, or their fields differ in a way that no batch can hold; the sentence
        names the field and two data sets.
    TypeError
        If one is no data set.
    """

    def __init__(self, *datasets: Any, output_strict: bool = True, num_workers: int = 2) -> None:
        if not datasets:
            raise ValueError("MultiDataset needs at least one data set: got none")
        for i, dataset in enumerate(datasets):
            if not isinstance(dataset, BatchDatasetProtocol):
                raise TypeError(
                    f"datasets[{i}] must be a data set (len, [], load_batches, field_names, "
                    f"close): got {type(dataset).__name__}"
                )
        self.datasets: tuple[Any, ...] = tuple(datasets)
        self.output_strict = output_strict
        lengths = [len(dataset) for dataset in datasets]
        self.offsets: list[int] = [0, *np.cumsum(lengths).tolist()]
        self._children = {i: (describe(d), fields_of(d)) for i, d in enumerate(datasets) if len(d)}
        self._forms = common_fields(self._children, output_strict)
        like = {
            name: (torch.empty((0, *form.row_shape), dtype=form.dtype), form.level)
            for name, form in self._forms.items()
        }
        self._template = Template(like, fill_labels=not output_strict)
        self._start_prefetch(num_workers)

    def validate_field_names(self, output_strict: bool | None = None) -> None:
        """Check that all data sets with samples carry the same fields.

        Raises
        ------
        ValueError
            Naming two that differ and the fields in question.
        """
        strict = self.output_strict if output_strict is None else output_strict
        common_fields(self._children, strict)

    def __len__(self) -> int:
        return self.offsets[-1]

    def to_global_index(self, dataset: int, index: int) -> int:
        """Index of a sample of a data set; both may be negative."""
        dataset = normalise_index(dataset, len(self.datasets))
        size = self.offsets[dataset + 1] - self.offsets[dataset]
        return self.offsets[dataset] + normalise_index(index, size)

    def to_local_index(self, index: int) -> tuple[int, int]:
        """Data set and the index in it of a sample."""
        index = normalise_index(index, len(self))
        dataset = int(np.searchsorted(self.offsets, index, side="right")) - 1
        return dataset, index - self.offsets[dataset]

    def _load_one(self, index: int) -> tuple[AtomicData, dict[str, Any]]:
        dataset, local = self.to_local_index(index)
        data, metadata = self.datasets[dataset][local]
        return self._completed(data), {**metadata, DATASET_INDEX_METADATA_KEY: dataset}

    def _completed(self, data: AtomicData) -> AtomicData:
        """A sample with the fields that it has in a batch."""
        forms = self._forms.items()
        if all(name in data and data[name].dtype == form.dtype for name, form in forms):
            return data
        whole: AtomicData = self._complete(Batch.from_data_list([data]))[0]
        whole.info = data.info
        return whole

    def load_batches(self, index_lists: Sequence[Sequence[int]], stream: Any = None) -> list[Batch]:
        """Read several batches at once: each data set once, then everything into its place.

        Returns
        -------
        list of Batch
            ``metadata["index"]`` holds indices of this MultiDataset, ``metadata["dataset_index"]``
            the data sets.
        """
        positions, lengths = flat_indices(index_lists, len(self))
        owner = np.searchsorted(self.offsets, positions, side="right") - 1
        parts, places = [], []
        for j in np.unique(owner).tolist():
            place = np.flatnonzero(owner == j)
            parts.append(self._part(j, (positions[place] - self.offsets[j]).tolist()))
            places.append(place)
        whole = Batch.concat(parts)
        if len(parts) > 1:
            whole = whole.index_select(torch.from_numpy(np.argsort(np.concatenate(places))))
        whole.metadata["index"] = torch.from_numpy(positions)
        whole.metadata[DATASET_INDEX_METADATA_KEY] = torch.from_numpy(owner)
        return whole.split(lengths)

    def _part(self, j: int, indices: list[int]) -> Batch:
        (batch,) = self.datasets[j].load_batches([indices])
        if batch.num_graphs != len(indices):
            raise RuntimeError(
                f"datasets[{j}] ({type(self.datasets[j]).__name__}) must give a batch of as many "
                f"structures as it is asked for: got {batch.num_graphs} for {len(indices)}"
            )
        return self._complete(batch)

    def get_batch(self, indices: Sequence[int]) -> Batch:
        """One batch of the chosen samples."""
        return self.load_batches([indices])[0]

    def _complete(self, batch: Batch) -> Batch:
        """Give every batch the same fields, whichever data sets it comes from."""
        return self._template.complete(widened(batch, self._forms))

    @property
    def field_names(self) -> list[str]:
        """Names of all fields of all data sets."""
        return sorted(self._forms)

    def get_metadata(self, index: int) -> tuple[int, int]:
        """Atoms and edges of one sample."""
        dataset, local = self.to_local_index(index)
        atoms, edges = self.datasets[dataset].get_metadata(local)
        return int(atoms), int(edges)

    def sizes(self) -> tuple[Indices, Indices]:
        """Atoms and edges of every sample, int64 [len] each, data set after data set.

        Raises
        ------
        TypeError
            If a data set does not know them without reading its samples.
        """
        parts = [dataset_sizes(dataset) for dataset in self.datasets]
        atoms, edges = (np.concatenate(column) for column in zip(*parts))
        return atoms, edges

    @property
    def pin_memory(self) -> bool:
        """Whether all data sets read into page-locked memory."""
        return all(getattr(dataset, "pin_memory", False) for dataset in self.datasets)

    @pin_memory.setter
    def pin_memory(self, value: bool) -> None:
        for dataset in self.datasets:
            if hasattr(dataset, "pin_memory"):
                dataset.pin_memory = value

    def close(self) -> None:
        """Stop reading ahead and close all data sets."""
        self._stop_prefetch()
        for dataset in self.datasets:
            dataset.close()

    def __repr__(self) -> str:
        lengths = " + ".join(map(str, np.diff(self.offsets).tolist()))
        return f"MultiDataset({lengths} = {len(self)} structures)"
