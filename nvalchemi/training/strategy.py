"""TrainingStrategy: the loop over epochs and batches, and the stages at which hooks are called."""

import warnings
from typing import TYPE_CHECKING, Any, Self

from pydantic import PrivateAttr, model_validator

from nvalchemi.distributed.collectives import get_rank, get_world_size
from nvalchemi.training.arguments import MAIN, check_loader, check_predictions, warn_of_lone_ranks
from nvalchemi.training.context import LoopState, TrainContext, loss_metadata
from nvalchemi.training.definition import TrainingDefinition
from nvalchemi.training.modes import training_modes
from nvalchemi.training.optimizers import (
    iter_qualified_named_parameters,
    setup_optimizers,
    step_lr_schedulers,
    step_metric_schedulers,
    step_optimizers,
    zero_gradients,
)
from nvalchemi.training.progress import (
    loader_length,
    rest_of_pass,
    restart_point,
    set_epoch,
    target_steps,
)
from nvalchemi.training.stages import DO_STAGES, TrainingStage
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

    if TYPE_CHECKING:  # fields are given in more forms than the one that they have in the end

        def __init__(self, **fields: Any) -> None: ...

    # pydantic takes microseconds to find a private attribute: steps are given the state
    _state: LoopState = PrivateAttr(default_factory=LoopState)

    @model_validator(mode="after")
    def _register_hooks(self) -> Self:
        for hook in self.hooks:
            self._state.registry.register(hook)
        self._check_performers()
        self._state.registry.call_all("on_register", self)
        return self

    def _check_performers(self) -> None:
        registry = self._state.registry
        performed = {stage: registry.performers(stage) for stage in DO_STAGES}
        for stage, performers in performed.items():
            if len(performers) > 1:
                names = ", ".join(type(hook).__name__ for hook in performers)
                raise ValueError(f"only one hook may do the work of {stage.name}: got {names}")
        self._state.performed = frozenset(stage for stage in DO_STAGES if performed[stage])

    def register_hook(self, hook: Any, stage: TrainingStage | None = None) -> None:
        """Add a hook after the others.

        Parameters
        ----------
        hook : Hook
            Called as ``hook(ctx, stage)``. Inside ``with strategy:`` its context is entered now.
        stage : TrainingStage, optional
            Its stage, instead of its own.

        Raises
        ------
        ValueError, TypeError
            See `nvalchemi.hooks.HookRegistry.register`; or if the work of a stage is done by
            another hook already.
        """
        state = self._state
        state.registry.register(hook, stage)
        try:
            self._check_performers()
        except ValueError:
            state.registry.unregister(hook)
            raise
        self.hooks.append(hook)
        if hasattr(hook, "on_register"):
            hook.on_register(self)
        if state.stack is not None:
            state.registry.enter_one(hook, state.stack)

    # What is asked of it from outside.

    @property
    def epoch(self) -> int:
        """The current epoch, from 0."""
        return self.epoch_count

    @property
    def active_dataloader(self) -> Any:
        """The loader of the current run; hooks at SETUP may replace it."""
        return self._state.loader

    @active_dataloader.setter
    def active_dataloader(self, loader: Any) -> None:
        self._state.loader = loader

    @property
    def optimizers(self) -> list[Any]:
        """Optimizers of the current or last run."""
        return [optimizer for optimizer, _ in self._state.pairs]

    @property
    def lr_schedulers(self) -> list[Any]:
        """Learning-rate schedulers of the current or last run."""
        return [scheduler for _, scheduler in self._state.pairs if scheduler is not None]

    # Contexts.

    def __enter__(self) -> Self:
        state = self._state
        if state.depth == 0:
            state.stack = state.registry.enter()
        state.depth += 1
        return self

    def __exit__(self, *error: object) -> None:
        state = self._state
        state.depth -= 1
        if state.depth == 0:
            stack, state.stack = state.stack, None
            state.ready, state.loader, state.ctx = False, None, TrainContext()
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
            not fit its length, no model has an optimizer, or the devices do not fit the models.
        """
        state = self._state
        with self:
            self._set_up(dataloader)
            length = loader_length(state.loader)
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
            # going on after num_epochs was raised keeps momenta and schedules
            self._begin(keep_optimizers=self.step_count > 0)
            state.validated_at = -1
            state.call(Stage.BEFORE_TRAINING)
            while self.step_count < target:
                self._run_epoch(state, target, length)
            state.call(Stage.AFTER_TRAINING)
            if self.validation_config is not None and state.validated_at != self.step_count:
                self.validate()

    def train_batch(self, batch: Any) -> dict[str, Any]:
        """Train on one batch; inside ``with strategy:`` everything is set up once for many.

        Outside of it hooks are set up for each batch; optimizers go on from one call to the next.

        Returns
        -------
        dict
            Result of the loss function.
        """
        state = self._state
        with self:
            if not state.ready:
                self._set_up(None)
                self._begin(keep_optimizers=True)
            return self._train_step(state, self._to_device(batch))

    def validate(self) -> dict[str, Any]:  # type: ignore[override]
        """Validate now; under several ranks all of them must call it.

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
        state = self._state
        if not state.ready:
            self._place_models()
            state.ctx = self._new_context()
        trained_on = state.ctx.batch
        with ValidationLoop.from_training_strategy(self) as loop:
            summary = loop.execute()
        self.last_validation = state.ctx.validation = summary
        state.ctx.batch = trained_on
        state.validated_at = self.step_count
        step_metric_schedulers(state.pairs, summary)
        state.call(Stage.AFTER_VALIDATION)
        return summary

    def _set_up(self, dataloader: Any) -> None:
        state = self._state
        check_loader(dataloader)
        state.ready = False
        state.loader = dataloader
        state.registry.refresh()
        state.registry.call_all("prepare_strategy", self)
        state.world_size = get_world_size(self.distributed_manager)
        self._place_models()
        state.ctx = self._new_context()
        state.call(Stage.SETUP)
        warn_of_lone_ranks(self.models.values(), state.world_size, state.ctx.global_rank)

    def _place_models(self) -> None:
        distinct = list(dict.fromkeys(self.devices))
        if len(distinct) > 1:
            raise ValueError(
                f"all models must be on one device: got {', '.join(map(str, distinct))}"
            )
        for model in self.models.values():
            model.to(distinct[0])

    def _begin(self, keep_optimizers: bool = False) -> None:
        """Optimizers and modes, once hooks have wrapped the models."""
        if not self.optimizer_configs:
            raise ValueError(
                "optimizer_configs is empty: a model without one is frozen, so nothing would be "
                f"trained; give one for at least one of {sorted(self.models)}"
            )
        state = self._state
        trained = {name: self.models[name] for name in self.optimizer_configs}
        others = [model for name, model in self.models.items() if name not in trained]
        assert state.stack is not None
        state.stack.enter_context(training_modes(trained.values(), others))
        parameters = [
            (id(parameter), parameter.requires_grad)
            for _, parameter in iter_qualified_named_parameters(trained)
        ]
        optimized = (dict(self.optimizer_configs), parameters)
        if not (keep_optimizers and state.optimized == optimized):
            pairs = setup_optimizers(self.models, self.optimizer_configs)
            state.pairs = [pair for group in pairs.values() for pair in group]
            state.optimized = optimized
        state.ctx = self._new_context()
        state.ready = True

    def _new_context(self) -> TrainContext:
        ctx = TrainContext(
            model=self.models.get(MAIN),
            models=self.models,
            global_rank=get_rank(self.distributed_manager),
            workflow=self,
            optimizers=self.optimizers,
            lr_schedulers=self.lr_schedulers,
            validation=self.last_validation,
        )
        ctx.show_counters(self)
        return ctx

    def _normalise_counters(self, length: int | None) -> None:
        self.epoch_count, self.epoch_step_count = restart_point(
            self.batch_count, self.step_count, self.epoch_count, self.epoch_step_count, length
        )
        self.batch_count = self.batch_count or self.step_count
        if not self.global_step_count:
            self.global_step_count = self.step_count * self._state.world_size

    def _run_epoch(self, state: LoopState, target: int, length: int | None) -> None:
        """Pass over the loader once, or what is left of this pass, or until the target."""
        set_epoch(state.loader, self.epoch_count)
        state.ctx.show_counters(self)
        state.call(Stage.BEFORE_EPOCH)
        batches_before, exhausted = self.batch_count, False
        for batch in rest_of_pass(state.loader, self.epoch_step_count, length):
            self._train_step(state, self._to_device(batch))
            if self._due_by_steps(state):
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
            state.ctx.show_counters(self)
            state.call(Stage.AFTER_EPOCH)
            config = self.validation_config
            if config is not None and config.due_after_epoch(self.epoch_count):
                self.validate()

    def _due_by_steps(self, state: LoopState) -> bool:
        config = self.validation_config
        if config is None or config.every_n_steps is None:
            return False
        return self.step_count % config.every_n_steps == 0 and self.step_count != state.validated_at

    # One batch.

    def _train_step(self, state: LoopState, batch: Any) -> dict[str, Any]:
        ctx, call = state.ctx, state.call
        ctx.batch, ctx.loss, ctx.losses = batch, None, None
        call(Stage.BEFORE_BATCH)
        zero_gradients(state.pairs)
        call(Stage.BEFORE_FORWARD)
        model = self.models[MAIN] if self.single_model_input else self.models
        predictions = self.training_fn(model, batch)
        check_predictions(predictions)
        call(Stage.AFTER_FORWARD)
        call(Stage.BEFORE_LOSS)
        targets = self.loss_target_assembler(self.loss_fn, predictions, batch, workflow=self)
        losses: dict[str, Any] = self.loss_fn(
            predictions,
            targets,
            step=self.step_count,
            epoch=self.epoch_count,
            joint_factors=state.joint_factors,
            **loss_metadata(batch),
        )
        ctx.loss, ctx.losses = losses["total_loss"], losses
        call(Stage.AFTER_LOSS)
        call(Stage.BEFORE_BACKWARD)
        if Stage.DO_BACKWARD not in state.performed:
            ctx.loss.backward()
        call(Stage.DO_BACKWARD)
        ctx.loss = losses["total_loss"] = ctx.loss.detach()
        call(Stage.AFTER_BACKWARD)
        call(Stage.BEFORE_OPTIMIZER_STEP)
        if Stage.DO_OPTIMIZER_STEP not in state.performed:
            step_optimizers(state.pairs)
        call(Stage.DO_OPTIMIZER_STEP)
        step_lr_schedulers(state.pairs)
        call(Stage.AFTER_OPTIMIZER_STEP)
        self.step_count += 1
        self.global_step_count += state.world_size
        self.batch_count += 1
        self.epoch_step_count += 1
        ctx.show_counters(self)
        call(Stage.AFTER_BATCH)
        return losses

    def _to_device(self, batch: Any) -> Any:
        return batch.to(self.devices[0], non_blocking=True) if hasattr(batch, "to") else batch
