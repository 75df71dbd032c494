"""The loop of TrainingStrategy: stages, counters, targets, epochs, and what is put back."""

import pytest
import torch
from loop_cases import ADAM, SGD, At, Net, Recorder, batches, loader, strategy, weights
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from nvalchemi.training import (
    DDPHook,
    EnergyMSELoss,
    LinearWeight,
    OptimizerConfig,
    TrainingStage,
    TrainingStrategy,
    ValidationConfig,
)

S = TrainingStage
STEP = [
    S.BEFORE_BATCH,
    S.BEFORE_FORWARD,
    S.AFTER_FORWARD,
    S.BEFORE_LOSS,
    S.AFTER_LOSS,
    S.BEFORE_BACKWARD,
    S.DO_BACKWARD,
    S.AFTER_BACKWARD,
    S.BEFORE_OPTIMIZER_STEP,
    S.DO_OPTIMIZER_STEP,
    S.AFTER_OPTIMIZER_STEP,
    S.AFTER_BATCH,
]
VALIDATION = [S.BEFORE_FORWARD, S.AFTER_FORWARD, S.AFTER_VALIDATION]


def test_stages_are_numbered_in_their_order():
    assert [stage.value for stage in TrainingStage] == list(range(1, 19))
    assert list(TrainingStage) == [
        S.SETUP,
        S.BEFORE_TRAINING,
        S.BEFORE_EPOCH,
        *STEP,
        S.AFTER_EPOCH,
        S.AFTER_TRAINING,
        S.AFTER_VALIDATION,
    ]


def test_order_of_stages_with_validation_after_each_epoch():
    seen = Recorder()
    config = ValidationConfig(validation_data=batches(2), every_n_epochs=1)
    strategy(num_epochs=1, hooks=[seen], validation_config=config).run(batches(1, 1))
    # W29: the weights are those of the validation before, so the final one is left out
    assert seen.stages == [
        S.SETUP,
        S.BEFORE_TRAINING,
        S.BEFORE_EPOCH,
        *STEP,
        *STEP,
        S.AFTER_EPOCH,
        *VALIDATION,
        S.AFTER_TRAINING,
    ]


def test_final_validation_comes_after_the_training():
    seen = Recorder()
    config = ValidationConfig(validation_data=batches(2))
    strategy(num_steps=1, hooks=[seen], validation_config=config).run(batches(1, 1))
    assert seen.stages[-4:] == [S.AFTER_TRAINING, *VALIDATION]


def test_validation_by_steps_comes_after_the_batch():
    seen = Recorder()
    config = ValidationConfig(validation_data=batches(2), every_n_steps=2)
    strategy(num_steps=5, hooks=[seen], validation_config=config).run(batches(1, 1, 1))
    steps, validated = 0, []
    for stage in seen.stages:
        steps += stage is S.AFTER_BATCH
        if stage is S.AFTER_VALIDATION:
            validated.append(steps)
    assert validated == [2, 4, 5]


def test_one_validation_where_step_target_and_cadence_meet():
    seen = Recorder()
    config = ValidationConfig(validation_data=batches(2), every_n_steps=2)
    strategy(num_epochs=2, hooks=[seen], validation_config=config).run(batches(1, 1))
    assert seen.stages.count(S.AFTER_VALIDATION) == 2


def test_result_is_that_of_a_plain_loop():
    data, reference = batches(2, 3, 1), Net()
    optimizer = torch.optim.Adam(reference.parameters(), lr=0.05)
    scheduler = StepLR(optimizer, step_size=2, gamma=0.5)
    for _ in range(3):
        for batch in data:
            optimizer.zero_grad()
            (reference(batch)["energy"] - batch.energy).square().mean().backward()
            optimizer.step()
            scheduler.step()
    model = Net()
    config = OptimizerConfig(
        optimizer_cls=torch.optim.Adam,
        optimizer_kwargs={"lr": 0.05},
        scheduler_cls=StepLR,
        scheduler_kwargs={"step_size": 2, "gamma": 0.5},
    )
    trained = strategy(models=model, optimizer_configs=config, num_epochs=3)
    trained.run(data)
    assert torch.allclose(weights(model), weights(reference), rtol=0, atol=1e-14)
    assert trained.optimizers[0].param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    assert [type(one) for one in trained.lr_schedulers] == [StepLR]


