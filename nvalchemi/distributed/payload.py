"""Objects by value between processes, their tensors and arrays through memory that is shared.

A payload is one anonymous file: a cloudpickle stream, then the bytes of every CPU tensor and numpy
array. Readers map it copy-on-write, so all ranks share one copy of what they only read, and a rank
that writes into a tensor changes its own copy alone.
"""

from __future__ import annotations

import inspect
import io
import marshal
import mmap
import os
import pickle
import struct
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.machinery import ModuleSpec, PathFinder
from types import CodeType, FunctionType, ModuleType
from typing import Any

import cloudpickle
import torch

from nvalchemi.distributed import origins
from nvalchemi.distributed.origins import Marker

_ALIGN = 64  # bytes; what vectorised kernels like
_registry = threading.Lock()  # cloudpickle's is one for all threads
_HEADER = struct.Struct("<QQ")  # length of the stream, number of buffers


def new_file() -> int:
    """Return the descriptor of an empty file without a name, in memory where the system can."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("nvalchemi")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def dump(obj: Any, descriptor: int, marker: Marker | None = None) -> None:
    """Write ``obj`` into the empty file behind ``descriptor``.

    With a ``marker``, ranks that load it can send its classes and functions back as themselves.

    Raises
    ------
    TypeError, pickle.PicklingError, or whatever the object raises
        If something in ``obj`` cannot be pickled.
    """
    stream = io.BytesIO()
    buffers: list[pickle.PickleBuffer] = []
    _Pickler(stream, buffers.append, marker).dump(obj)
    views = [buffer.raw() for buffer in buffers]
    sizes = [view.nbytes for view in views]
    body = stream.getbuffer()
    with open(descriptor, "wb", closefd=False) as file:
        file.write(_HEADER.pack(body.nbytes, len(views)))
        file.write(struct.pack(f"<{len(sizes)}Q", *sizes))
        file.write(body)
        for view in views:
            file.seek(-file.tell() % _ALIGN, os.SEEK_CUR)
            file.write(view)
        file.flush()
        os.ftruncate(descriptor, file.tell())


def load(descriptor: int) -> Any:
    """Read the object back; its tensors and arrays lie on the mapped file."""
    mapped = memoryview(mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY))
    length, count = _HEADER.unpack_from(mapped)
    sizes = struct.unpack_from(f"<{count}Q", mapped, _HEADER.size)
    start = _HEADER.size + 8 * count
    body = mapped[start : start + length]
    buffers, end = [], start + length
    for size in sizes:
        begin = end + -end % _ALIGN
        end = begin + size
        buffers.append(mapped[begin:end])
    return pickle.loads(body, buffers=buffers)


def dumps(obj: Any) -> bytes:
    """Return ``obj`` as bytes that ``pickle.loads`` reads."""
    stream = io.BytesIO()
    _Pickler(stream).dump(obj)
    return stream.getvalue()


class _Pickler(cloudpickle.Pickler):
    """cloudpickle, with the bytes of plain CPU tensors out of the stream if ``on_buffer`` is given.

    What came from the parent goes back as its mark (see origins).
    """

    def __init__(
        self,
        stream: io.BytesIO,
        on_buffer: Callable[[pickle.PickleBuffer], Any] | None = None,
        marker: Marker | None = None,
    ) -> None:
        super().__init__(stream, protocol=5, buffer_callback=on_buffer)
        self._marker = marker
        self._storages: dict[int, torch.UntypedStorage] = {}

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) in (torch.Tensor, torch.nn.Parameter) and _is_plain(obj):
            storage = obj.untyped_storage()
            # one Python object per storage, so that views of one tensor stay views of one tensor
            storage = self._storages.setdefault(storage._cdata, storage)
            layout = (obj.dtype, obj.storage_offset(), tuple(obj.size()), obj.stride())
            return _make_tensor, (type(obj), storage, *layout, obj.requires_grad)
        if type(obj) is torch.UntypedStorage and obj.device.type == "cpu":
            content: Any = torch.empty(0, dtype=torch.uint8).set_(obj).numpy()
            return _make_storage, (pickle.PickleBuffer(content),)
        if type(obj) is CodeType:  # cloudpickle drops the file's name, and tracebacks their lines
            return marshal.loads, (marshal.dumps(obj),)
        if not isinstance(obj, (type, FunctionType)):
            return super().reducer_override(obj)
        as_mark = origins.as_mark(obj)
        if as_mark is not None:
            return as_mark
        reduced = super().reducer_override(obj)
        if not isinstance(reduced, tuple) or len(reduced) != 6:
            return reduced  # not by value
        if isinstance(obj, type):
            _keep_slots(obj, reduced[1])
        return self._marker.mark(obj, reduced) if self._marker else reduced


def _keep_slots(obj: type, arguments: tuple[Any, ...]) -> None:
    """Let a class with slots be made with them: cloudpickle's would have a __dict__ instead."""
    if "__slots__" in vars(obj) and not issubclass(obj, tuple):  # a NamedTuple makes its own
        for content in arguments:
            if isinstance(content, dict) and "__module__" in content:
                content["__slots__"] = vars(obj)["__slots__"]


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
        and not vars(tensor)
    )


