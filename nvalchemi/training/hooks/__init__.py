"""Hooks of a training."""

from nvalchemi.training.hooks.ddp import DDPHook
from nvalchemi.training.hooks.report import RunFolder

__all__ = ["DDPHook", "RunFolder"]
