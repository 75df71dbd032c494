"""PaiNN: symmetries, forces and stress against finite differences, smoothness, training use."""

import copy

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import bulk, molecule

from nvalchemi.data.atomic_data import AtomicData
from nvalchemi.data.batch import Batch
from nvalchemi.data.neighbors import add_neighbor_list
from nvalchemi.models import PaiNN, compositions, fit_atomic_energies

CUTOFF = 4.5
OUTPUTS = ("energy", "forces", "stress")


def batch_of(*structures: Atoms, dtype: torch.dtype = torch.float64) -> Batch:
    data = [AtomicData.from_atoms(atoms, dtype=dtype) for atoms in structures]
    return add_neighbor_list(Batch.from_data_list(data), CUTOFF)


def alloy(repeat: tuple[int, int, int] = (2, 1, 1), seed: int = 0) -> Atoms:
    atoms = bulk("Cu", cubic=True) * repeat
    atoms.numbers[::3] = 28
    atoms.rattle(0.15, seed=seed)
    rng = np.random.default_rng(seed)
    atoms.set_cell(atoms.cell @ (np.eye(3) + 0.04 * rng.normal(size=(3, 3))), scale_atoms=True)
    return atoms


def ethanol(seed: int = 0) -> Atoms:
    atoms = molecule("CH3CH2OH")
    atoms.rattle(0.1, seed=seed)
    return atoms


@pytest.fixture(scope="module")
def model() -> PaiNN:
    torch.manual_seed(0)
    atomic_energies = torch.linspace(-5.0, 0.0, 119)
    return PaiNN(
        CUTOFF, 16, 3, atomic_energies=atomic_energies, energy_scale=2.0, outputs=OUTPUTS
    ).double()


def test_rotation_with_reflection_turns_forces_and_stress(model):
    rotation = np.linalg.qr(np.random.default_rng(0).normal(size=(3, 3)))[0]
    rotation[:, 0] *= -np.sign(np.linalg.det(rotation))
    turn = torch.from_numpy(rotation)
    structures = [alloy(), ethanol()]
    turned = [atoms.copy() for atoms in structures]
    for atoms in turned:
        atoms.set_cell(atoms.cell.array @ rotation)
        atoms.positions = atoms.positions @ rotation
    before, after = model(batch_of(*structures)), model(batch_of(*turned))
    torch.testing.assert_close(after["energy"], before["energy"])
    torch.testing.assert_close(after["forces"], before["forces"] @ turn)
    torch.testing.assert_close(after["stress"][0], turn.T @ before["stress"][0] @ turn)


def test_translation_and_wrapping_change_nothing(model):
    structures = [alloy(), ethanol()]
    moved = [atoms.copy() for atoms in structures]
    for atoms in moved:
        atoms.translate([1.3, -0.7, 2.9])
        atoms.wrap() if atoms.pbc.any() else None
    before, after = model(batch_of(*structures)), model(batch_of(*moved))
    for name in ("energy", "forces"):
        torch.testing.assert_close(after[name], before[name])
    torch.testing.assert_close(after["stress"][0], before["stress"][0])


def test_renumbering_atoms_renumbers_forces(model):
    atoms = alloy()
    order = np.random.default_rng(0).permutation(len(atoms))
    before, after = model(batch_of(atoms)), model(batch_of(atoms[order]))
    torch.testing.assert_close(after["energy"], before["energy"])
    torch.testing.assert_close(after["forces"], before["forces"][torch.from_numpy(order)])


@pytest.mark.parametrize("atoms", [alloy(), alloy((1, 1, 1)), ethanol()])
def test_forces_equal_finite_differences(model, atoms):
    forces, step = model(batch_of(atoms))["forces"], 1e-4
    for atom, axis in [(0, 0), (1, 2), (3, 1)]:
        energies = []
        for sign in (-1, 1):
            moved = atoms.copy()
            moved.positions[atom, axis] += sign * step
            energies.append(model(batch_of(moved))["energy"].item())
        expected = -(energies[1] - energies[0]) / (2 * step)
        assert forces[atom, axis].item() == pytest.approx(expected, abs=1e-6)


