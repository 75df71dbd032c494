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
from nvalchemi.data.pairs import PairSearch


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


# Structures that spread thinly: vesin divides by zero there, which ends the whole process.


@pytest.mark.parametrize("direction", [(0, 0, 1), (0, 1, 1), (1, 1, 1), (1, 0.1, 0.01)])
@pytest.mark.parametrize("distance", [2e3, 1e5, 1e9, 1e12])
def test_atom_that_flew_away_has_no_neighbours(direction, distance):
    positions = np.array([[0.0, 0, 0], [0.96, 0, 0], np.array(direction) * distance])
    pairs, shifts = neighbor_list(positions, None, None, 5.0)
    assert pairs.tolist() == [[0, 1], [1, 0]]
    assert not shifts.any()


def test_wide_flake_and_long_wire_have_their_neighbours():
    flake = np.stack(np.meshgrid(np.arange(40.0), np.arange(40.0), [0.0]), -1).reshape(-1, 3) * 60
    twins = np.concatenate([flake, flake + [0, 0, 1.5]])
    pairs, _ = neighbor_list(twins, None, None, 5.0)
    assert pairs.tolist() == [[i, (i + 1600) % 3200] for i in range(3200)]
    wire = np.array([[0.0, 0, 0], [0, 3e4, 3e4]])
    pairs, shifts = neighbor_list(wire, np.eye(3) * 3.0, np.array([True, False, False]), 5.0)
    assert pairs.tolist() == [[0, 0], [0, 0], [1, 1], [1, 1]]
    assert shifts.tolist() == [[-1, 0, 0], [1, 0, 0]] * 2


@given(
    st.integers(0, 2**32 - 1),
    st.tuples(st.booleans(), st.booleans(), st.booleans()),
    st.floats(1.0, 5.0),
)
@settings(max_examples=50, deadline=None)
def test_tree_finds_what_the_grid_finds(seed, pbc, cutoff):
    positions, cell, periodic = random_structure(seed, pbc)
    search = PairSearch(cutoff)
    grid, tree = (search.find(positions, cell, periodic, compact) for compact in (True, False))
    assert as_set(*tree[:2]) == as_set(*grid[:2])
    assert np.array_equal(tree[0][:, 0], grid[0][:, 0])
    np.testing.assert_allclose(np.sort(grid[2]), np.sort(tree[2]), atol=1e-12)


def test_atoms_many_cells_away_keep_their_neighbours_or_are_refused():
    cell, pbc = np.eye(3) * 3.0, np.ones(3, bool)
    pairs, shifts = neighbor_list(np.array([[0.0, 0, 0], [1, 0, 3e9]]), cell, pbc, 2.0)
    assert pairs.tolist() == [[0, 1], [1, 0]]
    assert shifts.tolist() == [[0, 0, -(10**9)], [0, 0, 10**9]]
    with pytest.raises(ValueError, match=r"atom 1 \(structure 0\) .* exploded"):
        neighbor_list(np.array([[0.0, 0, 0], [1, 0, 7e9]]), cell, pbc, 2.0)


def test_batch_with_one_structure_that_spreads_thinly():
    far = molecule("H2O")
    far.positions[0] += [0, 1e6, 0]
    batch = Batch.from_data_list([of_atoms(molecule("H2O")), of_atoms(far)])
    batch = add_neighbor_list(batch, 5.0)
    assert batch.num_edges_list == [6, 2]


# Atoms in one place, where no energy is defined.


def test_coincident_atoms_are_refused_with_structure_and_atoms():
    twice = Atoms("CHH", positions=[[0, 0, 0], [1, 0, 0], [1, 0, 1e-9]])
    good = of_atoms(molecule("H2O"))
    with pytest.raises(ValueError, match="atoms 1 and 2 of structure 1 lie in one place"):
        add_neighbor_list(Batch.from_data_list([good, of_atoms(twice)]), 5.0)
    image = np.array([[0.0, 0, 0], [0, 0, 3]])
    with pytest.raises(ValueError, match="atoms 0 and 1 of structure 0 lie in one place"):
        neighbor_list(image, np.eye(3) * 3, np.ones(3, bool), 2.0)


# Lists that were made elsewhere.


def foreign(images: str) -> Batch:
    batch = add_neighbor_list(Batch.from_data_list([of_atoms(bulk("Cu", cubic=True))] * 2), 4.0)
    edges = {"neighbor_list": batch.neighbor_list}
    if images == "shifts":
        boxes = batch.cell[batch.batch_idx.long()[batch.neighbor_list[:, 0]]]
        whole = batch.neighbor_list_shifts.double()
        edges["shifts"] = torch.einsum("ek,eki->ei", whole, boxes)
    return batch.with_edges(torch.tensor(batch.num_edges_list), edges)


def test_cartesian_shifts_serve_and_follow_the_cell():
    batch = foreign("shifts")
    own = add_neighbor_list(batch, 4.0)
    torch.testing.assert_close(edge_vectors(batch), edge_vectors(own))
    deform = torch.eye(3, dtype=torch.float64) + 0.1 * torch.rand(3, 3, dtype=torch.float64)
    moved = (batch.positions @ deform, batch.cell @ deform)
    torch.testing.assert_close(edge_vectors(batch, *moved), edge_vectors(own, *moved))
    cell = batch.cell.clone().requires_grad_()
    weights = torch.rand(batch.num_edges, 3, dtype=torch.float64)
    gradients = [
        torch.autograd.grad((edge_vectors(b, None, cell) * weights).sum(), cell)[0]
        for b in (batch, own)
    ]
    torch.testing.assert_close(*gradients)


def test_periodic_list_without_images_is_refused():
    batch = foreign("none")
    with pytest.raises(ValueError, match="neither neighbor_list_shifts .* nor shifts"):
        edge_vectors(batch)
    batch.pbc = torch.zeros(2, 3, dtype=torch.bool)
    assert edge_vectors(batch).shape == (batch.num_edges, 3)
