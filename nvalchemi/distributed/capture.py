"""What a function captures, walked as the pickler walks it, each object with the path to it.

The walk goes downwards from named roots, in the pickler's order, by the pickler's own reductions,
and needs no recursion. A path is what one would write in the notebook: ``settings['log'].stream``.
"""

from __future__ import annotations

import functools
import inspect
import io
import pickle
import re
import time
from collections.abc import Callable, Iterable, Iterator
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch

from nvalchemi.distributed.modules import innermost
from nvalchemi.distributed.pickling import Pickler
from nvalchemi.distributed.tensor_forms import LARGE
from nvalchemi.distributed.unsendable import Refusal, describe

_SIZED = (str, bytes, bytearray)
_ATOMS = frozenset(
    [type(None), bool, int, float, complex, *_SIZED, CodeType, pickle.PickleBuffer]
    + [type(Ellipsis), type(NotImplemented), torch.dtype, torch.Size]
)
_OF_MODULE = re.compile(r"\._(?:modules|parameters|buffers)\['(\w+)'\]")
_PATIENCE = 5.0  # s; how long a search may take
_LONGEST = 120  # characters of a path


class Place:
    """An object in the capture and how one gets to it.

    ``label`` is what is appended to the parent's path, or, of a ``variable``, its name: paths begin
    anew there. ``error`` is why the object could not be pickled, if so.
    """

    __slots__ = ("depth", "error", "label", "obj", "parent", "variable")

    def __init__(self, obj: Any, parent: Place | None, label: str, variable: bool = False) -> None:
        self.obj, self.parent, self.label, self.variable = obj, parent, label, variable
        self.error: Exception | None = None
        self.depth: int = 0 if parent is None else parent.depth + 1

    def line(self) -> list[Place]:
        """Return the places from the root to this one."""
        places: list[Place] = []
        place: Place | None = self
        while place is not None:
            places.append(place)
            place = place.parent
        return places[::-1]

    def __str__(self) -> str:
        line = self.line()
        text, user = "", ""
        for place in line:
            if place.variable:
                owner = None if place.parent is None else innermost(place.parent.obj)
                is_root = owner is None or owner is innermost(line[0].obj)
                text, user = place.label, "" if is_root else _qualname(owner)
            elif place.parent is not None and isinstance(place.parent.obj, type):
                text, user = _qualname(place.parent.obj) + place.label, ""
            else:
                text += place.label
        text = _OF_MODULE.sub(lambda m: _item(m[1]), text)
        if len(text) > _LONGEST:
            text = f"{text[: _LONGEST - 40]} ... {text[-36:]}"
        return f"{text} (used by {user})" if user else text


def _item(name: str) -> str:
    return f"[{name}]" if name.isdigit() else f".{name}"


def _qualname(obj: Any) -> str:
    return str(getattr(obj, "__qualname__", type(obj).__qualname__)).replace("<locals>.", "")


