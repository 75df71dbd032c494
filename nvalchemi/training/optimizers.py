"""Optimizers and learning-rate schedulers: described by a config, built for models, stepped."""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, cast

from pydantic import BeforeValidator, ConfigDict, Field, model_validator
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from nvalchemi.training.strict import StrictModel

SchedulerMetricAdapter = Callable[[Mapping[str, Any]], float]


class OptSchedPair(tuple[Optimizer, LRScheduler | None]):
    """(optimizer, scheduler or None), and where the scheduler's metric comes from.

    The metric is a key of the validation summary, or a function of that summary. It is kept here
    and not on the scheduler, whose whole `__dict__` goes into checkpoints.
    """

    metric: str | SchedulerMetricAdapter

    def __new__(
        cls,
        optimizer: Optimizer,
        scheduler: LRScheduler | None = None,
        metric: str | SchedulerMetricAdapter = "total_loss",
    ) -> OptSchedPair:
        pair = super().__new__(cls, (optimizer, scheduler))
        pair.metric = metric
        return pair

    def __getnewargs__(self) -> tuple[Any, ...]:
        return (*self, self.metric)


def _import_class(value: object) -> object:
    """The class behind a dotted name; anything but a string passes through."""
    if not isinstance(value, str):
        return value
    module, _, name = value.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{value!r} is not the dotted name of a class: {error}; "
            "write it in full, for example 'torch.optim.AdamW'"
        ) from error


