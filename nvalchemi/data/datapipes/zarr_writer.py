"""AtomicDataZarrWriter: write, append to, thin out and tidy a store of structures."""

import uuid
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import zarr
from torch import Tensor

from nvalchemi.data.atomic_data import AtomicData
from nvalchemi.data.batch import Batch
from nvalchemi.data.checks import NEIGHBOR_CUTOFF, check_name, check_tensor
from nvalchemi.data.datapipes.zarr_config import ZarrArrayConfig, ZarrWriteConfig
from nvalchemi.data.datapipes.zarr_defragment import kept_blocks
from nvalchemi.data.datapipes.zarr_holes import leaves_out_empty
from nvalchemi.data.datapipes.zarr_layout import (
    GENERATION,
    MASKS,
    PENDING,
    POINTERS,
    StoreIndex,
    StoreLike,
    anchored,
    exclusive,
    exists,
    local_path,
    open_root,
    read_index,
)
from nvalchemi.data.datapipes.zarr_payload import (
    Payload,
    as_row_numbers,
    make_payload,
    shift_neighbors,
    structures_of,
    to_numpy,
)
from nvalchemi.data.datapipes.zarr_replace import replaced_by_rename
from nvalchemi.data.fields import FIELDS, Level, resolve_level

Structures = AtomicData | Batch | Iterable[AtomicData]


