"""The loop of TrainingStrategy: stages, counters, targets, models, losses and schedulers."""

import pytest
import torch
from loop_cases import ADAM, SGD, STEP, At, Net, Recorder, batches, loader, strategy, weights
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from nvalchemi.training import (
    EnergyMSELoss,
    LinearWeight,
    OptimizerConfig,
    TrainingStage,
    TrainingStrategy,
    ValidationConfig,
)

S = TrainingStage
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
