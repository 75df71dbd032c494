"""From a loader, or a strategy with DDPHook, to the source of the indices."""

import copy
import math
import warnings
from typing import Any

from torch.utils.data import BatchSampler

from nvalchemi.data.datapipes.dataloader import DataLoader
from nvalchemi.data.datapipes.samplers import DistributedSamplerProtocol
from nvalchemi.sharding.choose import source_of, source_of_instances
from nvalchemi.sharding.samples import SampleSet
from nvalchemi.sharding.sources import Source
from nvalchemi.training import DDPHook
from nvalchemi.training.hooks.loader_sharding import Place, shard_loader


def source_of_loader(
    loader: Any, samples: SampleSet, world_size: int, sampler_cls: Any, kwargs: dict[str, Any]
) -> Source:
    """Source of the batches that DDPHook would give to each rank."""

    def prepare(rank: int) -> Any:
        place = Place(world_size, rank, sampler_cls, kwargs)
        with warnings.catch_warnings():
            if rank:  # once is enough
                warnings.simplefilter("ignore", UserWarning)
            # ours are changed in place, so a copy is
            own = copy.copy(loader) if isinstance(loader, DataLoader) else loader
            return batches_of_loader(shard_loader(own, place)[0])

    if world_size == 1:  # DDPHook does nothing
        return source_of_instances(batches_of_loader(loader), samples, 1, None, False)
    built = find_distributed(loader)
    if built is not None:
        return source_of_instances(prepare(int(built.rank)), samples, world_size, None, False)
    return source_of(prepare, samples, world_size, None, False, fresh=True)


def batches_of_loader(loader: Any) -> Any:
    """What yields the batches of a loader as lists of indices."""
    if loader.batch_sampler is not None:
        return loader.batch_sampler
    return BatchSampler(loader.sampler, loader.batch_size or 1, bool(loader.drop_last))


def find_distributed(loader: Any) -> Any:
    """A sampler of the loader that is built for ranks already."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    for sampler in (loader.sampler, batch_sampler, getattr(batch_sampler, "sampler", None)):
        if isinstance(sampler, DistributedSamplerProtocol):
            return sampler
    return None


def find_hook(strategy: Any) -> DDPHook:
    for hook in strategy.hooks:
        if isinstance(hook, DDPHook):
            return hook
    raise ValueError(
        "the strategy must have a DDPHook to be planned for ranks, and it has none: without it "
        "every rank trains on all samples"
    )


def epochs_of(strategy: Any, steps: int) -> int:
    """Epochs that a strategy passes over, the last one perhaps in part."""
    if strategy.num_epochs is not None:
        return max(1, math.ceil(strategy.num_epochs * strategy.epoch_step_modifier))
    return max(1, math.ceil(strategy.num_steps / max(1, steps)))
