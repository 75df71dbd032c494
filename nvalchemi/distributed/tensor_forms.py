"""Tensors, arrays and views of memory, taken apart so that their bytes can lie elsewhere.

Each ``Forms`` method returns what pickle calls a reduced form: a function that makes the object
again, and its arguments, the bytes among them as a buffer.
"""

from __future__ import annotations

import mmap
import os
import pickle
from typing import Any

import numpy as np
import torch
from numpy.lib.array_utils import byte_bounds

from nvalchemi.distributed.unsendable import Kind, Refusal

_WAYS = (
    "__reduce_ex__",
    "__reduce__",
    "__setstate__",
    "__torch_dispatch__",
    "__torch_function__",
)
LARGE = 1 << 20  # bytes; from here on an object is worth naming


class Forms:
    """The reduced forms of the data in one pickle.

    Parameters
    ----------
    to_cpu
        Take tensors from the device they are on, instead of refusing those that are on one.

    Attributes
    ----------
    large
        Tensors and arrays of at least ``LARGE`` bytes, with their bytes.
    """

    def __init__(self, to_cpu: bool) -> None:
        self.large: list[tuple[Any, int]] = []
        self._to_cpu = to_cpu
        self._carriers: dict[int, Any] = {}  # by storage: the first tensor, which has the bytes

    def of_tensor(self, obj: torch.Tensor) -> Any:
        """Return the form of a tensor; tensors on one storage stay so."""
        kind = type(obj)
        if kind is torch.Tensor:
            form = self._of_simple(obj)
            if form is not None:
                return form
        device = obj.device
        if device.type == "meta":
            return NotImplemented  # it has no content, here and there
        if device.type != "cpu" and not self._to_cpu:
            raise on_device("tensor", device)
        if not _is_plain(obj, kind):
            return NotImplemented  # its parts come here one by one
        has_grad = obj.requires_grad and obj.is_leaf  # else it is a result, whose graph stays
        layout = (obj.dtype, obj.storage_offset(), tuple(obj.shape), obj.stride(), has_grad)
        storage = obj.untyped_storage()
        carrier = self._carriers.setdefault(storage._cdata, obj)
        if carrier is obj:
            form = _make_tensor, (kind, self._buffer(obj, storage), *layout)
        else:
            form = _share, (kind, carrier, *layout)
        attributes = vars(obj)
        grad = obj.grad if has_grad else None
        if attributes or grad is not None:
            return *form, (dict(attributes), grad), None, None, _set_attributes
        return form

    def _of_simple(self, obj: torch.Tensor) -> Any:
        """Return the short form of what most tensors are: all of a storage, in order."""
        try:
            content: Any = obj.numpy()
        except (RuntimeError, TypeError):  # on a device, sparse, with grad, of a type of torch only
            return None
        nbytes, storage = content.nbytes, obj.untyped_storage()
        if not nbytes or nbytes != storage.nbytes() or not content.flags.c_contiguous:
            return None
        if obj.__dict__ or self._carriers.setdefault(storage._cdata, obj) is not obj:
            return None
        if nbytes >= LARGE:
            self.large.append((obj, nbytes))
        return _make_simple, (pickle.PickleBuffer(content), obj.dtype, content.shape)

    def _buffer(self, obj: Any, storage: torch.UntypedStorage) -> pickle.PickleBuffer:
        if storage.device.type != "cpu":
            storage = storage.cpu()
        if storage.nbytes() >= LARGE:
            self.large.append((obj, storage.nbytes()))
        content: Any = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
        return pickle.PickleBuffer(content)

    def of_storage(self, obj: torch.UntypedStorage) -> Any:
        """Return the form of a storage: that of a tensor on it, if there was one."""
        if obj.device.type == "meta":
            return NotImplemented
        if obj.device.type != "cpu" and not self._to_cpu:
            raise on_device("storage", obj.device)
        carrier = self._carriers.setdefault(obj._cdata, obj)
        if carrier is obj:
            return _make_storage, (self._buffer(obj, obj),)
        return _storage_of, (carrier,)

    def of_typed_storage(self, obj: Any) -> Any:
        """Return the form of what torch's own forms of tensors contain."""
        storage = obj._untyped_storage
        if storage.device.type == "meta":
            return NotImplemented
        return _make_typed_storage, (storage, obj.dtype)

    def of_array(self, obj: np.ndarray) -> Any:
        """Return the form of an array without Python objects."""
        if obj.dtype.hasobject or not obj.dtype.itemsize:
            return NotImplemented
        if obj.flags.c_contiguous:
            order, content = "C", obj
        elif obj.flags.f_contiguous:
            order, content = "F", obj.T
        else:
            order, content = "C", np.ascontiguousarray(obj)
        if obj.nbytes >= LARGE:
            self.large.append((obj, obj.nbytes))
        # as bytes: some types (dates) have no buffers
        flat: Any = content.reshape(-1).view(np.uint8)
        return _make_array, (pickle.PickleBuffer(flat), obj.dtype, obj.shape, order)

    def of_memmap(self, obj: np.memmap) -> Any:
        """Let the reader map the same file; what was changed in memory only goes as an array."""
        mapping = obj._mmap  # type: ignore[attr-defined]
        has_file = mapping is not None and obj.mode != "c" and os.path.exists(obj.filename or "")
        if not has_file or not obj.size:
            return NotImplemented if obj.dtype.hasobject else (_as_memmap, (np.asarray(obj),))
        low, high = byte_bounds(obj)
        begin = obj.offset - obj.offset % mmap.ALLOCATIONGRANULARITY
        start = begin + low - _address(np.frombuffer(mapping, np.uint8))
        mode = "r" if obj.mode == "r" else "r+"
        place = (mode, start, high - low, _address(obj) - low)
        return _open_memmap, (str(obj.filename), *place, obj.dtype, obj.shape, obj.strides)