def test_stress_equals_finite_strain(model):
    atoms, step = alloy(), 1e-4
    stress = model(batch_of(atoms))["stress"][0]
    torch.testing.assert_close(stress, stress.T)
    for i, j in [(0, 0), (1, 1), (0, 2), (1, 2)]:
        energies = []
        for sign in (-1, 1):
            strain = np.zeros((3, 3))
            strain[i, j] += sign * step / 2
            strain[j, i] += sign * step / 2
            strained = atoms.copy()
            strained.set_cell(atoms.cell.array @ (np.eye(3) + strain), scale_atoms=True)
            energies.append(model(batch_of(strained))["energy"].item())
        expected = (energies[1] - energies[0]) / (2 * step) / atoms.get_volume()
        assert stress[i, j].item() == pytest.approx(expected, abs=1e-6)


def test_energy_and_forces_are_smooth_where_an_atom_leaves(model):
    def dimer(distance: float) -> dict[str, torch.Tensor]:
        return model(batch_of(Atoms("CuNi", [[0, 0, 0], [distance, 0, 0]])))

    apart = dimer(CUTOFF + 1.0)
    inside, outside = dimer(CUTOFF - 1e-3), dimer(CUTOFF + 1e-3)
    torch.testing.assert_close(outside["energy"], apart["energy"], rtol=0, atol=1e-12)
    torch.testing.assert_close(inside["energy"], apart["energy"], rtol=0, atol=1e-7)
    torch.testing.assert_close(inside["forces"], apart["forces"], rtol=0, atol=1e-4)


def test_a_longer_list_gives_the_same(model):
    atoms = alloy()
    data = Batch.from_data_list([AtomicData.from_atoms(atoms, dtype=torch.float64)])
    far = add_neighbor_list(data, CUTOFF + 2.0)
    near = batch_of(atoms)
    assert far.num_edges > near.num_edges
    for name, value in model(near).items():
        torch.testing.assert_close(model(far)[name], value)


def test_batch_equals_singles(model):
    structures = [alloy(), ethanol(), alloy((2, 2, 2), seed=1), molecule("H2O"), bulk("Cu")]
    together = model(batch_of(*structures))
    alone = [model(batch_of(atoms)) for atoms in structures]
    torch.testing.assert_close(together["energy"], torch.cat([out["energy"] for out in alone]))
    torch.testing.assert_close(together["forces"], torch.cat([out["forces"] for out in alone]))
    for stress, out in zip(together["stress"], alone):
        expected = out["stress"][0] if "stress" in out else torch.full_like(stress, torch.nan)
        torch.testing.assert_close(stress, expected, equal_nan=True)


def test_energy_is_extensive(model):
    atoms = ethanol()
    far = atoms.copy()
    far.translate([100.0, 0, 0])
    single = model(batch_of(atoms))
    both = model(batch_of(atoms + far))
    torch.testing.assert_close(both["energy"], 2 * single["energy"])
    torch.testing.assert_close(both["forces"], single["forces"].repeat(2, 1))


def test_supercell_doubles_the_energy_and_keeps_the_stress(model):
    atoms = alloy((1, 1, 1))
    single, double = model(batch_of(atoms)), model(batch_of(atoms * (1, 1, 2)))
    torch.testing.assert_close(double["energy"], 2 * single["energy"])
    torch.testing.assert_close(double["stress"], single["stress"])


def test_single_atom_has_energy_and_no_force(model):
    batch = batch_of(Atoms("Cu", [[1.0, 2.0, 3.0]]))
    out = model(batch)
    assert batch.num_edges == 0 and out["energy"].isfinite().all()
    assert torch.equal(out["forces"], torch.zeros(1, 3, dtype=torch.float64))


