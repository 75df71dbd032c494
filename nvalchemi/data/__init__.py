"""Structures, batches of them, and the pipes that bring them to a training."""

from typing import Any

from nvalchemi.data import datapipes
from nvalchemi.data.atomic_data import AtomicData
from nvalchemi.data.batch import Batch
from nvalchemi.data.transforms import Compose

__all__ = ["AtomicData", "Batch", "Compose", *datapipes.__all__]


def __getattr__(name: str) -> Any:
    # scripts of the peer import the data pipes from here too
    if name in datapipes.__all__:
        return getattr(datapipes, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
