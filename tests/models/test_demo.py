"""The dummy models: outputs, gradients of every parameter, replicas that stay equal."""

import copy

import pytest
import torch
from ase.build import molecule

from nvalchemi.data.atomic_data import AtomicData
from nvalchemi.data.batch import Batch
from nvalchemi.models.demo import DemoModel, DemoModelWrapper
from nvalchemi.models.mlp import MLPPotential


def batch_of(*names: str, dtype: torch.dtype = torch.float64) -> Batch:
    parts = [AtomicData.from_atoms(molecule(name), dtype=dtype) for name in names]
    return Batch.from_data_list(parts)


def models():
    torch.manual_seed(0)
    return [DemoModelWrapper(DemoModel()), MLPPotential(num_layers=1), MLPPotential()]


@pytest.mark.parametrize("model", models())
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_outputs_follow_the_positions_in_shape_and_dtype(model, dtype):
    batch = batch_of("H2O", "CH4", "CO", dtype=dtype)
    out = model(batch)
    assert out["energy"].shape == (3, 1) and out["forces"].shape == batch.positions.shape
    assert out["energy"].dtype == out["forces"].dtype == dtype
    assert out.keys() == model.model_config.outputs
    assert model.model_config.autograd_outputs == {"forces"}


@pytest.mark.parametrize("model", models())
def test_forces_equal_finite_differences(model):
    model, batch = copy.deepcopy(model).double(), batch_of("H2O", "CH4")
    torch.autograd.gradcheck(
        lambda positions: model.energy(batch, positions, None),
        (batch.positions.clone().requires_grad_(),),
    )
    energy_gradient = torch.autograd.functional.jacobian(
        lambda positions: model.energy(batch, positions, None).sum(), batch.positions
    )
    torch.testing.assert_close(model(batch)["forces"], -energy_gradient)


@pytest.mark.parametrize("model", models())
@pytest.mark.parametrize("loss", [("energy",), ("forces",), ("energy", "forces")])
def test_every_parameter_gets_a_gradient(model, loss):
    model, batch = copy.deepcopy(model), batch_of("H2O", "CH4", dtype=torch.float32)
    out = model(batch)
    sum(out[name].pow(2).sum() for name in loss).backward()
    missing = [name for name, p in model.named_parameters() if p.grad is None]
    assert not missing


@pytest.mark.parametrize("model", models())
def test_forward_changes_no_parameter(model):
    # An embedding that is renormalised in forward drifts apart between ranks that see different
    # batches (W38): forward must leave parameters alone, also large ones.
    model = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(10)
    before = copy.deepcopy(model.state_dict())
    model(batch_of("H2O", "CH4", dtype=torch.float32))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_mlp_is_invariant():
    model, batch = MLPPotential().double(), batch_of("CH3CH2OH", "H2O")
    rotation = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64))[0]
    moved = batch.with_fields("atom", {"positions": batch.positions @ rotation + 3.0})
    torch.testing.assert_close(model(moved)["energy"], model(batch)["energy"])
    torch.testing.assert_close(model(moved)["forces"], model(batch)["forces"] @ rotation)


def test_demo_model_alone_takes_one_structure():
    batch = batch_of("H2O")
    energy = DemoModel().double()(batch.atomic_numbers, batch.positions)
    assert energy.shape == (1, 1)


def test_sizes_are_checked():
    with pytest.raises(ValueError, match="must be positive: got 0 and 2"):
        MLPPotential(hidden_features=0)
