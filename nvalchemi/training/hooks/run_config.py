"""What config.json says: what is trained, on what, by which ranks, with which versions."""

import platform
from collections.abc import Iterator
from importlib import metadata
from typing import Any

import torch
import torch.distributed as dist

import nvalchemi
from nvalchemi.data.datapipes.multidataset import MultiDataset
from nvalchemi.distributed.collectives import get_world_size
from nvalchemi.training.hooks.run_files import plain
from nvalchemi.training.modes import unwrap_model
from nvalchemi.training.progress import loader_length, target_steps


def length_of(strategy: Any) -> tuple[int | None, int | None]:
    """Steps of the run and of an epoch, None where nobody knows."""
    per_epoch = None if strategy.active_dataloader is None else _length(strategy.active_dataloader)
    if strategy.num_steps is None and per_epoch is None:
        return None, None
    modifier = strategy.epoch_step_modifier
    return target_steps(strategy.num_epochs, strategy.num_steps, modifier, per_epoch), per_epoch


def describe_run(strategy: Any) -> dict[str, Any]:
    """Everything, as JSON knows it."""
    total, per_epoch = length_of(strategy)
    world_size = get_world_size(strategy.distributed_manager)
    named = zip(strategy.loss_fn.component_names, strategy.loss_fn.weights, strict=True)
    config = strategy.validation_config
    return {
        "models": {name: _model(model) for name, model in strategy.models.items()},
        "optimizers": {
            name: [_optimizer(one) for one in configs]
            for name, configs in strategy.optimizer_configs.items()
        },
        "loss": plain(dict(named)),
        "length": {
            "num_epochs": strategy.num_epochs,
            "num_steps": strategy.num_steps,
            "steps": total,
            "steps_per_epoch": per_epoch,
        },
        "data": _loader(strategy.active_dataloader, world_size),
        "validation": None
        if config is None
        else {
            "name": config.name,
            "every_n_epochs": config.every_n_epochs,
            "every_n_steps": config.every_n_steps,
            "data": _loader(config.validation_data, None),
        },
        "ranks": {
            "world_size": world_size,
            "backend": dist.get_backend()
            if dist.is_available() and dist.is_initialized()
            else None,
            "device": _device(strategy.devices[0]),
            "threads": torch.get_num_threads(),
        },
        "hooks": [type(hook).__name__ for hook in strategy.hooks],
        "versions": {
            "nvalchemi": nvalchemi.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": metadata.version("numpy"),
            "cuda": torch.version.cuda,
        },
    }


def _model(model: Any) -> dict[str, Any]:
    model = unwrap_model(model)
    parameters = list(model.parameters())
    return {
        "class": plain(type(model)),
        "parameters": sum(p.numel() for p in parameters),
        "trainable": sum(p.numel() for p in parameters if p.requires_grad),
        "dtype": str(parameters[0].dtype).removeprefix("torch.") if parameters else None,
    }


def _optimizer(config: Any) -> dict[str, Any]:
    return {
        "class": plain(config.optimizer_cls),
        "arguments": plain(config.optimizer_kwargs),
        "scheduler": plain(config.scheduler_cls),
        "scheduler_arguments": plain(config.scheduler_kwargs),
    }


def _loader(loader: Any, world_size: int | None) -> dict[str, Any] | None:
    if loader is None:
        return None
    dataset = getattr(loader, "dataset", None)
    known: dict[str, Any] = {
        "class": plain(type(loader)),
        "batches": _length(loader),
        "dataset": None if dataset is None else plain(type(dataset)),
        "samples": _length(dataset),
        "batch_size": _first(_parts(loader), "batch_size"),
        "seed": _first(_parts(loader), "seed"),
        "samplers": [plain(type(part)) for part in _parts(loader) if part is not loader],
    }
    if isinstance(dataset, MultiDataset):
        known["sets"] = [len(part) for part in dataset.datasets]
    if world_size is not None and isinstance(known["batch_size"], int):
        known["global_batch_size"] = known["batch_size"] * world_size
    return known


def _parts(loader: Any) -> Iterator[Any]:
    """The loader, and the samplers that it has."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    nested = getattr(batch_sampler, "sampler", None)
    for part in (loader, batch_sampler, getattr(loader, "sampler", None), nested):
        if part is not None:
            yield part


def _first(parts: Iterator[Any], name: str) -> int | None:
    values = (getattr(part, name, None) for part in parts)
    return next((v for v in values if isinstance(v, int) and not isinstance(v, bool)), None)


def _length(sized: Any) -> int | None:
    try:
        return loader_length(sized)
    except ValueError:  # empty, which the training refuses for itself
        return 0


def _device(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