@pytest.mark.parametrize("loss", [("energy",), ("forces",), ("energy", "forces"), OUTPUTS])
@pytest.mark.parametrize("structure", ["alloy", "perfect crystal", "one atom"])
def test_every_parameter_gets_a_finite_gradient(loss, structure):
    # DDP without find_unused_parameters waits for each of them; in a perfect crystal vectors and
    # forces vanish, where a careless norm has no second derivative.
    atoms = {"alloy": alloy(), "perfect crystal": bulk("Cu", cubic=True), "one atom": Atoms("Cu")}
    model = PaiNN(CUTOFF, 8, 3, outputs=OUTPUTS)
    out = model(batch_of(atoms[structure], dtype=torch.float32))
    sum((out[name] - 1).pow(2).sum() for name in loss if name in out).backward()
    bad = [
        name
        for name, p in model.named_parameters()
        if p.grad is None or not p.grad.isfinite().all()
    ]
    assert not bad


def test_gradient_of_a_force_loss_is_right():
    torch.manual_seed(0)
    model, batch = PaiNN(CUTOFF, 4, 2, 4, outputs=OUTPUTS).double(), batch_of(alloy((1, 1, 1)))

    def loss() -> torch.Tensor:
        out = model(batch)
        return sum((out[name] - 0.1).pow(2).mean() for name in OUTPUTS)

    loss().backward()
    for parameter in model.parameters():
        direction = torch.randn_like(parameter)
        with torch.no_grad():
            values = []
            for shift in (1e-5, -2e-5):
                parameter.add_(direction, alpha=shift)
                values.append(loss().item())
            parameter.add_(direction, alpha=1e-5)
        expected = (values[0] - values[1]) / 2e-5
        found = (parameter.grad * direction).sum().item()
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-8)