def test_counters_at_each_stage():
    seen = []

    class Counters(Recorder):
        def __call__(self, ctx, stage):
            counts = (ctx.step_count, ctx.batch_count, ctx.epoch_step_count, ctx.epoch)
            seen.append((stage, *counts))

    trained = strategy(num_epochs=2, hooks=[Counters()])
    trained.run(batches(1, 1))
    at = {stage: [row[1:] for row in seen if row[0] is stage] for stage in TrainingStage}
    # the step counts once it is done: the old number up to AFTER_OPTIMIZER_STEP
    assert at[S.BEFORE_BATCH] == [(0, 0, 0, 0), (1, 1, 1, 0), (2, 2, 0, 1), (3, 3, 1, 1)]
    assert at[S.AFTER_OPTIMIZER_STEP] == at[S.BEFORE_BATCH]
    assert at[S.AFTER_BATCH] == [(1, 1, 1, 0), (2, 2, 2, 0), (3, 3, 1, 1), (4, 4, 2, 1)]
    assert at[S.BEFORE_EPOCH] == [(0, 0, 0, 0), (2, 2, 0, 1)]
    assert at[S.AFTER_EPOCH] == [(2, 2, 0, 1), (4, 4, 0, 2)]
    counters = (trained.step_count, trained.batch_count, trained.epoch_count, trained.epoch)
    assert counters == (4, 4, 2, 2)
    assert (trained.global_step_count, trained.epoch_step_count) == (4, 0)


def test_loss_is_attached_from_after_loss_to_before_backward():
    attached, contexts = {}, set()

    class Look(Recorder):
        def __call__(self, ctx, stage):
            contexts.add(id(ctx))
            if stage in STEP:
                attached[stage] = ctx.loss is not None and ctx.loss.requires_grad
            assert ctx.workflow is trained and ctx.model is trained.models["main"]
            assert (ctx.models, ctx.global_rank) == (trained.models, 0)

    trained = strategy(num_steps=2, hooks=[At(S.BEFORE_TRAINING, lambda ctx: contexts.clear())])
    trained.register_hook(Look())
    trained.run(batches(1, 1))
    live = [stage for stage, yes in attached.items() if yes]
    assert live == [S.AFTER_LOSS, S.BEFORE_BACKWARD, S.DO_BACKWARD]
    assert len(contexts) == 1


def test_context_has_losses_optimizers_and_batch():
    seen = []
    data = batches(2)
    hook = At(S.AFTER_BATCH, lambda ctx: seen.append((ctx.batch, ctx.losses, ctx.optimizers)))
    trained = strategy(num_steps=1, hooks=[hook])
    trained.run(data)
    ((batch, losses, optimizers),) = seen
    assert batch is data[0] and optimizers == trained.optimizers
    assert set(losses["per_component_unweighted"]) == {"EnergyMSELoss"}
    assert not losses["total_loss"].requires_grad


# How long.


@pytest.mark.parametrize(
    ("fields", "steps"),
    [
        ({"num_epochs": 3}, 12),
        ({"num_epochs": 1, "epoch_step_modifier": 0.3}, 2),
        ({"num_epochs": 2, "epoch_step_modifier": 1.2}, 10),
        ({"num_steps": 3}, 3),
        ({"num_steps": 9}, 9),
    ],
)
def test_target_is_epochs_times_batches_rounded_up(fields, steps):
    seen = Recorder()
    trained = strategy(**fields, hooks=[seen])
    trained.run(loader(4))
    assert trained.step_count == steps
    assert seen.indices == [step % 4 for step in range(steps)]
    assert (trained.epoch_count, trained.epoch_step_count) == divmod(steps, 4)
    assert seen.stages.count(S.AFTER_EPOCH) == steps // 4