class OptimizerConfig(StrictModel):
    """An optimizer and, if wanted, its learning-rate scheduler, checked when it is written.

    Attributes
    ----------
    optimizer_cls : type or str
        A `torch.optim.Optimizer` subclass, or its dotted name.
    optimizer_kwargs : dict
        Constructor arguments beside the parameters.
    scheduler_cls : type or str, optional
        An `LRScheduler` subclass, or its dotted name. It steps once per executed optimizer step;
        a `ReduceLROnPlateau` steps after each validation.
    scheduler_kwargs : dict
        Constructor arguments beside the optimizer.
    scheduler_metric_adapter : str or callable, optional
        For `ReduceLROnPlateau`: the key of the validation summary to follow, or a function
        `summary -> float`. By default "total_loss".

    Raises
    ------
    pydantic.ValidationError
        For a class that is no optimizer or scheduler, arguments that its constructor lacks or
        still needs, and scheduler settings without a scheduler that uses them.
    """

    model_config = ConfigDict(validate_assignment=True)

    optimizer_cls: Annotated[type[Optimizer], BeforeValidator(_import_class)]
    optimizer_kwargs: dict[str, Any] = Field(default_factory=dict)
    scheduler_cls: Annotated[type[LRScheduler] | None, BeforeValidator(_import_class)] = None
    scheduler_kwargs: dict[str, Any] = Field(default_factory=dict)
    scheduler_metric_adapter: str | SchedulerMetricAdapter | None = None

    @model_validator(mode="after")
    def _check(self) -> OptimizerConfig:
        _check_kwargs("optimizer", self.optimizer_cls, self.optimizer_kwargs)
        closure = inspect.signature(self.optimizer_cls.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise ValueError(
                f"{self.optimizer_cls.__name__} needs a closure at each step, which a training "
                "step does not have; choose an optimizer whose step() takes no argument"
            )
        if self.scheduler_cls is None:
            if self.scheduler_kwargs:
                raise ValueError(
                    f"scheduler_kwargs need a scheduler_cls: {sorted(self.scheduler_kwargs)}"
                )
        else:
            _check_kwargs("scheduler", self.scheduler_cls, self.scheduler_kwargs)
        if self.scheduler_metric_adapter is not None and not self.metric_driven:
            name = self.scheduler_cls.__name__ if self.scheduler_cls else None
            raise ValueError(
                "scheduler_metric_adapter is used by ReduceLROnPlateau only: scheduler_cls is "
                f"{name}"
            )
        return self

    @property
    def metric_driven(self) -> bool:
        """Whether the scheduler follows a validation metric."""
        return self.scheduler_cls is not None and issubclass(self.scheduler_cls, ReduceLROnPlateau)

    def build(self, params: Iterable[Any]) -> OptSchedPair:
        """(optimizer, scheduler or None) over these parameters or parameter groups."""
        optimizer = self.optimizer_cls(params, **self.optimizer_kwargs)
        if self.scheduler_cls is None:
            return OptSchedPair(optimizer)
        scheduler = self.scheduler_cls(optimizer, **self.scheduler_kwargs)
        return OptSchedPair(optimizer, scheduler, self.scheduler_metric_adapter or "total_loss")

    def to_spec(self) -> dict[str, Any]:
        """JSON-ready fields: a tuple is {"tuple": [...]}, a function {"callable": dotted name}.

        Raises
        ------
        ValueError
            If an argument cannot be written as JSON, or the adapter cannot be imported by name.
        """
        adapter = self.scheduler_metric_adapter
        if adapter is not None and not isinstance(adapter, str):
            name = f"{adapter.__module__}.{getattr(adapter, '__qualname__', '?')}"
            try:
                same = _import_class(name) is adapter
            except ValueError:
                same = False
            if not same or adapter.__module__ == "__main__":
                raise ValueError(
                    f"scheduler_metric_adapter {name!r} cannot be imported by name, so it cannot "
                    "be written as a spec; define it at the top level of a module"
                )
        spec = {
            "optimizer_cls": _dotted(self.optimizer_cls),
            "optimizer_kwargs": _tuples_marked(self.optimizer_kwargs),
            "scheduler_cls": _dotted(self.scheduler_cls) if self.scheduler_cls else None,
            "scheduler_kwargs": _tuples_marked(self.scheduler_kwargs),
            "scheduler_metric_adapter": {"callable": name} if callable(adapter) else adapter,
        }
        try:
            return cast(dict[str, Any], json.loads(json.dumps(spec)))
        except TypeError as error:
            raise ValueError(
                f"the optimizer config cannot be written as a spec: {error}; its arguments must "
                "be numbers, strings, lists and dicts of them"
            ) from error

    @classmethod
    def from_spec(cls, spec: Mapping[str, Any]) -> OptimizerConfig:
        """The config that `to_spec` described, checked again."""
        fields = dict(spec)
        for name in {"optimizer_kwargs", "scheduler_kwargs"} & fields.keys():
            fields[name] = _tuples_restored(fields[name])
        adapter = fields.get("scheduler_metric_adapter")
        if isinstance(adapter, Mapping):
            fields["scheduler_metric_adapter"] = _import_class(adapter["callable"])
        return cls(**fields)


def _tuples_marked(value: Any) -> Any:
    """The same with each tuple as {"tuple": [...]}: JSON has lists only."""
    if isinstance(value, tuple):
        return {"tuple": [_tuples_marked(entry) for entry in value]}
    if isinstance(value, list):
        return [_tuples_marked(entry) for entry in value]
    if isinstance(value, Mapping):
        return {name: _tuples_marked(entry) for name, entry in value.items()}
    return value


def _tuples_restored(value: Any) -> Any:
    if isinstance(value, list):
        return [_tuples_restored(entry) for entry in value]
    if not isinstance(value, Mapping):
        return value
    if set(value) == {"tuple"} and isinstance(value["tuple"], list):
        return tuple(_tuples_restored(entry) for entry in value["tuple"])
    return {name: _tuples_restored(entry) for name, entry in value.items()}


def _dotted(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _check_kwargs(kind: str, cls: type, kwargs: Mapping[str, Any]) -> None:
    """ValueError for arguments that the constructor does not know, or needs and does not get."""
    # Behind self and the parameters (of an optimizer) or the optimizer (of a scheduler).
    parameters = list(inspect.signature(cls.__init__).parameters.values())[2:]  # type: ignore[misc]
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    named = [
        parameter for parameter in parameters if parameter.kind is not parameter.VAR_POSITIONAL
    ]
    allowed = [parameter.name for parameter in named]
    unknown = sorted(set(kwargs) - set(allowed))
    if unknown:
        raise ValueError(
            f"Invalid {kind} kwargs for {cls.__name__}: {unknown}; allowed are {allowed}"
        )
    missing = [
        parameter.name
        for parameter in named
        if parameter.default is parameter.empty and parameter.name not in kwargs
    ]
    if missing:
        raise ValueError(f"Missing {kind} kwargs for {cls.__name__}: {missing}")


def iter_qualified_named_parameters(
    models: Mapping[str, nn.Module] | nn.ModuleDict,
) -> Iterator[tuple[str, nn.Parameter]]:
    """("main.layer.weight", parameter) for each model; a DDP wrapper does not show in it."""
    for name, model in models.items():
        inner = model.module if isinstance(model, DistributedDataParallel) else model
        for parameter_name, parameter in inner.named_parameters():
            yield f"{name}.{parameter_name}", parameter


def setup_optimizers(
    models: Mapping[str, nn.Module] | nn.ModuleDict,
    configs: Mapping[str, OptimizerConfig | Sequence[OptimizerConfig]],
    *,
    allowed_parameter_names: Iterable[str] | None = None,
) -> dict[str, list[OptSchedPair]]:
    """Optimizers and schedulers for the trainable parameters of the configured models.

    Parameters
    ----------
    models : mapping of str to Module
        Wrapped in DistributedDataParallel or not.
    configs : mapping of str to OptimizerConfig or sequence of them
        By model name; each config makes an optimizer over all the model's trainable parameters.
    allowed_parameter_names : iterable of str, optional
        Qualified names, as of `iter_qualified_named_parameters`; others are left out.

    Raises
    ------
    TypeError
        For a config that is none.
    ValueError
        For a key that is no model, a name that is no parameter, a model without configs or
        without trainable parameters.
    """
    unknown = sorted(set(configs) - set(models.keys()))
    if unknown:
        raise ValueError(
            f"optimizer_configs keys {unknown} are not models; "
            f"the models are {sorted(models.keys())}"
        )
    allowed = None if allowed_parameter_names is None else set(allowed_parameter_names)
    if allowed is not None:
        there = {name for name, _ in iter_qualified_named_parameters(models)}
        if allowed - there:
            raise ValueError(
                f"allowed_parameter_names {sorted(allowed - there)} are no parameters; names are "
                f"like {sorted(there)[:3]}"
            )
    pairs = {}
    for model_name, given in configs.items():
        model_configs = _config_list(model_name, given)
        params = [
            parameter
            for name, parameter in iter_qualified_named_parameters({model_name: models[model_name]})
            if parameter.requires_grad and (allowed is None or name in allowed)
        ]
        if not params:
            raise ValueError(
                f"Configured model {model_name!r} has no trainable parameters "
                "(requires_grad=True and allowed by the optimizer parameter filter)"
            )
        pairs[model_name] = [config.build(params) for config in model_configs]
    return pairs


def _config_list(model_name: str, given: object) -> list[OptimizerConfig]:
    configs = [given] if isinstance(given, OptimizerConfig) else given
    if not isinstance(configs, Sequence) or isinstance(configs, str):
        raise TypeError(
            f"optimizer_configs[{model_name!r}] must be an OptimizerConfig or a list of them: got "
            f"{type(given).__name__}"
        )
    if not configs:
        raise ValueError(f"model {model_name!r} has an empty list of optimizer configs")
    for config in configs:
        if not isinstance(config, OptimizerConfig):
            raise TypeError(
                f"optimizer_configs[{model_name!r}] must hold OptimizerConfigs: got "
                f"{type(config).__name__}"
            )
    return list(configs)


def zero_gradients(pairs: Iterable[tuple[Optimizer, LRScheduler | None]]) -> None:
    """Drop the gradients of all optimized parameters."""
    for optimizer, _ in pairs:
        optimizer.zero_grad(set_to_none=True)


def step_optimizers(pairs: Iterable[tuple[Optimizer, LRScheduler | None]]) -> None:
    """One step of each optimizer."""
    for optimizer, _ in pairs:
        optimizer.step()


def step_lr_schedulers(pairs: Iterable[tuple[Optimizer, LRScheduler | None]]) -> None:
    """One step of each time-based scheduler, to be called after an executed optimizer step."""
    for _, scheduler in pairs:
        if scheduler is not None and not isinstance(scheduler, ReduceLROnPlateau):
            scheduler.step()


def step_metric_schedulers(
    pairs: Iterable[tuple[Optimizer, LRScheduler | None]], summary: Mapping[str, Any]
) -> bool:
    """Show the validation summary to each `ReduceLROnPlateau`.

    Returns
    -------
    bool
        Whether there was one.

    Raises
    ------
    KeyError
        If the summary lacks the metric that a scheduler follows.
    TypeError
        If the metric is not one number.
    """
    stepped = False
    for pair in pairs:
        scheduler = pair[1]
        if isinstance(scheduler, ReduceLROnPlateau):
            scheduler.step(_metric(getattr(pair, "metric", "total_loss"), summary))
            stepped = True
    return stepped


def _metric(source: str | SchedulerMetricAdapter, summary: Mapping[str, Any]) -> float:
    if not isinstance(source, str):
        value: Any = source(summary)
    elif source in summary:
        value = summary[source]
    else:
        raise KeyError(
            f"the scheduler follows {source!r}, which the validation summary lacks; "
            f"it has {sorted(summary)}; set scheduler_metric_adapter"
        )
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"a scheduler's metric must be one number, {source!r} gave {type(value).__name__}; "
            "set scheduler_metric_adapter to a function summary -> float"
        ) from error
