"""Layout of a store on disk: names, how it is opened, and what a reader may believe of it.

::

    /              attributes: num_samples; fields {"core": {name: level}, "custom": {name: level}};
                   neighbor_cutoff (Angstrom) where it is known
    /meta          atoms_ptr, edges_ptr [N+1]; samples_mask [N]; atoms_mask [V]; edges_mask [E]
    /core/NAME     fields of the table, rows of all structures one after the other
    /custom/NAME   other fields

N counts stored structures, the deleted ones too. neighbor_list holds atom numbers of the store.
"""

import os
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import zarr
from zarr.abc.store import Store
from zarr.storage import LocalStore, StorePath

from nvalchemi.data.checks import NEIGHBOR_CUTOFF
from nvalchemi.data.datapipes.zarr_holes import fill_holes
from nvalchemi.data.fields import Level, resolve_level

StoreLike = str | Path | Store | StorePath | MutableMapping[str, Any]

POINTERS: dict[Level, str] = {"atom": "atoms_ptr", "edge": "edges_ptr"}
MASKS: dict[Level, str] = {"system": "samples_mask", "atom": "atoms_mask", "edge": "edges_mask"}

# Our own attributes, all optional. `pending_append` is set before an append grows the first array
# and goes in the same write that raises num_samples: while it stands, only its "samples" count.
PENDING = "pending_append"
# Changes whenever rows are renumbered, so that a reader notices that its pointers are stale.
GENERATION = "generation"


class FieldSchema(NamedTuple):
    """What a store says of one field."""

    level: Level
    dtype: np.dtype[Any]
    row_shape: tuple[int, ...]


@dataclass(frozen=True)
class StoreIndex:
    """All that is needed to find rows: read once when a store is opened.

    Parameters
    ----------
    pointers : dict
        First row of each stored structure and the end, int64 [N+1], for "atom" and "edge".
    mask : ndarray
        bool [N], False where deleted.
    arrays, levels, groups : dict
        By field name: the array, its level, and "core" or "custom".
    attributes : dict
        Attributes of the root.
    identity : tuple
        Tells a store from one that took its place.
    """

    pointers: dict[Level, np.ndarray]
    mask: np.ndarray
    arrays: dict[str, zarr.Array]
    levels: dict[str, Level]
    groups: dict[str, str]
    attributes: dict[str, Any]
    identity: tuple[str | None, int | None]

    @property
    def num_stored(self) -> int:
        """Stored structures N, deleted ones included."""
        return len(self.mask)

    @cached_property
    def active(self) -> np.ndarray:
        """Numbers of the structures that are not deleted, int64."""
        return np.flatnonzero(self.mask)

    @property
    def neighbor_cutoff(self) -> float | None:
        """Distance (Angstrom) up to which neighbour lists are complete; None where not known."""
        value = self.attributes.get(NEIGHBOR_CUTOFF)
        if not isinstance(value, int | float) or "neighbor_list" not in self.arrays:
            return None
        return float(value)

    def as_seen_with(self, mask: np.ndarray, names: list[str]) -> "StoreIndex":
        """The store as it was: later structures and fields left out, deleted structures there."""
        pointers = {level: pointer[: len(mask) + 1] for level, pointer in self.pointers.items()}
        arrays = {name: self.arrays[name] for name in names}
        return replace(self, mask=mask, pointers=pointers, arrays=arrays)

    def rows(self, level: Level) -> int:
        """Rows of a field of this level."""
        return self.num_stored if level == "system" else int(self.pointers[level][-1])

    def schema(self) -> dict[str, FieldSchema]:
        """Level, dtype and shape of a row of each field."""
        return {
            name: FieldSchema(self.levels[name], array.dtype, tuple(array.shape[1:]))
            for name, array in self.arrays.items()
        }


def local_path(store: StoreLike) -> Path | None:
    """Folder of a store on this file system, None for any other store."""
    if isinstance(store, StorePath):
        root = local_path(store.store)
        return None if root is None else root / store.path
    if isinstance(store, LocalStore):
        return Path(store.root).resolve()
    if isinstance(store, Path) or (isinstance(store, str) and "://" not in store):
        return Path(store).resolve()
    return None


def anchored(store: StoreLike) -> StoreLike:
    """The store, named so that it is found from any working directory."""
    if isinstance(store, str | Path):
        kind = type(store)
        return store if local_path(store) is None else kind(os.path.abspath(store))
    return local_path(store) or store


def exists(store: StoreLike) -> bool:
    """Whether something is stored there already."""
    path = local_path(store)
    if path is not None:
        return path.is_file() or (path.is_dir() and any(path.iterdir()))
    try:
        zarr.open_group(cast(Any, store), mode="r", use_consolidated=False)
    except FileNotFoundError:
        return False
    return True


def open_root(store: StoreLike, mode: str = "r") -> zarr.Group:
    """Open the root group of a store.

    Raises
    ------
    FileNotFoundError
        If there is none.
    ValueError
        If it is a Zarr group of another kind.
    """
    path = local_path(store)
    if path is not None and not path.exists():
        raise FileNotFoundError(f"no store at {path}")
    try:
        # consolidated metadata are a copy, and stale as soon as a writer appends
        root = zarr.open_group(
            cast(Any, path or store), mode=cast(Any, mode), use_consolidated=False
        )
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{path or store} is no Zarr group") from error
    for group in ("meta", "core"):
        if group not in root:
            raise ValueError(
                f"{path or store} is no store of structures: it has no group {group!r}"
            )
    return root


