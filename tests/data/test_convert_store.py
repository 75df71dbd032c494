"""Import into a store: complete or not at all, with what was left out in the report."""

import numpy as np
import pytest
import torch
from ase.build import bulk, molecule
from ase.calculators.singlepoint import SinglePointCalculator
from ase.io import write

from nvalchemi.data import convert
from nvalchemi.data.convert import LabelKeys, import_atoms, import_extxyz, read_extxyz
from nvalchemi.data.datapipes import AtomicDataZarrReader
from nvalchemi.data.demo_sets import alloys


def water(energy):
    atoms = molecule("H2O")
    atoms.calc = SinglePointCalculator(atoms, energy=energy, forces=np.full((3, 3), energy))
    return atoms


def copper(energy):
    atoms = bulk("Cu", cubic=True)
    atoms.calc = SinglePointCalculator(atoms, energy=energy, forces=np.full((4, 3), energy))
    return atoms


def test_a_file_becomes_a_store_with_the_same_structures(tmp_path):
    write(tmp_path / "alloys.xyz", alloys(12), format="extxyz")
    keys = LabelKeys(stress="stress")
    audit = import_extxyz(tmp_path / "alloys.xyz", tmp_path / "alloys.zarr", label_keys=keys)
    assert audit.num_kept == 12 and audit.refused == {} and audit.counts["stress"] == 12

    batch = AtomicDataZarrReader(tmp_path / "alloys.zarr").read_batch(range(12))
    for stored, read in zip(
        batch.to_data_list(), read_extxyz(tmp_path / "alloys.xyz", label_keys=keys), strict=True
    ):
        for name, value in read:
            assert torch.equal(getattr(stored, name), value), name
    assert [p.name for p in tmp_path.iterdir() if ".partial" in p.name] == []


def test_blocks_and_neighbour_lists(tmp_path, monkeypatch):
    structures = alloys(7, seed=4)
    import_atoms(structures, tmp_path / "whole.zarr", cutoff=3.5)
    monkeypatch.setattr(convert, "_BLOCK_STRUCTURES", 2)
    import_atoms(structures, tmp_path / "blocks.zarr", cutoff=3.5)
    whole = AtomicDataZarrReader(tmp_path / "whole.zarr").read_batch(range(7))
    blocks = AtomicDataZarrReader(tmp_path / "blocks.zarr").read_batch(range(7))
    assert whole.num_edges > 0
    for name in ("positions", "energy", "neighbor_list", "neighbor_list_shifts"):
        assert torch.equal(getattr(whole, name), getattr(blocks, name)), name


def test_a_refused_structure_leaves_no_store(tmp_path, monkeypatch):
    monkeypatch.setattr(convert, "_BLOCK_STRUCTURES", 2)
    frames = [water(float(i)) for i in range(6)]
    del frames[5].calc.results["forces"]
    with pytest.raises(ValueError, match=r"no forces in 1 of 6 structures \(5\)"):
        import_atoms(frames, tmp_path / "w.zarr")
    assert list(tmp_path.iterdir()) == []


def test_skip_leaves_out_and_says_so(tmp_path):
    frames = [water(float(i)) for i in range(4)]
    del frames[1].calc.results["forces"]
    with pytest.warns(UserWarning, match="1 of 4 structures are left out"):
        audit = import_atoms(frames, tmp_path / "w.zarr", missing="skip")
    assert list(audit.refused) == [1] and audit.num_kept == 3
    batch = AtomicDataZarrReader(tmp_path / "w.zarr").read_batch([0, 1, 2])
    assert batch.energy.ravel().tolist() == [0.0, 2.0, 3.0]


def test_nothing_left_is_an_error(tmp_path):
    with (
        pytest.raises(ValueError, match="no structure is left"),
        pytest.warns(UserWarning, match="left out"),
    ):
        import_atoms([molecule("H2O")], tmp_path / "w.zarr", missing="skip")
    assert list(tmp_path.iterdir()) == []


def test_periodic_and_lone_structures_go_into_one_store(tmp_path):
    import_atoms([water(1.0), copper(2.0), water(3.0)], tmp_path / "m.zarr")
    batch = AtomicDataZarrReader(tmp_path / "m.zarr").read_batch([0, 1, 2])
    assert batch.energy.ravel().tolist() == [1.0, 2.0, 3.0]
    assert batch.pbc.any(dim=1).tolist() == [False, True, False]
    assert not batch.cell[0].any() and batch.cell[1].any()


def test_an_existing_store_is_not_touched(tmp_path):
    import_atoms([water(1.0)], tmp_path / "w.zarr")
    with pytest.raises(FileExistsError, match="exists already"):
        import_atoms([water(2.0)], tmp_path / "w.zarr")
    assert AtomicDataZarrReader(tmp_path / "w.zarr").read_batch([0]).energy.item() == 1.0


def test_a_store_can_not_hold_a_label_of_some_structures(tmp_path):
    with pytest.raises(ValueError, match="missing must be one of 'raise', 'skip': got 'allow'"):
        import_atoms([water(1.0)], tmp_path / "w.zarr", missing="allow")
    with pytest.raises(TypeError, match="frames must be a list"):
        import_atoms(iter([water(1.0)]), tmp_path / "w.zarr")