class Unsized:
    def __init__(self, data):
        self.data = data
        self.passes = 0

    def __iter__(self):
        self.passes += 1
        return iter(self.data)


def test_loader_without_length():
    unsized = Unsized(batches(1, 1, 1))
    trained = strategy(num_steps=7)
    trained.run(unsized)
    assert (trained.step_count, trained.epoch_count, unsized.passes) == (7, 2, 3)
    with pytest.raises(ValueError, match="num_epochs requires a sized dataloader"):
        strategy(num_epochs=1).run(Unsized(batches(1)))


def test_iterator_works_while_it_lasts():
    trained = strategy(num_steps=2)
    trained.run(iter(batches(1, 1, 1)))
    assert trained.step_count == 2
    short = strategy(num_steps=4)
    with pytest.raises(ValueError, match="dataloader produced no batches before reaching 4 steps"):
        short.run(iter(batches(1, 1, 1)))
    assert short.step_count == 3


@pytest.mark.parametrize("fields", [{"num_epochs": 1}, {"num_steps": 1}])
def test_empty_loader(fields):
    with pytest.raises(ValueError, match="the dataloader is empty"):
        strategy(**fields).run([])
    with pytest.raises(ValueError, match="the dataloader is empty"):
        strategy(**fields).run(loader(2, batch_size=3, drop_last=True))


def test_a_finished_strategy_warns_and_goes_on_when_there_is_more_to_do():
    # W36: a second run is no silent no-op
    seen, model = Recorder(), Net()
    trained = strategy(models=model, num_epochs=1, hooks=[seen])
    data = loader(3)
    trained.run(data)
    before, calls = weights(model), len(seen.stages)
    with pytest.warns(UserWarning, match="step_count=3 has reached the target of 3 steps"):
        trained.run(data)
    assert torch.equal(weights(model), before)
    assert seen.stages[calls:] == [S.SETUP]
    trained.num_epochs = 3
    trained.run(data)
    assert (trained.step_count, trained.epoch_count) == (9, 3)
    assert seen.indices == [0, 1, 2] * 3


def test_final_validation_after_counters_were_set_back():
    config = ValidationConfig(validation_data=batches(2))
    trained = strategy(num_steps=2, validation_config=config)
    trained.run(batches(1, 1))
    first = trained.last_validation["total_loss"]
    trained.step_count = trained.batch_count = trained.epoch_count = trained.epoch_step_count = 0
    trained.run(batches(1, 1))
    assert trained.last_validation["total_loss"] != first


# Hooks.


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


class Context(Recorder):
    """Notes when it is entered and left, and raises when told to."""

    def __init__(self, name, log, fail=None):
        super().__init__()
        self.name, self.log, self.fail = name, log, fail

    def __enter__(self):
        if self.fail == "enter":
            raise OSError(f"{self.name} can not enter")
        self.log.append(f"+{self.name}")
        return self

    def __exit__(self, *error):
        self.log.append(f"-{self.name}")
        if self.fail == "exit":
            raise OSError(f"{self.name} can not leave")


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


class Failing(Exception):
    pass


def raise_failing(ctx):
    raise Failing


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


# Several models.


def test_named_models_each_with_optimizers():
    models = {"main": Net(), "shift": nn.Linear(1, 1).double(), "frozen": Net()}

    def function(models, batch):
        assert set(models) == {"main", "shift", "frozen"}
        shift = models["shift"](batch.energy.new_ones(batch.num_graphs, 1))
        return {"predicted_energy": models["main"](batch)["energy"] + shift}

    before = {name: weights(model) for name, model in models.items()}
    trained = strategy(
        models=models,
        optimizer_configs={"shift": [SGD], "main": [ADAM]},
        training_fn=function,
    )
    trained.run(batches(2, 2))
    changed = {name: not torch.equal(weights(models[name]), old) for name, old in before.items()}
    assert changed == {"main": True, "shift": True, "frozen": False}
    assert len(trained.optimizers) == 2
    assert isinstance(trained, TrainingStrategy) and not trained.single_model_input


