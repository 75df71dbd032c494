"""Hooks of a training."""

from nvalchemi.training.hooks.ddp import DDPHook

__all__ = ["DDPHook"]
