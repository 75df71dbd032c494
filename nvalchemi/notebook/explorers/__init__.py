"""Widgets around the pictures: what each rank sees, what is in each batch, what is in the data.

An explorer is a thin shell of ipywidgets: it reads a plan or a data set, never a training, and all
that it draws can be had without it from `nvalchemi.notebook.plots`. Only what is visible is
computed: at once from a part of the draws where there are many, and exactly while the kernel is
idle, in pieces on the kernel's own event loop, without a thread.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nvalchemi.notebook.explorers.batch import BatchExplorer
    from nvalchemi.notebook.explorers.dataset import DatasetExplorer
    from nvalchemi.notebook.explorers.shard import ShardExplorer

_HOMES = {"BatchExplorer": "batch", "DatasetExplorer": "dataset", "ShardExplorer": "shard"}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
