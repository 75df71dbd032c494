"""Training from a notebook cell, and seeing what every rank will be given."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

# not lazily: loading the submodule of the same name later would put it in the function's place
from nvalchemi.distributed.workers import Stopped
from nvalchemi.notebook.handle import LaunchHandle
from nvalchemi.notebook.launch import RankError, RankResults, launch
from nvalchemi.notebook.pool import WorkerPool

if TYPE_CHECKING:
    from nvalchemi.notebook.explorers.batch import BatchExplorer
    from nvalchemi.notebook.explorers.dataset import DatasetExplorer
    from nvalchemi.notebook.explorers.shard import ShardExplorer
    from nvalchemi.notebook.monitor import TrainingMonitor

# widgets: matplotlib and ipywidgets are imported with the first of them
_WIDGETS = {
    "BatchExplorer": "explorers.batch",
    "DatasetExplorer": "explorers.dataset",
    "ShardExplorer": "explorers.shard",
    "TrainingMonitor": "monitor",
}

__all__ = [
    "BatchExplorer",
    "DatasetExplorer",
    "LaunchHandle",
    "RankError",
    "RankResults",
    "ShardExplorer",
    "Stopped",
    "TrainingMonitor",
    "WorkerPool",
    "launch",
]


def __getattr__(name: str) -> Any:
    if name not in _WIDGETS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_WIDGETS[name]}"), name)


def load_ipython_extension(shell: Any) -> None:
    """``%load_ext nvalchemi.notebook``: the magic ``%%ranks`` and those around it."""
    from nvalchemi.notebook.magics import RankMagics

    shell.register_magics(RankMagics)
