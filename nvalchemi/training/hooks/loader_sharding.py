"""Give each rank its share of a loader: keep, install or refuse a sampler, and undo it.

Nothing of the user's is replaced in silence: a loader's default order is replaced by a distributed
one, a subset or weights are dealt out as they are, and everything else is kept if it is built for
these ranks or refused with the remedy.
"""

import inspect
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from nvalchemi.data.datapipes.dataloader import DataLoader
from nvalchemi.data.datapipes.multidataset import MultiDataset
from nvalchemi.data.datapipes.samplers import DistributedSamplerProtocol, MultiDatasetBatchSampler
from nvalchemi.data.datapipes.sharded_sampler import ShardedSampler, can_shard

# Copied to a torch DataLoader that is built anew around another sampler.
_TORCH_OPTIONS = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "generator",
    "persistent_workers",
    "multiprocessing_context",
    "pin_memory_device",
    "in_order",
)


# Samplers that know nothing of ranks, whatever they were built with.
RANKLESS = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


@dataclass(frozen=True)
class Place:
    """Which rank of how many, and what the user asked of the sampler."""

    world_size: int
    rank: int
    sampler_cls: Callable[..., Any]
    sampler_kwargs: dict[str, Any]


def shard_loader(loader: Any, place: Place) -> tuple[Any, Callable[[], None]]:
    """Loader whose batches are those of this rank, and what undoes the change.

    Raises
    ------
    ValueError
        If it is built for other ranks, or can not be sharded; with the remedy.
    """
    if not hasattr(loader, "sampler"):
        warnings.warn(
            f"{type(loader).__name__} has no sampler, so it is used as it is: make sure that it "
            "yields other batches on every rank, and equally many",
            UserWarning,
            stacklevel=2,
        )
        return loader, _nothing
    if not hasattr(loader, "dataset"):
        raise ValueError(
            f"{type(loader).__name__} has a sampler but no dataset: a distributed sampler can not "
            "be built without the data set; give the loader one, or shard it yourself"
        )
    if _is_distributed(loader, place):
        return loader, _nothing
    if isinstance(loader.dataset, IterableDataset):
        return _check_iterable(loader, place), _nothing
    _refuse_foreign(loader, place)
    if isinstance(loader, DataLoader):
        return _install(loader, place)
    return _rebuild(loader, place), _nothing


def _nothing() -> None:
    return None


def _samplers(loader: Any) -> Iterator[tuple[str, Any]]:
    batch_sampler = getattr(loader, "batch_sampler", None)
    yield "sampler", getattr(loader, "sampler", None)
    yield "batch_sampler", batch_sampler
    yield "batch_sampler.sampler", getattr(batch_sampler, "sampler", None)


def refuse_other_ranks(loader: Any, world_size: int, rank: int) -> bool:
    """Whether a sampler of the loader is built for ranks; an error if for others than these."""
    for where, sampler in _samplers(loader):
        if isinstance(sampler, DistributedSamplerProtocol):
            _check_built_for(sampler, world_size, rank, f"the {where} of the loader")
            return True
    return False


def _is_distributed(loader: Any, place: Place) -> bool:
    if refuse_other_ranks(loader, place.world_size, place.rank):
        return True
    for _, sampler in _samplers(loader):
        # a class of the user's own may know its ranks by other names; torch's plain ones know none
        known = isinstance(place.sampler_cls, type) and isinstance(sampler, place.sampler_cls)
        if known and type(sampler) not in RANKLESS:
            return True
    return False


def _check_built_for(sampler: Any, world_size: int, rank: int, what: str) -> None:
    if (sampler.num_replicas, sampler.rank) != (world_size, rank):
        raise ValueError(
            f"{what} ({type(sampler).__name__}) is built for rank {sampler.rank} of "
            f"{sampler.num_replicas}, but this is rank {rank} of {world_size}: ranks "
            f"would see the wrong samples. Build it with num_replicas={world_size} and "
            f"rank={rank}, or leave it out and pass its options as "
            "DDPHook(sampler_kwargs=...)"
        )


