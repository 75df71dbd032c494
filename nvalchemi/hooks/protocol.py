"""What a hook is, and what it is told."""

from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol, runtime_checkable


@dataclass(kw_only=True)
class HookContext:
    """What every hook is told.

    Parameters
    ----------
    batch : Batch
        The current batch; between batches the last one, None before the first.
    model : Module, optional
        The model that is called "main".
    global_rank : int
        Rank of this process among all.
    workflow : optional
        The object that calls the hooks, such as a TrainingStrategy.
    """

    batch: Any = None
    model: Any = None
    global_rank: int = 0
    workflow: Any = None


@runtime_checkable
class Hook(Protocol):
    """Something that is called at a stage.

    Attributes
    ----------
    frequency : int
        It is called at every so many steps, at BEFORE_EPOCH and AFTER_EPOCH every so many epochs;
        1 for always. It does not apply to SETUP, BEFORE_TRAINING, AFTER_TRAINING and
        AFTER_VALIDATION.
    stage : Enum or None
        The stage. A hook of several stages has ``_runs_on_stage(stage) -> bool`` instead.

    Notes
    -----
    Further methods are used where a hook has them: ``on_register(workflow)``,
    ``prepare_strategy(strategy)`` before models are moved, ``__enter__`` and ``__exit__`` (or
    ``close()``) around a run.

    A hook whose `stage` is DO_BACKWARD or DO_OPTIMIZER_STEP does the work of that stage instead of
    the strategy; at most one may. A hook of several stages only observes, also there.
    """

    frequency: int
    stage: Enum | None

    def __call__(self, ctx: Any, stage: Any) -> None: ...
