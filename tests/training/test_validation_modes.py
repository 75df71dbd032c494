"""Gradients and modes during a validation, and that it changes nothing."""

import math

import pytest
import torch
from loop_cases import At, Net, Recorder, batches, loader, strategy, weights
from torch import nn
from validation_cases import DATA, Custom, cut, potential, validating

from nvalchemi.data.datapipes import DataLoader
from nvalchemi.models import DemoModel, DemoModelWrapper, MLPPotential
from nvalchemi.training import (
    EnergyMAELoss,
    EnergyMSELoss,
    ForceMSELoss,
    TrainingStage,
    ValidationConfig,
    evaluating,
)

S = TrainingStage


# Gradients.


class AutogradForces(nn.Module):
    """Forces by autograd without a word about it: no model_config."""

    def __init__(self):
        super().__init__()
        self.net = Net()

    def forward(self, batch):
        positions = batch.positions.detach().requires_grad_()
        energy = self.net(batch.with_fields("atom", {"positions": positions}))["energy"]
        return {"energy": energy, "forces": -torch.autograd.grad(energy.sum(), positions)[0]}


@pytest.mark.parametrize(
    "model", [AutogradForces(), DemoModelWrapper(DemoModel().double()), potential()]
)
@pytest.mark.parametrize(
    "loss", [EnergyMSELoss(), EnergyMAELoss(), EnergyMSELoss() + ForceMSELoss()]
)
def test_model_with_autograd_forces_validates_in_auto_mode(model, loss):
    # W31: an energy loss alone does not tell that the model needs autograd
    assert math.isfinite(
        validating(cut(DATA, [5, 5]), models=model, loss_fn=loss).validate()["total_loss"]
    )


def test_loss_that_says_nothing_is_evaluated_with_autograd():
    # W31: and not refused at the first validation, after the training steps were done
    loss = Custom(target_key="energy", prediction_key="predicted_energy")
    assert loss.requires_eval_grad is None
    model = DemoModelWrapper(DemoModel().double(), outputs=("energy",))
    assert records(model, loss) == [True]


def records(model, loss, **fields):
    """Whether autograd recorded, for each batch."""
    seen = []

    def function(model, batch):
        seen.append(torch.is_grad_enabled())
        return {f"predicted_{name}": value for name, value in model(batch).items()}

    data = cut(DATA, [10])
    validating(data, models=model, loss_fn=loss, validation_fn=function, **fields).validate()
    assert torch.is_grad_enabled()
    return seen


def test_autograd_records_only_where_it_is_needed():
    plain = DemoModelWrapper(DemoModel().double(), outputs=("energy",))
    assert records(plain, EnergyMSELoss()) == [False]
    assert records(potential(), EnergyMSELoss()) == [True]
    assert records(Net(), EnergyMSELoss()) == [True]  # no model_config
    assert records(potential(), ForceMSELoss()) == [True]
    assert records(plain, EnergyMSELoss(), grad_mode="enabled") == [True]
    assert records(Net(), EnergyMSELoss(), grad_mode="disabled") == [False]


def test_weights_and_gradients_are_left_alone():
    model = MLPPotential(hidden_features=4).double()
    batch = cut(DATA, [10])[0]
    model(batch)["forces"].square().sum().backward()
    before = [parameter.grad.clone() for parameter in model.parameters()]
    old = weights(model)
    validating([batch], models=model).validate()
    assert torch.equal(weights(model), old)
    assert all(torch.equal(p.grad, was) for p, was in zip(model.parameters(), before))


# Modes.


def test_models_are_in_evaluation_mode_and_put_back():
    # W30: a part that is in evaluation mode stays so
    model = Net(dropout=0.5)
    model.net[0].eval()
    before = [module.training for module in model.modules()]
    seen = []
    data = cut(DATA, [5, 5])
    fields = {"models": model, "loss_fn": EnergyMSELoss()}

    def look():
        return [At(S.BEFORE_FORWARD, lambda ctx: seen.append(model.net[1].training))]

    first = validating(data, hooks=look(), **fields).validate()
    assert validating(data, **fields).validate() == first  # no dropout
    assert seen == [False, False]
    assert [module.training for module in model.modules()] == before
    validating(data, hooks=look(), set_eval=False, **fields).validate()
    assert seen[2:] == [True, True]

    def fail(model, batch):
        raise KeyError("in the middle")

    with pytest.raises(KeyError):
        validating(data, validation_fn=fail, **fields).validate()
    assert [module.training for module in model.modules()] == before
    with evaluating(model):
        validating(data, **fields).validate()
        assert not model.training


def test_training_goes_on_in_training_mode_after_a_validation():
    model, modes = Net(dropout=0.5), []
    hook = At(S.BEFORE_BATCH, lambda ctx: modes.append(model.net[1].training))
    config = ValidationConfig(validation_data=batches(2), every_n_steps=1)
    strategy(models=model, hooks=[hook], validation_config=config, num_steps=3).run(batches(1))
    assert modes == [True, True, True]


def test_validation_does_not_change_the_training():
    plain, watched = Net(), Net()
    strategy(models=plain, num_epochs=3).run(loader(4))
    config = ValidationConfig(validation_data=loader(4, batch_size=3), every_n_steps=1)
    strategy(models=watched, num_epochs=3, validation_config=config).run(loader(4))
    assert torch.equal(weights(plain), weights(watched))


@pytest.mark.parametrize("prefetch_factor", [0, 1, 2])
def test_validation_on_the_data_set_of_the_training(prefetch_factor):
    # two loaders read ahead from one data set at the same time
    train = loader(8, prefetch_factor=prefetch_factor)
    trained, validated = Recorder(), []
    config = ValidationConfig(
        validation_data=DataLoader(train.dataset, batch_size=2, prefetch_factor=prefetch_factor),
        every_n_steps=4,
        batch_callback=lambda **told: validated.extend(told["batch"].metadata["index"].tolist()),
    )
    strategy(num_epochs=1, hooks=[trained], validation_config=config).run(train)
    assert trained.indices == list(range(8))
    assert validated == [*range(8), *range(8)]
