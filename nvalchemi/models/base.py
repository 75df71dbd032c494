"""The small protocol that a model keeps, and derivatives of an energy in one place.

A model is an `nn.Module` whose ``forward(batch)`` returns a dict of predictions, with a
`ModelConfig` that says which. A potential only writes its energy: `EnergyModel` takes forces and
stress from it by automatic differentiation.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor, nn

from nvalchemi.data.batch import Batch
from nvalchemi.data.checks import NEIGHBOR_CUTOFF, neighbor_list_remedy

# Outputs that `energy_forces_stress` can make of an energy.
ENERGY_OUTPUTS = frozenset({"energy", "forces", "stress"})


class NeighborListFormat(Enum):
    """How a model wants its neighbours: COO is one row for each edge, ``neighbor_list`` [E, 2]."""

    COO = "coo"


@dataclass(frozen=True, slots=True)
class NeighborConfig:
    """The neighbour list that a model needs.

    Parameters
    ----------
    cutoff : float
        In Angstrom; a list with a larger cutoff serves too.
    format : NeighborListFormat
        COO.

    Raises
    ------
    ValueError
        If the cutoff is not positive and finite.
    """

    cutoff: float
    format: NeighborListFormat = NeighborListFormat.COO

    def __post_init__(self) -> None:
        if not (math.isfinite(self.cutoff) and self.cutoff > 0):
            raise ValueError(f"cutoff must be positive and finite, in Angstrom: got {self.cutoff}")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What a model predicts and what it needs for that.

    Parameters
    ----------
    outputs : frozenset of str
        Keys of the dict that ``forward`` returns.
    autograd_outputs : frozenset of str
        Those of them that are derivatives, made by automatic differentiation.
    neighbor_config : NeighborConfig, optional
        The neighbour list that a batch must carry; None for a model without neighbours.

    Raises
    ------
    TypeError
        If a set of names is a single string.
    ValueError
        If there are no outputs, or `autograd_outputs` names something that is not among them.
    """

    outputs: frozenset[str] = frozenset({"energy"})
    autograd_outputs: frozenset[str] = frozenset()
    neighbor_config: NeighborConfig | None = None

    def __post_init__(self) -> None:
        for name in ("outputs", "autograd_outputs"):
            value = getattr(self, name)
            if isinstance(value, str):
                raise TypeError(f"{name} must be a set of names: got the string {value!r}")
            object.__setattr__(self, name, frozenset(value))
        if not self.outputs:
            raise ValueError("outputs must name at least one prediction, such as 'energy'")
        unknown = sorted(self.autograd_outputs - self.outputs)
        if unknown:
            raise ValueError(
                f"autograd_outputs must be among outputs {sorted(self.outputs)}: got {unknown}"
            )


class BaseModelMixin:
    """What training expects of a model: a `model_config`, and ``forward(batch) -> dict``.

    Mix it into an `nn.Module` (name it first) and set `model_config` in ``__init__``.
    """

    model_config: ModelConfig

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Predictions by name: energy [B, 1], forces [V, 3], stress [B, 3, 3]."""
        raise NotImplementedError(f"{type(self).__name__} must define forward(batch)")


class EnergyModel(BaseModelMixin, nn.Module):
    """A potential: a subclass writes `energy`, forces and stress follow.

    Parameters
    ----------
    outputs : iterable of str
        Any of "energy", "forces", "stress". What is not asked for is not computed: leave out
        forces and stress when the loss has no use for them.
    neighbor_config : NeighborConfig, optional
        The neighbour list that `energy` reads.

    Raises
    ------
    ValueError
        For an output that is not one of these.
    """

    def __init__(
        self,
        outputs: tuple[str, ...] | frozenset[str] = ("energy", "forces"),
        neighbor_config: NeighborConfig | None = None,
    ) -> None:
        super().__init__()
        wanted = frozenset({outputs} if isinstance(outputs, str) else outputs)
        unknown = sorted(wanted - ENERGY_OUTPUTS)
        if unknown:
            raise ValueError(f"outputs must be among {sorted(ENERGY_OUTPUTS)}: got {unknown}")
        self.model_config = ModelConfig(wanted, wanted - {"energy"}, neighbor_config)

    def energy(self, batch: Batch, positions: Tensor, cell: Tensor | None) -> Tensor:
        """Energy of each structure at these positions and in these cells.

        Parameters
        ----------
        batch : Batch
            All else: elements, neighbour list, structure of each atom.
        positions : Tensor [V, 3]
            In Angstrom; stands for ``batch.positions``.
        cell : Tensor [B, 3, 3] or None
            In Angstrom; stands for ``batch.cell``, None where the batch has none.

        Returns
        -------
        Tensor [B, 1]
            In eV, differentiable in positions and cell.
        """
        raise NotImplementedError(f"{type(self).__name__} must define energy(...)")

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Predict what `model_config.outputs` names; see `energy_forces_stress`.

        Raises
        ------
        ValueError
            As `check_neighbor_reach`.
        """
        needs = self.model_config.neighbor_config
        if needs is not None:
            check_neighbor_reach(batch, needs.cutoff, type(self).__name__)
        return energy_forces_stress(self.energy, batch, self.model_config.outputs)


