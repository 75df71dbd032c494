"""AtomicDataZarrReader: structures from a Zarr store, many at a time; its writer beside it."""

import os
import threading
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from nvalchemi.data.batch import Batch
from nvalchemi.data.checks import NEIGHBOR_CUTOFF, is_free_name
from nvalchemi.data.datapipes.reader import Metadata, Reader, Sample, resolve_indices
from nvalchemi.data.datapipes.zarr_check import check_chunks, check_neighbors
from nvalchemi.data.datapipes.zarr_config import ZarrArrayConfig, ZarrWriteConfig
from nvalchemi.data.datapipes.zarr_defragment import row_plans
from nvalchemi.data.datapipes.zarr_gather import BlockCache, Staged, offsets
from nvalchemi.data.datapipes.zarr_layout import (
    FieldSchema,
    StoreIndex,
    StoreLike,
    anchored,
    identity,
    local_path,
    open_root,
    read_index,
)
from nvalchemi.data.datapipes.zarr_writer import AtomicDataZarrWriter
from nvalchemi.data.fields import LEVELS, Level

__all__ = [
    "AtomicDataZarrReader",
    "AtomicDataZarrWriter",
    "FieldSchema",
    "ZarrArrayConfig",
    "ZarrWriteConfig",
]

# Without them there is no Batch.
_ALWAYS_READ = ("atomic_numbers", "positions")


