"""Which modules the ranks import, and which travel to them as they are here."""

from __future__ import annotations

import functools
import importlib
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from types import MethodType, ModuleType
from typing import Any

import cloudpickle

_registry = threading.Lock()  # cloudpickle's is one for all threads
_OWN = __name__.partition(".")[0]
_MADE_BY_IMPORT = frozenset({"__builtins__", "__loader__", "__spec__", "__cached__"})


@contextmanager
def by_value(fn: Callable[..., Any], modules: Iterable[ModuleType] = ()) -> Iterator[None]:
    """Let what lies in ``modules`` travel by value, and what lies in the module of ``fn``, too, if
    ranks should not import that one.

    Cells (``__main__``) always travel by value. So does a module that a rank cannot find, or whose
    import is still going on: importing it again would run it again. Any other module is imported by
    the ranks, so that its classes stay the ones that its other modules know.
    """
    wanted = [*modules]
    home = sys.modules.get(getattr(innermost(fn), "__module__", None) or "")
    if home is not None and home.__name__ != "__main__" and not _can_be_imported(home):
        wanted.append(home)
    with by_value_here(wanted):
        yield


@contextmanager
def by_value_here(modules: Iterable[ModuleType]) -> Iterator[None]:
    """Let what lies in these modules travel by value."""
    wanted = [*modules]
    if not wanted:
        yield
        return
    with _registry:
        known = cloudpickle.list_registry_pickle_by_value()
        new = {module.__name__: module for module in wanted if module.__name__ not in known}
        for module in new.values():
            cloudpickle.register_pickle_by_value(module)
        try:
            yield
        finally:
            for module in new.values():
                cloudpickle.unregister_pickle_by_value(module)


def goes_by_value(name: str) -> bool:
    """Return whether the functions and classes of a module do not go by name now."""
    parts = name.split(".")
    above = {".".join(parts[:depth]) for depth in range(1, len(parts) + 1)}
    is_registered = not above.isdisjoint(cloudpickle.list_registry_pickle_by_value())
    return name == "__main__" or name not in sys.modules or is_registered


def named_modules(modules: Any) -> dict[str, ModuleType]:
    """Return the modules of ``launch(by_value=...)`` and their submodules, by name.

    Raises
    ------
    TypeError
        If something is neither a module nor the name of one.
    ValueError
        If a module is not imported, or is one that ranks can only import: installed, built in.
    """
    if isinstance(modules, (str, ModuleType)):
        modules = (modules,)
    if not isinstance(modules, Iterable):
        raise TypeError(f"by_value must be modules, or their names: {modules!r}")
    found: dict[str, ModuleType] = {}
    for given in modules:
        module = _named_module(given)
        if module.__name__ != "__main__":  # always by value
            found |= _with_submodules(module)
    return found


def _named_module(given: Any) -> ModuleType:
    if not isinstance(given, (str, ModuleType)):
        raise TypeError(f"by_value must be modules, or their names: {given!r}")
    name = given if isinstance(given, str) else given.__name__
    module = sys.modules.get(name)
    if module is None:
        raise ValueError(
            f"by_value: no module {name!r} is imported here; import it first, and name it as in "
            "sys.modules"
        )
    if isinstance(given, ModuleType) and given is not module:
        raise ValueError(
            f"by_value: this module {name!r} is not the one that is imported under this name now; "
            "take the one in sys.modules, or import it again"
        )
    file = getattr(module, "__file__", None)
    if name.partition(".")[0] == _OWN:
        raise ValueError(f"by_value: {name!r} runs the ranks, they import it; leave it out")
    if name != "__main__" and (_is_built_in(module) or _is_installed(file or "")):
        raise ValueError(
            f"by_value: {name!r} is installed or built in, ranks import it; name only modules of "
            "your own, beside the notebook"
        )
    return module


def _is_built_in(module: ModuleType) -> bool:
    """Return whether a module has no Python source that could be here in another state."""
    file = getattr(module, "__file__", None)
    if file is None:
        return getattr(module, "__spec__", None) is not None and not hasattr(module, "__path__")
    return not str(file).endswith((".py", ".pyc"))


def is_own(module: ModuleType) -> bool:
    """Return whether a module is one of the user's Python files: none of ours, none installed."""
    file = getattr(module, "__file__", None)
    if file is None or module.__name__ == "__main__" or module.__name__.partition(".")[0] == _OWN:
        return False
    return str(file).endswith(".py") and not _is_installed(file)


def _with_submodules(module: ModuleType) -> dict[str, ModuleType]:
    inside = module.__name__ + "."
    below = {name: m for name, m in sys.modules.items() if name.startswith(inside)}
    return {module.__name__: module} | {
        name: m for name, m in below.items() if isinstance(m, ModuleType) and not _is_built_in(m)
    }


def innermost(fn: Any) -> Any:
    """Return the function inside partials and bound methods."""
    while True:
        if isinstance(fn, functools.partial):
            fn = fn.func
        elif isinstance(fn, MethodType):
            fn = fn.__func__
        else:
            return fn


def contents(module: ModuleType, left_out: Mapping[str, str]) -> tuple[dict[str, Any], Any]:
    """Return what to send of a module that travels as a whole, and what not, with reasons."""
    gone = _MADE_BY_IMPORT | set(left_out)
    return {k: v for k, v in vars(module).items() if k not in gone}, dict(left_out)


def module_of(name: str) -> ModuleType:
    """On a rank: return a module that arrives, so far perhaps empty."""
    return sys.modules.setdefault(name, ModuleType(name))


def globals_of(name: str) -> dict[str, Any]:
    """On a rank: return the variables of a module that arrives."""
    return vars(module_of(name))


def fill_module(module: ModuleType, state: tuple[dict[str, Any], dict[str, str]]) -> None:
    """On a rank: give a module that arrived what it contains, and make it what an import finds."""
    content, left_out = state
    vars(module).update(content)
    if left_out and "__getattr__" not in content:
        module.__getattr__ = functools.partial(  # type: ignore[method-assign]
            _tell_what_is_missing, module.__name__, left_out
        )
    package, _, name = module.__name__.rpartition(".")
    if package:
        setattr(importlib.import_module(package), name, module)


def _tell_what_is_missing(module: str, left_out: dict[str, str], name: str) -> Any:
    if name in left_out:
        raise AttributeError(f"{module}.{name} did not come to the ranks: {left_out[name]}")
    raise AttributeError(f"module {module!r} has no attribute {name!r}")


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
    return file.startswith(_installation())


@functools.cache
def _installation() -> tuple[str, ...]:
    return tuple(sysconfig.get_path(kind) for kind in ("stdlib", "purelib", "platlib"))
