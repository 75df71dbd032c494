"""Modules whose files have changed since they were imported: ranks would run the new text.

The bytecode cache beside a module holds what was imported, unless another process has imported the
new text meanwhile: a rank, for one. So each module is remembered when it is first looked at, and
then its functions are compared with those of its file, too. What that first look cannot see is a
constant that was changed before it, if the cache does not exist or is of the new text.
"""

from __future__ import annotations

import hashlib
import importlib.util
import marshal
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from types import CodeType, FunctionType, ModuleType
from typing import Any

from nvalchemi.distributed.modules import is_own


@dataclass(frozen=True)
class _Text:
    """The text that a module was made from: ``stamp`` is that of its file, when last seen so."""

    spec: Any  # a reload makes another one
    stamp: tuple[int, int]
    digest: bytes


_known: dict[str, _Text] = {}


def edited_since_import(names: Iterable[str]) -> list[str]:
    """Return those of the user's modules, and of those they import, that have been edited.

    Installed modules, and what is not made from a Python file, are not looked at.
    """
    return sorted(name for name in _reached(names) if _is_edited(sys.modules[name]))


def _reached(names: Iterable[str]) -> set[str]:
    """Return the user's modules among ``names`` and those that these use, at any depth."""
    found: set[str] = set()
    waiting = {name for name in names if name}
    while waiting:
        name = waiting.pop()
        module = sys.modules.get(name)
        if name in found or not isinstance(module, ModuleType) or not is_own(module):
            continue
        found.add(name)
        parts = name.split(".")
        waiting |= {".".join(parts[:depth]) for depth in range(1, len(parts))}
        for value in list(vars(module).values()):
            home = value.__name__ if isinstance(value, ModuleType) else _home(value)
            if isinstance(home, str):
                waiting.add(home)
    return found


def _home(value: Any) -> Any:
    """Return the module of a definition, or of the class of another object."""
    kind = type(value)
    return vars(kind).get("__module__") if not _is_definition(kind) else value.__module__


def _is_definition(kind: type) -> bool:
    return issubclass(kind, (type, FunctionType))


def _is_edited(module: ModuleType) -> bool:
    file, spec = str(module.__file__), getattr(module, "__spec__", None)
    if type(getattr(spec, "loader", None)) is not SourceFileLoader:
        return False  # who rewrites what he loads (pytest its assertions) cannot be compared
    try:
        status = os.stat(file)
        stamp = (status.st_mtime_ns, status.st_size)
        known = _known.get(module.__name__)
        if known is not None and known.spec is spec and known.stamp == stamp:
            return False
        with open(file, "rb") as source:
            text = source.read()
    except OSError:
        return False  # it is gone: it goes by value
    digest = hashlib.sha256(text).digest()
    if known is not None and known.spec is spec:
        edited = digest != known.digest
    else:
        edited = _differs(module, text, stamp)
    if not edited:
        _known[module.__name__] = _Text(spec, stamp, digest)
    return edited


def _differs(module: ModuleType, text: bytes, stamp: tuple[int, int]) -> bool:
    """Return whether a module that was not seen before was made from another text."""
    try:
        now = compile(text, str(module.__file__), "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return True  # it could not have been imported so
    cached = _cached(module)
    if cached is not None:
        made_from, code = cached
        if made_from != (int(stamp[0] // 1_000_000_000) & 0xFFFFFFFF, stamp[1] & 0xFFFFFFFF):
            return code != now
    codes = {code.co_qualname: code for code in _codes(now)}
    return any(codes.get(code.co_qualname) != code for code in _codes_here(module))


def _cached(module: ModuleType) -> tuple[tuple[int, int], CodeType] | None:
    """Return what the bytecode cache was made from, (time, size), and the code in it."""
    try:
        with open(module.__cached__, "rb") as file:
            content = file.read()
        if content[:4] != importlib.util.MAGIC_NUMBER or int.from_bytes(content[4:8], "little"):
            return None  # of another Python, or checked by hash
        time, size = (int.from_bytes(content[i : i + 4], "little") for i in (8, 12))
        return (time, size), marshal.loads(content[16:])
    except (AttributeError, OSError, EOFError, ValueError, TypeError):
        return None


def _codes(code: CodeType) -> Iterator[CodeType]:
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield const
            yield from _codes(const)


def _codes_here(module: ModuleType) -> Iterator[CodeType]:
    """Yield the code of the functions and methods that a module defines."""
    for value in list(vars(module).values()):
        members = list(vars(value).values()) if isinstance(value, type) else [value]
        for member in members:
            if isinstance(member, (classmethod, staticmethod)):
                member = member.__func__
            while isinstance(member, FunctionType) and "__wrapped__" in vars(member):
                member = vars(member)["__wrapped__"]
            if isinstance(member, FunctionType) and member.__module__ == module.__name__:
                if member.__code__.co_filename == module.__file__:
                    yield member.__code__
