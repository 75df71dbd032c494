"""TrainingStrategy: the loop over epochs and batches, and the stages at which hooks are called."""

import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import islice
from typing import Any, Self

from pydantic import PrivateAttr, model_validator

from nvalchemi.distributed.collectives import get_rank, get_world_size
from nvalchemi.hooks.registry import HookRegistry
from nvalchemi.training.arguments import MAIN
from nvalchemi.training.context import TrainContext, loss_metadata
from nvalchemi.training.definition import TrainingDefinition
from nvalchemi.training.modes import training_modes
from nvalchemi.training.optimizers import (
    OptSchedPair,
    setup_optimizers,
    step_lr_schedulers,
    step_metric_schedulers,
    step_optimizers,
    zero_gradients,
)
from nvalchemi.training.progress import loader_length, restart_point, target_steps
from nvalchemi.training.stages import DO_STAGES, EPOCH_STAGES, SINGLE_STAGES, TrainingStage
from nvalchemi.training.validation import ValidationLoop

Stage = TrainingStage


class TrainingStrategy(TrainingDefinition):
    """Train models on the batches of a loader.

    Parameters
    ----------
    models : Module or dict of str to Module
        What is trained; one alone is called "main".
    optimizer_configs : OptimizerConfig, list, or dict of str to list
        By model name. A model without one is frozen and in evaluation mode during the run.
    num_epochs, num_steps : int
        How long; exactly one of them.
    epoch_step_modifier : float
        Factor on the steps that num_epochs makes.
    hooks : list
        Called at their stages, in this order.
    training_fn : callable or dotted name
        ``(model, batch) -> predictions``, or ``(models, batch)`` where models were given by name.
        `default_training_fn` suits models that return a dict.
    loss_fn : ComposedLossFunction or leaf loss
        What is minimised.
    loss_target_assembler : callable
        Reads the targets from a batch.
    devices : list of torch.device or str
        One for all models, or one for each.
    distributed_manager : DistributedManager, optional
        Tells rank, world size and device.
    validation_config : ValidationConfig, optional
        When and on what to validate.
    step_count, global_step_count, batch_count, epoch_count (or epoch), epoch_step_count : int
        Where to go on; zero at the start.

    Raises
    ------
    pydantic.ValidationError
        A ValueError: for arguments that are missing, unknown or contradict each other.
    """

    _world_size: int = PrivateAttr(default=1)
    _registry: HookRegistry = PrivateAttr(default_factory=lambda: HookRegistry(TrainingStage))
    _performs: dict[TrainingStage, bool] = PrivateAttr(default_factory=dict)
    _stack: ExitStack | None = PrivateAttr(default=None)
    _depth: int = PrivateAttr(default=0)
    _ctx: TrainContext | None = PrivateAttr(default=None)
    _pairs: list[OptSchedPair] = PrivateAttr(default_factory=list)
    _loader: Any = PrivateAttr(default=None)
    _validated_at: int = PrivateAttr(default=-1)

    @model_validator(mode="after")
    def _register_hooks(self) -> Self:
        for hook in self.hooks:
            self._registry.register(hook)
        self._check_performers()
        self._registry.call_all("on_register", self)
        return self

    def _check_performers(self) -> None:
        self._registry.refresh()
        for stage in DO_STAGES:
            performers = self._registry.performers(stage)
            if len(performers) > 1:
                names = ", ".join(type(hook).__name__ for hook in performers)
                raise ValueError(f"only one hook may do the work of {stage.name}: got {names}")
            self._performs[stage] = bool(performers)

    def register_hook(self, hook: Any, stage: TrainingStage | None = None) -> None:
        """Add a hook after the others.

        Parameters
        ----------
        hook : Hook
            Called as ``hook(ctx, stage)``.
        stage : TrainingStage, optional
            Its stage, instead of its own.

        Raises
        ------
        ValueError, TypeError
            See `nvalchemi.hooks.HookRegistry.register`.
        """
        self._registry.register(hook, stage)
        self._check_performers()
        self.hooks.append(hook)
        if hasattr(hook, "on_register"):
            hook.on_register(self)

    # What is asked of it from outside.

    @property
    def epoch(self) -> int:
        """The current epoch, from 0."""
        return self.epoch_count

    @property
    def active_dataloader(self) -> Any:
        """The loader of the current run; hooks at SETUP may replace it."""
        return self._loader

    @active_dataloader.setter
    def active_dataloader(self, loader: Any) -> None:
        self._loader = loader

    @property
    def optimizers(self) -> list[Any]:
        """Optimizers of the current or last run."""
        return [optimizer for optimizer, _ in self._pairs]

    @property
    def lr_schedulers(self) -> list[Any]:
        """Learning-rate schedulers of the current or last run."""
        return [scheduler for _, scheduler in self._pairs if scheduler is not None]

    # Contexts.

    def __enter__(self) -> Self:
        if self._depth == 0:
            self._stack = self._registry.enter()
        self._depth += 1
        return self

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            stack, self._stack = self._stack, None
            self._loader = None
            self._ctx = None
            assert stack is not None
            stack.__exit__(*error)  # type: ignore[arg-type]

    # The run.

    def run(self, dataloader: Any) -> None:
        """Train until num_epochs or num_steps is reached.

        Parameters
        ----------
        dataloader : iterable of Batch
            Passed over again and again; its samplers are told the epoch.

        Raises
        ------
        ValueError
            If the loader is empty or has no length though epochs were asked for, the counters do
            not fit its length, or the devices do not fit the models.
        """
        with self:
            self._set_up(dataloader)
            length = loader_length(self._loader)
            target = target_steps(self.num_epochs, self.num_steps, self.epoch_step_modifier, length)
            if self.step_count >= target:
                warnings.warn(
                    f"nothing to train: step_count={self.step_count} has reached the target of "
                    f"{target} steps; raise num_epochs or num_steps, or set the counters to 0",
                    UserWarning,
                    stacklevel=2,
                )
                return
            self._normalise_counters(length)
            ctx = self._begin()
            self._call(Stage.BEFORE_TRAINING)
            while self.step_count < target:
                self._run_epoch(ctx, target, length)
            self._call(Stage.AFTER_TRAINING)
            if self.validation_config is not None and self._validated_at != self.step_count:
                self.validate()

    def train_batch(self, batch: Any) -> dict[str, Any]:
        """Train on one batch; inside ``with strategy:`` everything is set up once for many.

        Returns
        -------
        dict
            Result of the loss function.
        """
        with self:
            if self._ctx is None:
                self._set_up(None)
                self._begin()
            ctx = self._ctx
            assert ctx is not None
            self._train_step(ctx, self._to_device(batch))
            assert isinstance(ctx.losses, dict)
            return ctx.losses

    def validate(self) -> dict[str, Any]:  # type: ignore[override]
        """Validate now.

        Returns
        -------
        dict
            The summary, see `ValidationLoop.execute`.

        Raises
        ------
        RuntimeError
            If there is no validation_config.
        """
        if self.validation_config is None:
            raise RuntimeError("validate() needs a validation_config: the strategy has none")
        with ValidationLoop.from_training_strategy(self) as loop:
            summary = loop.execute()
        self.last_validation = summary
        self._validated_at = self.step_count
        step_metric_schedulers(self._pairs, summary)
        if self._ctx is not None:
            self._ctx.validation = summary
        self._call(Stage.AFTER_VALIDATION)
        return summary

    def _set_up(self, dataloader: Any) -> None:
        self._loader = dataloader
        self._ctx = self._new_context()
        self._registry.refresh()
        self._registry.call_all("prepare_strategy", self)
        self._world_size = get_world_size(self.distributed_manager)
        distinct = list(dict.fromkeys(self.devices))
        if len(distinct) > 1:
            raise ValueError(
                f"all models must be on one device: got {', '.join(map(str, distinct))}"
            )
        for model in self.models.values():
            model.to(distinct[0])
        self._call(Stage.SETUP)

    def _begin(self) -> TrainContext:
        """Optimizers and modes, once hooks have wrapped the models."""
        others = [m for name, m in self.models.items() if name not in self.optimizer_configs]
        trained = [self.models[name] for name in self.optimizer_configs]
        assert self._stack is not None
        self._stack.enter_context(training_modes(trained, others))
        pairs = setup_optimizers(self.models, self.optimizer_configs)
        self._pairs = [pair for group in pairs.values() for pair in group]
        ctx = self._ctx = self._new_context()
        return ctx

    def _new_context(self) -> TrainContext:
        ctx = TrainContext(
            model=self.models.get(MAIN),
            models=self.models,
            global_rank=get_rank(self.distributed_manager),
            workflow=self,
            optimizers=self.optimizers,
            lr_schedulers=self.lr_schedulers,
        )
        self._show_counters(ctx)
        return ctx

    def _normalise_counters(self, length: int | None) -> None:
        self.epoch_step_count = restart_point(
            self.batch_count, self.step_count, self.epoch_count, self.epoch_step_count, length
        )
        self.batch_count = self.batch_count or self.step_count
        if not self.global_step_count:
            self.global_step_count = self.step_count * self._world_size

    def _run_epoch(self, ctx: TrainContext, target: int, length: int | None) -> None:
        """Pass over the loader once, or what is left of this pass, or until the target."""
        set_epoch(self._loader, self.epoch_count)
        self._show_counters(ctx)
        self._call(Stage.BEFORE_EPOCH)
        batches_before, exhausted = self.batch_count, False
        for batch in self._rest_of_pass(length):
            self._train_step(ctx, self._to_device(batch))
            if self._due_by_steps():
                self.validate()
            if self.step_count >= target:
                break
        else:
            exhausted = True
        if self.batch_count == batches_before and not self.epoch_step_count:
            raise ValueError(
                f"the dataloader produced no batches before reaching {target} steps (at step "
                f"{self.step_count}): an iterator that is used up can not be passed over again"
            )
        if exhausted or (length is not None and self.epoch_step_count >= length):
            self.epoch_count += 1
            self.epoch_step_count = 0
            self._show_counters(ctx)
            self._call(Stage.AFTER_EPOCH)
            config = self.validation_config
            if config is not None and config.due_after_epoch(self.epoch_count):
                self.validate()

    def _rest_of_pass(self, length: int | None) -> Iterator[Any]:
        """Batches of the current epoch that are not done yet."""
        done = self.epoch_step_count
        if not done:
            return iter(self._loader)
        if length is not None and done >= length:
            return iter(())
        if hasattr(self._loader, "set_epoch_step"):
            self._loader.set_epoch_step(done)
            return iter(self._loader)
        return islice(iter(self._loader), done, None)

    def _due_by_steps(self) -> bool:
        config = self.validation_config
        if config is None or config.every_n_steps is None:
            return False
        return self.step_count % config.every_n_steps == 0 and self.step_count != self._validated_at

    # One batch.

    def _train_step(self, ctx: TrainContext, batch: Any) -> None:
        ctx.batch, ctx.loss, ctx.losses = batch, None, None
        self._call(Stage.BEFORE_BATCH)
        zero_gradients(self._pairs)
        self._call(Stage.BEFORE_FORWARD)
        predictions = self.training_fn(
            self.models[MAIN] if self.single_model_input else self.models, batch
        )
        self._call(Stage.AFTER_FORWARD)
        self._call(Stage.BEFORE_LOSS)
        targets = self.loss_target_assembler(self.loss_fn, predictions, batch, workflow=self)
        losses = self.loss_fn(
            predictions,
            targets,
            step=self.step_count,
            epoch=self.epoch_count,
            **loss_metadata(batch),
        )
        ctx.loss, ctx.losses = losses["total_loss"], losses
        self._call(Stage.AFTER_LOSS)
        self._call(Stage.BEFORE_BACKWARD)
        if not self._performs[Stage.DO_BACKWARD]:
            ctx.loss.backward()
        self._call(Stage.DO_BACKWARD)
        ctx.loss = losses["total_loss"] = ctx.loss.detach()
        self._call(Stage.AFTER_BACKWARD)
        self._call(Stage.BEFORE_OPTIMIZER_STEP)
        if not self._performs[Stage.DO_OPTIMIZER_STEP]:
            step_optimizers(self._pairs)
        self._call(Stage.DO_OPTIMIZER_STEP)
        step_lr_schedulers(self._pairs)
        self._call(Stage.AFTER_OPTIMIZER_STEP)
        self.step_count += 1
        self.global_step_count += self._world_size
        self.batch_count += 1
        self.epoch_step_count += 1
        self._show_counters(ctx)
        self._call(Stage.AFTER_BATCH)

    def _to_device(self, batch: Any) -> Any:
        return batch.to(self.devices[0], non_blocking=True) if hasattr(batch, "to") else batch

    def _show_counters(self, ctx: TrainContext) -> None:
        ctx.step_count = self.step_count
        ctx.global_step_count = self.global_step_count
        ctx.batch_count = self.batch_count
        ctx.epoch_step_count = self.epoch_step_count
        ctx.epoch = self.epoch_count

    def _call(self, stage: TrainingStage) -> None:
        hooks = self._registry.at(stage)
        if not hooks:
            return
        if stage in SINGLE_STAGES:
            count = 0
        else:
            count = self.epoch_count if stage in EPOCH_STAGES else self.step_count
        ctx = self._ctx if self._ctx is not None else self._new_context()
        for frequency, hook in hooks:
            if count % frequency == 0:
                hook(ctx, stage)


def set_epoch(loader: Any, epoch: int) -> None:
    """Tell the epoch to the loader, its samplers and the samplers inside, each that asks for it."""
    batch_sampler: Any = getattr(loader, "batch_sampler", None)
    nested = getattr(batch_sampler, "sampler", None)
    targets = (getattr(loader, "sampler", None), batch_sampler, nested, loader)
    told: list[Any] = []
    for target in targets:
        tell = getattr(target, "set_epoch", None)
        if callable(tell) and all(target is not other for other in told):
            tell(epoch)
            told.append(target)
