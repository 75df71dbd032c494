"""Random structures for property tests: from one atom without edges to a few with many."""

import torch
from hypothesis import strategies as st

from nvalchemi.data.atomic_data import AtomicData

# Levels of the two custom fields, as a reader of raw dicts has to tell them.
LEVELS_OF_CUSTOM = {"tag": "node", "weight": "edge"}


def random_structure(num_atoms: int, num_edges: int, seed: int, periodic: bool) -> AtomicData:
    """Structure with fields at every level, one custom at each, some NaN among the labels."""
    g = torch.Generator().manual_seed(seed)
    fields = {
        "atomic_numbers": torch.randint(1, 119, (num_atoms,), generator=g),
        "positions": torch.randn(num_atoms, 3, generator=g),
        "forces": torch.randn(num_atoms, 3, generator=g),
        "energy": torch.randn(1, 1, generator=g),
        "neighbor_list": torch.randint(0, num_atoms, (num_edges, 2), generator=g),
        "neighbor_list_shifts": torch.randint(-1, 2, (num_edges, 3), generator=g),
        "temperature": torch.rand(1, generator=g),
    }
    if periodic:
        fields["cell"] = torch.randn(1, 3, 3, generator=g)
        fields["pbc"] = torch.rand(1, 3, generator=g) < 0.5
    if seed % 3 == 0:
        fields["forces"][0] = torch.nan
    data = AtomicData(**fields)
    data.add_node_property("tag", torch.randint(0, 5, (num_atoms,), generator=g))
    data.add_edge_property("weight", torch.rand(num_edges, 2, generator=g))
    return data


def molecule(num_atoms: int, num_edges: int = 0, **fields: torch.Tensor) -> AtomicData:
    return random_structure(num_atoms, num_edges, seed=7 * num_atoms, periodic=False).replace(
        **fields
    )


def three() -> list[AtomicData]:
    return [random_structure(n, e, seed=n, periodic=True) for n, e in ((3, 4), (1, 0), (2, 5))]


@st.composite
def structures(draw: st.DrawFn, min_size: int = 1, max_size: int = 6, periodic: bool = True):
    """List of structures that carry the same fields."""
    sizes = st.tuples(st.integers(1, 6), st.integers(0, 9), st.integers(0, 2**20))
    return [
        random_structure(atoms, edges, seed, periodic)
        for atoms, edges, seed in draw(st.lists(sizes, min_size=min_size, max_size=max_size))
    ]
