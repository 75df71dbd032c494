"""The demo model: a small network by the names that scripts of the peer use."""

import torch
from torch import Tensor, nn

from nvalchemi.data.batch import Batch
from nvalchemi.models.base import EnergyModel
from nvalchemi.models.reference_energies import MAX_ATOMIC_NUMBER


class DemoModel(nn.Module):
    """A plain network from elements and positions to energies, to try out the machinery with.

    It is not invariant to rotation or translation. The embedding is never renormalised: ranks
    that see different batches would each change their own copy, and drift apart.

    Parameters
    ----------
    num_atom_types : int
        Atomic numbers are below this.
    hidden_dim : int
        Width.
    """

    def __init__(self, num_atom_types: int = MAX_ATOMIC_NUMBER + 1, hidden_dim: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_atom_types, hidden_dim)
        self.coordinates = nn.Linear(3, hidden_dim)
        # No bias at the end: a loss on forces alone would leave it without a gradient.
        self.network = nn.Sequential(
            nn.Linear(hidden_dim, hidden_dim),
            nn.SiLU(),
            nn.Linear(hidden_dim, hidden_dim),
            nn.SiLU(),
            nn.Linear(hidden_dim, 1, bias=False),
        )

    def forward(
        self,
        atomic_numbers: Tensor,
        positions: Tensor,
        batch_idx: Tensor | None = None,
        num_graphs: int = 1,
    ) -> Tensor:
        """Energies.

        Parameters
        ----------
        atomic_numbers : Tensor int [V]
            Elements.
        positions : Tensor [V, 3]
            In Angstrom.
        batch_idx : Tensor int [V], optional
            Structure of each atom; all belong to structure 0 if not given.
        num_graphs : int
            Structures.

        Returns
        -------
        Tensor [num_graphs, 1]
            In eV.
        """
        if batch_idx is None:
            batch_idx = torch.zeros_like(atomic_numbers)
        element = self.embedding(atomic_numbers.long())
        features = element + torch.tanh(self.coordinates(positions.to(element.dtype)))
        atomic = self.network(features).to(positions.dtype)
        return atomic.new_zeros(num_graphs, 1).index_add(0, batch_idx, atomic)


class DemoModelWrapper(EnergyModel):
    """Give a `DemoModel` the interface of a model: ``forward(batch)`` -> energy, forces.

    Parameters
    ----------
    model : DemoModel
        Takes (atomic_numbers, positions, batch_idx, num_graphs), returns energies [B, 1].
    outputs : iterable of str
        Any of "energy", "forces", "stress".
    """

    def __init__(
        self,
        model: nn.Module,
        outputs: tuple[str, ...] | frozenset[str] = ("energy", "forces"),
    ) -> None:
        super().__init__(outputs)
        self.model = model

    def energy(self, batch: Batch, positions: Tensor, cell: Tensor | None) -> Tensor:
        """Energy [B, 1] in eV; see `EnergyModel.energy`."""
        energy: Tensor = self.model(
            batch.atomic_numbers, positions, batch.batch_idx, batch.num_graphs
        )
        return energy
