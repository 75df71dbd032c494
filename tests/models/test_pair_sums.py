"""Sums over neighbours as matrix products equal sums edge by edge, however blocks are cut."""

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import bulk, molecule
from hypothesis import given, settings
from hypothesis import strategies as st

from nvalchemi.data.atomic_data import AtomicData
from nvalchemi.data.batch import Batch
from nvalchemi.data.neighbors import add_neighbor_list
from nvalchemi.models.pair_sums import PairSums

COPPER = bulk("Cu", cubic=True)

# name: structures, and the (number, rows, columns) of the blocks that they fill
CASES = {
    "equal sizes": ([COPPER * (2, 1, 1)] * 3, [(3, 8, 8)]),
    "nearly equal sizes": ([COPPER * (2, 1, 1), (COPPER * (2, 1, 1))[:-1]], [(2, 8, 8)]),
    "many images of few atoms": ([bulk("Cu"), COPPER], [(1, 4, 4), (1, 1, 1)]),
    "molecules": ([molecule("CH4"), molecule("CH3CH2OH")], [(1, 9, 9), (1, 5, 5)]),
    "a large cell": ([COPPER * (9, 2, 2), COPPER], [(1, 4, 4), (144, 1, 18)]),
    "two large cells": ([COPPER * (9, 2, 2), COPPER * (8, 2, 2)], [(272, 1, 18)]),
    "a lone atom": ([molecule("H2O"), molecule("H2O")[:1]], [(1, 3, 3), (1, 1, 1)]),
    "as many columns as atoms": (
        # 8 + 7 + 7 atoms padded to 24, which two atoms without an edge make up
        [
            COPPER * (2, 1, 1),
            *2 * [(COPPER * (2, 1, 1))[:-1]],
            Atoms("Ar2", [[0, 0, 0], [9, 0, 0]]),
        ],
        [(3, 8, 8), (2, 1, 1)],
    ),
    "far apart, no edge": ([molecule("H2O")], [(3, 1, 1)]),
}


def edge_by_edge(batch: Batch, weights: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
    centre, neighbor = batch.neighbor_list.unbind(1)
    terms = weights.unsqueeze(2) * features[neighbor].unsqueeze(1)
    return terms.new_zeros(batch.num_nodes, *terms.shape[1:]).index_add(0, centre, terms)


def assert_same_sums(batch: Batch, pairs: PairSums) -> None:
    weights = torch.randn(batch.num_edges, 2, dtype=torch.float64)
    features = torch.randn(batch.num_nodes, 5, dtype=torch.float64)
    sums = pairs.sum(pairs.matrices(weights), features)
    torch.testing.assert_close(sums, edge_by_edge(batch, weights, features))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("shuffled", [False, True])
def test_equals_the_sum_over_edges(case, shuffled):
    structures, blocks = CASES[case]
    data = [AtomicData.from_atoms(atoms, dtype=torch.float64) for atoms in structures]
    cutoff = 0.5 if case == "far apart, no edge" else 4.0
    batch = add_neighbor_list(Batch.from_data_list(data), cutoff)
    if shuffled:
        order = torch.randperm(batch.num_edges, generator=torch.Generator().manual_seed(0))
        edges = {name: value[order] for name, value in batch.fields("edge").items()}
        batch = batch.with_fields("edge", edges)
    pairs = PairSums(batch)
    assert pairs._blocks == blocks
    assert_same_sums(batch, pairs)


@given(st.lists(st.tuples(st.integers(1, 30), st.floats(2.0, 20.0)), min_size=1, max_size=8))
@settings(max_examples=60, deadline=None)
def test_equals_the_sum_over_edges_in_any_mixture(sizes: list[tuple[int, float]]) -> None:
    rng = np.random.default_rng(0)
    data = [
        AtomicData(
            atomic_numbers=torch.full((size,), 18),
            positions=torch.from_numpy(rng.uniform(0, edge, (size, 3))),
        )
        for size, edge in sizes
    ]
    batch = add_neighbor_list(Batch.from_data_list(data), 3.0)
    assert_same_sums(batch, PairSums(batch))
