"""From what a user says of a sampler to the source of its indices, as DDPHook would build it."""

import inspect
from collections.abc import Callable
from typing import Any

from torch.utils.data import BatchSampler, DistributedSampler

from nvalchemi.data.datapipes.samplers import MultiDatasetBatchSampler
from nvalchemi.sharding.iterated import IteratedSource
from nvalchemi.sharding.samples import SampleSet
from nvalchemi.sharding.sources import Source, TorchSource, WindowSource
from nvalchemi.sharding.varying import VaryingSource, varies
from nvalchemi.training.hooks.loader_sharding import sampler_arguments


def source_of_class(
    sampler_cls: Callable[..., Any],
    samples: SampleSet,
    world_size: int,
    defaults: dict[str, Any],
    overrides: dict[str, Any],
) -> Source:
    """Source of a class or factory, called with what DDPHook gives it.

    Parameters
    ----------
    defaults : dict
        shuffle, seed, drop_last, and batch_size or None.
    overrides : dict
        The user's sampler_kwargs.
    """
    by_itself = bool(getattr(sampler_cls, "yields_batches", False))  # of sizes of its own
    makes_batches = by_itself or knows_batch_size(sampler_cls)
    batch_size = defaults["batch_size"]
    if by_itself and (batch_size or 1) > 1:
        raise ValueError(
            f"{getattr(sampler_cls, '__name__', sampler_cls)} chooses the sizes of batches itself: "
            f"leave batch_size out, got {batch_size}"
        )
    if batch_size is None and not by_itself and not (makes_batches and "batch_size" in overrides):
        raise ValueError("a plan needs batch_size, the samples in a batch of one rank; got None")
    given = {name: value for name, value in defaults.items() if name != "batch_size"}
    if makes_batches and not by_itself:
        given["batch_size"] = batch_size

    def make(rank: int) -> Any:
        known = {"num_replicas": world_size, "rank": rank, **given}
        arguments = sampler_arguments(sampler_cls, known, overrides)
        check_call(sampler_cls, samples.dataset, arguments)
        return sampler_cls(samples.dataset, **arguments)

    drop_last = bool(overrides.get("drop_last", defaults["drop_last"]))
    size = None if makes_batches else batch_size
    return source_of(make, samples, world_size, size, drop_last, fresh=True)


def source_of_instances(
    sampler: Any, samples: SampleSet, world_size: int, batch_size: int | None, drop_last: bool
) -> Source:
    """Source of a sampler that is built already, or of one for each rank."""
    if isinstance(sampler, list | tuple):
        if len(sampler) != world_size:
            raise ValueError(
                f"samplers must be one for each rank: got {len(sampler)} for {world_size} ranks"
            )
        return IteratedSource(
            lambda rank: sampler[rank],
            samples,
            world_size,
            batch_size,
            drop_last,
            fresh=False,
            first=sampler[0],
        )
    replicas = getattr(inner_of(sampler), "num_replicas", None)
    if replicas != world_size and not (replicas is None and world_size == 1):
        raise ValueError(
            f"{type(inner_of(sampler)).__name__} must be built for the {world_size} ranks of the "
            f"plan, got num_replicas={replicas}; build it for them, pass its class, or pass one "
            "sampler per rank as a list to plan them as they are"
        )

    def same(rank: int) -> Any:
        return sampler

    return source_of(same, samples, world_size, batch_size, drop_last, fresh=False)


def source_of(
    make: Callable[[int], Any],
    samples: SampleSet,
    world_size: int,
    batch_size: int | None,
    drop_last: bool,
    *,
    fresh: bool,
) -> Source:
    """The quickest source that is exact for what `make` builds."""
    first = make(0)
    sampler = first
    if type(first) is BatchSampler:
        sampler, batch_size, drop_last = first.sampler, first.batch_size, first.drop_last
    if getattr(sampler, "num_replicas", None) == world_size:
        check_length(sampler, samples)
        if callable(getattr(sampler, "window", None)):
            if varies(sampler):
                return VaryingSource(sampler, samples)
            own = None if hasattr(sampler, "batch_size") else batch_size or 1
            return WindowSource(sampler, samples, own, drop_last)
        if type(sampler) is DistributedSampler:
            return TorchSource(sampler, samples, batch_size or 1, drop_last)
    if not fresh and world_size > 1:
        raise ValueError(
            f"one {type(first).__name__} knows the samples of its own rank only: pass its class, a "
            f"factory, or a list of {world_size}, one for each rank"
        )
    return IteratedSource(
        make, samples, world_size, batch_size, drop_last, fresh=fresh, first=first
    )


def check_length(sampler: Any, samples: SampleSet) -> None:
    dataset: Any = getattr(sampler, "dataset", None)
    lengths = getattr(sampler, "lengths", None)
    length = sum(lengths) if lengths is not None else getattr(sampler, "length", None)
    if length is None and hasattr(dataset, "__len__"):
        length = len(dataset)
    if length is not None and length != len(samples):
        raise ValueError(
            f"the sampler must be built for the samples of the plan: {type(sampler).__name__} is "
            f"for {length}, the plan for {len(samples)}"
        )


def inner_of(sampler: Any) -> Any:
    return sampler.sampler if type(sampler) is BatchSampler else sampler


def default_sampler(samples: SampleSet) -> Callable[..., Any]:
    """What DDPHook installs where the user names nothing."""
    return MultiDatasetBatchSampler if samples.several else DistributedSampler


def knows_batch_size(sampler_cls: Callable[..., Any]) -> bool:
    try:
        return "batch_size" in inspect.signature(sampler_cls).parameters
    except (TypeError, ValueError):
        return False


def check_call(sampler_cls: Callable[..., Any], samples: Any, arguments: dict[str, Any]) -> None:
    try:
        inspect.signature(sampler_cls).bind(samples, **arguments)
    except TypeError as error:
        name = getattr(sampler_cls, "__name__", repr(sampler_cls))
        raise ValueError(
            f"{name} can not be built from the data set and {sorted(arguments)}: {error}; name its "
            "arguments in sampler_kwargs"
        ) from error
    except ValueError:
        pass  # a class without a signature: let it speak for itself
