"""Objects by value between processes, their tensors and arrays through memory that is shared.

A payload is one anonymous file: a pickle, then the bytes of its tensors and arrays, then their
lengths. Readers map it copy-on-write, so all ranks share one copy of what they only read, and a
rank that writes into a tensor changes its own copy alone. The file has no name, is sealed against
changes once it is written, and no other user can open it.
"""

from __future__ import annotations

import fcntl
import gc
import io
import mmap
import os
import pickle
import struct
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from nvalchemi.distributed.capture import Place, explain, roots_of, walk
from nvalchemi.distributed.edited import edited_since_import
from nvalchemi.distributed.modules import by_value, contents
from nvalchemi.distributed.origins import Marker
from nvalchemi.distributed.pickling import Pickler
from nvalchemi.distributed.tensor_forms import LARGE

_ALIGN = 64  # bytes; what vectorised kernels like
_HEADER = struct.Struct("<QQ")  # length of the stream, number of buffers
_WORTH_TELLING = 100_000_000  # bytes
_PADDING = bytes(_ALIGN)


def new_file() -> int:
    """Return the descriptor of an empty file without a name, in memory where the system can."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("nvalchemi", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.fchmod(descriptor, 0o600)
        return descriptor
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _seal(descriptor: int) -> None:
    """Let nobody change the file any more, this process included."""
    seals = ("WRITE", "GROW", "SHRINK", "SEAL")
    if hasattr(os, "memfd_create") and hasattr(fcntl, "F_ADD_SEALS"):
        bits = sum(getattr(fcntl, f"F_SEAL_{seal}") for seal in seals)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, bits)


@dataclass(frozen=True)
class Sent:
    """What a task carries to the ranks.

    Attributes
    ----------
    nbytes
        Its size.
    edited
        Modules that ranks import, and whose files have changed since they were imported here.
    large
        Its largest parts by name, with their bytes; empty if ``nbytes`` is small.
    """

    nbytes: int
    edited: list[str]
    large: list[tuple[str, int]]

    def describe_large(self, pool: bool = False) -> str | None:
        """Return a sentence on what is large, if the task is."""
        if self.nbytes < _WORTH_TELLING:
            return None
        sender = "the pool" if pool else "launch()"
        parts = [f"{name} ({_megabytes(size)})" for name, size in self.large]
        if len(parts) == 1:
            return f"{sender} sends {parts[0]} to the ranks"
        what = f": {', '.join(parts)}" if parts else ""
        return f"{sender} sends {_megabytes(self.nbytes)} to the ranks{what}"

    def describe_edited(self, pool: bool = False) -> str | None:
        """Return a sentence on modules that are not on the ranks what they are here."""
        if not self.edited:
            return None
        names = ", ".join(self.edited)
        if pool:
            return (
                f"edited since it was imported: {names}. Ranks that import it from now on run the "
                "file as it is now, others what they have; to run the file everywhere, "
                "importlib.reload it here and call restart() of the pool"
            )
        return (
            f"edited since it was imported: {names}. The ranks run the file as it is now; to run "
            f"it here, too, importlib.reload it, or send what is here: launch(by_value=[{names}])"
        )


def dump_task(
    fn: Callable[..., Any],
    args: tuple,
    kwargs: dict[str, Any],
    sources: dict[str, Any],
    descriptor: int,
    marker: Marker | None = None,
    modules: Mapping[str, ModuleType] | None = None,
) -> Sent:
    """Write what ranks need to call ``fn(*args, **kwargs)``, which :func:`load` gives back.

    Parameters
    ----------
    sources
        Entries for the ranks' linecache.
    descriptor
        Of an empty file from :func:`new_file`; nobody can change the file afterwards.
    marker
        Marks what goes by value, so that ranks can send it back as itself.
    modules
        What :func:`nvalchemi.distributed.modules.named_modules` made of ``by_value``: these travel
        as they are here.

    Raises
    ------
    TypeError
        If something cannot be sent: it names it, the path to it, and what to do.
    """
    modules = modules or {}
    roots = roots_of(fn, args, kwargs)
    for name, module in modules.items():
        inside = contents(module, {})[0].items()
        roots += [Place(value, None, f"{name}.{key}", True) for key, value in inside]
    with by_value(fn, modules.values()):
        whole: dict[str, dict[str, str]] = {name: {} for name in modules}
        task = _Task(tuple(modules.values()), (fn, args, kwargs, sources))
        pickler = _write(task, descriptor, marker=marker, whole=whole)
        if isinstance(pickler.failure, Exception) and modules:
            whole = {name: _unsendable_content(module) for name, module in modules.items()}
            pickler = _write(task, descriptor, marker=marker, whole=whole)
        if pickler.failure is not None:
            raise explain(roots, pickler, back=False) from pickler.failure
        _seal(descriptor)
        nbytes = os.fstat(descriptor).st_size
        large = _name_large(roots, pickler) if nbytes >= _WORTH_TELLING else []
    return Sent(nbytes, edited_since_import(pickler.referred), large)


def dump_result(value: Any, descriptor: int) -> None:
    """Write what a rank returns; tensors are taken to the CPU.

    Raises
    ------
    TypeError
        If something cannot be sent back: it names the path to it, ``result['loader']``.
    """
    pickler = _write(value, descriptor, to_cpu=True)
    if pickler.failure is not None:
        raise explain([Place(value, None, "result", True)], pickler, back=True) from pickler.failure
    _seal(descriptor)


def dumps(obj: Any) -> bytes:
    """Return ``obj`` as bytes that ``pickle.loads`` reads; tensors are taken to the CPU."""
    stream = io.BytesIO()
    Pickler(stream, to_cpu=True).dump(obj)
    return stream.getvalue()


def load(descriptor: int) -> Any:
    """Read the object back; its tensors and arrays lie on the mapped file."""
    mapped = memoryview(mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY))
    length, count = _HEADER.unpack_from(mapped)
    table = len(mapped) - 8 * count
    buffers, end = [], _HEADER.size + length
    for (size,) in struct.iter_unpack("<Q", mapped[table:]):
        begin = end + -end % _ALIGN
        end = begin + size
        buffers.append(mapped[begin:end])
    with _without_collection():
        return pickle.loads(mapped[_HEADER.size : _HEADER.size + length], buffers=buffers)


@contextmanager
def _without_collection() -> Iterator[None]:
    """Keep Python from looking for garbage while all that is made is kept: it doubles the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _write(obj: Any, descriptor: int, **options: Any) -> Pickler:
    """Write ``obj``, and return the pickler, whose ``failure`` tells why that was not possible."""
    buffers: list[pickle.PickleBuffer] = []
    os.ftruncate(descriptor, 0)
    os.lseek(descriptor, 0, os.SEEK_SET)
    with open(descriptor, "wb", buffering=LARGE, closefd=False) as file:
        file.write(bytes(_HEADER.size))
        pickler = Pickler(file, buffers.append, **options)
        try:
            with _without_collection():
                pickler.dump(obj)
        except Exception as error:
            pickler.failure = error
            return pickler
        end = file.tell()
        pickler.length = end - _HEADER.size
        sizes = []
        for buffer in buffers:
            view = buffer.raw()
            sizes.append(view.nbytes)
            padding = -end % _ALIGN
            file.write(_PADDING[:padding])
            file.write(view)
            end += padding + view.nbytes
        file.write(struct.pack(f"<{len(sizes)}Q", *sizes))
        file.seek(0)
        file.write(_HEADER.pack(pickler.length, len(sizes)))
    return pickler