def test_one_named_model_is_passed_by_name():
    seen = []

    def function(models, batch):
        seen.append(set(models))
        return {"predicted_energy": models["net"](batch)["energy"]}

    strategy(models={"net": Net()}, optimizer_configs={"net": SGD}, training_fn=function).run(
        batches(1)
    )
    assert seen == [{"net"}, {"net"}]


def test_nothing_to_optimize_is_told_before_the_first_step():
    with pytest.raises(ValueError, match="optimizer_configs is empty: .* at least one of.*main"):
        strategy(optimizer_configs={}).run(batches(1))
    model = Net().requires_grad_(False)
    with pytest.raises(ValueError, match="'main' has no trainable parameters"):
        strategy(models=model).run(batches(1))


def test_models_on_several_devices_are_refused():
    trained = strategy(
        models={"a": Net(), "b": Net()},
        optimizer_configs={"a": SGD},
        devices=["cpu", "meta"],
        training_fn=lambda models, batch: {},
    )
    with pytest.raises(ValueError, match="all models must be on one device: got cpu, meta"):
        trained.run(batches(1))


# Losses and schedulers.


def test_schedules_get_step_and_epoch():
    seen = []
    by_step = LinearWeight(start=1.0, end=0.0, num_steps=10)
    by_epoch = LinearWeight(start=0.0, end=4.0, num_steps=4, per_epoch=True)
    loss = by_step * EnergyMSELoss() + by_epoch * EnergyMSELoss(ignore_nonfinite=True)
    hook = At(S.AFTER_LOSS, lambda ctx: seen.append(ctx.losses["per_component_raw_weight"]))
    strategy(loss_fn=loss, hooks=[hook], num_epochs=2).run(batches(1, 1))
    names = ("EnergyMSELoss_0", "EnergyMSELoss_1")
    assert [one[names[0]] for one in seen] == pytest.approx([1.0, 0.9, 0.8, 0.7])
    assert [one[names[1]] for one in seen] == [0.0, 0.0, 1.0, 1.0]


def test_plateau_scheduler_follows_the_validation():
    plateau = OptimizerConfig(
        optimizer_cls=torch.optim.SGD,
        optimizer_kwargs={"lr": 0.01},
        scheduler_cls=ReduceLROnPlateau,  # a falling loss is no gain if it shall rise
        scheduler_kwargs={"mode": "max", "factor": 0.5, "patience": 0},
    )
    rates = []
    config = ValidationConfig(validation_data=batches(2), every_n_epochs=1)
    hook = At(S.AFTER_VALIDATION, lambda ctx: rates.append(ctx.optimizers[0].param_groups[0]["lr"]))
    trained = strategy(
        optimizer_configs=plateau, validation_config=config, hooks=[hook], num_epochs=3
    )
    trained.run(batches(1, 1))
    assert rates == [0.01, 0.005, 0.0025]
    assert trained.last_validation["num_batches"] == 1


def test_assembler_and_missing_label():
    def assemble(loss_fn, predictions, batch, **context):
        assert context["workflow"] is trained
        return {"energy": torch.zeros_like(batch.energy)}

    model = Net()
    trained = strategy(models=model, loss_target_assembler=assemble, num_steps=30)
    trained.run(batches(4))
    assert model(batches(4)[0])["energy"].abs().mean() < Net()(batches(4)[0])["energy"].abs().mean()
    with pytest.raises(AttributeError, match="Batch is missing target attribute 'charge'"):
        strategy(loss_fn=EnergyMSELoss(target_key="charge")).run(batches(1))


# Epochs and samplers.


class Tells:
    """Notes the epochs that it is told."""

    def __init__(self, data=()):
        self.data = data
        self.epochs = []

    def set_epoch(self, epoch):
        self.epochs.append(epoch)

    def __iter__(self):
        return iter(self.data)

    def __len__(self):
        return len(self.data)


