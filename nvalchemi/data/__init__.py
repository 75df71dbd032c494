"""Structures, batches of them, and the pipes that bring them to a training."""

from nvalchemi.data.atomic_data import AtomicData
from nvalchemi.data.batch import Batch

__all__ = ["AtomicData", "Batch"]