class AtomicDataZarrReader(Reader):
    """Reader of a store: the structures that it held, less the deleted ones, when it was opened.

    It may be used by several threads, and be sent to other processes, where it opens the store
    again and sees the same structures. Structures that are appended later show after `refresh`.

    Parameters
    ----------
    store : path, zarr Store, StorePath or dict
        Where it is.
    pin_memory : bool
        Put tensors in page-locked memory; without an accelerator this does nothing.
    include_index_in_metadata : bool
        Whether the metadata of a sample holds its "index".
    fields : sequence of str, optional
        Read these only (and atomic_numbers and positions, which a batch can not do without).
    cache_bytes : int
        Memory for decoded chunks.

    Raises
    ------
    FileNotFoundError
        If there is no store.
    ValueError
        If it is torn or of another kind (the sentence names the array), or lacks one of `fields`.
    """

    def __init__(
        self,
        store: StoreLike,
        *,
        pin_memory: bool = False,
        include_index_in_metadata: bool = True,
        fields: Sequence[str] | None = None,
        cache_bytes: int = 2**28,
    ) -> None:
        super().__init__(pin_memory=pin_memory, include_index_in_metadata=include_index_in_metadata)
        if isinstance(fields, str):
            raise TypeError(f"fields must be a sequence of names: got the string {fields!r}")
        self.store = anchored(store)
        self.cache_bytes = cache_bytes
        self._fields = None if fields is None else tuple(fields)
        self._closed = False
        self._reset()
        self._adopt(read_index(self.store))

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._view: tuple[StoreIndex, BlockCache] | None = None
        self._seen: object = None

    def _adopt(self, index: StoreIndex) -> None:
        """Take an index and an empty cache; both at once, for threads that read meanwhile."""
        if index.attributes["fields"].get("levels"):
            warnings.warn(
                f"{self.store} has fields at levels of its own; they are not read",
                UserWarning,
                stacklevel=3,
            )
        if self._fields is not None:
            unknown = sorted(set(self._fields) - set(index.arrays))
            if unknown:
                raise ValueError(
                    f"the store has no field {', '.join(map(repr, unknown))}: it keeps "
                    f"{', '.join(index.arrays)}"
                )
            wanted = {*_ALWAYS_READ, *self._fields}
            kept = {name: array for name, array in index.arrays.items() if name in wanted}
            index = replace(index, arrays=kept)
        index = replace(index, arrays=self._readable(index.arrays))
        # small enough to go to other processes, where they give the same view of the store
        self._mask, self._names, self._identity = index.mask, list(index.arrays), index.identity
        self._view = (index, BlockCache(self.cache_bytes))

    def _readable(self, arrays: dict[str, Any]) -> dict[str, Any]:
        """Arrays less those of other tools that a Batch can not hold under their names."""
        taken = [name for name in arrays if not is_free_name(name, Batch)]
        if taken:
            warnings.warn(
                f"{self.store} has fields that Batch can not hold under their names: "
                f"{', '.join(map(repr, taken))}; they are not read",
                UserWarning,
                stacklevel=4,
            )
        return {name: array for name, array in arrays.items() if name not in taken}

    def _opened(self) -> tuple[StoreIndex, BlockCache]:
        """Index and cache, made anew in a process that the reader was sent to or forked into."""
        self._refuse_closed()
        if self._pid != os.getpid():  # forked: a thread of the parent may have held the lock
            self._reset()
        view = self._view
        if view is not None:
            return view
        with self._lock:
            if self._view is None:
                index = read_index(self.store)
                if not _same(self._identity, index.identity):
                    raise RuntimeError(_REWRITTEN.format(self.store))
                # what was appended or deleted since stays unseen, as where it came from
                self._adopt(index.as_seen_with(self._mask, self._names))
            assert self._view is not None
            return self._view

    def _refuse_closed(self) -> None:
        if self._closed:
            raise RuntimeError(f"the reader of {self.store} is closed: open a new one")

    def __getstate__(self) -> dict[str, Any]:
        local = ("_lock", "_pid", "_view", "_seen")
        return {name: value for name, value in self.__dict__.items() if name not in local}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    # What the store holds.

    def __len__(self) -> int:
        """Number of structures that are not deleted."""
        return len(self._opened()[0].active)

    @property
    def field_levels(self) -> dict[str, Level]:
        """Level of each field by name: "atom", "edge" or "system"."""
        index, _ = self._opened()
        return {name: index.levels[name] for name in index.arrays}

    def _get_field_names(self) -> list[str]:
        return list(self._opened()[0].arrays)

    def schema(self) -> dict[str, FieldSchema]:
        """Level, dtype and shape of a row of each field."""
        return self._opened()[0].schema()

    @property
    def num_nodes_per_sample(self) -> np.ndarray:
        """Atoms of each structure, int64 [len]."""
        index, _ = self._opened()
        return np.diff(index.pointers["atom"])[index.active]

    @property
    def num_edges_per_sample(self) -> np.ndarray:
        """Edges of each structure, int64 [len]."""
        index, _ = self._opened()
        return np.diff(index.pointers["edge"])[index.active]

    def get_metadata(self, index: int) -> tuple[int, int]:
        """Atoms and edges of one structure; nothing is read."""
        opened, _ = self._opened()
        row = opened.active[self._resolve([index])[0]]
        atoms, edges = opened.pointers["atom"], opened.pointers["edge"]
        return int(atoms[row + 1] - atoms[row]), int(edges[row + 1] - edges[row])

    def _get_sample_metadata(self, index: int) -> Metadata:
        opened, _ = self._opened()
        stored, reach = opened.active[index], opened.neighbor_cutoff
        known: Metadata = {"source_file": str(self.store), "physical_index": str(stored)}
        return known if reach is None else {**known, NEIGHBOR_CUTOFF: reach}

    def _resolve(self, indices: Sequence[int]) -> np.ndarray:
        return resolve_indices(indices, len(self), f"{self.store} with {len(self)} structures")

    # Reading.

    def read_batch(self, indices: Sequence[int]) -> Batch:
        """Structures as one batch on the CPU, in the order of the indices.

        Each field is read once, by whole chunks, and gathered once.

        Parameters
        ----------
        indices : sequence of int
            At least one; negative ones count from the end, repeats are fine.

        Raises
        ------
        IndexError
            If one lies outside.
        ValueError
            If a neighbour list in the store points outside its structure, or a file of the store
            is lost.
        RuntimeError
            If the reader is closed, or the store was rewritten since it was opened.
        """
        index, cache = self._opened()
        size = len(index.active)
        chosen = resolve_indices(indices, size, f"{self.store} with {size} structures")
        if not len(chosen):
            raise ValueError("read_batch needs at least one index: got none")
        rows = index.active[chosen]
        plans = row_plans(index, rows)
        blocks = Staged(cache)
        try:
            values = {
                name: plans[index.levels[name]].read(name, array, blocks)
                for name, array in index.arrays.items()
            }
        finally:  # also where a file was not found: the whole store may have gone
            self._refuse_rewritten(index.identity)
        blocks.commit()
        nodes, edges = plans["atom"].counts, plans["edge"].counts
        if "neighbor_list" in values:
            neighbors = values["neighbor_list"]
            neighbors -= np.repeat(index.pointers["atom"][rows], edges)[:, None].astype(
                neighbors.dtype
            )
            check_neighbors(neighbors, nodes, edges, chosen)
            neighbors += np.repeat(offsets(nodes), edges)[:, None].astype(neighbors.dtype)
        by_level: dict[Level, dict[str, torch.Tensor]] = {level: {} for level in LEVELS}
        for name, value in values.items():
            by_level[index.levels[name]][name] = torch.from_numpy(value)
        metadata = {"index": torch.from_numpy(chosen)}
        if index.neighbor_cutoff is not None:
            metadata[NEIGHBOR_CUTOFF] = torch.full(
                (len(chosen),), index.neighbor_cutoff, dtype=torch.float64
            )
        batch = Batch.from_arrays(
            by_level["atom"],
            by_level["edge"],
            by_level["system"],
            torch.from_numpy(nodes),
            torch.from_numpy(edges),
            metadata,
        )
        return batch.pin_memory() if self._pins() else batch

    def _load_many_samples(self, indices: Sequence[int]) -> list[Sample]:
        if not len(indices):
            return []
        return [structure.to_dict() for structure in self.read_batch(indices).to_data_list()]

    def check_integrity(self) -> None:
        """Read through the whole store: lengths, missing chunks, neighbour lists.

        Raises
        ------
        ValueError
            Naming what is wrong and where.
        """
        self._refuse_closed()
        check_chunks(self.store)
        for start in range(0, len(self), 4096):
            self.read_batch(range(start, min(start + 4096, len(self))))

    # Opening and closing.

    def refresh(self) -> None:
        """Open again, to see what was appended, deleted or defragmented since."""
        self._refuse_closed()
        if self._pid != os.getpid():
            self._reset()
        with self._lock:
            self._adopt(read_index(self.store))

    def close(self) -> None:
        """Let go of the store; any use after that raises RuntimeError."""
        self._closed = True
        self._view = None

    def _refuse_rewritten(self, read_from: tuple[str | None, int | None]) -> None:
        """Check, after reading, that the rows were those of the store that was opened.

        A rewrite replaces the folder, and an absent chunk reads as zeros, so this can not be left
        out. It costs one look at a file unless the store has changed.
        """
        path = local_path(self.store)
        if path is None:
            return
        try:
            status = os.stat(path / "zarr.json")
            seen = (read_from, status.st_ino, status.st_mtime_ns)
            if seen == self._seen:
                return
            now = identity(self.store, dict(open_root(self.store).attrs))
        except FileNotFoundError:
            raise RuntimeError(_REWRITTEN.format(self.store)) from None
        if not _same(read_from, now):
            raise RuntimeError(_REWRITTEN.format(self.store))
        self._seen = seen

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{int(self._mask.sum())} structures"
        return f"AtomicDataZarrReader({str(self.store)!r}, {state})"


_REWRITTEN = (
    "{} was rewritten or removed after this reader was opened, so its rows are others now: "
    "call refresh() or open a new reader"
)


def _same(first: tuple[str | None, int | None], second: tuple[str | None, int | None]) -> bool:
    """Compare generations, or folder numbers where the store was made without."""
    if first[0] is None and second[0] is None:
        return first[1] == second[1]
    return first[0] == second[0]
