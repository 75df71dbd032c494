"""A multilayer perceptron on each atom: the dummy potential of the DDP example."""

import torch
from torch import Tensor, nn

from nvalchemi.data.batch import Batch
from nvalchemi.models.base import EnergyModel
from nvalchemi.models.reference_energies import MAX_ATOMIC_NUMBER


class MLPPotential(EnergyModel):
    """Energy as a sum over atoms of an MLP of the element and the distance from the centroid.

    It needs no neighbour list, is quick, and does not change when a structure is moved, rotated or
    its atoms are renumbered. It is no model of matter: it sees no bonds, and in a periodic
    structure the centroid has no meaning. Every parameter takes part in every energy and force.

    Parameters
    ----------
    hidden_features : int
        Width.
    num_layers : int
        Hidden layers.
    outputs : iterable of str
        Any of "energy", "forces", "stress".

    Raises
    ------
    ValueError
        If a size is not positive.
    """

    def __init__(
        self,
        hidden_features: int = 32,
        num_layers: int = 2,
        outputs: tuple[str, ...] | frozenset[str] = ("energy", "forces"),
    ) -> None:
        super().__init__(outputs)
        if hidden_features < 1 or num_layers < 1:
            raise ValueError(
                "hidden_features and num_layers must be positive: got "
                f"{hidden_features} and {num_layers}"
            )
        self.embedding = nn.Embedding(MAX_ATOMIC_NUMBER + 1, hidden_features)
        layers: list[nn.Module] = [nn.Linear(hidden_features + 1, hidden_features), nn.SiLU()]
        for _ in range(num_layers - 1):
            layers += [nn.Linear(hidden_features, hidden_features), nn.SiLU()]
        # No bias at the end: a loss on forces alone would leave it without a gradient.
        self.network = nn.Sequential(*layers, nn.Linear(hidden_features, 1, bias=False))

    def energy(self, batch: Batch, positions: Tensor, cell: Tensor | None) -> Tensor:
        """Energy [B, 1] in eV; see `EnergyModel.energy`."""
        structure = batch.batch_idx
        counts = batch.num_nodes_per_graph.unsqueeze(1).to(positions.dtype)
        sums = positions.new_zeros(batch.num_graphs, 3).index_add(0, structure, positions)
        offsets = positions - (sums / counts).index_select(0, structure)
        squared = offsets.pow(2).sum(1, keepdim=True)
        element = self.embedding(batch.atomic_numbers.long())
        features = torch.cat([element, (squared / (1 + squared)).to(element.dtype)], 1)
        atomic = self.network(features).to(positions.dtype)
        return atomic.new_zeros(batch.num_graphs, 1).index_add(0, structure, atomic)
