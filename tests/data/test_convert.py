"""Import of ASE structures and extended XYZ: labels found where they are, missing ones reported."""

from pathlib import Path

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import bulk, fcc111, molecule
from ase.calculators.emt import EMT
from ase.calculators.singlepoint import SinglePointCalculator
from ase.constraints import FixAtoms
from ase.io import write
from ase.units import kcal, mol

from nvalchemi.data import AtomicData
from nvalchemi.data.convert import (
    LabelKeys,
    audit_labels,
    from_ase,
    import_atoms,
    import_extxyz,
    read_extxyz,
)

_SHARED = Path(__file__).resolve().parents[2].parent / "shared" / "data"


def crystal(energy=-3.0, **more):
    atoms = bulk("Cu", "fcc", a=3.7, cubic=True)
    forces = np.arange(12.0).reshape(4, 3) / 10
    atoms.calc = SinglePointCalculator(atoms, energy=energy, forces=forces, **more)
    return atoms


def ethanol(**info):
    atoms = molecule("CH3CH2OH")
    atoms.info.update(info)
    return atoms


def shared_file(name):
    path = _SHARED / name
    if not path.is_file():
        pytest.skip(f"{path.name} is an optional real file, not shipped with the project")
    return path


# Where labels are found.


def test_labels_of_the_calculator_are_read():
    stress = np.array([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    data = from_ase(crystal(stress=stress), dtype=torch.float64)
    assert data.energy.tolist() == [[-3.0]]
    assert data.forces.shape == (4, 3) and float(data.forces[3, 2]) == pytest.approx(1.1)
    assert data.stress.tolist() == [[[1.0, 6.0, 5.0], [6.0, 2.0, 4.0], [5.0, 4.0, 3.0]]]
    assert data.pbc.tolist() == [[True, True, True]] and data.cell.shape == (1, 3, 3)
    assert data.atomic_numbers.tolist() == [29] * 4


def test_labels_under_other_keys_are_read_from_info_and_arrays():
    atoms = ethanol(REF_energy=-5.5)
    atoms.arrays["REF_forces"] = np.full((9, 3), 0.25)
    data = from_ase(atoms, label_keys=LabelKeys(energy="REF_energy", forces="REF_forces"))
    assert data.energy.item() == -5.5 and float(data.forces.min()) == 0.25
    assert "REF_energy" not in data.info


def test_absent_labels_stay_absent():
    data = from_ase(molecule("H2O"))
    assert data.energy is None and data.forces is None and data.stress is None
    assert data.atomic_masses is None and data.velocities is None and data.atom_categories is None
    assert set(data.to_dict()) == {"atomic_numbers", "positions"}


def test_no_calculation_is_started():
    class Refuses(EMT):
        def calculate(self, *args, **kwargs):
            raise AssertionError("a calculation was started")

    atoms = bulk("Cu")
    atoms.calc = Refuses()
    assert from_ase(atoms).energy is None


def test_forces_of_constrained_atoms_are_the_stored_ones(tmp_path):
    atoms = crystal()
    atoms.set_constraint(FixAtoms([0, 1, 2, 3]))
    assert not atoms.get_forces().any()
    assert float(from_ase(atoms).forces.max()) == pytest.approx(1.1)

    write(tmp_path / "fixed.xyz", atoms, format="extxyz")
    (read,) = read_extxyz(tmp_path / "fixed.xyz")
    assert float(read.forces.max()) == pytest.approx(1.1)
    assert any("constraints" in finding for finding in audit_labels([atoms]).findings)


def test_results_of_another_geometry_are_no_labels():
    atoms = bulk("Cu", cubic=True)
    atoms.calc = EMT()
    atoms.get_potential_energy()
    atoms.positions[0] += 0.1
    with pytest.raises(ValueError, match="another geometry"):
        from_ase(atoms)
    atoms.get_potential_energy()
    assert from_ase(atoms).energy is not None


def test_two_places_that_disagree_are_refused():
    atoms = crystal(energy=-3.0)
    atoms.info["energy"] = -3.0
    assert from_ase(atoms).energy.item() == -3.0
    atoms.info["energy"] = -4.0
    with pytest.raises(ValueError, match=r"differs between atoms\.info and the results"):
        from_ase(atoms)


def test_the_input_is_neither_changed_nor_shared():
    atoms = crystal()
    atoms.info["name"] = "x"
    before = atoms.copy()
    results = {key: np.copy(value) for key, value in atoms.calc.results.items()}
    data = from_ase(atoms, dtype=torch.float64)
    data.positions += 1.0
    data.forces += 1.0
    data.cell += 1.0
    assert atoms == before and atoms.info == before.info
    assert set(atoms.arrays) == set(before.arrays)
    for key, value in results.items():
        np.testing.assert_array_equal(atoms.calc.results[key], value)


def test_from_atoms_of_atomic_data_reads_the_same():
    atoms = crystal(stress=np.arange(6.0))
    assert AtomicData.from_atoms(atoms) == from_ase(atoms)


def test_numbers_of_info_are_kept_and_strings_are_not():
    data = from_ase(ethanol(temperature=300.0, name="ethanol", ids=np.arange(3)))
    assert data.info["temperature"].item() == 300.0 and data.info["ids"].tolist() == [0, 1, 2]
    assert "name" not in data.info


# Shapes, stress, cells.


@pytest.mark.parametrize("shape", [(3, 3), (9,), (6,)])
def test_stress_comes_in_three_shapes(shape):
    full = np.array([[1.0, 6.0, 5.0], [6.0, 2.0, 4.0], [5.0, 4.0, 3.0]])
    atoms = bulk("Cu")
    atoms.info["s"] = np.arange(1.0, 7.0) if shape == (6,) else full.reshape(shape)
    data = from_ase(atoms, label_keys=LabelKeys(energy=None, forces=None, stress="s"))
    assert data.stress[0].tolist() == full.tolist()


def test_a_virial_becomes_a_stress_only_when_asked():
    atoms = bulk("Cu", cubic=True)
    atoms.info["virial"] = 2.0 * np.eye(3)
    assert from_ase(atoms).stress is None
    assert from_ase(atoms, dtype=torch.float64).virial[0, 0, 0].item() == 2.0
    keys = LabelKeys(energy=None, forces=None, stress_from_virial="virial")
    data = from_ase(atoms, label_keys=keys, dtype=torch.float64)
    assert data.stress[0, 1, 1].item() == pytest.approx(-2.0 / atoms.cell.volume)
    assert data.virial is None


def test_the_sign_of_the_virial_is_that_of_a_compressed_cell():
    atoms = bulk("Cu", a=3.3, cubic=True)
    atoms.calc = EMT()
    stress = atoms.get_stress(voigt=False)
    labelled = bulk("Cu", a=3.3, cubic=True)
    labelled.info["virial"] = -stress * atoms.cell.volume
    assert labelled.info["virial"].trace() > 0
    keys = LabelKeys(energy=None, forces=None, stress_from_virial="virial")
    data = from_ase(labelled, label_keys=keys, dtype=torch.float64)
    np.testing.assert_allclose(data.stress[0].numpy(), stress, atol=1e-12)


def test_stress_from_a_virial_needs_three_periodic_directions():
    slab = fcc111("Cu", (2, 2, 3), vacuum=8.0)
    slab.info["virial"] = np.eye(3)
    keys = LabelKeys(energy=None, forces=None, stress_from_virial="virial")
    with pytest.raises(ValueError, match="periodic in all directions"):
        from_ase(slab, label_keys=keys)


def test_partial_periodicity_is_kept_and_none_drops_cell_and_stress():
    slab = fcc111("Cu", (2, 2, 3))
    assert not slab.cell[2].any()
    data = from_ase(slab)
    assert data.pbc.tolist() == [[True, True, False]]
    assert data.cell[0, 2].tolist() == [0.0, 0.0, 0.0]

    boxed = molecule("H2O", cell=[10, 10, 10])
    boxed.info["stress"] = np.zeros(6)
    data = from_ase(boxed)
    assert data.cell is None and data.pbc is None and data.stress is None


@pytest.mark.parametrize("cell", [np.zeros((3, 3)), [[1, 0, 0], [2, 0, 0], [0, 0, 1]]])
def test_a_periodic_structure_needs_a_cell(cell):
    with pytest.raises(ValueError, match=r"periodic along TTT.*zero or dependent"):
        from_ase(Atoms("Cu", cell=cell, pbc=True))


@pytest.mark.parametrize(
    ("key", "value", "match"),
    [
        ("energy", np.nan, "'energy' is not finite"),
        ("energy", "low", "'energy' is no number"),
        ("energy", True, "'energy' is no number"),
        ("energy", np.zeros(2), "'energy' must have one number"),
        ("dipole", np.zeros(2), "'dipole' must have 3 numbers"),
    ],
)
def test_broken_labels_are_refused_whatever_the_policy(key, value, match):
    with pytest.raises(ValueError, match=match):
        from_ase(ethanol(**{key: value}))


def test_forces_of_another_shape_are_refused():
    atoms = ethanol()
    atoms.arrays["forces"] = np.zeros((9, 2))
    with pytest.raises(ValueError, match=r"must have shape \[9, 3\]: got shape \[9, 2\]"):
        from_ase(atoms)


def test_structures_that_no_model_can_take_are_refused():
    with pytest.raises(ValueError, match="no atoms"):
        from_ase(Atoms())
    with pytest.raises(ValueError, match="dummy atoms"):
        from_ase(Atoms("XH", positions=np.eye(3)[:2]))
    with pytest.raises(TypeError, match=r"takes an ase.Atoms: got str"):
        from_ase("H2O")


# Files and policies.


@pytest.fixture
def partly_labelled(tmp_path):
    """Five structures; 1 and 3 lack forces."""
    frames = [ethanol(my_energy=-1.0 * i) for i in range(5)]
    for i in (0, 2, 4):
        frames[i].arrays["my_forces"] = np.full((9, 3), float(i))
    path = tmp_path / "partly.xyz"
    write(path, frames, format="extxyz")
    return path


_MINE = LabelKeys(energy="my_energy", forces="my_forces")


def test_reserved_and_own_keys_survive_a_file(tmp_path):
    frames = [crystal(energy=float(i), stress=np.arange(6.0)) for i in range(3)]
    for i, atoms in enumerate(frames):
        atoms.info["REF_energy"] = 10.0 + i
    write(tmp_path / "a.xyz", frames, format="extxyz")
    standard = list(read_extxyz(tmp_path / "a.xyz", label_keys=LabelKeys(stress="stress")))
    assert [data.energy.item() for data in standard] == [0.0, 1.0, 2.0]
    np.testing.assert_allclose(standard[2].stress[0], from_ase(frames[2]).stress[0], atol=1e-7)
    own = list(read_extxyz(tmp_path / "a.xyz", label_keys=LabelKeys(energy="REF_energy")))
    assert [data.energy.item() for data in own] == [10.0, 11.0, 12.0]


def test_a_missing_label_raises_and_all_structures_are_counted(partly_labelled):
    frames = read_extxyz(partly_labelled, label_keys=_MINE)
    assert next(frames).forces is not None
    with pytest.raises(ValueError, match=r"no forces in 2 of 5 structures \(1, 3\)"):
        next(frames)


def test_skip_leaves_out_and_reports(partly_labelled):
    with pytest.warns(UserWarning, match=r"2 of 5 structures are left out \(1: forces is missing"):
        kept = list(read_extxyz(partly_labelled, label_keys=_MINE, missing="skip"))
    assert [data.energy.item() for data in kept] == [0.0, -2.0, -4.0]


def test_allow_keeps_without_the_label(partly_labelled):
    kept = list(read_extxyz(partly_labelled, label_keys=_MINE, missing="allow"))
    assert [data.forces is None for data in kept] == [False, True, False, True, False]


def test_the_error_names_what_is_there_instead(tmp_path):
    atoms = ethanol(energy=-1.0)
    atoms.arrays["force"] = np.zeros((9, 3))
    atoms.arrays["frac_pos"] = np.zeros((9, 3))
    write(tmp_path / "f.xyz", atoms, format="extxyz")
    with pytest.raises(ValueError, match=r"no key 'forces', but 'force' \(LabelKeys\(forces="):
        list(read_extxyz(tmp_path / "f.xyz"))


def test_a_virial_is_offered_where_stress_is_asked():
    atoms = bulk("Cu")
    atoms.info |= {"energy": 1.0, "virial": np.eye(3)}
    audit = audit_labels([atoms], LabelKeys(forces=None, stress="stress"))
    assert any("stress_from_virial='virial'" in problem for problem in audit.problems)


def test_files_that_can_not_be_read_say_where(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no file .*none\.xyz"):
        list(read_extxyz(tmp_path / "none.xyz"))
    (tmp_path / "empty.xyz").write_text("")
    with pytest.raises(ValueError, match="holds no structure"):
        list(read_extxyz(tmp_path / "empty.xyz"))
    write(tmp_path / "a.xyz", [crystal(), crystal()], format="extxyz")
    text = (tmp_path / "a.xyz").read_text()
    (tmp_path / "cut.xyz").write_text("\n".join(text.splitlines()[:-2]) + "\n")
    with pytest.raises(ValueError, match="structure 1 can not be read"):
        list(read_extxyz(tmp_path / "cut.xyz"))


def test_a_file_with_an_at_sign_in_its_name_is_read(tmp_path):
    write(tmp_path / "plain.xyz", crystal(), format="extxyz")
    (tmp_path / "plain.xyz").rename(tmp_path / "md@300.xyz")
    assert len(list(read_extxyz(tmp_path / "md@300.xyz"))) == 1


# What errors and warnings say.


@pytest.fixture
def broken(tmp_path):
    """Two structures, one of them with an energy that is not finite."""
    path = tmp_path / "broken.xyz"
    write(path, [crystal(), crystal(energy=np.nan)], format="extxyz")
    return path


def errors_of(call, match):
    with pytest.raises(ValueError, match=match) as found:
        call()
    return str(found.value)


def test_a_missing_label_is_answered_with_what_the_called_function_takes(partly_labelled, tmp_path):
    def imported():
        import_extxyz(partly_labelled, tmp_path / "s.zarr", label_keys=_MINE)

    text = errors_of(imported, "missing='skip' leaves such structures out")
    assert "allow" not in text
    with pytest.raises(ValueError, match="must be one of 'raise', 'skip'"):
        import_extxyz(partly_labelled, tmp_path / "s.zarr", missing="allow")
    text = errors_of(lambda: list(read_extxyz(partly_labelled, label_keys=_MINE)), "'skip' leaves")
    assert "missing='allow' keeps them without the label" in text
    keys = LabelKeys(forces="my_forces")
    text = errors_of(
        lambda: from_ase(ethanol(energy=1.0), label_keys=keys, missing="raise"), "allo"
    )
    assert "skip" not in text


def test_a_broken_label_is_not_answered_with_allow(broken, tmp_path):
    unread = r"LabelKeys\(energy=None\) does not read the label"
    for policy in ("raise", "allow"):
        text = errors_of(lambda: list(read_extxyz(broken, missing=policy)), unread)  # noqa: B023
        assert "missing='skip' leaves such structures out" in text and "allow" not in text
    text = errors_of(lambda: import_extxyz(broken, tmp_path / "s.zarr"), unread)
    assert "missing='skip' leaves such structures out" in text and "allow" not in text
    for policy in ("raise", "allow"):
        text = errors_of(lambda: from_ase(crystal(np.nan), missing=policy), unread)  # noqa: B023
        assert "missing=" not in text
    assert "no key" not in text  # what was not there was not asked for either


def test_label_keys_may_be_a_mapping_everywhere(partly_labelled, tmp_path):
    mine = {"energy": "my_energy", "forces": None}
    assert len(list(read_extxyz(partly_labelled, label_keys=mine))) == 5
    assert audit_labels(partly_labelled, mine).keys == LabelKeys(energy="my_energy", forces=None)
    assert import_extxyz(partly_labelled, tmp_path / "a.zarr", label_keys=mine).num_kept == 5
    frames = [ethanol(my_energy=2.0)]
    assert import_atoms(frames, tmp_path / "b.zarr", label_keys=mine).num_kept == 1
    assert from_ase(frames[0], label_keys=mine).energy.item() == 2.0


@pytest.mark.parametrize(
    ("keys", "match"),
    [
        (
            {"enrgy": "E"},
            r"maps labels \(energy, forces, .*\) to the keys of the data: got .*enrgy",
        ),
        ("energy", "must be LabelKeys or a mapping of labels to keys"),
        (["energy", "forces"], "must be LabelKeys or a mapping"),
        ({"energy": 3}, "key of energy must be a name or None"),
    ],
)
def test_other_label_keys_are_refused_everywhere(partly_labelled, tmp_path, keys, match):
    store = tmp_path / "s.zarr"
    for call in (
        lambda: read_extxyz(partly_labelled, label_keys=keys),
        lambda: audit_labels(partly_labelled, keys),
        lambda: import_extxyz(partly_labelled, store, label_keys=keys),
        lambda: import_atoms([ethanol()], store, label_keys=keys),
        lambda: from_ase(ethanol(), label_keys=keys),
    ):
        with pytest.raises(TypeError, match=match):
            call()
    assert not store.exists()


def test_a_key_of_the_other_level_is_not_called_absent(tmp_path):
    atoms = ethanol(REF_energy=-5.5)
    atoms.arrays["REF_forces"] = np.zeros((9, 3))
    swapped = LabelKeys(energy="REF_forces", forces="REF_energy")
    problems = "; ".join(audit_labels([atoms], swapped).problems)
    assert "'REF_forces' is there, but as an array with a row for each atom" in problems
    assert "'REF_energy' is there, but as a value of the whole structure" in problems
    assert "there is no key" not in problems
    write(tmp_path / "a.xyz", atoms, format="extxyz")
    with pytest.raises(ValueError, match="'REF_forces' is there, but as an array"):
        list(read_extxyz(tmp_path / "a.xyz", label_keys=swapped))


def test_warnings_point_at_the_line_of_the_user(partly_labelled, tmp_path):
    frames = [crystal(energy=-123456.7)] * 2 + [molecule("H2O")]
    calls = (
        lambda: list(read_extxyz(partly_labelled, label_keys=_MINE, missing="skip")),
        lambda: import_extxyz(
            partly_labelled, tmp_path / "a.zarr", label_keys=_MINE, missing="skip"
        ),
        lambda: import_atoms(frames, tmp_path / "b.zarr", missing="skip"),
        lambda: from_ase(crystal(energy=-123456.7)),
        lambda: AtomicData.from_atoms(crystal(energy=-123456.7)),
    )
    for call in calls:
        with pytest.warns(UserWarning) as seen:
            call()
        assert {warning.filename for warning in seen} == {__file__}


def test_arrays_that_ase_keeps_for_itself_are_no_labels():
    slab = fcc111("Cu", (1, 1, 2), vacuum=5.0)
    slab.set_initial_magnetic_moments(np.zeros(2))
    slab.set_initial_charges(np.array([0.5, -0.5]))
    slab.arrays["mine"] = np.zeros(2)
    assert slab.arrays["tags"].any()
    assert set(audit_labels([slab]).other_keys) == {"initial_charges", "mine"}


def test_arguments_are_checked_before_the_file_is_opened(tmp_path):
    with pytest.raises(ValueError, match="missing must be one of"):
        read_extxyz(tmp_path / "none.xyz", missing="zero")
    with pytest.raises(ValueError, match="not both"):
        LabelKeys(stress="stress", stress_from_virial="virial")
    with pytest.raises(TypeError, match="key of energy"):
        LabelKeys(energy=3)


# The audit.


def test_the_audit_counts_and_prints(partly_labelled):
    audit = audit_labels(partly_labelled, _MINE)
    assert audit.num_frames == 5 and audit.num_atoms == 45
    assert audit.counts == {"energy": 5, "forces": 3}
    assert audit.ranges["energy"] == pytest.approx((-4 / 9, 0.0))
    assert audit.ranges["forces"][1] == pytest.approx(4 * 3**0.5)
    assert audit.elements == {"C": 10, "H": 30, "O": 5}
    assert audit.sizes == {9: 5} and audit.pbc == {"FFF": 5}
    text, page = str(audit), audit._repr_html_()
    for part in ("partly.xyz", "my_forces", "3 of 5", "no forces in 2 of 5 structures"):
        assert part in text and part in page
    assert "<table>" in page and "Traceback" not in text


def test_the_audit_names_labels_that_were_not_asked_for():
    audit = audit_labels([crystal(stress=np.zeros(6))])
    assert any("LabelKeys(stress='stress')" in finding for finding in audit.findings)
    assert audit.other_keys["stress"] == 1


def test_the_audit_finds_forces_that_are_all_zero():
    atoms = ethanol(energy=-1.0)
    atoms.arrays["forces"] = np.zeros((9, 3))
    assert any("exactly zero in 1 structures" in f for f in audit_labels([atoms]).findings)


# Real files.


def test_carbon_file_with_forces_under_force():
    path = shared_file("carbon_reduced_100.xyz")
    with pytest.raises(ValueError, match=r"no forces in 100 of 100 .* but 'force'"):
        list(read_extxyz(path))
    keys = LabelKeys(forces="force", stress_from_virial="virial")
    frames = list(read_extxyz(path, label_keys=keys, dtype=torch.float64))
    assert len(frames) == 100 and all(data.forces.shape == (4, 3) for data in frames)
    assert frames[0].energy.item() == -632.106478
    volume = float(torch.linalg.det(frames[0].cell[0]).abs())
    assert frames[0].stress[0, 0, 0].item() == pytest.approx(-17.67401361 / volume)


def test_ethanol_file_in_kcal():
    path = shared_file("ethanol_reduced_100.xyz")
    assert any("kcal/mol" in finding for finding in audit_labels(path).findings)
    frames = list(read_extxyz(path, units="kcal/mol/Angstrom", dtype=torch.float64))
    assert frames[0].energy.item() == pytest.approx(-97079.92222178938 * kcal / mol)


def test_water_in_single_precision():
    arrays = np.load(shared_file("water_192atoms.npz"))
    atoms = Atoms(
        arrays["atomic_numbers"], arrays["positions"][0], cell=arrays["cell"][0], pbc=True
    )
    atoms.calc = SinglePointCalculator(
        atoms, energy=arrays["energy"][0], forces=arrays["forces"][0]
    )
    with pytest.warns(UserWarning, match="resolved to"):
        data = from_ase(atoms)
    assert data.forces.shape == (192, 3)


def test_labels_that_nobody_wants_and_members_that_are_no_atoms(tmp_path):
    with pytest.raises(ValueError, match="LabelKeys must want at least one label"):
        LabelKeys(energy=None, forces=None)
    with pytest.raises(ValueError, match="LabelKeys must want at least one label"):
        audit_labels([ethanol(energy=1.0)], {"energy": None, "forces": None})
    for look in (
        lambda: import_atoms([ethanol(energy=1.0), 3], tmp_path / "a.zarr", missing="skip"),
        lambda: audit_labels([ethanol(energy=1.0), 3]),
    ):
        with pytest.raises(TypeError, match="structure 1 of structures must be an ase.Atoms: got"):
            look()
    assert list(tmp_path.iterdir()) == []


def test_missing_raise_asks_for_energy_and_forces_when_no_keys_are_named():
    atoms = ethanol(energy=1.0)
    with pytest.raises(ValueError, match="no forces") as error:
        from_ase(atoms, missing="raise")
    assert not any(name in str(error.value) for name in ("virial", "dipole", "charges", "stress"))
    atoms.arrays["forces"] = np.ones((len(atoms), 3))
    atoms.info["dipole"] = np.ones(3)
    data = from_ase(atoms, missing="raise")
    assert data.dipole.tolist() == [[1, 1, 1]] and "dipole" not in data.info
    atoms.info["dipole"] = np.ones(4)
    with pytest.raises(ValueError, match="unusable dipole"):
        from_ase(atoms, missing="raise")
    with pytest.raises(ValueError, match="no charges"):
        from_ase(ethanol(energy=1.0), label_keys={"charges": "charges"}, missing="raise")
