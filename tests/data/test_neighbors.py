"""Neighbour lists against ASE's, periodic and not, and what must be refused."""

import functools

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import bulk, molecule
from ase.neighborlist import primitive_neighbor_list
from hypothesis import given, settings
from hypothesis import strategies as st

from nvalchemi.data.atomic_data import AtomicData
from nvalchemi.data.batch import Batch
from nvalchemi.data.neighbors import add_neighbor_list, edge_vectors, neighbor_list


def as_set(pairs: object, shifts: object) -> set[tuple[int, ...]]:
    rows = np.concatenate([np.asarray(pairs), np.asarray(shifts)], axis=1).tolist()
    found = {tuple(row) for row in rows}
    assert len(found) == len(rows), "a pair appears twice"
    return found


def ase_set(positions: np.ndarray, cell: np.ndarray, pbc: np.ndarray, cutoff: float) -> set:
    i, j, shifts = primitive_neighbor_list("ijS", pbc, cell, positions, cutoff)
    return as_set(np.stack([i, j], 1), shifts)


def structure(positions: np.ndarray, cell: np.ndarray, pbc: np.ndarray) -> AtomicData:
    return AtomicData(
        atomic_numbers=torch.full((len(positions),), 29),
        positions=torch.from_numpy(positions),
        cell=torch.from_numpy(cell)[None],
        pbc=torch.from_numpy(pbc)[None],
    )


def of_atoms(atoms: Atoms) -> AtomicData:
    fields = structure(atoms.positions, atoms.cell.array, atoms.pbc).to_dict()
    fields["atomic_numbers"] = torch.from_numpy(atoms.numbers)
    if not atoms.pbc.any():
        del fields["cell"], fields["pbc"]
    return AtomicData(**fields)


def random_structure(seed: int, pbc: tuple[bool, ...]) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(seed)
    cell = np.zeros((3, 3))
    while abs(np.linalg.det(cell)) <= 0.1 * np.linalg.norm(cell, axis=1).prod():
        cell = np.eye(3) * rng.uniform(1.5, 5.0) + rng.normal(size=(3, 3))
    positions = rng.uniform(-1.0, 2.0, (rng.integers(1, 6), 3)) @ cell
    return positions, cell, np.array(pbc)


@given(
    st.integers(0, 2**32 - 1),
    st.tuples(st.booleans(), st.booleans(), st.booleans()),
    st.floats(1.0, 5.0),
)
@settings(max_examples=100, deadline=None)
def test_equals_ase_in_small_skewed_cells(seed, pbc, cutoff):
    positions, cell, periodic = random_structure(seed, pbc)
    pairs, shifts = neighbor_list(positions, cell, periodic, cutoff)
    assert as_set(pairs, shifts) == ase_set(positions, cell, periodic, cutoff)
    assert (pairs[:, 0].diff() >= 0).all()


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=5), st.data())
@settings(max_examples=25, deadline=None)
def test_batch_equals_singles(seeds, data):
    pbc = st.tuples(st.booleans(), st.booleans(), st.booleans())
    parts = [random_structure(seed, data.draw(pbc)) for seed in seeds]
    batch = add_neighbor_list(Batch.from_data_list([structure(*part) for part in parts]), 3.0)
    for part, data in zip(parts, batch.to_data_list(), strict=True):
        assert as_set(data.neighbor_list, data.neighbor_list_shifts) == ase_set(*part, 3.0)
    batch.validate()


def test_vectors_have_the_distances_and_point_to_the_neighbor():
    positions, cell, pbc = random_structure(3, (True, True, False))
    batch = add_neighbor_list(Batch.from_data_list([structure(positions, cell, pbc)] * 2), 4.0)
    vectors = edge_vectors(batch)[: batch.num_edges_list[0]].numpy()
    distances, expected = primitive_neighbor_list("dD", pbc, cell, positions, 4.0)
    np.testing.assert_allclose(sorted(np.linalg.norm(vectors, axis=1)), sorted(distances))
    np.testing.assert_allclose(
        vectors[np.lexsort(vectors.round(6).T)], expected[np.lexsort(expected.round(6).T)]
    )


