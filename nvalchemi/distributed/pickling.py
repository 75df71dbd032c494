"""A pickler for tensors, arrays, and what is defined in cells.

It is cloudpickle's, with four differences: the bytes of CPU tensors and numpy arrays stay out of
the stream (buffers of pickle protocol 5); what came from the parent goes back as its mark; named
modules travel as wholes; and what would arrive as something else is refused.
"""

from __future__ import annotations

import dis
import functools
import inspect
import io
import marshal
import pickle
import sys
import weakref
from collections.abc import Callable, Mapping
from types import CodeType, FunctionType, ModuleType
from typing import Any

import cloudpickle
import numpy as np
import torch

from nvalchemi.distributed import origins
from nvalchemi.distributed.modules import (
    contents,
    fill_module,
    globals_of,
    goes_by_value,
    module_of,
)
from nvalchemi.distributed.origins import Marker
from nvalchemi.distributed.tensor_forms import Forms, of_view, on_device
from nvalchemi.distributed.unsendable import Kind, Refusal, describe

_BROKEN = (
    ("multiprocessing.connection", "_ConnectionBase"),  # would be the number of a descriptor
    ("ipywidgets", "Widget"),
    ("tqdm.std", "tqdm"),
)
_STREAMS = ("stdin", "stdout", "stderr")
_BY_NAME = ("LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")  # how a class's body looks up a global


def _see_class_bodies(code: CodeType) -> None:
    """Let cloudpickle know the globals that bodies of classes in a function use.

    They are looked up as names, and it looks for globals alone. What it finds in a code it keeps,
    and what is added there it takes for its own.
    """
    found = cloudpickle.cloudpickle._extract_code_globals(code)
    for const in code.co_consts:
        if isinstance(const, CodeType):
            if not const.co_flags & inspect.CO_NEWLOCALS:
                names = (i for i in dis.get_instructions(const) if i.opname in _BY_NAME)
                found.update(dict.fromkeys(str(i.argval) for i in names))
            _see_class_bodies(const)
            found.update(cloudpickle.cloudpickle._extract_code_globals(const))


class Pickler(cloudpickle.Pickler):
    """Pickle one object.

    Parameters
    ----------
    stream
        Where the pickle is written to.
    on_buffer
        Called with the buffer of each tensor and array; without it they are part of the stream.
    marker
        Marks classes and functions that go by value, so that ranks can send them back.
    to_cpu
        Take tensors from the device they are on, instead of refusing those that are on one.
    whole
        Modules that are sent with all they contain, and per module what is left out and why.

    Attributes
    ----------
    current
        The object that was begun last: the one to blame when pickling fails.
    forms
        The forms of tensors and arrays, and which of them are large.
    referred
        Names of the modules that the reader has to import, and others.
    failure, length
        Why pickling failed, and the length of the stream; its user sets them.
    """

    def __init__(
        self,
        stream: Any,
        on_buffer: Callable[[pickle.PickleBuffer], Any] | None = None,
        marker: Marker | None = None,
        to_cpu: bool = False,
        whole: Mapping[str, Mapping[str, str]] | None = None,
    ) -> None:
        super().__init__(stream, protocol=5, buffer_callback=on_buffer)
        self.current: Any = None
        self.forms = Forms(to_cpu)
        self.referred: set[str] = set()
        self.failure: Exception | None = None
        self.length = 0
        self._marker = marker
        self.whole = whole or {}
        self._globals: dict[str, _Globals] = {}
        self._reducers: dict[type, Callable[[Any], Any] | None] = {}

    def dump(self, obj: Any) -> None:
        """Write ``obj`` into the stream."""
        try:
            super().dump(obj)
        finally:
            self._reducers.clear()  # they refer to this pickler, which keeps tensors alive

    def reducer_override(self, obj: Any) -> Any:
        self.current = obj
        kind = type(obj)
        try:
            reducer = self._reducers[kind]
        except KeyError:
            reducer = self._reducers[kind] = self._reducer_of(kind)
        return NotImplemented if reducer is None else reducer(obj)

    def _reducer_of(self, kind: type) -> Callable[[Any], Any] | None:
        if issubclass(kind, type) or kind is FunctionType:
            return self._definition
        if issubclass(kind, torch.Tensor):
            return self.forms.of_tensor
        if kind is np.ndarray:
            return self.forms.of_array
        if _arrives_broken(kind):
            return _refuse
        found: Any = {
            np.memmap: self.forms.of_memmap,
            torch.UntypedStorage: self.forms.of_storage,
            torch.storage.TypedStorage: self.forms.of_typed_storage,
            torch.Generator: _refuse_on_device,
            torch.nn.parallel.DistributedDataParallel: _refuse_wrapped,
            ModuleType: self._module,
            CodeType: _code,
            memoryview: of_view,
            functools._lru_cache_wrapper: self._cached,
            weakref.WeakKeyDictionary: _weak_dictionary,
            weakref.WeakValueDictionary: _weak_dictionary,
        }.get(kind)
        if found is None and (
            kind is io.TextIOWrapper or any(kind is type(getattr(sys, s, None)) for s in _STREAMS)
        ):
            return _text_file
        return found

    def _definition(self, obj: Any) -> Any:
        as_mark = self._mark_of(obj)
        if as_mark is not None:
            return as_mark
        if isinstance(obj, FunctionType):
            _see_class_bodies(obj.__code__)
        reduced = super().reducer_override(obj)
        if not isinstance(reduced, tuple) or len(reduced) != 6:  # not by value
            self.referred.add(getattr(obj, "__module__", None) or "")
            return reduced
        if isinstance(obj, type):
            _keep_slots(obj, reduced[1])
        else:
            self._note_imports(obj.__code__)
            reduced = self._with_globals_of_module(obj, reduced)
        return self._marker.mark(obj, reduced) if self._marker else reduced

    def _note_imports(self, code: CodeType) -> None:
        """Note what a function may import when it runs: the names that could be modules."""
        self.referred.update(code.co_names)
        for const in code.co_consts:
            if isinstance(const, CodeType):
                self._note_imports(const)

    def _mark_of(self, obj: Any) -> Any:
        return origins.as_mark(obj)

    def _with_globals_of_module(self, obj: FunctionType, reduced: tuple) -> tuple:
        """Let a function of a module that goes as a whole have that module's variables."""
        name = str(obj.__globals__.get("__name__"))
        if name not in self.whole or obj.__globals__ is not vars(sys.modules[name]):
            return reduced
        make, (code, _, *rest), state, *more = reduced
        variables = self._globals.setdefault(name, _Globals(name))
        return (make, (code, variables, *rest), state, *more)

    def _module(self, obj: ModuleType) -> Any:
        if obj.__name__ in self.whole:
            content = contents(obj, self.whole[obj.__name__])
            return module_of, (obj.__name__,), content, None, None, fill_module
        self.referred.add(obj.__name__)
        return NotImplemented

    def _cached(self, obj: Any) -> Any:
        """Let a function in ``functools.lru_cache`` go as functions do, without what it cached."""
        self.referred.add(obj.__module__)
        if not goes_by_value(obj.__module__) and "<locals>" not in obj.__qualname__:
            return NotImplemented
        settings = obj.cache_parameters()
        return _make_cached, (settings["maxsize"], settings["typed"], obj.__wrapped__)


