"""What a TrainingStrategy is given, checked and brought into one form."""

import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from nvalchemi.data.batch import Batch
from nvalchemi.training.losses import BaseLossFunction, ComposedLossFunction
from nvalchemi.training.optimizers import OptimizerConfig

MAIN = "main"


def default_training_fn(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    """Call the model and prefix its outputs: energy becomes predicted_energy, and so on."""
    return {f"predicted_{name}": value for name, value in model(batch).items() if value is not None}


def named_models(models: Any) -> dict[str, nn.Module]:
    """Turn one model into ``{"main": model}`` and a mapping of models into a dict.

    Raises
    ------
    ValueError
        If there is none, or one is no Module.
    """
    named = models
    if isinstance(models, nn.Module) and not isinstance(models, nn.ModuleDict):
        named = {MAIN: models}
    if not isinstance(named, Mapping | nn.ModuleDict) or not len(named):
        got = "none" if isinstance(models, Mapping | nn.ModuleDict) else type(models).__name__
        raise ValueError(f"models must be a Module or a dict of them, at least one: got {got}")
    for name, model in named.items():
        if not isinstance(model, nn.Module):
            raise ValueError(
                f"models[{name!r}] must be a torch.nn.Module: got {type(model).__name__}"
            )
    return dict(named.items())


def named_optimizer_configs(configs: Any, single_model: bool) -> dict[str, list[OptimizerConfig]]:
    """Turn one config or a list into that of the "main" model, and a mapping into lists.

    Raises
    ------
    ValueError
        If a form without names is given for several models, or a list is empty.
    """
    if isinstance(configs, OptimizerConfig | list | tuple) and not single_model:
        raise ValueError(
            "optimizer_configs must be a dict by model name, because models is a dict: got "
            f"{type(configs).__name__}"
        )
    if isinstance(configs, OptimizerConfig | list | tuple):
        configs = {MAIN: configs}
    if not isinstance(configs, Mapping):
        raise ValueError(
            "optimizer_configs must be an OptimizerConfig, a list of them or a dict by model: got "
            f"{type(configs).__name__}"
        )
    named = {}
    for name, config in configs.items():
        entries = list(config) if isinstance(config, list | tuple) else [config]
        if not entries or not all(isinstance(entry, OptimizerConfig) for entry in entries):
            raise ValueError(
                f"optimizer_configs[{name!r}] must be an OptimizerConfig or a list of them, at "
                f"least one: got {config!r}"
            )
        named[name] = entries
    return named


def composed_loss(loss_fn: Any) -> ComposedLossFunction:
    """Turn a leaf loss into a composition of one.

    Raises
    ------
    ValueError
        If it is neither.
    """
    if isinstance(loss_fn, ComposedLossFunction):
        return loss_fn
    if isinstance(loss_fn, BaseLossFunction):
        return ComposedLossFunction([loss_fn])
    raise ValueError(
        "loss_fn must be a ComposedLossFunction or a leaf loss such as EnergyMSELoss(): got "
        f"{type(loss_fn).__name__}"
    )


def resolve_training_fn(
    function: Any, argument: str = "training_fn"
) -> Callable[[Any, Any], Mapping[str, Tensor]]:
    """Import a dotted name, and check that the function takes (model or models, batch).

    Raises
    ------
    ValueError
        If it can not be found or called, or does not take exactly two arguments.
    """
    if isinstance(function, str):
        module, _, name = function.rpartition(".")
        try:
            function = getattr(import_module(module), name)
        except (ImportError, AttributeError, ValueError) as error:
            raise ValueError(f"{argument} {function!r} can not be imported: {error}") from error
    if not callable(function):
        raise ValueError(f"{argument} must be a function (model, batch): got {function!r}")
    try:
        signature = inspect.signature(function)
    except ValueError:
        return function  # written in C and silent about its arguments
    try:
        signature.bind("model", "batch")
    except TypeError:
        raise ValueError(
            f"{argument} must accept exactly the two arguments (model, batch), or (models, batch): "
            f"got {getattr(function, '__name__', function)}{signature}"
        ) from None
    return function


def resolve_devices(devices: Any) -> list[torch.device]:
    """Turn a device, a string or a sequence of them into a list.

    Raises
    ------
    ValueError
        If it is empty or names no device.
    """
    if isinstance(devices, str | torch.device):
        devices = [devices]
    if not isinstance(devices, Sequence) or not devices:
        raise ValueError("devices must contain at least one torch.device")
    resolved = []
    for device in devices:
        try:
            resolved.append(torch.device(device))
        except (RuntimeError, TypeError) as error:
            raise ValueError(f"devices must hold torch devices: got {device!r}") from error
        if resolved[-1].type == "cuda" and (resolved[-1].index or 0) >= torch.cuda.device_count():
            raise ValueError(
                f"devices asks for {resolved[-1]}, but torch finds {torch.cuda.device_count()} "
                "CUDA devices here; use 'cpu', or the device of the manager"
            )
    return resolved


def check_loader(loader: Any) -> None:
    """Refuse what is no loader of batches but easily taken for one.

    Raises
    ------
    TypeError
        For a data set or a single batch, with the remedy.
    """
    if isinstance(loader, Batch):
        raise TypeError("run() takes a loader of batches: put the one Batch in a list")
    if hasattr(loader, "load_batches"):
        raise TypeError(
            f"run() takes a loader of batches: wrap the {type(loader).__name__} in "
            "DataLoader(dataset, batch_size=...)"
        )
    if loader is not None and not hasattr(loader, "__iter__"):
        raise TypeError(f"run() takes a loader of batches: got {type(loader).__name__}")


def check_predictions(predictions: Any) -> None:
    """Refuse what a training function must not return.

    Raises
    ------
    TypeError
        If it is no mapping.
    """
    if not isinstance(predictions, Mapping):
        raise TypeError(
            "training_fn must return a dict of predictions such as {'predicted_energy': ...}: got "
            f"{type(predictions).__name__}"
        )


def warn_of_lone_ranks(models: Iterable[nn.Module], world_size: int, rank: int) -> None:
    """Say so when several ranks are there and nothing lets them train together."""
    together = any(isinstance(model, DistributedDataParallel) for model in models)
    if world_size > 1 and not together and rank == 0:
        warnings.warn(
            f"{world_size} ranks, but no model is wrapped for them: each rank trains alone, on all "
            "of the data; add DDPHook() to hooks to train together",
            UserWarning,
            stacklevel=4,
        )
