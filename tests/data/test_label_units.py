"""Units of labels are converted when told; energies of too little precision are reported."""

import numpy as np
import pytest
import torch
from ase.build import bulk, molecule
from ase.calculators.singlepoint import SinglePointCalculator
from ase.io import write
from ase.units import Bohr, Hartree, kcal, mol

from nvalchemi.data.convert import LabelKeys, audit_labels, from_ase, read_extxyz


def crystal(energy=-3.0, **more):
    atoms = bulk("Cu", "fcc", a=3.7, cubic=True)
    forces = np.arange(12.0).reshape(4, 3) / 10
    atoms.calc = SinglePointCalculator(atoms, energy=energy, forces=forces, **more)
    return atoms


def ethanol(**info):
    atoms = molecule("CH3CH2OH")
    atoms.info.update(info)
    return atoms


@pytest.mark.parametrize(
    ("units", "energy", "force"),
    [
        ("eV/Angstrom", 1.0, 1.0),
        ("kcal/mol/Angstrom", kcal / mol, kcal / mol),
        ("Hartree/Angstrom", Hartree, Hartree),
        ("Hartree/Bohr", Hartree, Hartree / Bohr),
    ],
)
def test_units_are_converted(units, energy, force):
    atoms = crystal(energy=1.0, stress=np.ones(6))
    atoms.calc.results["forces"] = np.ones((4, 3))
    data = from_ase(atoms, units=units, dtype=torch.float64)
    assert data.energy.item() == pytest.approx(energy)
    assert data.forces[0, 0].item() == pytest.approx(force)
    assert data.stress[0, 0, 0].item() == pytest.approx(force**3 / energy**2)
    np.testing.assert_array_equal(data.positions.numpy(), atoms.positions)


def test_unknown_units_are_refused():
    with pytest.raises(ValueError, match=r"units must be one of .*: got 'eV'"):
        from_ase(crystal(), units="eV")


def test_energies_that_float32_does_not_resolve_warn():
    atoms = ethanol(energy=-29944.1234)
    with pytest.warns(UserWarning, match=r"resolved to 0\.00.* eV .*torch\.float64"):
        from_ase(atoms)


def test_energies_that_came_in_float32_warn_also_in_float64():
    atoms = ethanol(energy=np.float32(-29944.0))
    with pytest.warns(UserWarning, match="resolved to"):
        from_ase(atoms, dtype=torch.float64)


def test_energies_that_fit_do_not_warn(recwarn):
    from_ase(ethanol(energy=-300.1234))
    from_ase(ethanol(energy=-29944.1234), dtype=torch.float64)
    assert not recwarn


def test_energies_in_kcal_are_found_out(tmp_path):
    energy = -97079.9
    write(tmp_path / "e.xyz", [ethanol(E=energy)] * 3, format="extxyz")
    keys = LabelKeys(energy="E", forces=None)
    audit = audit_labels(tmp_path / "e.xyz", keys)
    assert any("kcal/mol" in finding for finding in audit.findings)
    with pytest.warns(UserWarning, match="below any possible energy"):
        list(read_extxyz(tmp_path / "e.xyz", label_keys=keys, dtype=torch.float64))
    right = audit_labels(tmp_path / "e.xyz", keys, units="kcal/mol/Angstrom")
    assert right.findings == []
    assert right.ranges["energy"][0] == pytest.approx(energy * kcal / mol / 9)