def check_neighbor_reach(batch: Batch, cutoff: float, model: str) -> None:
    """Refuse a batch without a neighbour list, or with one that is known to be too short.

    Nothing is read from an accelerator; a list whose cutoff nobody remembers is taken as it is.

    Parameters
    ----------
    batch : Batch
        Its ``metadata["neighbor_cutoff"]`` is looked at.
    cutoff : float
        Needed, in Angstrom.
    model : str
        Name for the error.

    Raises
    ------
    ValueError
        Naming both cutoffs and the remedy.
    """
    if "neighbor_list" not in batch:
        raise ValueError(
            f"{model} with cutoff {cutoff:g} Angstrom needs a neighbor_list, the batch has none: "
            f"{neighbor_list_remedy(cutoff)}"
        )
    known = batch.metadata.get(NEIGHBOR_CUTOFF)
    if known is None:
        return
    shortest = float(known.min())
    if shortest < cutoff * (1 - 1e-6):  # the same number in single precision passes
        raise ValueError(
            f"{model} has cutoff {cutoff:g} Angstrom, the neighbour lists of the batch reach only "
            f"to {shortest:g}: {neighbor_list_remedy(cutoff)}"
        )


def energy_forces_stress(
    energy: Callable[[Batch, Tensor, Tensor | None], Tensor],
    batch: Batch,
    outputs: frozenset[str] = ENERGY_OUTPUTS,
) -> dict[str, Tensor]:
    """Energy and its derivatives, from one forward and one backward pass.

    Forces are -dE/dr. Stress is dE/d(strain)/V at zero strain, tensile positive as in ASE; strain
    moves atoms r and lattice vectors a alike, so dE/d(strain) = sum r dE/dr + sum a dE/da.

    Works under ``torch.no_grad()`` and ``torch.inference_mode()`` too: derivatives are taken all
    the same, and what is returned has no graph. With gradients enabled the result can be
    differentiated once more, as a loss on forces needs.

    Parameters
    ----------
    energy : callable
        ``energy(batch, positions, cell) -> [B, 1]``, as `EnergyModel.energy`.
    batch : Batch
        Structures.
    outputs : frozenset of str
        Any of "energy", "forces", "stress".

    Returns
    -------
    dict of str to Tensor
        energy [B, 1] in eV, forces [V, 3] in eV/Angstrom, stress [B, 3, 3] in eV/Angstrom^3.
        Stress is there when the batch has cell and pbc; its rows are NaN for structures that are
        not periodic in all three directions, because they have no volume (losses leave such rows
        out with ``ignore_nonfinite=True``).
    """
    keep_graph = torch.is_grad_enabled()
    periodic = "cell" in batch and "pbc" in batch
    names = outputs & (ENERGY_OUTPUTS if periodic else {"energy", "forces"})
    cell = getattr(batch, "cell", None)
    if names == {"energy"}:
        return {"energy": energy(batch, batch.positions, cell)}
    with torch.inference_mode(False), torch.enable_grad():
        if batch.positions.is_inference():
            # Tensors made in inference mode can not take part in a derivative; copies can.
            batch, cell = batch.clone(), None if cell is None else cell.clone()
        positions = _differentiable(batch.positions, keep_graph)
        inputs = [positions]
        if "stress" in names:
            cell = _differentiable(batch.cell, keep_graph)
            inputs.append(cell)
        total = energy(batch, positions, cell)
        gradients = torch.autograd.grad(
            total.sum(), inputs, create_graph=keep_graph, allow_unused=True, materialize_grads=True
        )
        predictions = {"energy": total, "forces": -gradients[0]}
        if "stress" in names:
            predictions["stress"] = _stress(batch, positions, inputs[1], *gradients)
    return {
        name: value if keep_graph else value.detach()
        for name, value in predictions.items()
        if name in names
    }


def _differentiable(tensor: Tensor, keep_graph: bool) -> Tensor:
    # A caller's own graph through the positions is kept, but only where gradients are enabled.
    if keep_graph and tensor.requires_grad:
        return tensor
    return tensor.detach().requires_grad_()


def _stress(
    batch: Batch, positions: Tensor, cell: Tensor, by_positions: Tensor, by_cell: Tensor
) -> Tensor:
    """Stress [B, 3, 3]; NaN where a structure is not periodic in three directions."""
    of_atoms = positions.unsqueeze(2) * by_positions.unsqueeze(1)
    by_strain = cell.transpose(1, 2) @ by_cell
    by_strain = by_strain.index_add(0, batch.batch_idx, of_atoms)
    by_strain = (by_strain + by_strain.transpose(1, 2)) / 2
    bulk = batch.pbc.all(1).view(-1, 1, 1)
    # Volume 1 stands in where there is none, so that gradients stay finite behind the NaN.
    first, second, third = cell.unbind(1)
    volume = (first * torch.linalg.cross(second, third)).sum(1).abs().view(-1, 1, 1)
    volume = torch.where(bulk, volume, 1.0)
    return torch.where(bulk, by_strain / volume, torch.nan)
