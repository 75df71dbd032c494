"""What a TrainingStrategy accepts, and how mistakes are told."""

import functools

import pytest
import torch
from loop_cases import SGD, Net, batches, strategy
from pydantic import ValidationError
from torch import nn

from nvalchemi.distributed import DistributedManager
from nvalchemi.training import (
    ComposedLossFunction,
    EnergyMSELoss,
    ForceMSELoss,
    OptimizerConfig,
    TrainingStage,
    TrainingStrategy,
    ValidationConfig,
    default_training_fn,
)


def two_models(**fields):
    named = {"models": {"a": Net(), "b": Net()}, "optimizer_configs": {"a": SGD}}
    return strategy(**{**named, **fields})


def test_defaults():
    trained = TrainingStrategy(
        models=Net(), training_fn=default_training_fn, loss_fn=EnergyMSELoss(), num_steps=1
    )
    assert trained.hooks == [] and trained.optimizer_configs == {}
    assert trained.devices == [torch.device("cpu")] and trained.epoch_step_modifier == 1.0
    names = ("step_count", "global_step_count", "batch_count", "epoch_count", "epoch_step_count")
    assert [getattr(trained, name) for name in names] == [0] * 5
    for name in ("distributed_manager", "validation_config", "last_validation", "num_epochs"):
        assert getattr(trained, name) is None
    assert trained.optimizers == trained.lr_schedulers == []
    assert trained.active_dataloader is None


def test_forms_of_models_and_optimizers():
    model = Net()
    single = strategy(models=model, optimizer_configs=[SGD, SGD])
    assert single.models == {"main": model} and single.single_model_input
    assert single.optimizer_configs == {"main": [SGD, SGD]}
    given = {"a": model, "b": Net()}
    named = strategy(models=given, optimizer_configs={"a": SGD, "b": (SGD,)})
    assert named.models == given and not named.single_model_input
    assert named.optimizer_configs == {"a": [SGD], "b": [SGD]}
    named.models["a"] = Net()  # as DDPHook does; the user's dict stays
    assert given["a"] is model
    in_dict = strategy(models=nn.ModuleDict(given), optimizer_configs={"a": SGD})
    assert set(in_dict.models) == {"a", "b"} and not in_dict.single_model_input


@pytest.mark.parametrize("value", ["cpu", torch.device("cpu"), ["cpu"], (torch.device("cpu"),)])
def test_forms_of_devices(value):
    assert strategy(devices=value).devices == [torch.device("cpu")]


def test_forms_of_losses():
    leaf = strategy(loss_fn=ForceMSELoss())
    assert isinstance(leaf.loss_fn, ComposedLossFunction)
    composed = EnergyMSELoss() + 10 * ForceMSELoss()
    assert strategy(loss_fn=composed).loss_fn is composed


def test_epoch_is_another_name_of_epoch_count():
    trained = strategy(epoch=3)
    assert trained.epoch_count == trained.epoch == 3
    trained.epoch_count = 4
    assert trained.epoch == 4
    with pytest.raises(ValidationError):
        strategy(epoch=3, epoch_count=3)


def test_manager_is_kept():
    trained = strategy(distributed_manager=DistributedManager)
    assert trained.distributed_manager is DistributedManager


def three(model, batch, more):
    return {}


def one(model):
    return {}


def keyword(model, batch, *, more):
    return {}


def hook_that_steps():
    class Hook:
        frequency = 1
        stage = TrainingStage.DO_OPTIMIZER_STEP

        def __call__(self, ctx, stage):
            pass

    return Hook()


NO_CONFIG = r"optimizer_configs\['main'\] must be .* at least one"
EXACTLY = "training_fn must accept exactly the two arguments"


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"num_epochs": None}, "Exactly one of num_epochs or num_steps must be set: got num_e"),
        ({"num_epochs": 1, "num_steps": 1}, "Exactly one of num_epochs or num_steps must be set"),
        ({"num_epochs": 0}, "num_epochs\n .*greater than or equal to 1"),
        ({"num_epochs": True}, "num_epochs\n .*valid integer"),
        ({"num_epochs": None, "num_steps": -1}, "num_steps\n .*greater than or equal to 1"),
        ({"epoch_step_modifier": 0}, "epoch_step_modifier\n .*greater than 0"),
        ({"optimizer_configs": {"x": SGD}}, "optimizer_configs key 'x' is not present in models"),
        (
            {"optimizer_configs": {"main": []}},
            NO_CONFIG,
        ),
        ({"optimizer_configs": []}, NO_CONFIG),
        ({"optimizer_configs": {"main": 3}}, r"optimizer_configs\['main'\] must be .*: got 3"),
        ({"optimizer_configs": [torch.optim.SGD]}, r"must be an OptimizerConfig or a list"),
        ({"optimizer_configs": None}, "optimizer_configs must be an OptimizerConfig, a list"),
        ({"optimizer_configs": torch.optim.SGD}, "optimizer_configs must be an OptimizerConfig"),
        ({"devices": []}, "devices must contain at least one torch.device"),
        (
            {"devices": ["cpu", "cpu"]},
            "one for each of the 1 models: got 2",
        ),
        ({"devices": "gpu"}, "devices must hold torch devices: got 'gpu'"),
        ({"devices": None}, "devices must contain at least one torch.device"),
        ({"training_fn": None}, "training_fn must be provided explicitly"),
        ({"training_fn": three}, EXACTLY + r".*got three\(model, batch, more\)"),
        ({"training_fn": one}, EXACTLY + r".*got one\(model\)"),
        ({"training_fn": keyword}, EXACTLY),
        ({"training_fn": 3}, r"training_fn must be a function \(model, batch\): got 3"),
        ({"training_fn": "no.such.function"}, "'no.such.function' can not be imported"),
        ({"training_fn": "default_training_fn"}, "'default_training_fn' can not be imported"),
        ({"loss_fn": nn.MSELoss()}, r"loss_fn must be a .* leaf loss such as .*: got MSELoss"),
        ({"loss_fn": None}, "loss_fn must be a ComposedLossFunction or a leaf loss"),
        ({"models": {}}, "models must be a Module or a dict of them, at least one: got none"),
        ({"models": None}, "models must be a Module or a dict of them"),
        ({"models": [Net()]}, "models must be a Module or a dict of them, .*: got list"),
        ({"models": {"main": 3}}, r"models\['main'\] must be a torch.nn.Module: got int"),
        ({"num_epoch": 3}, "no argument 'num_epoch'; did you mean 'num_epochs'"),
        ({"step_count": -1}, "step_count\n .*greater than or equal to 0"),
        (
            {"hooks": [hook_that_steps(), hook_that_steps()]},
            "only one hook may do the work of DO_OPTIMIZER_STEP: got Hook, Hook",
        ),
    ],
)
def test_mistakes_are_told_at_construction(fields, sentence):
    with pytest.raises(ValidationError, match=sentence) as caught:
        strategy(**fields)
    assert isinstance(caught.value, ValueError)
    # the sentence, and not models written out in full
    assert "Linear(" not in str(caught.value) and "input_value" not in str(caught.value)


