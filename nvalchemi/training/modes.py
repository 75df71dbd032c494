"""Training and evaluation modes, set for a while and put back exactly, submodule by submodule."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn
from torch.nn.parallel import DistributedDataParallel


def unwrap_model(model: nn.Module) -> nn.Module:
    """The module inside a DistributedDataParallel, else the model itself."""
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    assert isinstance(inner, nn.Module)
    return inner


@contextmanager
def evaluating(models: nn.Module | Iterable[nn.Module]) -> Iterator[None]:
    """Evaluation mode inside; afterwards each submodule is in the mode that it had."""
    models = [models] if isinstance(models, nn.Module) else list(models)
    flags = [(module, module.training) for model in models for module in model.modules()]
    for module, _ in flags:
        module.training = False
    try:
        yield
    finally:
        for module, training in flags:
            module.training = training


@contextmanager
def training_modes(trained: Iterable[nn.Module], others: Iterable[nn.Module]) -> Iterator[None]:
    """Training mode for the trained models; the others are frozen and in evaluation mode.

    A trained model that is in training mode keeps the modes of its submodules: a part that the
    user put into evaluation mode stays so. Afterwards every mode and requires_grad is as before.
    """
    trained, others = list(trained), list(others)
    flags = [(m, m.training) for model in (*trained, *others) for m in model.modules()]
    frozen = [(p, p.requires_grad) for model in others for p in model.parameters()]
    for model in trained:
        # a wrapper for several ranks is always in training mode: what counts is the model inside
        if not unwrap_model(model).training:
            model.train()
    for model in others:
        model.eval()
        model.requires_grad_(False)
    try:
        yield
    finally:
        for module, training in flags:
            module.training = training
        for parameter, requires_grad in frozen:
            parameter.requires_grad_(requires_grad)