def test_single_precision_follows_double(model):
    atoms = [alloy(), ethanol()]
    exact = model(batch_of(*atoms))
    single = copy.deepcopy(model).float()
    out = single(batch_of(*atoms, dtype=torch.float32))
    mixed = single(batch_of(*atoms))
    for name in ("energy", "forces"):
        assert out[name].dtype == torch.float32 and mixed[name].dtype == torch.float64
        torch.testing.assert_close(out[name].double(), exact[name], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(mixed[name], exact[name], rtol=1e-4, atol=1e-4)


def test_reference_energies_are_added_and_survive_a_state_dict():
    table = compositions([29, 29, 28], [2, 1])
    fitted = fit_atomic_energies(table, [-6.0, -5.0])
    model = PaiNN(CUTOFF, 8, 1, atomic_energies=fitted, energy_scale=3.0).double()
    with torch.no_grad():
        model.readout[-1].weight.zero_()
    batch = batch_of(Atoms("CuNiCu", np.diag([1.0, 3.0, 5.0])))
    assert model(batch)["energy"].item() == pytest.approx(-11.0)
    other = PaiNN(CUTOFF, 8, 1).double()
    other.load_state_dict(model.state_dict())
    assert other(batch)["energy"].item() == pytest.approx(-11.0)


def test_an_element_that_was_not_fitted_is_refused():
    fitted = fit_atomic_energies(compositions([29], [1]), [-3.0])
    model = PaiNN(CUTOFF, 8, 1, atomic_energies=fitted)
    with pytest.raises(ValueError, match=r"no reference energy for atomic numbers \[1, 8\]"):
        model(batch_of(molecule("H2O"), dtype=torch.float32))


def test_what_is_given_is_checked():
    with pytest.raises(ValueError, match="must be positive"):
        PaiNN(num_interactions=0)
    with pytest.raises(ValueError, match="indexed by atomic number"):
        PaiNN(atomic_energies=[0.0, 1.0])
    with pytest.raises(ValueError, match="neighbor_list.*has none: import the data with cutoff=5"):
        PaiNN()(Batch.from_data_list([AtomicData.from_atoms(molecule("H2O"))]))


# Reference energies keep their digits.

E0 = -535100.1237  # eV, as large as all-electron totals of heavy atoms


def heavy(**options: object) -> PaiNN:
    energies = np.full(119, np.nan)
    energies[[28, 29]] = E0, -45000.7654321
    torch.manual_seed(0)
    return PaiNN(CUTOFF, 8, 1, atomic_energies=energies, **options)


def reference_sum(model: PaiNN, atoms: Atoms) -> float:
    """Energy of the batch less what the network alone says."""
    bare = copy.deepcopy(model)
    bare.atomic_energies.zero_()
    batch = batch_of(atoms)
    return (model(batch)["energy"] - bare(batch)["energy"]).item()


@pytest.mark.parametrize(
    "cast",
    [
        lambda model: model,
        lambda model: model.double(),
        lambda model: model.to(torch.float64).float(),
        lambda model: model.half().float(),
        lambda model: torch.nn.Sequential(model).bfloat16().double()[0],
        lambda model: copy.deepcopy(model).double(),
    ],
)
def test_reference_energies_stay_in_double_precision(cast):
    model, atoms = cast(heavy()), alloy((1, 1, 1))
    assert model.atomic_energies.dtype == torch.float64
    assert float(model.atomic_energies[28]) == E0
    exact = sum(float(model.atomic_energies[z]) for z in atoms.numbers)
    assert reference_sum(model, atoms) == pytest.approx(exact, abs=1e-8)


def test_reference_energies_come_back_from_a_state(tmp_path):
    torch.save(heavy().double().state_dict(), tmp_path / "state.pt")
    model = PaiNN(CUTOFF, 8, 1).double()
    model.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert float(model.half().atomic_energies[28]) == E0


def test_model_made_without_memory_becomes_real():
    with torch.device("meta"):
        model = PaiNN(CUTOFF, 8, 1)
    model.to_empty(device="cpu").load_state_dict(heavy().state_dict())
    assert float(model.atomic_energies[28]) == E0
    assert model.to("meta").atomic_energies.is_meta


def test_float32_batch_gets_the_rounded_sum():
    batch = batch_of(alloy(), dtype=torch.float32)
    model = heavy()
    energy = model(batch)["energy"]
    assert energy.dtype == torch.float32
    wide = model.double()(batch_of(alloy()))["energy"].item()
    assert energy.item() == pytest.approx(wide, abs=float(np.spacing(np.float32(abs(wide)))))


@pytest.mark.parametrize("scale", [0.0, -1.0, float("inf"), float("nan")])
def test_energy_scale_must_be_positive_and_finite(scale):
    with pytest.raises(ValueError, match="energy_scale must be positive and finite"):
        PaiNN(energy_scale=scale)


def test_infinite_reference_energy_is_refused():
    energies = np.zeros(119)
    energies[6] = np.inf
    with pytest.raises(ValueError, match=r"atomic numbers \[6\] are infinite"):
        PaiNN(atomic_energies=energies)


# Lists that were made elsewhere.


def test_atoms_in_one_place_are_refused_and_not_nan(model):
    pair = AtomicData(
        atomic_numbers=torch.tensor([6, 8]),
        positions=torch.zeros(2, 3, dtype=torch.float64),
        neighbor_list=torch.tensor([[0, 1], [1, 0]]),
    )
    batch = Batch.from_data_list([pair.replace(positions=torch.eye(3)[:2].double()), pair])
    with pytest.raises(ValueError, match="atoms 0 and 1 of structure 1 of the batch"):
        model(batch)


def test_cartesian_shifts_give_the_same_energy_forces_and_stress(model):
    batch = batch_of(alloy(), alloy(seed=1))
    boxes = batch.cell[batch.batch_idx.long()[batch.neighbor_list[:, 0]]]
    shifts = torch.einsum("ek,eki->ei", batch.neighbor_list_shifts.double(), boxes)
    edges = {"neighbor_list": batch.neighbor_list, "shifts": shifts}
    foreign = batch.with_edges(torch.tensor(batch.num_edges_list), edges)
    expected, got = model(batch), model(foreign)
    for name in OUTPUTS:
        torch.testing.assert_close(got[name], expected[name])
