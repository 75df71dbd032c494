"""Training from a notebook cell."""

from typing import Any

# not lazily: loading the submodule of the same name later would put it in the function's place
from nvalchemi.distributed.workers import Stopped
from nvalchemi.notebook.handle import LaunchHandle
from nvalchemi.notebook.launch import RankError, RankResults, launch
from nvalchemi.notebook.pool import WorkerPool

__all__ = ["LaunchHandle", "RankError", "RankResults", "Stopped", "WorkerPool", "launch"]


def load_ipython_extension(shell: Any) -> None:
    """``%load_ext nvalchemi.notebook``: the magic ``%%ranks`` and those around it."""
    from nvalchemi.notebook.magics import RankMagics

    shell.register_magics(RankMagics)