@pytest.mark.parametrize("left_out", ["models", "training_fn", "loss_fn"])
def test_what_is_required(left_out):
    fields = {"models": Net(), "training_fn": default_training_fn, "loss_fn": EnergyMSELoss()}
    del fields[left_out]
    with pytest.raises(ValidationError, match=left_out):
        TrainingStrategy(num_steps=1, **fields)


def test_unnamed_optimizers_for_named_models():
    with pytest.raises(ValidationError, match="must be a dict by model name"):
        two_models(optimizer_configs=SGD)
    with pytest.raises(ValidationError, match="must be a dict by model name"):
        two_models(optimizer_configs=[SGD])


def test_devices_for_named_models():
    assert len(two_models(devices=["cpu", "cpu"]).devices) == 2
    with pytest.raises(ValidationError, match="each of the 2 models: got 3"):
        two_models(devices=["cpu"] * 3)


class Callable:
    def __call__(self, model, batch):
        return default_training_fn(model, batch)

    def method(self, model, batch):
        return default_training_fn(model, batch)


def with_option(model, batch, scale=1.0):
    return default_training_fn(model, batch)


@pytest.mark.parametrize(
    "function",
    [
        Callable(),
        Callable().method,
        with_option,
        functools.partial(with_option, scale=2.0),
        lambda *arguments: default_training_fn(*arguments),
        "nvalchemi.training.default_training_fn",
    ],
)
def test_functions_that_take_two_arguments(function):
    trained = strategy(training_fn=function, num_steps=1)
    trained.run(batches(2))
    assert trained.step_count == 1


def test_default_training_fn_prefixes_what_there_is():
    class Model(nn.Module):
        def forward(self, batch):
            return {"energy": batch, "stress": None}

    assert default_training_fn(Model(), 3) == {"predicted_energy": 3}


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"validation_data": iter(batches(1))}, "can be passed over again: got list_iterator"),
        ({"validation_data": (b for b in batches(1))}, "passed over again: got generator"),
        ({"validation_data": 3}, "must be a loader or a list of batches .*: got int"),
        ({"validation_data": batches(2)[0]}, "put the Batch in a list"),
        ({"every_n_epochs": 1, "every_n_steps": 1}, "exclude each other: give one"),
        ({"every_n_epochs": 0}, "greater than or equal to 1"),
        ({"every_n_steps": True}, "valid integer"),
        ({"grad_mode": "on"}, "'auto', 'enabled' or 'disabled'"),
        ({"use_ema": True}, "'auto', 'always' or 'never'"),
        ({"validation_fn": three}, "validation_fn must accept exactly the two arguments"),
        ({"validation_fn": "no.such"}, "validation_fn 'no.such' can not be imported"),
        ({"loss_fn": nn.MSELoss()}, "loss_fn must be a"),
        (
            {"validation_dataset": []},
            "no argument 'validation_dataset'; did you mean 'validation_data'",
        ),
    ],
)
def test_mistakes_in_a_validation_config(fields, sentence):
    with pytest.raises(ValidationError, match=sentence) as caught:
        ValidationConfig(**{"validation_data": batches(1), **fields})
    assert "input_value" not in str(caught.value)


def test_validation_config_defaults():
    config = ValidationConfig(validation_data=batches(1), loss_fn=EnergyMSELoss())
    assert isinstance(config.loss_fn, ComposedLossFunction)
    assert (config.grad_mode, config.set_eval, config.name) == ("auto", True, "validation")
    assert (config.use_ema, config.use_mixed_precision) == ("auto", "auto")
    assert config.every_n_epochs is config.every_n_steps is config.batch_callback is None


def test_a_strategy_does_not_share_its_lists():
    hooks = []
    config = OptimizerConfig(optimizer_cls=torch.optim.SGD, optimizer_kwargs={"lr": 1.0})
    trained = strategy(hooks=hooks, optimizer_configs=config)
    trained.register_hook(hook_that_steps())
    assert hooks == [] and len(trained.hooks) == 1
