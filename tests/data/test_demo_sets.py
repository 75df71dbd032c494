"""The demo sets: labels as independent evaluations give them, consistent, and the same twice."""

import builtins
import sys
import warnings

import numpy as np
import pytest
from ase.calculators.emt import EMT

from nvalchemi.data import demo_sets
from nvalchemi.data.demo_sets import alloys, molecules

_SET = 24


def xtb_energy(atoms):
    tblite = pytest.importorskip("tblite.ase")
    copy = atoms.copy()
    copy.calc = tblite.TBLite(method="GFN2-xTB", verbosity=0, accuracy=0.01)
    return copy.get_potential_energy(), copy.get_forces()


def emt_energy(atoms):
    copy = atoms.copy()
    copy.calc = EMT()
    return copy.get_potential_energy()


def label_bytes(structures):
    return b"".join(
        array.tobytes()
        for atoms in structures
        for array in (
            atoms.numbers,
            atoms.positions,
            np.asarray(atoms.cell),
            np.float64(atoms.calc.results["energy"]),
            atoms.calc.results["forces"],
            np.asarray(atoms.calc.results.get("stress", 0.0)),
        )
    )


def test_alloy_labels_are_those_of_emt():
    for atoms in alloys(5, seed=3):
        copy = atoms.copy()
        copy.calc = EMT()
        assert atoms.calc.results["energy"] == pytest.approx(copy.get_potential_energy(), abs=1e-10)
        np.testing.assert_allclose(atoms.calc.results["forces"], copy.get_forces(), atol=1e-10)
        np.testing.assert_allclose(atoms.calc.results["stress"], copy.get_stress(), atol=1e-12)


def test_molecule_labels_are_those_of_gfn2_xtb():
    for atoms in molecules(4, seed=3):
        energy, forces = xtb_energy(atoms)
        assert atoms.calc.results["energy"] == pytest.approx(energy, abs=1e-4)
        np.testing.assert_allclose(atoms.calc.results["forces"], forces, atol=2e-3)


@pytest.mark.parametrize("make", [alloys, molecules])
def test_forces_are_the_derivative_of_the_energy(make):
    energy = emt_energy if make is alloys else lambda atoms: xtb_energy(atoms)[0]
    atoms = make(2, seed=1)[1]
    step = 1e-4
    for atom, axis in ((0, 0), (1, 2), (len(atoms) - 1, 1)):
        sides = []
        for sign in (1, -1):
            moved = atoms.copy()
            moved.positions[atom, axis] += sign * step
            sides.append(energy(moved))
        numerical = -(sides[0] - sides[1]) / (2 * step)
        assert atoms.calc.results["forces"][atom, axis] == pytest.approx(numerical, abs=5e-3)


def test_stress_is_the_derivative_by_strain_with_tension_positive():
    atoms = alloys(1, seed=5)[0]
    step = 1e-5
    for voigt, (i, j) in enumerate(((0, 0), (1, 1), (2, 2), (1, 2), (0, 2), (0, 1))):
        sides = []
        for sign in (1, -1):
            strain = np.eye(3)
            strain[i, j] += sign * step / 2
            strain[j, i] += sign * step / 2
            moved = atoms.copy()
            moved.set_cell(atoms.cell @ strain, scale_atoms=True)
            sides.append(emt_energy(moved))
        numerical = (sides[0] - sides[1]) / (2 * step) / atoms.cell.volume
        assert atoms.calc.results["stress"][voigt] == pytest.approx(numerical, abs=1e-6)

    stretched = atoms.copy()
    stretched.set_cell(1.1 * atoms.cell, scale_atoms=True)
    stretched.calc = EMT()
    assert stretched.get_stress()[:3].sum() > 0


@pytest.mark.parametrize("make", [alloys, molecules])
def test_equal_seeds_give_equal_bytes_and_longer_sets_begin_alike(make):
    first = make(_SET, seed=7)
    assert label_bytes(first) == label_bytes(make(_SET, seed=7))
    assert label_bytes(first[:5]) == label_bytes(make(5, seed=7))
    assert label_bytes(first) != label_bytes(make(_SET, seed=8))


def test_alloys_are_varied_and_of_the_stated_sizes():
    structures = alloys(150)
    sizes = {len(atoms) for atoms in structures}
    assert min(sizes) == 4 and 90 < max(sizes) <= 108
    assert any(len(atoms) % 4 for atoms in structures), "some cells have vacancies"
    assert {s for atoms in structures for s in atoms.symbols} == {"Cu", "Ni", "Pd", "Ag", "Au"}
    assert {len(set(atoms.symbols)) for atoms in structures} == {1, 2, 3}
    assert all(atoms.pbc.all() for atoms in structures)


def test_molecules_are_organic_closed_shell_and_a_third_is_ethanol():
    structures = molecules(120)
    for atoms in structures:
        assert {"C", "H"} <= set(atoms.symbols) <= {"C", "H", "N", "O"}
        assert atoms.numbers.sum() % 2 == 0
        assert not atoms.pbc.any() and "stress" not in atoms.calc.results
    names = [atoms.info["name"] for atoms in structures]
    assert names.count("CH3CH2OH") >= 40 and len(set(names)) == len(demo_sets._organic_names())


@pytest.mark.parametrize("make", [alloys, molecules])
def test_forces_are_those_of_molecular_dynamics_and_no_atoms_overlap(make):
    structures = make(100)
    forces = np.concatenate([atoms.calc.results["forces"] for atoms in structures])
    assert 0.5 < np.linalg.norm(forces, axis=1).mean() < 2.0
    shortest = 2.0 if make is alloys else 0.8
    for atoms in structures:
        distances = atoms.get_all_distances(mic=bool(atoms.pbc.any()))
        assert distances[np.triu_indices(len(atoms), k=1)].min() > shortest


def test_nothing_is_printed(capfd):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        molecules(10)
        alloys(3)
    captured = capfd.readouterr()
    assert captured.out == "" and captured.err == ""


def test_a_failing_cycle_is_drawn_anew_and_reported(monkeypatch):
    plain = molecules(3, seed=2)
    label = demo_sets._xtb_labels
    failures = iter([True])

    def fails_once(atoms):
        if atoms.info["name"] == plain[1].info["name"] and next(failures, False):
            raise RuntimeError("SCF not converged in 250 cycles")
        return label(atoms)

    monkeypatch.setattr(demo_sets, "_xtb_labels", fails_once)
    with pytest.warns(UserWarning, match="molecule 1 .* is drawn anew: SCF not converged"):
        again = molecules(3, seed=2)
    assert label_bytes([again[0], again[2]]) == label_bytes([plain[0], plain[2]])
    assert again[1].info == plain[1].info and not np.allclose(
        again[1].positions, plain[1].positions
    )


def test_without_tblite_the_error_says_what_to_install(monkeypatch):
    real_import = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name.startswith("tblite"):
            raise ImportError("No module named 'tblite'")
        return real_import(name, *args, **kwargs)

    for name in [name for name in sys.modules if name.startswith("tblite")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ImportError, match=r"pip install 'nvalchemi\[xtb\]'"):
        molecules(1)


@pytest.mark.parametrize("make", [alloys, molecules])
def test_impossible_arguments_are_refused(make):
    with pytest.raises(ValueError, match="num_structures must be at least 1: got 0"):
        make(0)
    with pytest.raises(ValueError, match="seed must not be negative: got -1"):
        make(1, seed=-1)