def _make_storage(content: Any) -> torch.UntypedStorage:
    if not memoryview(content).nbytes:
        return torch.UntypedStorage(0)
    return torch.frombuffer(content, dtype=torch.uint8).untyped_storage()


def _make_tensor(
    kind: type, storage: Any, dtype: torch.dtype, offset: int, size: Any, stride: Any, grad: bool
) -> torch.Tensor:
    tensor = torch.empty(0, dtype=dtype).set_(storage, offset, size, stride)
    if kind is torch.nn.Parameter:
        return torch.nn.Parameter(tensor, requires_grad=grad)
    return tensor.requires_grad_(grad)


@contextmanager
def by_value(fn: Callable[..., Any]) -> Iterator[None]:
    """Let what lies in the module of ``fn`` travel by value, if ranks should not import it.

    Cells (``__main__``) always travel by value. So does a module that a rank cannot find, or whose
    import is still going on: importing it again would run it again. Any other module is imported by
    the ranks, so that its classes stay the ones that its other modules know.
    """
    module = sys.modules.get(getattr(innermost(fn), "__module__", None) or "")
    if module is None or module.__name__ == "__main__" or _can_be_imported(module):
        yield
        return
    with _registry:
        known = module.__name__ in cloudpickle.list_registry_pickle_by_value()
        if not known:
            cloudpickle.register_pickle_by_value(module)
        try:
            yield
        finally:
            if not known:
                cloudpickle.unregister_pickle_by_value(module)


def innermost(fn: Any) -> Any:
    """Return the function inside partials and bound methods."""
    while True:
        if isinstance(fn, partial):
            fn = fn.func
        elif inspect.ismethod(fn):
            fn = fn.__func__
        else:
            return fn


def _can_be_imported(module: ModuleType) -> bool:
    """Return whether a rank that imports this module gets the same file, and may run it."""
    spec, file = getattr(module, "__spec__", None), getattr(module, "__file__", None)
    if getattr(spec, "_initializing", False):
        return False
    if file is None:
        return spec is not None  # built in, or a namespace
    if _is_installed(file):
        return True
    path, found = None, None
    parts = module.__name__.split(".")
    for depth in range(1, len(parts) + 1):
        found = _find_spec(".".join(parts[:depth]), path)
        if found is None:
            return False
        path = found.submodule_search_locations
    return found is not None and found.origin == file


def _find_spec(name: str, path: Sequence[str] | None) -> ModuleSpec | None:
    """Look for a module as a fresh interpreter would, also by the finders of editable installs."""
    for finder in sys.meta_path:
        home = sys.modules.get(getattr(finder, "__module__", ""))
        if finder is PathFinder or _is_installed(getattr(home, "__file__", None) or ""):
            spec = finder.find_spec(name, path)
            if spec is not None:
                return spec
    return None


def _is_installed(file: str) -> bool:
    return file.startswith(tuple(sysconfig.get_path(k) for k in ("stdlib", "purelib", "platlib")))


def find_unsendable(fn: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> str | None:
    """Return the name of the argument or captured variable that cannot be pickled."""
    inner = innermost(fn)
    named: dict[str, Any] = {f"argument {i}": value for i, value in enumerate(args)}
    named |= {f"argument {name!r}": value for name, value in kwargs.items()}
    if inspect.isfunction(inner):
        captured = inspect.getclosurevars(inner)
        named |= {repr(name): value for name, value in captured.nonlocals.items()}
        named |= {repr(name): value for name, value in captured.globals.items()}
    for name, value in named.items():
        try:
            _Pickler(io.BytesIO()).dump(value)
        except Exception:
            return name
    return None
