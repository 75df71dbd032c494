"""Structures for tests of stores and readers."""

import torch

from nvalchemi.data.atomic_data import AtomicData


def structure(
    num_atoms: int, num_edges: int | None = None, seed: int = 0, labels: bool = True
) -> AtomicData:
    """Random structure; without a number of edges it has no neighbour list."""
    g = torch.Generator().manual_seed(1000 * num_atoms + seed)
    fields = {
        "atomic_numbers": torch.randint(1, 100, (num_atoms,), generator=g),
        "positions": torch.randn(num_atoms, 3, generator=g),
        "cell": torch.randn(1, 3, 3, generator=g),
        "pbc": torch.rand(1, 3, generator=g) < 0.5,
    }
    if labels:
        fields["energy"] = torch.randn(1, 1, generator=g)
        fields["forces"] = torch.randn(num_atoms, 3, generator=g)
    if num_edges is not None:
        fields["neighbor_list"] = torch.randint(0, num_atoms, (num_edges, 2), generator=g)
        fields["neighbor_list_shifts"] = torch.randint(-1, 2, (num_edges, 3), generator=g)
    return AtomicData(**fields)


def chain(num_atoms: int, energy: float = 0.0) -> AtomicData:
    """Structure whose neighbour list is 0-1, 1-2, ... and so tells its own numbering."""
    left = torch.arange(num_atoms - 1)
    return AtomicData(
        atomic_numbers=torch.full((num_atoms,), 6),
        positions=torch.arange(3.0 * num_atoms).reshape(num_atoms, 3),
        energy=torch.tensor([[energy]]),
        forces=torch.full((num_atoms, 3), energy),
        neighbor_list=torch.stack([left, left + 1], dim=1),
    )