class AtomicDataZarrWriter:
    """Writer of one store; it holds nothing open between calls.

    On a local file system every call is all or nothing for whoever reads meanwhile: a new or
    defragmented store is built beside its place and renamed, and appended structures count only
    when all of their rows are there. One writer works at a time; a second one is refused.

    Parameters
    ----------
    store : path, zarr Store, StorePath or dict
        Where it is or shall be.
    config : ZarrWriteConfig or mapping, optional
        Chunks and codecs of the arrays that this writer creates.
    """

    def __init__(
        self, store: StoreLike, config: ZarrWriteConfig | Mapping[str, Any] | None = None
    ) -> None:
        self.store = anchored(store)
        self.config = ZarrWriteConfig.of(config)

    def write(self, data: Structures) -> None:
        """Make a new store.

        Parameters
        ----------
        data : AtomicData, list of AtomicData, or Batch
            At least one structure; all carry the same fields. The cutoff of the neighbour lists
            of a Batch is kept where it is known (``metadata["neighbor_cutoff"]``).

        Raises
        ------
        FileExistsError
            If something is there already.
        ValueError
            If there is no structure, or their fields or cutoffs differ; the sentence says which.
        RuntimeError
            If another writer is making the same store.

        Warns
        -----
        UserWarning
            If structures have `info`, which is not stored.
        """
        if exists(self.store):
            raise FileExistsError(
                f"{self.store} exists already: use append() to add to it, or remove it before"
            )
        structures = structures_of(data)
        if not len(structures):
            raise ValueError("write() needs at least one structure: got none")
        payload = make_payload(structures)
        path = local_path(self.store)
        if path is None:
            build_store(self.store, payload, self.config)
            return
        with replaced_by_rename(path, replaces=False) as beside:
            build_store(beside, payload, self.config)

    def append(self, data: Structures) -> None:
        """Add structures behind those of the store.

        Parameters
        ----------
        data : AtomicData, list of AtomicData, or Batch
            They carry exactly the fields of the store in its dtypes; an empty list adds nothing.
            Where the store keeps cell and pbc, a structure without either is stored as not
            periodic (zero cell, pbc False).

        Raises
        ------
        FileNotFoundError
            If there is no store.
        ValueError
            If a structure lacks a field of the store or carries another, or dtype or shape differ,
            or its neighbour list has not the cutoff that the store knows of its lists. Nothing has
            been changed then.
        RuntimeError
            If another writer is at work.
        """
        structures = structures_of(data)
        open_root(self.store)
        if not len(structures):
            return
        with exclusive(local_path(self.store)):
            index = read_index(self.store)
            payload = make_payload(structures, index)
            append_rows(self.store, index, payload)

    def add_custom(self, key: str, tensor: Tensor, level: str) -> None:
        """Add a field to all stored structures.

        Parameters
        ----------
        key : str
            Its name.
        tensor : Tensor
            One row per structure, atom or edge, those of deleted structures included.
        level : {"system", "atom", "edge"}
            What its rows belong to.

        Raises
        ------
        ValueError
            If the store has a field of that name, it can not name a field, or the level or the
            number of rows is wrong.
        """
        place = resolve_level(level)
        value = to_numpy(key, tensor)
        with exclusive(local_path(self.store)):
            index = read_index(self.store)
            if key in index.arrays:
                raise ValueError(f"the store has a field {key!r} already: choose another name")
            if key in FIELDS and FIELDS[key].level != place:
                raise ValueError(
                    f"{key} is a field of the level {FIELDS[key].level!r}: got {level!r}"
                )
            for owner in (AtomicData, Batch):
                check_name(key, owner)
            check_tensor(key, tensor, place, index.rows(place))
            if key == "neighbor_list":
                raise ValueError("neighbor_list can not be added later: write structures with it")
            root = open_root(self.store, "r+")
            _discard_tail(root, index)
            _create(root, "custom", key, value, self.config)
            fields = {group: dict(names) for group, names in index.attributes["fields"].items()}
            fields.setdefault("custom", {})[key] = place
            root.attrs.put({**_settled(index.attributes), "fields": fields})

    def delete(self, indices: int | Sequence[int] | np.ndarray | Tensor) -> None:
        """Hide structures from readers; `defragment` gives their space back.

        Their rows stay where they are, so this costs one update of three masks however many
        structures there are.

        Parameters
        ----------
        indices : int or sequence of int
            Numbers of stored structures, deleted ones counted too ("physical_index" in the
            metadata of a reader): they do not move when others are deleted. In a store without
            deleted structures they are the indices of its reader.

        Raises
        ------
        IndexError
            If one lies outside.

        Warns
        -----
        UserWarning
            If one is deleted already.
        """
        with exclusive(local_path(self.store)):
            index = read_index(self.store)
            chosen = as_row_numbers(indices, index.num_stored)
            again = chosen[~index.mask[chosen]]
            if len(again):
                warnings.warn(
                    f"already deleted: {again.tolist()}. delete() counts stored structures, the "
                    "deleted ones too",
                    UserWarning,
                    stacklevel=2,
                )
            if not len(chosen):
                return
            root = open_root(self.store, "r+")
            keep = index.mask.copy()
            keep[chosen] = False
            for level in ("atom", "edge", "system"):  # what readers go by comes last
                rows = (
                    keep if level == "system" else np.repeat(keep, np.diff(index.pointers[level]))
                )
                _update_mask(root, MASKS[level], rows)

    def defragment(self, config: ZarrWriteConfig | Mapping[str, Any] | None = None) -> None:
        """Rewrite the store without its deleted structures.

        A local store is copied block by block beside its place and then takes it; twice the space
        is needed for that time. Readers that were open must be refreshed, and say so. A store
        elsewhere is rewritten in place through memory, which is not safe against interruption.

        Parameters
        ----------
        config : ZarrWriteConfig or mapping, optional
            Chunks and codecs of the new arrays, those of this writer if not given.

        Raises
        ------
        ValueError
            If no structure would be left.
        """
        chosen = self.config if config is None else ZarrWriteConfig.of(config)
        path = local_path(self.store)
        with exclusive(path):
            index = read_index(self.store)
            _refuse_own_levels(index)
            if not index.mask.any():
                raise ValueError("defragment() would leave no structure: remove the store instead")
            if path is None:
                blocks = list(kept_blocks(index, rows_per_block=None))
                build_store(self.store, blocks[0], chosen, index.attributes, mode="w")
                return
            with replaced_by_rename(path, replaces=True) as beside:
                self._copy(index, beside, chosen)

    @staticmethod
    def _copy(index: StoreIndex, target: Path, config: ZarrWriteConfig) -> None:
        for number, block in enumerate(kept_blocks(index)):
            if number == 0:
                build_store(target, block, config, index.attributes)
            else:
                append_rows(target, read_index(target), block)


def build_store(
    store: StoreLike,
    payload: Payload,
    config: ZarrWriteConfig,
    attributes: Mapping[str, Any] | None = None,
    mode: str = "w-",
) -> None:
    """Make a store; the attributes that a reader needs are written last."""
    root = zarr.open_group(cast(Any, store), mode=cast(Any, mode), zarr_format=3)
    for group in ("meta", "core", "custom"):
        root.create_group(group)
    counts = {"atom": payload.num_nodes, "edge": payload.num_edges}
    for level, name in POINTERS.items():
        _create(root, "meta", name, np.append(0, np.cumsum(counts[level])), config)
    sizes = {level: int(count.sum()) for level, count in counts.items()}
    for level, name in MASKS.items():
        _create(root, "meta", name, np.ones(sizes.get(level, len(payload)), bool), config)
    fields: dict[str, dict[str, Level]] = {"core": {}, "custom": {}}
    for name, value in payload.values.items():
        if name == "neighbor_list":
            value = shift_neighbors(value, 0, sizes["atom"] - 1)
        group = payload.groups[name]
        _create(root, group, name, value, config)
        fields[group][name] = payload.levels[name]
    reach = payload.neighbor_cutoff
    known = {} if reach is None else {NEIGHBOR_CUTOFF: reach}
    root.attrs.put(
        {
            **_settled(attributes or {}),
            **known,
            "num_samples": len(payload),
            "fields": fields,
            GENERATION: uuid.uuid4().hex,
        }
    )


