"""The same samples with other settings of the plan: which can be changed, and what they make."""

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import DistributedSampler

from nvalchemi.data.datapipes.dataloader import DataLoader
from nvalchemi.data.datapipes.weights import check_integer
from nvalchemi.sharding.choose import default_sampler, source_of_class
from nvalchemi.sharding.loaders import find_distributed, source_of_loader
from nvalchemi.training.hooks.loader_sharding import _is_default_order

if TYPE_CHECKING:
    from nvalchemi.sharding.plan import ShardPlan

NAMES = ("world_size", "batch_size", "seed", "shuffle", "drop_last", "epoch_policy")
BUILT = (
    "the sampler was built before the plan: pass its class to ShardPlan, or its options to "
    "DDPHook, to change settings"
)


@dataclass(frozen=True)
class Made:
    """What the sampler of a plan is built from.

    Attributes
    ----------
    sampler_cls : callable or None
        Class or factory; None for the default.
    loader : DataLoader or None
        What DDPHook would be given.
    given : dict
        batch_size, shuffle, seed and drop_last for a plan without loader.
    """

    sampler_cls: Callable[..., Any] | None
    loader: Any = None
    given: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Setting:
    """A setting of a plan.

    Attributes
    ----------
    value
    fixed : str
        Why it can not be changed; empty if it can.
    """

    value: Any
    fixed: str = ""


def settings_of(plan: "ShardPlan") -> dict[str, Setting]:
    """World size, batch size, seed, shuffle, drop_last and epoch_policy of a plan, by name."""
    values = current_values(plan)
    return {name: Setting(values[name], why_fixed(plan, name)) for name in NAMES}


def current_values(plan: "ShardPlan") -> dict[str, Any]:
    made, sampler = plan._made, getattr(plan.source, "sampler", None)
    given = {} if made is None else made.given
    drop_last = given.get("drop_last", getattr(getattr(made, "loader", None), "drop_last", False))
    return {
        "world_size": plan.world_size,
        "batch_size": plan.batch_size,
        "seed": int(getattr(sampler, "seed", None) or plan._seed),
        "shuffle": plan.source.shuffled is not False,
        "drop_last": bool(plan.sampler_kwargs.get("drop_last", drop_last)),
        "epoch_policy": getattr(sampler, "epoch_policy", None),
    }


def why_fixed(plan: "ShardPlan", name: str) -> str:
    """Why a setting can not be changed; empty if it can."""
    made = plan._made
    if made is None:
        return BUILT
    loader = made.loader
    if loader is not None:
        if find_distributed(loader) is not None:
            return BUILT
        if name == "batch_size" and loader.batch_size is None:
            return "the batches are made by the loader's own batch_sampler"
        if name not in ("world_size", "batch_size") and plan.world_size == 1:
            return "on one rank DDPHook leaves the loader as it is"
    if name == "world_size":
        return ""
    built_by = made.sampler_cls or default_sampler(plan.samples)
    if name == "batch_size":
        chooses = getattr(built_by, "yields_batches", False)
        return f"{plan.source.name} chooses the sizes of its batches" if chooses else ""
    if loader is not None and has_own_order(made) and name not in ("seed", "drop_last"):
        return f"the loader's own {type(loader.sampler).__name__} is dealt out as it is"
    if not knows(built_by, name) and not (name == "drop_last" and loader is None):
        return f"{plan.source.name} has no argument {name}"
    return without_effect(plan, name)


def without_effect(plan: "ShardPlan", name: str) -> str:
    """Why a setting that the sampler knows changes nothing now."""
    if name == "seed" and plan.source.shuffled is False:
        return "shuffle is off, so no order is drawn"
    if name == "epoch_policy":
        sampler = getattr(plan.source, "sampler", None)
        if plan.sampler_kwargs.get("num_batches") is not None:
            return "num_batches says how long an epoch is"
        every = getattr(sampler, "draws_per_dataset", None) == plan.samples.lengths
        if every and not getattr(sampler, "replacement", None):
            return "every sample comes once an epoch: only weights or replacement need a policy"
    return ""


def has_own_order(made: Made) -> bool:
    """Whether DDPHook deals out the loader's sampler in the place of making one."""
    return made.sampler_cls is DistributedSampler and not _is_default_order(made.loader.sampler)


def knows(built_by: Callable[..., Any], name: str) -> bool:
    try:
        parameters = inspect.signature(built_by).parameters
    except (TypeError, ValueError):
        return True
    passed_on = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    return name in parameters or passed_on


def replan(plan: "ShardPlan", **changes: Any) -> "ShardPlan":
    """The plan with other settings; samples, sizes and epochs are shared with it.

    Parameters
    ----------
    plan : ShardPlan
    **changes
        Some of world_size, batch_size, seed, shuffle, drop_last, epoch_policy.

    Raises
    ------
    ValueError, TypeError
        For a setting that can not be changed, with the reason, and as the sampler itself.
    """
    unknown = sorted(set(changes) - set(NAMES))
    if unknown:
        raise ValueError(f"settings of a plan are {', '.join(NAMES)}; got {', '.join(unknown)}")
    made = plan._made
    for name in changes:
        reason = why_fixed(plan, name)
        if reason or made is None:
            raise ValueError(f"{name} can not be changed: {reason}")
    assert made is not None
    ranks = check_integer("world_size", changes.pop("world_size", plan.world_size), 1)
    if "batch_size" in changes:
        check_integer("batch_size", changes["batch_size"], 1)
    if "seed" in changes:
        check_integer("seed", changes["seed"])
    kwargs = dict(plan.sampler_kwargs)
    if made.loader is not None:
        # the user's own batch_size of the sampler goes before the loader's
        size = None if "batch_size" in kwargs else changes.pop("batch_size", None)
        loader = made.loader if size is None else with_batch_size(made.loader, size)
        made, kwargs = replace(made, loader=loader), {**kwargs, **changes}
        source = source_of_loader(loader, plan.samples, ranks, made.sampler_cls, kwargs)
    else:
        own = {n: v for n, v in changes.items() if n in made.given and n not in kwargs}
        kwargs |= {n: v for n, v in changes.items() if n not in own}
        made = replace(made, given={**made.given, **own})
        built_by = made.sampler_cls or default_sampler(plan.samples)
        source = source_of_class(built_by, plan.samples, ranks, made.given, kwargs)
    new = type(plan).__new__(type(plan))
    new._fill(plan.samples, source, plan.epochs, kwargs, made)
    new._seed = int(kwargs.get("seed", made.given.get("seed", 0)) or 0)
    return new


def with_batch_size(loader: Any, batch_size: int) -> Any:
    """A loader that differs in its batch size; of torch's only what DDPHook looks at is kept."""
    if isinstance(loader, DataLoader):
        own = copy.copy(loader)
        own.batch_size = batch_size
        return own
    return TorchLoader(
        loader.dataset,
        batch_size=batch_size,
        sampler=loader.sampler,
        drop_last=bool(loader.drop_last),
    )
