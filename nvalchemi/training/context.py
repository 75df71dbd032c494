"""What the hooks of a training are told, and what its losses are."""

from dataclasses import dataclass, field
from typing import Any

from nvalchemi.data.batch import Batch
from nvalchemi.hooks.protocol import HookContext


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
        Summary of the last validation, at AFTER_VALIDATION.
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


def loss_metadata(batch: Any) -> dict[str, Any]:
    """What losses need to know of a batch beside predictions and targets."""
    if not isinstance(batch, Batch):
        return {}
    return {
        "batch_idx": batch.batch_idx,
        "num_graphs": batch.num_graphs,
        "num_nodes_per_graph": batch.num_nodes_per_graph,
    }