def test_vectors_follow_positions_and_cell():
    positions, cell, pbc = random_structure(4, (True, True, True))
    batch = add_neighbor_list(Batch.from_data_list([structure(positions, cell, pbc)]), 3.0)
    strain = torch.tensor([[0.01, 0.02, 0.0], [0.02, -0.03, 0.01], [0.0, 0.01, 0.02]]).double()
    deform = torch.eye(3, dtype=torch.float64) + strain
    moved = edge_vectors(batch, batch.positions @ deform, batch.cell @ deform)
    torch.testing.assert_close(moved, edge_vectors(batch) @ deform)
    torch.autograd.gradcheck(
        lambda r, c: edge_vectors(batch, r, c),
        (batch.positions.requires_grad_(), batch.cell.requires_grad_()),
    )


def test_single_atom_has_an_empty_list_of_the_right_kind():
    lone = AtomicData(atomic_numbers=torch.tensor([18]), positions=torch.zeros(1, 3))
    batch = add_neighbor_list(Batch.from_data_list([lone]), 5.0)
    assert batch.neighbor_list.shape == (0, 2) and batch.neighbor_list_shifts.shape == (0, 3)
    assert batch.neighbor_list.dtype == batch.neighbor_list_shifts.dtype == torch.int64
    assert edge_vectors(batch).shape == (0, 3)
    assert batch.num_edges_per_graph.tolist() == [0]


def test_no_edges_between_structures_of_a_batch():
    water = of_atoms(molecule("H2O"))
    batch = add_neighbor_list(Batch.from_data_list([water, water]), 10.0)
    assert batch.num_edges_list == [6, 6]
    batch.validate()


def test_molecules_and_crystals_share_a_batch():
    parts = [of_atoms(molecule("H2O")), of_atoms(bulk("Cu", cubic=True))]
    batch = functools.partial(add_neighbor_list, cutoff=3.0)(Batch.from_data_list(parts))
    assert batch.num_edges_list == [6, 4 * 12]


def test_an_old_list_is_replaced_and_the_given_batch_is_left_alone():
    batch = Batch.from_data_list([of_atoms(bulk("Cu", cubic=True))])
    near = add_neighbor_list(batch, 3.0)
    far = add_neighbor_list(near, 4.0)
    assert near.num_edges == 4 * 12 and far.num_edges == 4 * 18
    assert "neighbor_list" not in batch


def test_other_edge_fields_are_not_dropped_in_silence():
    batch = add_neighbor_list(Batch.from_data_list([of_atoms(molecule("H2O"))]), 3.0)
    batch = batch.with_fields("edge", {"edge_embeddings": torch.zeros(batch.num_edges, 4)})
    with pytest.raises(ValueError, match="edge_embeddings"):
        add_neighbor_list(batch, 3.0)


@pytest.mark.parametrize("cutoff", [0.0, -1.0, float("nan"), float("inf")])
def test_cutoff_must_be_positive_and_finite(cutoff):
    with pytest.raises(ValueError, match="cutoff must be positive and finite"):
        neighbor_list(np.zeros((1, 3)), None, None, cutoff)


def test_periodic_structures_need_a_sound_cell():
    flat = np.array([[3.0, 0, 0], [0, 3.0, 0], [3.0, 3.0, 0]])
    with pytest.raises(ValueError, match="needs a cell"):
        neighbor_list(np.zeros((1, 3)), None, np.array([True, False, False]), 3.0)
    with pytest.raises(ValueError, match="finite and independent: structure 0"):
        neighbor_list(np.zeros((1, 3)), flat, np.array([True, True, True]), 3.0)
    with pytest.raises(ValueError, match="finite and independent"):
        neighbor_list(np.zeros((1, 3)), np.full((3, 3), np.nan), np.array([True] * 3), 3.0)
    # the third vector is not periodic, so nothing depends on it
    pairs, _ = neighbor_list(np.zeros((1, 3)), flat, np.array([True, True, False]), 3.1)
    assert len(pairs) == 4


def test_positions_must_be_finite():
    water = of_atoms(molecule("H2O"))
    batch = Batch.from_data_list([water, water])
    batch.positions = batch.positions.clone().index_fill(0, torch.tensor([4]), float("nan"))
    with pytest.raises(ValueError, match=r"atom 4 \(structure 1\)"):
        add_neighbor_list(batch, 3.0)


def test_vectors_need_a_list():
    with pytest.raises(ValueError, match="no neighbor_list: import the data with cutoff"):
        edge_vectors(Batch.from_data_list([of_atoms(molecule("H2O"))]))