def test_set_epoch_reaches_loader_and_all_samplers():
    # W36: also the loader itself
    data = Tells(batches(1, 1))
    data.sampler, data.batch_sampler = Tells(), Tells()
    data.batch_sampler.sampler = Tells()
    strategy(num_epochs=3).run(data)
    every = (data, data.sampler, data.batch_sampler, data.batch_sampler.sampler)
    assert [one.epochs for one in every] == [[0, 1, 2]] * 4


def test_set_epoch_is_told_once_to_each():
    data = Tells(batches(1))
    data.sampler = data.batch_sampler = data
    strategy(num_epochs=1, epoch_count=4, batch_count=4, step_count=0).run(data)
    assert data.epochs == [4]


@pytest.mark.parametrize("shuffle", [False, True])
def test_torch_sampler_draws_a_new_order_each_epoch(shuffle):
    from torch.utils.data import BatchSampler, DistributedSampler

    plain = loader(6)
    sampler = DistributedSampler(plain.dataset, num_replicas=1, rank=0, shuffle=shuffle)
    seen = Recorder()
    data = loader(6, batch_sampler=BatchSampler(sampler, 1, False), batch_size=None)
    strategy(hooks=[seen], num_epochs=2).run(data)
    first, second = seen.indices[:6], seen.indices[6:]
    assert sorted(first) == sorted(second) == list(range(6))
    assert (first != second) is shuffle


# Going on in the middle of an epoch.


def plain_torch_loader(size):
    return torch.utils.data.DataLoader(list(range(size)), batch_size=1, collate_fn=one_batch)


def one_batch(numbers):
    from loop_cases import structure

    from nvalchemi.data import Batch

    batch = Batch.from_data_list([structure(number) for number in numbers])
    batch.metadata["index"] = torch.tensor(numbers)
    return batch


@pytest.mark.parametrize("make", [loader, plain_torch_loader])
@pytest.mark.parametrize("stop", range(1, 9))
def test_counters_of_a_stopped_training_go_on_exactly(make, stop):
    straight, model = Net(), Net()
    strategy(models=straight, num_steps=9).run(make(4))
    first, second = Recorder(), Recorder()
    begun = strategy(models=model, num_steps=stop, hooks=[first])
    begun.run(make(4))
    names = ("step_count", "batch_count", "epoch_count", "epoch_step_count", "global_step_count")
    counters = {name: getattr(begun, name) for name in names}
    rest = strategy(models=model, num_steps=9, hooks=[second], **counters)
    rest.run(make(4))
    assert first.indices + second.indices == [step % 4 for step in range(9)]
    assert torch.equal(weights(model), weights(straight))
    assert {name: getattr(rest, name) for name in names} == {
        "step_count": 9,
        "batch_count": 9,
        "epoch_count": 2,
        "epoch_step_count": 1,
        "global_step_count": 9,
    }


@pytest.mark.parametrize("make", [loader, plain_torch_loader])
@pytest.mark.parametrize(
    ("counters", "first"),
    [
        ({"step_count": 6}, 2),  # a count of steps alone
        ({"batch_count": 6}, 2),
        ({"step_count": 2}, 2),
        ({"step_count": 4}, 0),
        ({"step_count": 6, "epoch": 1}, 2),
        ({"step_count": 6, "epoch_count": 1, "epoch_step_count": 2}, 2),
        ({"step_count": 1, "batch_count": 6}, 2),  # steps that were left out count as batches
    ],
)
def test_counters_set_by_hand(make, counters, first):
    seen = Recorder()
    trained = strategy(num_steps=12, hooks=[seen], **counters)
    trained.run(make(4))
    steps = 12 - counters.get("step_count", 0)
    assert seen.indices == [(first + step) % 4 for step in range(steps)]
    done = counters.get("batch_count", counters.get("step_count", 0)) + steps
    assert (trained.epoch_count, trained.epoch_step_count) == divmod(done, 4)


