"""What a model declares, and derivatives of an energy in every gradient mode."""

import pytest
import torch
from ase.build import bulk, molecule
from torch import nn

from nvalchemi.data.atomic_data import AtomicData
from nvalchemi.data.batch import Batch
from nvalchemi.data.neighbors import add_neighbor_list
from nvalchemi.models import (
    BaseModelMixin,
    DemoModel,
    DemoModelWrapper,
    EnergyModel,
    ModelConfig,
    NeighborConfig,
    NeighborListFormat,
    energy_forces_stress,
)


class Springs(EnergyModel):
    """0.5 k sum of squares of positions and of lattice vectors, with k a parameter."""

    def __init__(self, outputs=("energy", "forces", "stress")):
        super().__init__(outputs)
        self.stiffness = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))

    def energy(self, batch, positions, cell):
        atomic = positions.pow(2).sum(1, keepdim=True)
        energy = atomic.new_zeros(batch.num_graphs, 1).index_add(0, batch.batch_idx, atomic)
        if cell is not None:
            energy = energy + cell.pow(2).sum((1, 2)).unsqueeze(1)
        return 0.5 * self.stiffness * energy


def molecules():
    parts = [AtomicData.from_atoms(molecule(n), dtype=torch.float64) for n in ("H2O", "CH4")]
    return Batch.from_data_list(parts)


def crystal_and_molecule():
    parts = [bulk("Cu", cubic=True), molecule("H2O")]
    return Batch.from_data_list([AtomicData.from_atoms(a, dtype=torch.float64) for a in parts])


def test_forces_and_stress_are_the_derivatives():
    batch = crystal_and_molecule()
    out = Springs()(batch)
    torch.testing.assert_close(out["forces"], -2.0 * batch.positions)
    # E(strain) = k/2 |x (1 + e)|^2, so dE/de = k x^T x, for atoms and lattice vectors together
    rows = torch.cat([batch.positions[:4], batch.cell[0]])
    expected = 2.0 * rows.T @ rows / torch.linalg.det(batch.cell[0])
    torch.testing.assert_close(out["stress"][0], expected)


def test_structures_without_volume_have_no_stress():
    assert set(Springs()(molecules())) == {"energy", "forces"}
    stress = Springs()(crystal_and_molecule())["stress"]
    assert stress[0].isfinite().all() and stress[1].isnan().all()


def test_nan_stress_of_a_molecule_leaves_gradients_finite():
    model, batch = Springs(), crystal_and_molecule()
    stress = model(batch)["stress"]
    torch.where(stress.isfinite(), stress, 0.0).pow(2).sum().backward()
    assert model.stiffness.grad.isfinite() and model.stiffness.grad != 0


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_forces_come_without_gradients_too(mode):
    # Validation of an energy-only loss runs without gradients, where a model that takes its forces
    # by autograd must not fail (W31).
    model, batch = DemoModelWrapper(DemoModel().double()), crystal_and_molecule()
    expected = model(batch)
    assert expected["forces"].requires_grad
    with mode():
        out = model(batch)
        inside = model(batch.clone())
    for name in ("energy", "forces"):
        assert not out[name].requires_grad
        torch.testing.assert_close(out[name], expected[name].detach())
        torch.testing.assert_close(inside[name], expected[name].detach())
    assert not batch.positions.requires_grad
    assert all(p.grad is None for p in model.parameters())


def test_a_callers_graph_through_positions_is_kept():
    model, batch = Springs(("energy", "forces")), molecules()
    scale = torch.ones((), dtype=torch.float64, requires_grad=True)
    batch.positions = batch.positions * scale
    model(batch)["forces"].sum().backward()
    torch.testing.assert_close(scale.grad, -2.0 * batch.positions.detach().sum())


def test_energy_alone_is_just_the_energy():
    model, batch = Springs(("energy",)), molecules()
    out = model(batch)
    assert set(out) == {"energy"} and out["energy"].shape == (2, 1)
    assert not model.model_config.autograd_outputs


def test_only_what_is_named_comes_out():
    out = energy_forces_stress(Springs().energy, molecules(), frozenset({"forces"}))
    assert set(out) == {"forces"}


def test_configs_check_their_values():
    config = ModelConfig(outputs=["energy", "forces"], autograd_outputs={"forces"})
    assert config.outputs == frozenset({"energy", "forces"}) and config.neighbor_config is None
    assert NeighborConfig(5.0).format is NeighborListFormat.COO
    with pytest.raises(TypeError, match="set of names"):
        ModelConfig(outputs="energy")
    with pytest.raises(ValueError, match="at least one"):
        ModelConfig(outputs=())
    with pytest.raises(ValueError, match=r"autograd_outputs must be among.*\['stress'\]"):
        ModelConfig(outputs={"energy"}, autograd_outputs={"stress"})
    with pytest.raises(ValueError, match="positive and finite"):
        NeighborConfig(float("nan"))
    with pytest.raises(ValueError, match=r"outputs must be among.*\['dipole'\]"):
        Springs(("energy", "dipole"))


def test_a_model_of_ones_own_only_needs_the_mixin():
    class Constant(BaseModelMixin, nn.Module):
        def __init__(self):
            super().__init__()
            self.model_config = ModelConfig()
            self.value = nn.Parameter(torch.zeros(1))

        def forward(self, batch):
            return {"energy": self.value.expand(batch.num_graphs, 1)}

    assert Constant()(molecules())["energy"].shape == (2, 1)


class Reaching(EnergyModel):
    """Counts edges; needs lists up to 4.5 Angstrom."""

    def __init__(self) -> None:
        super().__init__(("energy",), NeighborConfig(4.5))

    def energy(self, batch, positions, cell):
        return batch.num_edges_per_graph.to(positions.dtype).unsqueeze(1)


def test_a_neighbour_list_known_to_be_too_short_is_refused_with_both_numbers():
    water = Batch.from_data_list([AtomicData.from_atoms(molecule("H2O"))])
    with pytest.raises(ValueError, match=r"reach only to 4: import the data with cutoff=4\.5, or"):
        Reaching()(Batch.concat([add_neighbor_list(water, 5.0), add_neighbor_list(water, 4.0)]))
    with pytest.raises(ValueError, match=r"Reaching with cutoff 4\.5 .* has none: import the data"):
        Reaching()(water)
    short = add_neighbor_list(water, 0.5)
    unknown = short.with_edges(short.num_edges_per_graph, short.fields("edge"))
    for batch in (add_neighbor_list(water, 4.5), add_neighbor_list(water, 9.0), unknown):
        assert Reaching()(batch)["energy"].shape == (1, 1)
