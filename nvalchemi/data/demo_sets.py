"""Two small labelled data sets, computed on the spot by physics packages: nothing is fetched.

They are for notebooks and tests. EMT and GFN2-xTB are real, differentiable energy surfaces, so
that energies, forces and stresses fit together; they are no substitute for ab initio data.

Sources
-------
EMT: K. W. Jacobsen, P. Stoltze, J. K. Norskov, Surf. Sci. 366, 394 (1996), as in ASE.
GFN2-xTB: C. Bannwarth, S. Ehlert, S. Grimme, J. Chem. Theory Comput. 15, 1652 (2019), as in tblite.
Molecules: ASE's g2 collection, L. A. Curtiss et al., J. Chem. Phys. 106, 1063 (1997).
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
from ase import Atoms
from ase.build import bulk
from ase.calculators.emt import EMT
from ase.calculators.singlepoint import SinglePointCalculator
from ase.data import atomic_numbers, reference_states
from ase.units import Bohr, Hartree

from nvalchemi.data.ase_atoms import warn_user

_METALS = ("Cu", "Ni", "Pd", "Ag", "Au")
_LATTICE_CONSTANT = {
    atomic_numbers[metal]: reference_states[atomic_numbers[metal]]["a"] for metal in _METALS
}
# Repeats of the cubic cell of four atoms and how often each is drawn: about 20 atoms on average.
_REPEATS = ((1, 1, 1), (2, 1, 1), (2, 2, 1), (2, 2, 2), (3, 2, 2), (3, 3, 2), (3, 3, 3))
_REPEAT_SHARES = (0.20, 0.25, 0.25, 0.17, 0.07, 0.04, 0.02)

# Amplitudes (Angstrom, standard deviation per component) like those of molecular dynamics at some
# hundred kelvin: the norm of the forces is about 1 eV/Angstrom on average in both sets.
_ALLOY_RATTLE = (0.02, 0.08)
_MOLECULE_RATTLE = (0.005, 0.035)

_ORGANIC = {"H", "C", "N", "O"}
_MAX_DRAWS = 20


def alloys(num_structures: int, seed: int = 0) -> list[Atoms]:
    """Periodic fcc cells of Cu, Ni, Pd, Ag and Au labelled with EMT.

    One to three elements on the sites, lattice constant by Vegard's rule, strained by a few per
    cent, rattled; a third of the cells with 16 or more atoms have one to three vacancies.

    Parameters
    ----------
    num_structures : int
        How many, at least 1. The first n structures do not depend on it.
    seed : int
        Equal seeds give equal structures.

    Returns
    -------
    list of ase.Atoms
        One to 27 cubic cells (4 to 108 atoms), each with a SinglePointCalculator that
        holds energy (eV), forces (eV/Angstrom) and stress (eV/Angstrom^3, Voigt order).

    Raises
    ------
    ValueError
        If num_structures < 1 or seed < 0.
    """
    _check(num_structures, seed)
    return [_emt_labels(_draw_alloy(_rng(seed, 0, i))) for i in range(num_structures)]


def molecules(num_structures: int, seed: int = 0) -> list[Atoms]:
    """Small closed-shell organic molecules of H, C, N and O labelled with GFN2-xTB.

    Every third structure is ethanol, the others go through the molecules of the g2 collection in
    turn; all are rattled. ``atoms.info["name"]`` is the name in that collection.

    Parameters
    ----------
    num_structures : int
        How many, at least 1. The first n structures do not depend on it.
    seed : int
        Equal seeds give equal structures.

    Returns
    -------
    list of ase.Atoms
        Without cell, each with a SinglePointCalculator that holds energy (eV) and forces
        (eV/Angstrom).

    Raises
    ------
    ValueError
        If num_structures < 1 or seed < 0.
    ImportError
        If tblite is not installed.
    RuntimeError
        If the self-consistent cycle of a molecule fails however often it is drawn anew.
    """
    _check(num_structures, seed)
    _import_tblite()
    with _one_openmp_thread():
        return [_labelled_molecule(seed, i) for i in range(num_structures)]


def _check(num_structures: int, seed: int) -> None:
    if num_structures < 1:
        raise ValueError(f"num_structures must be at least 1: got {num_structures}")
    if seed < 0:
        raise ValueError(f"seed must not be negative: got {seed}")


def _rng(seed: int, *path: int) -> np.random.Generator:
    # keyed by position in the set, so that a longer set begins with the shorter one
    return np.random.default_rng((seed, *path))


def _draw_alloy(rng: np.random.Generator) -> Atoms:
    num_elements = rng.choice((1, 2, 3), p=(0.25, 0.45, 0.30))
    elements = rng.choice(list(_LATTICE_CONSTANT), size=num_elements, replace=False)
    # permuted, so that elongated cells point anywhere
    repeat = rng.permutation(_REPEATS[rng.choice(len(_REPEATS), p=_REPEAT_SHARES)])

    atoms = bulk("Cu", "fcc", a=1.0, cubic=True).repeat(repeat.tolist())
    shares = rng.dirichlet(np.ones(num_elements))
    atoms.numbers = rng.choice(elements, size=len(atoms), p=shares)
    lattice_constant = np.mean([_LATTICE_CONSTANT[int(z)] for z in atoms.numbers])

    strain = rng.uniform(-0.04, 0.05) * np.eye(3)
    shear = rng.uniform(-0.02, 0.02, size=(3, 3))
    strain = strain + (shear + shear.T) / 2
    atoms.set_cell(lattice_constant * atoms.cell @ (np.eye(3) + strain), scale_atoms=True)

    if len(atoms) >= 16 and rng.random() < 1 / 3:
        del atoms[rng.choice(len(atoms), size=rng.integers(1, 4), replace=False)]
    atoms.positions += rng.normal(scale=rng.uniform(*_ALLOY_RATTLE), size=(len(atoms), 3))
    return atoms


def _emt_labels(atoms: Atoms) -> Atoms:
    calculator = EMT()
    calculator.calculate(atoms, ["energy", "forces", "stress"])
    labels = {name: calculator.results[name] for name in ("energy", "forces", "stress")}
    atoms.calc = SinglePointCalculator(atoms, **labels)
    return atoms


@cache
def _organic_names() -> tuple[str, ...]:
    """Closed-shell molecules of the g2 collection with carbon, hydrogen and maybe N and O."""
    from ase.collections import g2

    names = []
    for name in sorted(g2.names):
        molecule = g2[name]
        symbols = set(molecule.get_chemical_symbols())
        even = int(molecule.numbers.sum()) % 2 == 0
        unpaired = np.any(molecule.get_initial_magnetic_moments() != 0)
        # CH2_s1A1d, the singlet carbene, passes every other test and is no stable molecule
        carbene = name.startswith("CH2_")
        if {"C", "H"} <= symbols <= _ORGANIC and even and not unpaired and not carbene:
            names.append(name)
    return tuple(names)


def _draw_molecule(index: int, rng: np.random.Generator) -> Atoms:
    from ase.collections import g2

    names = _organic_names()
    turn = index - index // 3 - 1
    name = "CH3CH2OH" if index % 3 == 0 else names[turn % len(names)]
    template = g2[name]
    noise = rng.normal(scale=rng.uniform(*_MOLECULE_RATTLE), size=(len(template), 3))
    return Atoms(template.numbers, template.positions + noise, info={"name": name})


def _labelled_molecule(seed: int, index: int) -> Atoms:
    for draw in range(_MAX_DRAWS):
        atoms = _draw_molecule(index, _rng(seed, 1, index, draw))
        try:
            return _xtb_labels(atoms)
        except RuntimeError as error:
            warn_user(
                f"molecule {index} ({atoms.info['name']}) of seed {seed} is drawn anew: {error}"
            )
    raise RuntimeError(f"GFN2-xTB failed for {_MAX_DRAWS} draws of molecule {index}, seed {seed}")


def _xtb_labels(atoms: Atoms) -> Atoms:
    calculator = _import_tblite()("GFN2-xTB", atoms.numbers, atoms.positions / Bohr)
    calculator.set("verbosity", 0)
    result = calculator.singlepoint()
    atoms.calc = SinglePointCalculator(
        atoms,
        energy=float(result.get("energy")) * Hartree,
        forces=-np.asarray(result.get("gradient")) * (Hartree / Bohr),
    )
    return atoms


def _import_tblite() -> Any:
    try:
        from tblite.interface import Calculator
    except ImportError as error:
        raise ImportError(
            "molecules() computes its labels with tblite, which is not installed: "
            "pip install 'nvalchemi[xtb]'"
        ) from error
    return Calculator


@contextmanager
def _one_openmp_thread() -> Iterator[None]:
    """Run tblite on one thread: more change the last bits of the labels and are slower here."""
    from tblite import _libtblite

    # resolved through tblite's own library, so that it is the OpenMP runtime which tblite uses
    library = ctypes.CDLL(_libtblite.__file__)
    if not hasattr(library, "omp_set_num_threads"):
        yield
        return
    before = library.omp_get_max_threads()
    library.omp_set_num_threads(1)
    try:
        yield
    finally:
        library.omp_set_num_threads(before)
