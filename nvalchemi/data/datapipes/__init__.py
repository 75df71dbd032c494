"""Stores, data sets, samplers and the loader."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nvalchemi.data.datapipes.balanced import BalancedBatchSampler
    from nvalchemi.data.datapipes.budget import BudgetBatchSampler
    from nvalchemi.data.datapipes.dataloader import DataLoader
    from nvalchemi.data.datapipes.dataset import BatchDatasetProtocol, Dataset
    from nvalchemi.data.datapipes.exact import ExactEvalSampler
    from nvalchemi.data.datapipes.in_memory_dataset import InMemoryDataset
    from nvalchemi.data.datapipes.multidataset import MultiDataset
    from nvalchemi.data.datapipes.reader import Reader, ReaderProtocol
    from nvalchemi.data.datapipes.samplers import (
        DistributedSamplerProtocol,
        EpochSampler,
        MultiDatasetBatchSampler,
        MultiDatasetSampler,
    )
    from nvalchemi.data.datapipes.zarr_store import (
        AtomicDataZarrReader,
        AtomicDataZarrWriter,
        ZarrArrayConfig,
        ZarrWriteConfig,
    )

# zarr is slow to import, so each name is fetched from its module when it is first used.
_HOMES = {
    "AtomicDataZarrReader": "zarr_store",
    "AtomicDataZarrWriter": "zarr_store",
    "BalancedBatchSampler": "balanced",
    "BatchDatasetProtocol": "dataset",
    "BudgetBatchSampler": "budget",
    "DataLoader": "dataloader",
    "Dataset": "dataset",
    "DistributedSamplerProtocol": "samplers",
    "EpochSampler": "samplers",
    "ExactEvalSampler": "exact",
    "InMemoryDataset": "in_memory_dataset",
    "MultiDataset": "multidataset",
    "MultiDatasetBatchSampler": "samplers",
    "MultiDatasetSampler": "samplers",
    "Reader": "reader",
    "ReaderProtocol": "reader",
    "ZarrArrayConfig": "zarr_store",
    "ZarrWriteConfig": "zarr_store",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
