"""A function and its arguments, packed for the ranks, with what their tracebacks need."""

from __future__ import annotations

import linecache
import os
import warnings
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

from nvalchemi.distributed import origins, payload
from nvalchemi.distributed.modules import named_modules


def pack(
    fn: Callable[..., Any],
    args: tuple,
    kwargs: dict[str, Any],
    marker: origins.Marker,
    by_value: Iterable[ModuleType | str] = (),
    *,
    pool: bool = False,
) -> int:
    """Write a call into a new payload and return its descriptor, which the caller closes.

    ``pool`` says that it is for ranks that stay, which may have imported modules before.

    Raises
    ------
    TypeError, ValueError
        If something in it cannot be sent; the text has its name and the path to it.

    Warns
    -----
    UserWarning
        If it is large, or if the ranks will import a module that was edited here meanwhile.
    """
    modules = named_modules(by_value)
    task = payload.new_file()
    try:
        sent = payload.dump_task(fn, args, kwargs, _cell_sources(), task, marker, modules)
    except BaseException:
        os.close(task)
        raise
    for sentence in (sent.describe_large(pool), sent.describe_edited(pool)):
        if sentence is not None:
            warnings.warn(sentence, stacklevel=4)  # the line that launches
    return task


def _cell_sources() -> dict[str, tuple[int, None, list[str], str]]:
    """Return linecache's entries for code that is in no file, so that tracebacks can show it."""
    sources = {}
    for name, entry in list(linecache.cache.items()):
        if len(entry) == 4 and not os.path.exists(name):
            sources[name] = (entry[0], None, entry[2], name)  # no time: never checked on disk
    return sources
