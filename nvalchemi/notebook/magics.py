"""The magics of ``%load_ext nvalchemi.notebook``: cells that run on ranks.

They use the `WorkerPool` that was made last, and make one where there is none.
"""

from __future__ import annotations

import argparse
import re
import shlex
from typing import Any, NoReturn

from IPython.core.error import UsageError
from IPython.core.magic import Magics, cell_magic, line_magic, magics_class

from nvalchemi.notebook.pool import WorkerPool, newest_pool
from nvalchemi.notebook.pool_status import PoolStatus
from nvalchemi.notebook.results import RankResults


@magics_class
class RankMagics(Magics):
    """``%%ranks`` and the line magics around it; each runs to its end before the next cell."""

    _pool: WorkerPool | None = None

    @cell_magic
    def ranks(self, line: str, cell: str) -> None:
        """Run this cell on every rank, or on some: ``%%ranks 0``, ``%%ranks 0,2-3``.

        The value of the last expression is shown for each rank. A rank that fails fails the cell.
        """
        __tracebackhide__ = True  # of an error the user's frames are those on the rank
        pool = self._get_pool()
        number = len(self._shell.history_manager.input_hist_parsed) - 1
        # a line for that of the magic, so that tracebacks have the cell's own numbers
        pool.execute("\n" + cell, parse_ranks(line, pool.nprocs), f"<%%ranks In[{number}]>")

    @line_magic
    def ranks_start(self, line: str) -> WorkerPool:
        """Start the ranks for ``%%ranks``: ``%ranks_start -n 4 --devices 0,1,2,3``.

        Returns the `WorkerPool`: ``pool = %ranks_start -n 2`` gives it a name. Options:
        ``-n NPROCS``, ``--devices cpu|cuda|0,1``, ``--backend gloo|nccl``, ``--threads N``.
        """
        former, self._pool = self._pool, WorkerPool(**_parse_start(line))
        if former is not None and not former.closed:
            former.close()
            print("The former ranks were ended: their namespaces are lost.")
        return self._pool

    @line_magic
    def ranks_pull(self, line: str) -> RankResults | dict[int, Any]:
        """Return what a name is on each rank: ``losses = %ranks_pull loss``. Assigns nothing.

        After it may stand ranks as after ``%%ranks``: ``%ranks_pull loss 0,2-3`` gives a
        dictionary by rank.
        """
        __tracebackhide__ = True
        if not line.strip():
            raise UsageError("%ranks_pull needs a name: losses = %ranks_pull loss")
        pool = self._get_pool()
        name, ranks = split_ranks(line.strip())
        chosen = parse_ranks(ranks, pool.nprocs, "%ranks_pull")
        return pool.pull(name) if chosen is None else pool.pull(name, chosen)

    @line_magic
    def ranks_push(self, line: str) -> None:
        """Send variables of this kernel to every rank, under their names: ``%ranks_push x y``."""
        __tracebackhide__ = True
        names = line.replace(",", " ").split()
        if not names:
            raise UsageError("%ranks_push needs names of variables: %ranks_push rate batch")
        missing = [name for name in names if name not in self._shell.user_ns]
        if missing:
            raise NameError(f"this kernel has no variable {', '.join(missing)}")
        self._get_pool().push(**{name: self._shell.user_ns[name] for name in names})

    @line_magic
    def ranks_status(self, line: str) -> PoolStatus:
        """Show of each rank whether it lives, what it does, its process, device and memory."""
        pool = newest_pool()
        return PoolStatus(()) if pool is None else pool.status()

    @line_magic
    def ranks_restart(self, line: str) -> None:
        """Start all ranks anew, with empty namespaces."""
        self._get_pool().restart()
        print("The ranks were restarted: their namespaces are empty.")

    @property
    def _shell(self) -> Any:
        return self.shell  # which is only None before the magics are registered

    def _get_pool(self) -> WorkerPool:
        pool = newest_pool()
        if pool is None:
            pool = self._pool = WorkerPool()
        return pool


def split_ranks(text: str) -> tuple[str, str]:
    """Return an expression and the ranks behind it; "x - 1" is an expression, "x 1" is not."""
    found = re.fullmatch(r"(.*\S)\s+(\d[\d,\s-]*)", text)
    if found is None:
        return text, ""
    try:
        compile(text, "<pulled>", "eval", dont_inherit=True)
    except (SyntaxError, ValueError):
        return found[1], found[2]
    return text, ""


def parse_ranks(text: str, nprocs: int, magic: str = "%%ranks") -> list[int] | None:
    """Return the ranks that a text like "0,2-3" names; None, for all, if it is empty."""
    chosen: list[int] = []
    for part in text.replace(",", " ").split():
        found = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if found is None:
            raise UsageError(f"{magic} takes ranks like 0 or 0,2-3: {text.strip()!r}")
        first, last = int(found[1]), int(found[2] or found[1])
        if not first <= last < nprocs:
            raise UsageError(f"{magic} {text.strip()}: there are ranks 0 to {nprocs - 1}")
        chosen += range(first, last + 1)
    return chosen or None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"%ranks_start: {message}")


def _parse_start(line: str) -> dict[str, Any]:
    parser = _Parser(prog="%ranks_start", add_help=False)
    parser.add_argument("-n", "--nprocs", type=int)
    parser.add_argument("--devices", type=_parse_devices)
    parser.add_argument("--backend")
    parser.add_argument("--threads", type=int)
    try:
        words = shlex.split(line)
    except ValueError as error:  # a quotation mark without its other
        raise UsageError(f"%ranks_start: {error}: {line.strip()}") from None
    return vars(parser.parse_args(words))


def _parse_devices(text: str) -> Any:
    parts = text.split(",")
    if len(parts) == 1 and not text.isdigit():
        return text
    return [int(part) if part.isdigit() else part for part in parts]
