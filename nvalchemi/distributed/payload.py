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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.machinery import PathFinder
from types import CodeType, ModuleType
from typing import Any

import cloudpickle
import torch

_ALIGN = 64  # bytes; what vectorised kernels like
_registry = threading.Lock()  # cloudpickle's is one for all threads
_HEADER = struct.Struct("<QQ")  # length of the stream, number of buffers


def new_file() -> int:
    """Return the descriptor of an empty file without a name, in memory where the system can."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("nvalchemi")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def dump(obj: Any, descriptor: int) -> None:
    """Write ``obj`` into the empty file behind ``descriptor``.

    Raises
    ------
    TypeError, pickle.PicklingError, or whatever the object raises
        If something in ``obj`` cannot be pickled.
    """
    stream = io.BytesIO()
    buffers: list[pickle.PickleBuffer] = []
    _Pickler(stream, buffers).dump(obj)
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


class _Pickler(cloudpickle.Pickler):
    """cloudpickle, with the bytes of plain CPU tensors out of the stream."""

    def __init__(self, stream: io.BytesIO, buffers: list[pickle.PickleBuffer]) -> None:
        super().__init__(stream, protocol=5, buffer_callback=buffers.append)
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
        return super().reducer_override(obj)


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

    Cells (``__main__``) always travel by value. So does a single file beside the script or among
    the tests: importing it again would run it again. An installed module or a package is imported
    by the ranks, so that its classes stay the ones that its other modules know.
    """
    module = sys.modules.get(getattr(innermost(fn), "__module__", None) or "")
    if module is None or module.__name__ == "__main__" or not _is_loose_file(module):
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


def _is_loose_file(module: ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    if file is None:
        return False
    if any(file.startswith(sysconfig.get_path(key)) for key in ("stdlib", "purelib", "platlib")):
        return False
    return "." not in module.__name__ or not _can_be_imported(module.__name__, file)


def _can_be_imported(name: str, file: str) -> bool:
    path, spec = None, None
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        spec = PathFinder.find_spec(".".join(parts[:depth]), path)
        if spec is None:
            return False
        path = spec.submodule_search_locations
    return spec is not None and spec.origin == file


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
            _Pickler(io.BytesIO(), []).dump(value)
        except Exception:
            return name
    return None