def _check_iterable(loader: Any, place: Place) -> Any:
    """An IterableDataset has no indices to deal out: it must have split itself."""
    dataset = loader.dataset
    if hasattr(dataset, "num_replicas") and hasattr(dataset, "rank"):
        _check_built_for(dataset, place.world_size, place.rank, "the IterableDataset of the loader")
        return loader
    raise ValueError(
        f"{type(dataset).__name__} is an IterableDataset: it has no indices that a sampler could "
        f"deal out, so all {place.world_size} ranks would see the same samples. Split it in its "
        "__iter__ (every world_size-th sample from rank on, also over get_worker_info()) and give "
        "it the attributes num_replicas and rank to say so"
    )


def _is_default_order(sampler: Any) -> bool:
    """Whether this is what shuffle=True or False gives, nothing that the user chose."""
    if type(sampler) is RandomSampler:
        return not sampler.replacement and sampler._num_samples is None
    return type(sampler) is SequentialSampler


def _refuse_foreign(loader: Any, place: Place) -> None:
    """Refuse an order of the user's that can neither be kept nor dealt out."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    if batch_sampler is not None and (
        isinstance(loader, DataLoader) or type(batch_sampler) is not BatchSampler
    ):
        raise ValueError(
            f"DDPHook cannot replace a non-distributed batch_sampler "
            f"({type(batch_sampler).__name__}): all ranks would see the same batches. Give it "
            f"num_replicas={place.world_size}, rank={place.rank} and set_epoch(epoch), pass its "
            "class as DDPHook(sampler_cls=...) with a loader that has none, or give the loader "
            "batch_size instead"
        )
    sampler = loader.sampler
    if place.sampler_cls is not DistributedSampler or _is_default_order(sampler):
        return
    if isinstance(loader.dataset, MultiDataset) or not can_shard(sampler):
        raise ValueError(
            f"DDPHook cannot shard the sampler of the loader ({type(sampler).__name__}): all "
            "ranks would see the same samples. Give it num_replicas, rank and set_epoch(epoch), "
            "pass its class as DDPHook(sampler_cls=...), or use torch's SubsetRandomSampler, "
            "WeightedRandomSampler or a list of indices on a single data set"
        )


def sampler_arguments(
    sampler_cls: Callable[..., Any], defaults: dict[str, Any], overrides: dict[str, Any]
) -> dict[str, Any]:
    """Arguments for a sampler: of the defaults those that it knows, then the user's.

    One that does not know both num_replicas and rank has names of its own and gets the user's
    arguments alone.
    """
    try:
        parameters = inspect.signature(sampler_cls).parameters
    except (TypeError, ValueError):
        return {**defaults, **overrides}
    if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        if not {"num_replicas", "rank"} <= set(parameters):
            ranked = {"num_replicas", "rank", "shuffle", "seed", "drop_last"}
            defaults = {n: v for n, v in defaults.items() if n not in ranked}
        defaults = {name: value for name, value in defaults.items() if name in parameters}
    return {**defaults, **overrides}


def _build(sampler_cls: Callable[..., Any], loader: Any, place: Place) -> Any:
    """Sampler for this rank over the data set of the loader."""
    shuffle = isinstance(loader.sampler, RandomSampler)
    defaults = {
        "num_replicas": place.world_size,
        "rank": place.rank,
        "shuffle": shuffle,
        "seed": 0,
        "drop_last": _drop_last(loader),
    }
    if makes_batches(sampler_cls):
        defaults["batch_size"] = loader.batch_size
    arguments = sampler_arguments(sampler_cls, defaults, place.sampler_kwargs)
    name = getattr(sampler_cls, "__name__", repr(sampler_cls))
    try:
        inspect.signature(sampler_cls).bind(loader.dataset, **arguments)
    except TypeError as error:
        raise ValueError(
            f"{name} can not be built from the data set and {sorted(arguments)}: {error}; "
            "name its arguments in DDPHook(sampler_kwargs=...)"
        ) from error
    except ValueError:
        pass  # a class without a signature: let it speak for itself
    if place.sampler_kwargs.get("seed") and arguments.get("shuffle") is False:
        warnings.warn(
            f"seed={place.sampler_kwargs['seed']} has no effect because shuffle is off (so is the "
            'loader\'s); pass shuffle=True to the loader or sampler_kwargs={"shuffle": True}',
            UserWarning,
            stacklevel=2,
        )
    sampler = sampler_cls(loader.dataset, **arguments)
    aware = isinstance(sampler, DistributedSamplerProtocol)
    if type(sampler) in RANKLESS or not (aware or arguments):
        raise ValueError(
            f"{name} was told nothing of the ranks, so all {place.world_size} would see the same "
            "samples: it needs num_replicas and rank, or arguments of its own in "
            "DDPHook(sampler_kwargs=...)"
        )
    if getattr(sampler, "yields_batches", False) and (loader.batch_size or 1) > 1:
        warnings.warn(
            f"batch_size={loader.batch_size} of the loader has no effect: {name} makes batches of "
            "its own size; leave batch_size out",
            UserWarning,
            stacklevel=2,
        )
    if aware:
        _check_built_for(sampler, place.world_size, place.rank, f"what {name} returned")
    return sampler


def _drop_last(loader: Any) -> bool:
    batch_sampler = getattr(loader, "batch_sampler", None)
    return bool(getattr(batch_sampler, "drop_last", getattr(loader, "drop_last", False)))


def makes_batches(sampler_cls: Callable[..., Any]) -> bool:
    """Whether what this class or factory builds yields batches: it says so, or has a batch_size."""
    while isinstance(sampler_cls, partial):
        sampler_cls = sampler_cls.func
    if getattr(sampler_cls, "yields_batches", False):
        return True
    try:
        return "batch_size" in inspect.signature(sampler_cls).parameters
    except (TypeError, ValueError):
        return False


def _own_order(loader: Any, place: Place) -> Any:
    """The user's subset or weights, dealt out; None where the order is the default one."""
    if place.sampler_cls is not DistributedSampler or _is_default_order(loader.sampler):
        return None
    known = {"seed", "drop_last"}
    unknown = sorted(set(place.sampler_kwargs) - known)
    if unknown:
        raise ValueError(
            f"sampler_kwargs {unknown} do not apply to the loader's own "
            f"{type(loader.sampler).__name__}, which is dealt out as it is; "
            f"allowed: {sorted(known)}"
        )
    return ShardedSampler(
        loader.sampler,
        num_replicas=place.world_size,
        rank=place.rank,
        seed=place.sampler_kwargs.get("seed", 0),
        drop_last=place.sampler_kwargs.get("drop_last", _drop_last(loader)),
    )


