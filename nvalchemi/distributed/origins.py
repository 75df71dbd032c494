"""Which class on a rank is which class of its parent.

A cell's classes and functions travel to the ranks by value. Each is marked on the way, and a rank
sends it back as its mark alone: the parent finds its own class again, and what a rank did to its
copy of the class stays on the rank.
"""

from __future__ import annotations

import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any

_originals: dict[str, Any] = {}  # by mark: in a parent while its ranks run, and on a rank
_marks: dict[int, str] = {}  # on a rank, by id; the objects live as long as _originals
_named: list[Any] = []  # on a rank: what its own module shows under its own name


class Marker:
    """Marks what one payload carries by value, and remembers it in ``sent``."""

    def __init__(self) -> None:
        self._prefix = uuid.uuid4().hex
        self.sent: dict[str, Any] = {}

    def mark(self, obj: Any, reduced: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return ``reduced``, the pickled form of ``obj``, so that a rank makes it with a mark."""
        make, arguments, *rest = reduced
        mark = f"{self._prefix}/{len(self.sent)}"
        self.sent[mark] = obj
        module = sys.modules.get(getattr(obj, "__module__", None) or "")
        is_named = module is not None and vars(module).get(obj.__qualname__) is obj
        return (_make, (mark, is_named, make, arguments), *rest)


def _make(mark: str, is_named: bool, make: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    obj = make(*arguments)
    _originals[mark] = obj
    _marks[id(obj)] = mark
    if is_named:
        _named.append(obj)
    return obj


def as_mark(obj: Any) -> tuple[Any, ...] | None:
    """Return the pickled form of what came from the parent; None if it must go by value."""
    mark = _marks.get(id(obj))
    if mark is None or (isinstance(obj, FunctionType) and _has_state(obj)):
        return None
    return _find, (mark,)


def _has_state(function: FunctionType) -> bool:
    """Return whether a function captures variables, which a rank may have changed."""
    return any(name != "__class__" for name in function.__code__.co_freevars)


def _find(mark: str) -> Any:
    return _originals[mark]


@contextmanager
def known(sent: dict[str, Any]) -> Iterator[None]:
    """Let what comes from ranks mean the objects that were sent to them."""
    _originals.update(sent)
    try:
        yield
    finally:
        for mark in sent:
            del _originals[mark]


def put_into_modules() -> None:
    """On a rank: put what has arrived where plain pickle (torch.save, DataLoader) looks for it.

    Processes that the rank spawns get it, too.
    """
    from nvalchemi.distributed import rank_children  # it needs this module

    rank_children.take_over()
    for obj in _named:
        name = obj.__module__
        module = sys.modules.get(name) or sys.modules.setdefault(name, ModuleType(name))
        setattr(module, obj.__qualname__, obj)
    _named.clear()


def modules_of_arrived() -> list[ModuleType]:
    """On a rank: return the modules, other than the notebook, of what came by value."""
    names = {obj.__module__ for obj in _originals.values()} - {"__main__"}
    return [sys.modules[name] for name in names if name in sys.modules]


def forget_functions() -> None:
    """On a rank that is asked again: let go of functions that came, and of all that they hold.

    Classes stay, so that their instances in the namespace can go back as what they were.
    """
    for mark, obj in list(_originals.items()):
        if isinstance(obj, FunctionType):
            _marks.pop(id(obj), None)
        if _marks.get(id(obj)) != mark:  # a function, or a class that came again
            del _originals[mark]