def append_rows(store: StoreLike, index: StoreIndex, payload: Payload) -> None:
    """Grow every array; one write of the attributes then makes the new rows count."""
    _refuse_own_levels(index)
    rows = {level: index.rows(level) for level in MASKS}
    counts = {"atom": payload.num_nodes, "edge": payload.num_edges}
    values = dict(payload.values)
    if "neighbor_list" in values:
        last = rows["atom"] + int(counts["atom"].sum()) - 1
        values["neighbor_list"] = shift_neighbors(values["neighbor_list"], rows["atom"], last)
    root = open_root(store, "r+")
    _discard_tail(root, index)
    total = index.num_stored + len(payload)
    pending = {"samples": index.num_stored, "target": total}
    root.attrs.put({**_settled(index.attributes), PENDING: pending})
    for name, value in values.items():
        _grow(root, index.groups[name], name, rows[payload.levels[name]], value)
    for level, name in POINTERS.items():
        entries = rows[level] + np.cumsum(counts[level])
        _grow(root, "meta", name, index.num_stored + 1, entries)
    for level, name in MASKS.items():
        added = len(payload) if level == "system" else int(counts[level].sum())
        _grow(root, "meta", name, rows[level], np.ones(added, bool))
    root.attrs.put({**_settled(index.attributes), "num_samples": total})


def _settled(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in attributes.items() if name != PENDING}


def _discard_tail(root: zarr.Group, index: StoreIndex) -> None:
    """Cut off rows that an interrupted append has left behind."""
    if PENDING not in index.attributes:
        return
    lengths = {f"meta/{name}": index.num_stored + 1 for name in POINTERS.values()}
    lengths |= {f"meta/{name}": index.rows(level) for level, name in MASKS.items()}
    lengths |= {f"{index.groups[n]}/{n}": index.rows(lv) for n, lv in index.levels.items()}
    for path, length in lengths.items():
        array = root.get(path)
        if isinstance(array, zarr.Array) and array.shape[0] > length:
            array.resize((length, *array.shape[1:]))
    root.attrs.put(_settled(index.attributes))


def _create(
    root: zarr.Group, group: str, name: str, value: np.ndarray, config: ZarrWriteConfig
) -> None:
    storage: ZarrArrayConfig = config.array(group, name)
    array = root.require_group(group).create_array(
        name,
        shape=value.shape,
        dtype=value.dtype,
        overwrite=True,
        **storage.arguments(name, value.dtype, value.shape[1:]),
    )
    if value.size:
        array[:] = value


def _grow(root: zarr.Group, group: str, name: str, start: int, value: np.ndarray) -> None:
    array = root.get(f"{group}/{name}")
    if array is None and name in ("atoms_mask", "edges_mask"):
        return  # no reader needs them, so a store may do without
    assert isinstance(array, zarr.Array) and array.shape[0] == start, name
    array = _writing_empty(array)
    array.resize((start + len(value), *array.shape[1:]))
    if value.size:
        array[start:] = value


def _writing_empty(array: zarr.Array) -> zarr.Array:
    """Array whose empty chunks are written, if not left out from its beginning on."""
    return array.with_config({"write_empty_chunks": not leaves_out_empty(array)})


def _refuse_own_levels(index: StoreIndex) -> None:
    levels = index.attributes["fields"].get("levels")
    if levels:
        raise ValueError(
            f"the store has fields at levels of its own ({', '.join(levels)}), which this writer "
            "does not know: it can be read, but not appended to or defragmented"
        )


def _update_mask(root: zarr.Group, name: str, keep: np.ndarray) -> None:
    """Clear entries that are no longer kept; only the chunks that hold them are written."""
    array = root.get(f"meta/{name}")
    if not isinstance(array, zarr.Array):
        return
    array = _writing_empty(array)
    old = np.asarray(array[: len(keep)], dtype=bool)
    changed = np.flatnonzero(old & ~keep)
    if len(changed):
        low, high = int(changed[0]), int(changed[-1]) + 1
        array[low:high] = old[low:high] & keep[low:high]