def _is_plain(tensor: torch.Tensor, kind: type) -> bool:
    """Return whether a tensor is its bytes, layout and attributes."""
    return (
        (kind is torch.Tensor or kind is torch.nn.Parameter or _is_plain_class(kind))
        and tensor.layout is torch.strided
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
        and tensor._backward_hooks is None
    )


def _is_plain_class(kind: type) -> bool:
    """Return whether a class of tensors leaves torch's own ways of making them as they are."""
    base = torch.nn.Parameter if issubclass(kind, torch.nn.Parameter) else torch.Tensor
    own = [name for name in _WAYS if _method(kind, name) != _method(base, name)]
    return not own and not hasattr(kind, "__tensor_flatten__")


def _method(kind: type, name: str) -> Any:
    found = getattr(kind, name, None)
    return getattr(found, "__func__", found)  # of a class method, whatever class asks


def on_device(what: str, device: torch.device) -> Refusal:
    """Return the error of what is on a device that a rank should not touch by itself."""
    return Refusal(
        Kind(
            f"a {what} on {device}",
            "pass it as it is on the CPU (.cpu()), or make it on the rank's own device",
        )
    )


def of_view(obj: memoryview) -> Any:
    """Return the form of a view of memory."""
    content = obj.cast("B") if obj.c_contiguous else obj.tobytes()
    return _make_view, (pickle.PickleBuffer(content), obj.format, obj.shape)


def _make_simple(content: Any, dtype: torch.dtype, shape: Any) -> torch.Tensor:
    return torch.frombuffer(content, dtype=dtype).view(shape)


def _make_tensor(kind: type, content: Any, *layout: Any) -> torch.Tensor:
    return _on(kind, _make_storage(content), *layout)


def _share(kind: type, carrier: Any, *layout: Any) -> torch.Tensor:
    return _on(kind, _storage_of(carrier), *layout)


def _on(
    kind: type,
    storage: Any,
    dtype: torch.dtype,
    offset: int,
    size: Any,
    stride: Any,
    has_grad: bool,
) -> torch.Tensor:
    tensor = torch.empty(0, dtype=dtype).set_(storage, offset, size, stride)
    if kind is torch.nn.Parameter:
        return torch.nn.Parameter(tensor, requires_grad=has_grad)
    if kind is not torch.Tensor:
        tensor = tensor.as_subclass(kind)
    return tensor.requires_grad_(has_grad) if has_grad else tensor


def _set_attributes(tensor: torch.Tensor, state: tuple[dict[str, Any], Any]) -> None:
    attributes, grad = state
    vars(tensor).update(attributes)
    if grad is not None:
        tensor.grad = grad


def _storage_of(carrier: Any) -> torch.UntypedStorage:
    return carrier if type(carrier) is torch.UntypedStorage else carrier.untyped_storage()


def _make_storage(content: Any) -> torch.UntypedStorage:
    if not memoryview(content).nbytes:
        return torch.UntypedStorage(0)
    return torch.frombuffer(content, dtype=torch.uint8).untyped_storage()


def _make_typed_storage(storage: torch.UntypedStorage, dtype: torch.dtype) -> Any:
    return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


def _make_array(content: Any, dtype: np.dtype, shape: Any, order: Any) -> np.ndarray:
    if not memoryview(content).nbytes:
        return np.empty(shape, dtype, order)
    return np.frombuffer(content, dtype).reshape(shape, order=order)


def _as_memmap(array: np.ndarray) -> np.memmap:
    return array.view(np.memmap)


def _open_memmap(
    name: str, mode: Any, start: int, length: int, first: int, dtype: Any, shape: Any, strides: Any
) -> np.ndarray:
    content = np.memmap(name, np.uint8, mode, start, (length,))
    item = content[first : first + dtype.itemsize].view(dtype)
    return np.lib.stride_tricks.as_strided(item, shape, strides, subok=True)


def _make_view(content: Any, form: Any, shape: Any) -> memoryview:
    view = memoryview(content)
    return view.cast(form, shape) if view.nbytes else view.cast(form)


def _address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]
