"""What the hooks of a training are told, what its losses are, and the state of its loop."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from nvalchemi.data.batch import Batch
from nvalchemi.hooks.protocol import HookContext
from nvalchemi.hooks.registry import HookRegistry
from nvalchemi.training.optimizers import OptSchedPair
from nvalchemi.training.stages import EPOCH_STAGES, RARE_STAGES, TrainingStage


@dataclass(kw_only=True)
class TrainContext(HookContext):
    """State of a training at a stage; one object per run, refreshed in place.

    Parameters
    ----------
    step_count : int
        Optimizer steps that ran, on this rank.
    global_step_count : int
        The same summed over ranks.
    batch_count : int
        Batches that were consumed.
    epoch_step_count : int
        Batches of the current epoch.
    epoch : int
        The current epoch, from 0.
    loss : Tensor, optional
        Total loss of the batch; attached to the graph from AFTER_LOSS to BEFORE_BACKWARD, detached
        afterwards.
    losses : dict, optional
        Result of the loss function: total_loss, per_component_unweighted and so on.
    models : dict of str to Module
        Models by name, wrapped in DistributedDataParallel where they are trained on several ranks.
    optimizers, lr_schedulers : list
        In the order of the models.
    grad_scaler : optional
        Gradient scaler, where there is one.
    validation : dict, optional
        Summary of the last validation.
    """

    step_count: int = 0
    global_step_count: int = 0
    batch_count: int = 0
    epoch_step_count: int = 0
    epoch: int = 0
    loss: Any = None
    losses: Any = None
    models: dict[str, Any] = field(default_factory=dict)
    optimizers: list[Any] = field(default_factory=list)
    lr_schedulers: list[Any] = field(default_factory=list)
    grad_scaler: Any = None
    validation: dict[str, Any] | None = None

    def show_counters(self, strategy: Any) -> None:
        """Take over where the strategy stands."""
        self.step_count = strategy.step_count
        self.global_step_count = strategy.global_step_count
        self.batch_count = strategy.batch_count
        self.epoch_step_count = strategy.epoch_step_count
        self.epoch = strategy.epoch_count


@dataclass(slots=True)
class LoopState:
    """What a strategy keeps beside its fields; slots, because every step reads them many times.

    `ready` says that models and optimizers are set up, `validated_at` the step of the last
    validation, `performed` the stages whose work a hook does, `optimized` for what `pairs` were
    built, `joint_factors` what makes the losses of several ranks one (see the loss function).
    """

    registry: HookRegistry = field(default_factory=lambda: HookRegistry(TrainingStage))
    performed: frozenset[TrainingStage] = frozenset()
    ctx: TrainContext = field(default_factory=TrainContext)
    pairs: list[OptSchedPair] = field(default_factory=list)
    optimized: Any = None
    stack: ExitStack | None = None
    depth: int = 0
    ready: bool = False
    loader: Any = None
    world_size: int = 1
    validated_at: int = -1
    joint_factors: Callable[[Tensor], Tensor] | None = None

    def call(self, stage: TrainingStage) -> None:
        """Call the hooks of a stage whose turn it is."""
        hooks = self.registry.at(stage)
        if not hooks:
            return
        count = self.ctx.epoch if stage in EPOCH_STAGES else self.ctx.step_count
        for frequency, hook in hooks:
            if stage in RARE_STAGES or count % frequency == 0:
                hook(self.ctx, stage)


def loss_metadata(batch: Any) -> dict[str, Any]:
    """What losses need to know of a batch beside predictions and targets."""
    if not isinstance(batch, Batch):
        return {}
    return {
        "batch_idx": batch.batch_idx,
        "num_graphs": batch.num_graphs,
        "num_nodes_per_graph": batch.num_nodes_per_graph,
    }