def _keep_slots(obj: type, arguments: tuple[Any, ...]) -> None:
    """Let a class with slots be made with them: cloudpickle's would have a __dict__ instead."""
    if "__slots__" in vars(obj) and not issubclass(obj, tuple):  # a NamedTuple makes its own
        for content in arguments:
            if isinstance(content, dict) and "__module__" in content:
                content["__slots__"] = vars(obj)["__slots__"]


def _refuse_on_device(obj: torch.Generator) -> Any:
    if obj.device.type != "cpu":
        raise on_device("random number generator", obj.device)
    return NotImplemented


def _refuse_wrapped(obj: Any) -> Any:
    remedy = "the model inside it, its .module"
    raise Refusal(
        Kind(
            "a DistributedDataParallel model, which belongs to a process group",
            f"pass {remedy}, and wrap it inside the function",
            f"return {remedy}",
        )
    )


def _arrives_broken(kind: type) -> bool:
    """Return whether an object could be pickled, and what is made of that does not work."""
    for home, name in _BROKEN:
        known = getattr(sys.modules.get(home), name, None)
        if isinstance(known, type) and issubclass(kind, known):
            return True
    return False


def _refuse(obj: Any) -> Any:
    raise Refusal(describe(obj) or Kind(f"a {type(obj).__name__}"))


def _code(obj: CodeType) -> Any:
    return marshal.loads, (marshal.dumps(obj),)  # cloudpickle drops the name of the file


def _text_file(obj: Any) -> Any:
    for name in _STREAMS:
        if obj is getattr(sys, name, None):
            return getattr, (sys, name)
    if type(obj) is io.TextIOWrapper:  # cloudpickle would send its content instead
        raise Refusal(describe(obj) or Kind("an open file"))
    return NotImplemented


def _weak_dictionary(obj: Any) -> Any:
    return type(obj), (dict(obj),)


def _make_cached(maxsize: int | None, typed: bool, function: Callable[..., Any]) -> Any:
    return functools.lru_cache(maxsize, typed)(function)


class _Globals:
    """Stands for the variables of a module that travels as a whole."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __reduce__(self) -> tuple[Any, ...]:
        return globals_of, (self.name,)