def test_batches_of_a_resumed_epoch_are_not_read_again():
    read = []
    data = loader(4, prefetch_factor=0)
    load = data.dataset.load_batches
    data.dataset.load_batches = lambda lists: read.extend(lists) or load(lists)
    strategy(num_steps=4, step_count=2).run(data)
    assert read == [[2], [3]]


def test_counters_that_contradict_the_loader():
    for counters in (
        {"epoch_count": 2, "step_count": 3},
        {"epoch_count": 1, "epoch_step_count": 2, "step_count": 7},
        {"epoch_count": 2},
        {"epoch_step_count": 6, "step_count": 6},
    ):
        with pytest.raises(ValueError, match="restart counters are inconsistent"):
            strategy(num_steps=50, **counters).run(loader(4))


def test_an_epoch_that_was_done_but_not_closed_is_closed():
    seen = Recorder()
    trained = strategy(num_steps=5, hooks=[seen], step_count=4, epoch_step_count=4)
    trained.run(loader(4))
    assert seen.stages[2:5] == [S.BEFORE_EPOCH, S.AFTER_EPOCH, S.BEFORE_EPOCH]
    assert seen.indices == [0]
    assert (trained.epoch_count, trained.epoch_step_count) == (1, 1)


# One batch at a time.


@pytest.mark.parametrize("inside", [True, False])
def test_train_batch_does_the_steps_of_run(inside):
    # outside of `with` the optimizers must keep their state between calls
    run, single, data = Net(), Net(), batches(2, 1, 3)
    strategy(models=run, optimizer_configs=ADAM, num_epochs=2).run(data)
    trained = strategy(models=single, optimizer_configs=ADAM, num_epochs=2)
    if inside:
        with trained:
            results = [trained.train_batch(batch) for batch in data * 2]
    else:
        results = [trained.train_batch(batch) for batch in data * 2]
    assert torch.equal(weights(single), weights(run))
    assert (trained.step_count, trained.batch_count) == (6, 6)
    assert all(not one["total_loss"].requires_grad for one in results)
    assert results[-1]["total_loss"] < results[0]["total_loss"]


def test_train_batch_sets_up_once_inside_with():
    seen, log = Recorder(), []
    trained = strategy(hooks=[seen, Context("a", log)])
    with trained:
        for batch in batches(1, 1, 1):
            trained.train_batch(batch)
    assert seen.stages == [S.SETUP, *STEP, *STEP, *STEP]
    assert log == ["+a", "-a"]
    seen.stages.clear()
    trained.train_batch(batches(1)[0])
    assert seen.stages == [S.SETUP, *STEP]


def test_train_batch_builds_new_optimizers_for_other_parameters():
    model = Net()
    trained = strategy(models=model, optimizer_configs=ADAM)
    trained.train_batch(batches(1)[0])
    trained.models["main"] = other = Net()
    trained.train_batch(batches(1)[0])
    assert not torch.equal(weights(other), weights(Net()))


def test_train_batch_after_a_failed_set_up_sets_up_again():
    armed, model = [True], Net()

    def fail_once(ctx):
        if armed:
            armed.clear()
            raise Failing

    trained = strategy(models=model, hooks=[At(S.SETUP, fail_once)])
    with trained:
        with pytest.raises(Failing):
            trained.train_batch(batches(1)[0])
        trained.train_batch(batches(1)[0])
    assert not torch.equal(weights(model), weights(Net()))


def test_train_batch_puts_modes_back_after_an_error():
    model = Net().eval()
    trained = strategy(models=model, hooks=[At(S.AFTER_LOSS, raise_failing)])
    with pytest.raises(Failing):
        trained.train_batch(batches(1)[0])
    assert not any(module.training for module in model.modules())


def test_ddp_hook_does_nothing_in_one_process():
    model, plain = Net(), Net()
    data = loader(4, shuffle=False)
    sampler = data.sampler
    trained = strategy(models=model, hooks=[DDPHook()])
    trained.run(data)
    strategy(models=plain).run(loader(4))
    assert torch.equal(weights(model), weights(plain))
    assert trained.models["main"] is model and data.sampler is sampler
