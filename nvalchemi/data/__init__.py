"""Structures, batches of them, and the pipes that bring them to a training."""

from typing import TYPE_CHECKING, Any

from nvalchemi.data import datapipes
from nvalchemi.data.atomic_data import AtomicData
from nvalchemi.data.batch import Batch
from nvalchemi.data.transforms import Compose

if TYPE_CHECKING:
    from nvalchemi.data.neighbors import add_neighbor_list

__all__ = ["AtomicData", "Batch", "Compose", "add_neighbor_list", *datapipes.__all__]


def __getattr__(name: str) -> Any:
    # scripts of the peer import the data pipes from here too
    if name in datapipes.__all__:
        return getattr(datapipes, name)
    if name == "add_neighbor_list":  # vesin is loaded only where lists are built
        from nvalchemi.data.neighbors import add_neighbor_list

        return add_neighbor_list
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