class _Task:
    """A task behind the modules that go with it: they must be there when it is loaded."""

    def __init__(self, modules: tuple[ModuleType, ...], content: tuple[Any, ...]) -> None:
        self._parts = (modules, content)

    def __reduce__(self) -> tuple[Any, ...]:
        return _second, self._parts


def _second(first: Any, second: Any) -> Any:
    return second


def _unsendable_content(module: ModuleType) -> dict[str, str]:
    """Return what of a module cannot be sent, with reasons."""
    found = {}
    content, _ = contents(module, {})
    nothing = {module.__name__: dict.fromkeys(content, "")}
    for name, value in content.items():
        pickler = Pickler(io.BytesIO(), lambda _: False, whole=nothing)
        try:
            pickler.dump(value)
        except Exception as error:
            pickler.failure = error
            root = Place(value, None, f"{module.__name__}.{name}", True)
            found[name] = str(explain([root], pickler, back=False))
    return found


def _name_large(roots: Iterable[Place], pickler: Pickler) -> list[tuple[str, int]]:
    """Return the names of the largest parts, the largest first."""
    sizes = {id(obj): nbytes for obj, nbytes in pickler.forms.large}
    named: list[tuple[str, int]] = []
    judge = Pickler(io.BytesIO(), lambda _: False, whole=pickler.whole)
    for place in walk(roots, judge, patience=1.0):
        nbytes = sizes.pop(id(place.obj), 0)
        if isinstance(place.obj, (bytes, bytearray, str)):
            nbytes = len(place.obj)
        if nbytes >= LARGE:
            named.append((str(place), nbytes))
        if not sizes and pickler.length < LARGE:
            break
    named.sort(key=lambda item: -item[1])
    return named[:4]


def _megabytes(nbytes: int) -> str:
    return f"{nbytes / 1e9:.1f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.0f} MB"
