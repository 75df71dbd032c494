"""Sums over neighbours as matrix products equal sums edge by edge, however blocks are cut."""

import pytest
import torch
from ase.build import bulk, molecule

from nvalchemi.data.atomic_data import AtomicData
from nvalchemi.data.batch import Batch
from nvalchemi.data.neighbors import add_neighbor_list
from nvalchemi.models.pair_sums import PairSums

# name: structures, and whether they make one dense block each
CASES = {
    "equal sizes": ([bulk("Cu", cubic=True) * (2, 1, 1)] * 3, True),
    "many images of few atoms": ([bulk("Cu"), bulk("Cu", cubic=True)], True),
    "different sizes": ([bulk("Cu", cubic=True) * (3, 2, 2), molecule("H2O")], False),
    "molecules": ([molecule("CH3CH2OH"), molecule("CH4")] * 2, False),
    "one atom": ([molecule("H2O"), molecule("H2O")[:1]], False),
    "no edge at all": ([molecule("H2O")[:1]], False),
}


def edge_by_edge(batch: Batch, weights: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
    centre, neighbor = batch.neighbor_list.unbind(1)
    terms = weights.unsqueeze(2) * features[neighbor].unsqueeze(1)
    return terms.new_zeros(batch.num_nodes, *terms.shape[1:]).index_add(0, centre, terms)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("shuffled", [False, True])
def test_equals_the_sum_over_edges(case, shuffled):
    structures, dense = CASES[case]
    data = [AtomicData.from_atoms(atoms, dtype=torch.float64) for atoms in structures]
    batch = add_neighbor_list(Batch.from_data_list(data), 4.0)
    if shuffled:
        order = torch.randperm(batch.num_edges, generator=torch.Generator().manual_seed(0))
        edges = {name: value[order] for name, value in batch.fields("edge").items()}
        batch = batch.with_fields("edge", edges)
    pairs = PairSums(batch)
    assert (pairs.shape[0] == batch.num_graphs and pairs.shape[1] > 1) == dense
    weights = torch.randn(batch.num_edges, 2, dtype=torch.float64)
    features = torch.randn(batch.num_nodes, 5, dtype=torch.float64)
    sums = pairs.sum(pairs.matrices(weights), features)
    torch.testing.assert_close(sums, edge_by_edge(batch, weights, features))
