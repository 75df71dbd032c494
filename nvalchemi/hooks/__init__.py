"""Hooks: what they are, and the registry that calls them."""

from typing import Any

from nvalchemi.hooks.protocol import Hook, HookContext
from nvalchemi.hooks.registry import HookRegistry

__all__ = ["Hook", "HookContext", "HookRegistry", "TrainContext"]


def __getattr__(name: str) -> Any:
    # the context of a training lives with the training; scripts of the peer import it from here
    if name == "TrainContext":
        from nvalchemi.training.context import TrainContext

        return TrainContext
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