def read_index(store: StoreLike) -> StoreIndex:
    """Open a store and read what is needed to find rows.

    Raises
    ------
    FileNotFoundError
        If there is none.
    ValueError
        If it is no store of structures, or torn; the sentence names the array.
    """
    for attempt in range(5):
        root = open_root(store)
        try:
            index = _load_index(store, root)
        except (ValueError, KeyError):
            # a writer may have moved on between two reads; a torn store stays as it is
            if attempt == 4 or dict(open_root(store).attrs) == dict(root.attrs):
                raise
            continue
        if dict(open_root(store).attrs) == index.attributes:
            return index
    raise ValueError(f"{store} changes faster than it can be read: is a writer appending to it?")


def identity(store: StoreLike, attributes: dict[str, Any]) -> tuple[str | None, int | None]:
    """Generation and folder number of a store."""
    path = local_path(store)
    return attributes.get(GENERATION), None if path is None else os.stat(path).st_ino


def _load_index(store: StoreLike, root: zarr.Group) -> StoreIndex:
    attributes = dict(root.attrs)
    where = str(local_path(store) or store)
    mask = _array(root, "meta/samples_mask", where)
    pending = cast("dict[str, int] | None", attributes.get(PENDING))
    count = mask.shape[0] if pending is None else pending["samples"]
    if pending is not None and mask.shape[0] > pending["target"]:
        raise ValueError(
            f"{where} is torn: meta/samples_mask has {mask.shape[0]} rows where an unfinished "
            f"append would leave {pending['target']}; another tool has appended since"
        )
    pointers = {level: _pointer(root, level, count, where, pending) for level in POINTERS}
    arrays, levels, groups = _fields(root, attributes, where)
    sizes: dict[Level, int] = {level: int(ptr[-1]) for level, ptr in pointers.items()}
    sizes["system"] = count
    for name, array in arrays.items():
        want, got = sizes[levels[name]], array.shape[0]
        if got < want or (got > want and pending is None):
            raise ValueError(
                f"{where} is torn: {groups[name]}/{name} has {got} rows where the pointers of "
                f"{count} structures need {want}"
            )
    return StoreIndex(
        pointers=pointers,
        mask=np.asarray(fill_holes(mask, np.arange(count), np.asarray(mask[:count])), dtype=bool),
        arrays=arrays,
        levels=levels,
        groups=groups,
        attributes=attributes,
        identity=identity(store, attributes),
    )


def _array(root: zarr.Group, path: str, where: str) -> zarr.Array:
    try:
        array = root[path]
    except KeyError:
        raise ValueError(f"{where} is torn: there is no array {path}") from None
    if not isinstance(array, zarr.Array):
        raise ValueError(f"{where} is torn: {path} is no array")
    return array


def _pointer(root: zarr.Group, level: Level, count: int, where: str, pending: object) -> np.ndarray:
    name = POINTERS[level]
    array = _array(root, f"meta/{name}", where)
    length = array.shape[0]
    if length < count + 1 or (length > count + 1 and pending is None):
        raise ValueError(
            f"{where} is torn: meta/{name} has {length} entries where {count} structures in "
            f"meta/samples_mask need {count + 1}"
        )
    found = fill_holes(array, np.arange(count + 1), np.asarray(array[: count + 1]))
    pointer = found.astype(np.int64, copy=False)
    if pointer[0] != 0 or (np.diff(pointer) < 0).any():
        raise ValueError(f"{where} is torn: meta/{name} does not rise from zero")
    return pointer


def _fields(
    root: zarr.Group, attributes: dict[str, Any], where: str
) -> tuple[dict[str, zarr.Array], dict[str, Level], dict[str, str]]:
    declared = attributes.get("fields")
    if not isinstance(declared, dict):
        raise ValueError(f"{where} is torn: its root has no attribute 'fields'")
    arrays: dict[str, zarr.Array] = {}
    levels: dict[str, Level] = {}
    groups: dict[str, str] = {}
    for group in ("core", "custom"):
        for name, level in declared.get(group, {}).items():
            arrays[name] = _array(root, f"{group}/{name}", where)
            levels[name], groups[name] = resolve_level(level), group
    return arrays, levels, groups


_BUSY = "another writer is at work on {}: wait until it has finished"


@contextmanager
def exclusive(path: Path | None) -> Iterator[None]:
    """Keep other writers out of a folder; the lock goes with the process that holds it.

    Raises
    ------
    RuntimeError
        If somebody else is writing.
    """
    try:
        import fcntl
    except ImportError:  # Windows has no lock on folders
        fcntl = None  # type: ignore[assignment]
    if path is None or fcntl is None:
        yield
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RuntimeError(_BUSY.format(path)) from None
        except OSError:
            pass  # some network file systems have no locks
        if not (path.exists() and os.path.samestat(os.fstat(handle), os.stat(path))):
            raise RuntimeError(_BUSY.format(path))  # it has put another folder in this place
        yield
    finally:
        os.close(handle)
