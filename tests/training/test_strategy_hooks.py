"""Hooks in the loop, their contexts, and what is put back after a run or an error."""

import pytest
import torch
from loop_cases import (
    SGD,
    At,
    Context,
    Failing,
    Net,
    Recorder,
    batches,
    loader,
    raise_failing,
    strategy,
    weights,
)

from nvalchemi.training import TrainingStage, ValidationConfig

S = TrainingStage


def test_frequency_counts_steps_and_at_epoch_stages_epochs():
    # W32: with 3 batches an epoch, every 5th epoch would never come by steps
    steps, after, before = [], [], []
    hooks = [
        At(S.AFTER_BATCH, lambda ctx: steps.append(ctx.step_count), frequency=4),
        At(S.AFTER_EPOCH, lambda ctx: after.append(ctx.epoch), frequency=5),
        At(S.BEFORE_EPOCH, lambda ctx: before.append(ctx.epoch), frequency=2),
    ]
    strategy(num_epochs=10, hooks=hooks, models=Net()).run(batches(1, 1, 1))
    assert steps == [4, 8, 12, 16, 20, 24, 28]
    assert after == [5, 10]
    assert before == [0, 2, 4, 6, 8]


@pytest.mark.parametrize(
    "stage", [S.SETUP, S.BEFORE_TRAINING, S.AFTER_TRAINING, S.AFTER_VALIDATION]
)
def test_frequency_does_not_swallow_stages_that_come_once(stage):
    calls = []
    config = ValidationConfig(validation_data=batches(1))
    hook = At(stage, lambda ctx: calls.append(ctx.step_count), frequency=100)
    trained = strategy(num_steps=3, hooks=[hook], validation_config=config)
    trained.run(batches(1))
    assert len(calls) == 1


def test_observer_of_all_stages_never_switches_off_the_training():
    # W35: answering True to DO_BACKWARD and DO_OPTIMIZER_STEP is no claim to do their work
    observed, plain = Net(), Net()
    strategy(models=observed, hooks=[Recorder(), Recorder()]).run(batches(1, 2))
    strategy(models=plain).run(batches(1, 2))
    assert torch.equal(weights(observed), weights(plain))
    assert not torch.equal(weights(observed), weights(Net()))


def test_hook_of_a_do_stage_does_the_work():
    model = Net()
    done = []

    def backward(ctx):
        (2 * ctx.loss).backward()
        done.append("backward")

    def step(ctx):
        done.append("step")  # and leaves the weights alone

    hooks = [At(S.DO_BACKWARD, backward), At(S.DO_OPTIMIZER_STEP, step)]
    strategy(models=model, hooks=hooks, num_steps=2).run(batches(1, 1))
    assert done == ["backward", "step"] * 2
    assert torch.equal(weights(model), weights(Net()))
    assert any(parameter.grad is not None for parameter in model.parameters())


def test_two_hooks_can_not_do_the_same_work():
    def hook():
        return At(S.DO_BACKWARD, lambda ctx: ctx.loss.backward())

    with pytest.raises(ValueError, match="only one hook may do the work of DO_BACKWARD: got At"):
        strategy(hooks=[hook(), hook()])
    model = Net()
    trained = strategy(models=model, hooks=[hook()], num_steps=1)
    with pytest.raises(ValueError, match="only one hook may do the work of DO_BACKWARD"):
        trained.register_hook(hook())
    trained.run(batches(1))  # the refused one has left no trace
    assert len(trained.hooks) == 1
    assert not torch.equal(weights(model), weights(Net()))


def test_register_hook_and_on_register():
    told = []

    class Told(At):
        def on_register(self, workflow):
            told.append(workflow)

    first = Told(S.AFTER_BATCH, lambda ctx: None)
    trained = strategy(hooks=[first])
    calls = []
    trained.register_hook(Told(S.AFTER_BATCH, lambda ctx: calls.append(1)), S.AFTER_EPOCH)
    assert told == [trained, trained]
    trained.run(batches(1, 1))
    assert len(calls) == 2  # at the given stage alone
    with pytest.raises(ValueError, match="registered already"):
        trained.register_hook(first)
    with pytest.raises(ValueError, match="registered already"):
        strategy(hooks=[first, first])


