"""Training: the strategy, its stages and hooks, losses, optimizers and validation."""

from nvalchemi.training.arguments import default_training_fn
from nvalchemi.training.context import TrainContext
from nvalchemi.training.hooks import DDPHook, RunFolder
from nvalchemi.training.losses import *  # noqa: F403
from nvalchemi.training.losses import __all__ as _losses
from nvalchemi.training.modes import evaluating, unwrap_model
from nvalchemi.training.optimizers import (
    OptimizerConfig,
    setup_optimizers,
    step_lr_schedulers,
    step_optimizers,
    zero_gradients,
)
from nvalchemi.training.stages import TrainingStage
from nvalchemi.training.strategy import TrainingStrategy
from nvalchemi.training.validation import ValidationConfig, ValidationLoop

__all__ = [
    "DDPHook",
    "OptimizerConfig",
    "RunFolder",
    "TrainContext",
    "TrainingStage",
    "TrainingStrategy",
    "ValidationConfig",
    "ValidationLoop",
    "default_training_fn",
    "evaluating",
    "setup_optimizers",
    "step_lr_schedulers",
    "step_optimizers",
    "unwrap_model",
    "zero_gradients",
    *_losses,
]
