"""Cells by the numbers that the notebook shows, instead of the files that IPython makes up."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from nvalchemi.distributed.rank_error import RankError

_PLACE = re.compile(r'File "([^"\n]+)", line')


def with_cell_numbers(text: str) -> str:
    """Return a traceback in which cells of this kernel are called as IPython calls them."""
    if "IPython" not in sys.modules:
        return text
    from IPython import get_ipython

    compiler = getattr(get_ipython(), "compile", None)
    numbers = getattr(compiler, "_filename_map", {})  # IPython's tracebacks use it, too

    def named(match: re.Match[str]) -> str:
        number = numbers.get(match[1])
        return match[0] if number is None else f"Cell In[{number}], line"

    return _PLACE.sub(named, text)


@contextmanager
def cells_by_number() -> Iterator[None]:
    """Let a RankError that passes name cells by their numbers."""
    try:
        yield
    except RankError as error:
        error.args = (with_cell_numbers(str(error)), error.rank)
        raise