def test_setup_hook_replaces_loader_and_prepare_comes_first():
    order = []

    class Prepare(Recorder):
        def prepare_strategy(self, strategy):
            order.append(("prepare", strategy.active_dataloader))

        def __call__(self, ctx, stage):
            if stage is S.SETUP:
                order.append(("setup", ctx.workflow.active_dataloader))
                ctx.workflow.active_dataloader = replacement

    given, replacement = batches(1), batches(1, 1, 1)
    trained = strategy(num_epochs=1, hooks=[Prepare()])
    trained.run(given)
    assert order == [("prepare", given), ("setup", given)]
    assert trained.step_count == 3
    assert trained.active_dataloader is None


class Closed(At):
    def __init__(self, log):
        super().__init__(S.SETUP, lambda ctx: None)
        self.log = log

    def close(self):
        self.log.append("closed")


def test_contexts_of_hooks_surround_the_run():
    log = []
    hooks = [Context("a", log), Closed(log), Context("b", log)]
    hooks.append(At(S.BEFORE_TRAINING, lambda ctx: log.append("run")))
    trained = strategy(hooks=hooks, num_epochs=1)
    trained.run(batches(1))
    assert log == ["+a", "+b", "run", "-b", "closed", "-a"]
    log.clear()
    trained.num_epochs = 3
    with trained:
        with trained:
            trained.run(batches(1))
        late = Context("late", log)
        trained.register_hook(late)
    assert log == ["+a", "+b", "run", "+late", "-late", "-b", "closed", "-a"]


def test_hooks_are_left_when_another_fails():
    # W34: all that were entered are left, whoever fails
    log = []
    with pytest.raises(OSError, match="b can not enter"):
        strategy(hooks=[Context("a", log), Context("b", log, "enter")]).run(batches(1))
    assert log == ["+a", "-a"]
    log.clear()
    trained = strategy(hooks=[Context("a", log), Context("b", log, "exit")])
    with pytest.raises(OSError, match="b can not leave"):
        trained.run(batches(1))
    assert log == ["+a", "+b", "-b", "-a"]
    assert trained.active_dataloader is None


# What is put back.

FAILING_STAGES = [S.SETUP, S.BEFORE_TRAINING, S.AFTER_LOSS, S.AFTER_EPOCH, S.AFTER_TRAINING]


@pytest.mark.parametrize("stage", [*FAILING_STAGES, None])
def test_everything_is_put_back_also_after_an_error(stage):
    main, teacher, loaders = Net(), Net(), []
    main.net[1].eval()
    teacher.net[0].bias.requires_grad_(False)
    teacher.net[2].eval()
    modes = [[module.training for module in model.modules()] for model in (main, teacher)]
    grads = [[p.requires_grad for p in model.parameters()] for model in (main, teacher)]
    hooks = [] if stage is None else [At(stage, raise_failing)]
    trained = strategy(
        models={"main": main, "teacher": teacher},
        optimizer_configs={"main": SGD},
        training_fn=lambda models, batch: {"predicted_energy": models["main"](batch)["energy"]},
        hooks=hooks,
    )

    def look(ctx):
        loaders.append(trained.active_dataloader)
        assert main.training and not main.net[1].training  # as the user wanted it
        assert not any(module.training for module in teacher.modules())
        assert not any(parameter.requires_grad for parameter in teacher.parameters())

    trained.register_hook(At(S.BEFORE_BATCH, look))
    data = batches(1, 1)
    if stage is None:
        trained.run(data)
    else:
        with pytest.raises(Failing):
            trained.run(data)
    assert all(one is data for one in loaders)
    assert trained.active_dataloader is None
    assert modes == [[module.training for module in model.modules()] for model in (main, teacher)]
    assert grads == [[p.requires_grad for p in model.parameters()] for model in (main, teacher)]


def test_a_run_that_failed_goes_on_where_it_stopped():
    armed = [True]

    def fail_once(ctx):
        if armed and ctx.step_count == 5:
            armed.clear()
            raise Failing

    seen = Recorder()
    data = loader(4, prefetch_factor=2)
    trained = strategy(num_epochs=3, hooks=[seen, At(S.BEFORE_FORWARD, fail_once)])
    with pytest.raises(Failing):
        trained.run(data)
    assert seen.indices == [0, 1, 2, 3, 0]
    trained.run(data)
    assert seen.indices == [0, 1, 2, 3] * 3


def test_a_model_in_evaluation_mode_is_trained_in_training_mode():
    model = Net(dropout=0.5).eval()
    modes = []
    hook = At(S.BEFORE_FORWARD, lambda ctx: modes.extend(m.training for m in model.modules()))
    strategy(models=model, hooks=[hook], num_steps=1).run(batches(1))
    assert modes and all(modes)
    assert not any(module.training for module in model.modules())