def _install(loader: DataLoader, place: Place) -> tuple[DataLoader, Callable[[], None]]:
    """Change an nvalchemi loader in place."""
    before = (loader.sampler, loader.batch_sampler)
    drop_last = place.sampler_kwargs.get("drop_last", loader.drop_last)

    def undo() -> None:
        loader.sampler, loader.batch_sampler = before

    if own := _own_order(loader, place):
        loader.sampler = None
        loader.batch_sampler = BatchSampler(own, loader.batch_size, drop_last)
        return loader, undo
    if isinstance(loader.dataset, MultiDataset) and place.sampler_cls is DistributedSampler:
        new = _build(MultiDatasetBatchSampler, loader, place)
    else:
        new = _build(place.sampler_cls, loader, place)
    if not makes_batches(place.sampler_cls) and not isinstance(new, MultiDatasetBatchSampler):
        new = BatchSampler(new, loader.batch_size, drop_last)
    loader.sampler, loader.batch_sampler = None, new
    return loader, undo


def _rebuild(loader: Any, place: Place) -> Any:
    """A torch DataLoader around another sampler; torch does not let one exchange it."""
    if loader.batch_size is None:
        raise ValueError(
            f"{type(loader).__name__} has batch_size=None (a batch_sampler of its own, or none): "
            "DDPHook can not build it anew; give it batch_size, or a batch_sampler that is built "
            "for the ranks (num_replicas, rank, set_epoch)"
        )
    options = {name: getattr(loader, name) for name in _TORCH_OPTIONS if hasattr(loader, name)}
    if loader.num_workers > 0:
        options["prefetch_factor"] = loader.prefetch_factor
    sampler = _own_order(loader, place) or _build(place.sampler_cls, loader, place)
    if makes_batches(place.sampler_cls):
        options["batch_sampler"] = sampler
    else:
        options.update(batch_size=loader.batch_size, sampler=sampler, drop_last=_drop_last(loader))
    kind: type[Any] = type(loader)
    try:
        return kind(loader.dataset, **options)
    except TypeError as error:
        raise ValueError(
            f"could not rebuild {kind.__name__} around a distributed sampler: {error}; build it "
            f"with num_replicas={place.world_size} and rank={place.rank} yourself"
        ) from error