def roots_of(fn: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> list[Place]:
    """Return the arguments and the function, as the places where a walk begins."""
    name = _qualname(innermost(fn))
    if isinstance(fn, functools.partial):
        name = f"partial({name})"
    elif not isinstance(fn, (type, MethodType, FunctionType)):
        name = f"{name}(...)"
    function = Place(fn, None, name, variable=True)
    places = [Place(value, None, f"argument {i}", True) for i, value in enumerate(args)]
    places += [Place(value, None, f"argument {name!r}", True) for name, value in kwargs.items()]
    return [function, *places]


def walk(roots: Iterable[Place], pickler: Pickler, patience: float = _PATIENCE) -> Iterator[Place]:
    """Yield each object once, until ``patience`` seconds have passed."""
    end = time.monotonic() + patience
    seen: dict[int, Any] = {}  # also keeps what was made on the way, so that ids stay its own
    stack: list[Iterator[Place]] = [iter(roots)]
    while stack:
        place = next(stack[-1], None)
        if place is None:
            stack.pop()
            continue
        if id(place.obj) in seen:
            continue
        seen[id(place.obj)] = place.obj
        if not len(seen) & 0xFF and time.monotonic() > end:
            return
        try:
            below = _children(place, pickler)
        except Exception as error:
            place.error = error
            below = iter(())
        yield place
        stack.append(below)


def _is_atom(obj: Any) -> bool:
    kind = type(obj)
    return kind in _ATOMS and (kind not in _SIZED or len(obj) < LARGE)


def _children(place: Place, pickler: Pickler) -> Iterator[Place]:
    obj = place.obj
    kind = type(obj)
    if kind in _ATOMS:
        return iter(())
    if kind in (list, tuple):
        return (Place(x, place, f"[{i}]") for i, x in enumerate(obj) if not _is_atom(x))
    if kind is dict:
        return _items(place, obj.items())
    if kind in (set, frozenset):
        return (Place(x, place, " (an element of it)") for x in obj if not _is_atom(x))
    reduced = _reduce(obj, pickler)
    if isinstance(reduced, str):
        return iter(())
    if kind is MethodType:
        is_root = place.parent is None and not place.label.startswith("argument ")
        label = "self" if is_root else ".__self__"
        return iter([Place(obj.__self__, place, label, is_root), Place(obj.__func__, place, "")])
    if kind is CellType:
        return iter([Place(obj.cell_contents, place, "")] if reduced[1] else [])
    if kind is FunctionType and len(reduced) == 6:
        return _of_function(place, reduced[2])
    if kind is np.ndarray and obj.dtype.hasobject:
        return (Place(x, place, f".flat[{i}]") for i, x in enumerate(obj.flat) if not _is_atom(x))
    if kind is functools.partial:
        return _of_partial(place)
    return _of_reduced(place, reduced)


def _reduce(obj: Any, pickler: Pickler) -> Any:
    """Return the pickled form of an object as the pickler would take it; a string if by name."""
    reduced = pickler.reducer_override(obj)
    if reduced is not NotImplemented:
        return reduced
    if isinstance(obj, (type, FunctionType)):
        return obj.__qualname__
    reducer = pickler.dispatch_table.get(type(obj))
    return obj.__reduce_ex__(5) if reducer is None else reducer(obj)


def _items(place: Place, items: Iterable[tuple[Any, Any]]) -> Iterator[Place]:
    for key, value in items:
        if not _is_atom(key):
            yield Place(key, place, f" (its key {_short(key)})")
        if not _is_atom(value):
            yield Place(value, place, f"[{_short(key)}]")


def _short(key: Any) -> str:
    if not isinstance(key, (str, int, float, tuple, bytes)):
        return f"<{type(key).__name__}>"
    text = repr(key)
    return text if len(text) <= 40 else text[:37] + "..."


def _of_function(place: Place, state: tuple[dict[str, Any], dict[str, Any]]) -> Iterator[Place]:
    attributes, own = state
    function = place.obj
    for name, value in own["__globals__"].items():
        if not _is_atom(value):
            yield Place(value, place, name, variable=True)
    names = function.__code__.co_freevars
    for name, cell in zip(names, function.__closure__ or (), strict=True):
        try:
            value = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
        if not _is_atom(value):
            yield Place(value, place, name, variable=True)
    yield from _of_defaults(place, function)
    for name, value in attributes.items():
        if not _is_atom(value):
            yield Place(value, place, f".{name}")
    for name, value in function.__annotations__.items():
        if not _is_atom(value):
            yield Place(value, place, f" (its annotation of {name!r})")


def _of_defaults(place: Place, function: FunctionType) -> Iterator[Place]:
    defaults = function.__defaults__ or ()
    code = function.__code__
    names = code.co_varnames[: code.co_argcount][code.co_argcount - len(defaults) :]
    named = dict(zip(names, defaults, strict=True)) | (function.__kwdefaults__ or {})
    for name, value in named.items():
        if not _is_atom(value):
            yield Place(value, place, f" (its default of {name!r})")


def _of_partial(place: Place) -> Iterator[Place]:
    partial = place.obj
    yield Place(partial.func, place, ".func")
    for i, value in enumerate(partial.args):
        yield Place(value, place, f".args[{i}]")
    for name, value in partial.keywords.items():
        yield Place(value, place, f".keywords[{name!r}]")
    yield from _items(place, vars(partial).items())


def _of_reduced(place: Place, reduced: tuple[Any, ...]) -> Iterator[Place]:
    obj = place.obj
    make, args, state, listed, mapped = (reduced + (None,) * 3)[:5]
    names = {id(value): name for name, value in _attributes(obj).items() if not _is_atom(value)}
    yield Place(make, place, "")
    for i, value in enumerate(args):
        if _is_atom(value):
            continue
        if value is type(obj):
            yield Place(value, place, " (its class)")
        else:
            label = f".{names[id(value)]}" if id(value) in names else f".__reduce_ex__(5)[1][{i}]"
            yield Place(value, place, label)
    if state is not None:
        yield from _of_state(place, state, names)
    for i, value in enumerate(listed or ()):
        if not _is_atom(value):
            yield Place(value, place, f"[{i}]")
    yield from _items(place, mapped or ())


def _of_state(place: Place, state: Any, names: dict[int, str]) -> Iterator[Place]:
    parts = state if isinstance(state, tuple) and len(state) == 2 else (state,)
    for part in parts:
        if not isinstance(part, dict):
            if not _is_atom(part):
                yield Place(part, place, ".__getstate__()")
            continue
        for name, value in part.items():
            if _is_atom(value):
                continue
            is_attribute = id(value) in names or isinstance(place.obj, (type, ModuleType))
            label = f".{name}" if is_attribute else f".__getstate__()[{_short(name)}]"
            yield Place(value, place, label)


def _attributes(obj: Any) -> dict[str, Any]:
    found = dict(getattr(obj, "__dict__", {}))
    for cls in type(obj).__mro__:
        slots = vars(cls).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            try:
                found[name] = inspect.getattr_static(obj, name).__get__(obj)
            except (AttributeError, TypeError):
                pass
    return found


def explain(roots: Iterable[Place], pickler: Pickler, back: bool) -> TypeError:
    """Return the error to raise when ``pickler`` has failed, with a sentence that names the cause.

    ``back`` says that a value should have gone from a rank to its parent.
    """
    error = pickler.failure
    assert error is not None
    where = "cannot be sent back" if back else "cannot be sent to the ranks"
    culprit = pickler.current
    judge = Pickler(io.BytesIO(), lambda _: False, to_cpu=back, whole=pickler.whole)
    deepest: Place | None = None
    for place in walk(roots, judge):
        if place.error is not None or (place.obj is culprit and not _is_too_deep(error)):
            return TypeError(_blame(place, error, where, back))
        if deepest is None or place.depth > deepest.depth:
            deepest = place
    if _is_too_deep(error) and deepest is not None:
        return TypeError(_blame_depth(deepest, where))
    return TypeError(_unknown("something it reaches", culprit, error, where, back))


def _blame_depth(deepest: Place, where: str) -> str:
    """Return the sentence on the variable or argument below which most of the levels are."""
    begins = [place for place in deepest.line() if place.variable or place.parent is None]
    levels = [b.depth - a.depth for a, b in zip(begins, [*begins[1:], deepest])]
    named = begins[levels.index(max(levels))]
    return (
        f"{named} {where}: it is nested too deeply; keep its parts in one list instead of each "
        "inside another"
    )


def _blame(place: Place, error: Exception, where: str, back: bool) -> str:
    """Return the sentence on a place, or on the largest thing around it that is known."""
    if isinstance(place.error, Refusal):
        known = [(place, place.error.kind)]
    else:
        described = ((above, describe(above.obj)) for above in place.line())
        known = [(above, kind) for above, kind in described if kind is not None]
    if not known:
        return _unknown(str(place), place.obj, place.error or error, where, back)
    blamed, kind = known[0]
    return f"{blamed} is {kind.what}, which {where}; {kind.back if back else kind.there}"


def _unknown(path: str, obj: Any, error: Exception, where: str, back: bool) -> str:
    remedy = (
        "return what it is made from"
        if back
        else "make it inside the function, or pass what it is made from"
    )
    name = f"{type(obj).__module__}.{type(obj).__qualname__}".removeprefix("builtins.")
    reason = f"{type(error).__name__}: {error}"
    return f"{path}, a {name.removeprefix('__main__.')}, {where} ({reason}); {remedy}"


def _is_too_deep(error: Exception) -> bool:
    return isinstance(error, RecursionError) or isinstance(error.__context__, RecursionError)
