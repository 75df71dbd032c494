"""Validation: when, on what, and the exact result over all ranks.

Every rank evaluates its share of the batches; the numerators and denominators of the losses are
summed over batches and ranks and divided once. The result does not depend on the number of ranks
or on how structures are batched.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, nullcontext
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, Self, cast

import torch
from pydantic import Field, field_validator, model_validator
from torch import nn
from torch.utils.data import RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from nvalchemi.data.batch import Batch
from nvalchemi.data.datapipes.dataloader import DataLoader
from nvalchemi.data.datapipes.exact import ExactEvalSampler
from nvalchemi.data.datapipes.samplers import DistributedSamplerProtocol
from nvalchemi.distributed.collectives import (
    all_gather_objects,
    get_rank,
    get_world_size,
    is_distributed_initialized,
)
from nvalchemi.training.arguments import MAIN, composed_loss, resolve_training_fn
from nvalchemi.training.context import loss_metadata
from nvalchemi.training.losses import BaseLossFunction, ComposedLossFunction
from nvalchemi.training.modes import evaluating, unwrap_model
from nvalchemi.training.stages import TrainingStage
from nvalchemi.training.strict import StrictModel
from nvalchemi.training.totals import LossTotals

Switch = Literal["auto", "always", "never"]


class ValidationConfig(StrictModel):
    """When to validate, and on what.

    Parameters
    ----------
    validation_data : iterable of Batch
        A loader or a list of batches; one that can be passed over again. Under several ranks each
        takes every so-manyth batch, unless its sampler is built for these ranks already.
    validation_fn, loss_fn : optional
        Instead of those of the training.
    every_n_epochs, every_n_steps : int, optional
        One of them, or none: then only at the end of the training.
    grad_mode : {"auto", "enabled", "disabled"}
        Whether autograd records. "auto" records unless all losses and models say that they can do
        without.
    set_eval : bool
        Whether models are in evaluation mode meanwhile.
    use_ema, use_mixed_precision : {"auto", "always", "never"}
        "always" is an error where no hook offers it.
    batch_callback : callable, optional
        Called with the keywords batch, predictions, loss, batch_count, step_count and epoch.
    name : str
        Title in the summary.
    """

    if TYPE_CHECKING:  # a loss or a function is given in more forms than it has in the end

        def __init__(self, **fields: Any) -> None: ...

    validation_data: Any
    validation_fn: Callable[[Any, Any], Any] | None = None
    loss_fn: ComposedLossFunction | None = None
    every_n_epochs: int | None = Field(default=None, ge=1, strict=True)
    every_n_steps: int | None = Field(default=None, ge=1, strict=True)
    grad_mode: Literal["auto", "enabled", "disabled"] = "auto"
    set_eval: bool = True
    use_ema: Switch = "auto"
    use_mixed_precision: Switch = "auto"
    batch_callback: Callable[..., None] | None = None
    name: str = "validation"

    @field_validator("validation_data")
    @classmethod
    def _can_be_repeated(cls, value: Any) -> Any:
        if isinstance(value, Batch):
            raise ValueError("validation_data must be a loader or a list: put the Batch in a list")
        if not isinstance(value, Iterable) or isinstance(value, Iterator | str | bytes):
            raise ValueError(
                "validation_data must be a loader or a list of batches that can be passed over "
                f"again: got {type(value).__name__}"
            )
        return value

    @field_validator("validation_fn", mode="before")
    @classmethod
    def _check_function(cls, value: Any) -> Any:
        return None if value is None else resolve_training_fn(value, "validation_fn")

    @field_validator("loss_fn", mode="before")
    @classmethod
    def _check_loss(cls, value: Any) -> Any:
        return None if value is None else composed_loss(value)

    @model_validator(mode="after")
    def _one_cadence(self) -> Self:
        if self.every_n_epochs is not None and self.every_n_steps is not None:
            raise ValueError("every_n_epochs and every_n_steps exclude each other: give one")
        return self

    def due_after_epoch(self, epoch_count: int) -> bool:
        """Whether to validate after so many epochs."""
        return self.every_n_epochs is not None and epoch_count % self.every_n_epochs == 0


class ValidationLoop:
    """One validation; a context manager within which `execute` runs it.

    Parameters
    ----------
    config : ValidationConfig
        What to do.
    models : dict of str to Module
        Models by name; a DistributedDataParallel is taken off, so that ranks need not move in step.
    single_model : bool
        Whether the function is called with the model instead of the dict.
    training_fn, loss_fn, loss_target_assembler
        Those of the training.
    device : torch.device
        Where batches go.
    distributed_manager : optional
        Tells rank and world size.
    step_count, epoch : int
        Where the training stands.
    call : callable
        ``call(stage, batch)`` tells hooks of a stage.
    """

    def __init__(
        self,
        *,
        config: ValidationConfig,
        models: Mapping[str, nn.Module],
        single_model: bool,
        training_fn: Callable[[Any, Any], Any],
        loss_fn: ComposedLossFunction,
        loss_target_assembler: Callable[..., Any],
        device: torch.device,
        distributed_manager: Any = None,
        step_count: int = 0,
        epoch: int = 0,
        call: Callable[[TrainingStage, Any], None] = lambda stage, batch: None,
    ) -> None:
        self.config = config
        self.models = {name: unwrap_model(model) for name, model in models.items()}
        self.single_model = single_model
        self.function = config.validation_fn or training_fn
        self.loss_fn = config.loss_fn or loss_fn
        self.assemble = loss_target_assembler
        self.device = device
        self.step_count, self.epoch = step_count, epoch
        self.call = call
        together = is_distributed_initialized() and get_world_size(distributed_manager) > 1
        self.world_size = get_world_size(distributed_manager) if together else 1
        self.rank = get_rank(distributed_manager) if together else 0
        self._stack: ExitStack | None = None
        for name in ("use_ema", "use_mixed_precision"):
            if getattr(config, name) == "always":
                raise RuntimeError(f"{name}='always', but no hook of the training offers it")

    @classmethod
    def from_training_strategy(cls, strategy: Any, config: ValidationConfig | None = None) -> Self:
        """Make one for a strategy, with its validation_config unless another is given."""

        def call(stage: TrainingStage, batch: Any) -> None:
            strategy._state.ctx.batch = batch
            strategy._state.call(stage)

        return cls(
            config=config or strategy.validation_config,
            models=strategy.models,
            single_model=strategy.single_model_input,
            training_fn=strategy.training_fn,
            loss_fn=strategy.loss_fn,
            loss_target_assembler=strategy.loss_target_assembler,
            device=strategy.devices[0],
            distributed_manager=strategy.distributed_manager,
            step_count=strategy.step_count,
            epoch=strategy.epoch_count,
            call=call,
        )

    def __enter__(self) -> Self:
        gradients = nullcontext() if self._records() else torch.no_grad()
        self._stack = ExitStack()
        if self.config.set_eval:
            self._stack.enter_context(evaluating(self.models.values()))
        self._stack.enter_context(gradients)
        return self

    def __exit__(self, *error: object) -> None:
        assert self._stack is not None
        self._stack.__exit__(*error)  # type: ignore[arg-type]
        self._stack = None

    def _records(self) -> bool:
        if self.config.grad_mode != "auto":
            return self.config.grad_mode == "enabled"
        # a loss or a model that says nothing of itself may need it, for forces by autograd
        leaves = cast(Iterable[BaseLossFunction], self.loss_fn.components)
        if any(leaf.requires_eval_grad is not False for leaf in leaves):
            return True
        configs = [getattr(model, "model_config", None) for model in self.models.values()]
        return any(getattr(config, "autograd_outputs", True) for config in configs)

    def execute(self) -> dict[str, Any]:
        """Evaluate all batches.

        Returns
        -------
        dict
            name, total_loss, per_component_unweighted, per_component_weight,
            per_component_raw_weight, per_component_sample, per_component_sample_count,
            num_batches, model_source, ema_model_keys, precision, distributed_reduced. A component
            without a single label is NaN.

        Raises
        ------
        RuntimeError
            Outside the context, or when another rank failed.
        ValueError
            If there are no batches.
        """
        if self._stack is None:
            raise RuntimeError("execute() works inside `with loop:` only")
        totals, failure = LossTotals(), None
        try:
            for batch in self._own_batches():
                totals.add(self._evaluate(batch, totals.num_batches), batch)
        except Exception as error:
            failure = error
        totals = self._sum_over_ranks(totals, failure)
        if totals.num_batches == 0:
            raise ValueError("validation_data produced no batches.")
        return {
            "name": self.config.name,
            **totals.summary(),
            "model_source": "live",
            "ema_model_keys": [],
            "precision": str(torch.get_default_dtype()).removeprefix("torch."),
            "distributed_reduced": self.world_size > 1,
        }

    def _evaluate(self, batch: Any, batch_count: int) -> dict[str, Any]:
        self.call(TrainingStage.BEFORE_FORWARD, batch)
        model = self.models[MAIN] if self.single_model else self.models
        predictions = self.function(model, batch)
        self.call(TrainingStage.AFTER_FORWARD, batch)
        targets = self.assemble(self.loss_fn, predictions, batch, batch_label="Validation batch")
        losses: dict[str, Any] = self.loss_fn(
            predictions, targets, step=self.step_count, epoch=self.epoch, **loss_metadata(batch)
        )
        if self.config.batch_callback is not None:
            self.config.batch_callback(
                batch=batch,
                predictions=predictions,
                loss=losses,
                batch_count=batch_count,
                step_count=self.step_count,
                epoch=self.epoch,
            )
        return losses

    def _own_batches(self) -> Iterator[Any]:
        """Every world_size-th batch, read for this rank alone where the loader allows it."""
        data = self.config.validation_data
        whole = self.world_size == 1 or self._is_sharded(data)
        first, step = (0, 1) if whole else (self.rank, self.world_size)
        batches: Iterator[Any]
        if isinstance(data, DataLoader):
            # an exact sampler gives a rank that has nothing in the last step an empty batch
            batches = data.read(filter(None, islice(data.index_batches(), first, None, step)))
        else:
            batches = islice(iter(data), first, None, step)
        for batch in batches:
            yield batch.to(self.device, non_blocking=True) if hasattr(batch, "to") else batch

    def _is_sharded(self, data: Any) -> bool:
        """Whether a sampler is built for these ranks; one that draws at random is refused."""
        batch_sampler = getattr(data, "batch_sampler", None)
        for sampler in (
            getattr(data, "sampler", None),
            batch_sampler,
            getattr(batch_sampler, "sampler", None),
        ):
            if isinstance(sampler, DistributedSamplerProtocol):
                self._check_sampler(sampler, data)
                return True
            if isinstance(sampler, RandomSampler | SubsetRandomSampler | WeightedRandomSampler):
                raise ValueError(
                    f"validation_data must not draw at random ({type(sampler).__name__}): each "
                    "rank would take its share of another order; use shuffle=False, or for a "
                    "subset its indices as a list, sampler=[...]"
                )
        return False

    def _check_sampler(self, sampler: DistributedSamplerProtocol, data: Any) -> None:
        there = (sampler.num_replicas, sampler.rank)
        if there != (self.world_size, self.rank):
            raise ValueError(
                f"the sampler of validation_data is built for rank {there[1]} of {there[0]}, this "
                f"is rank {self.rank} of {self.world_size}; leave the sampler out, and each rank "
                "takes its share"
            )
        # samplers for training fill the last step with samples that were there already
        if not isinstance(sampler, ExactEvalSampler) and self.rank == 0:
            warnings.warn(
                f"validation_data has a {type(sampler).__name__}, which may count samples twice or "
                "leave some out to make the ranks even; use a loader of its own without a sampler, "
                "and every sample counts once",
                UserWarning,
                stacklevel=2,
            )

    def _sum_over_ranks(self, totals: LossTotals, failure: Exception | None) -> LossTotals:
        if self.world_size == 1:
            if failure is not None:
                raise failure
            return totals
        sentence = None if failure is None else f"{type(failure).__name__}: {failure}"
        gathered = all_gather_objects((totals, sentence))
        if failure is not None:
            raise failure
        for rank, (_, said) in enumerate(gathered):
            if said is not None:
                raise RuntimeError(f"validation failed on rank {rank}: {said}")
        return LossTotals.merged([part for part, _ in gathered])
