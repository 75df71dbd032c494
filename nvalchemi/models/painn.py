"""PaiNN: an equivariant message-passing potential with energy, forces and stress.

Each atom holds F scalars and F vectors. An interaction adds to them a sum over neighbours
(`Message`), then mixes scalars and vectors of the same atom (`Update`). After K. Schütt, O. Unke
and M. Gastegger, "Equivariant message passing for the prediction of tensorial properties and
molecular spectra", ICML 2021, with these differences: the radial filters have no bias, so that the
sum over neighbours can be taken before the filter (see `PairSums`); a polynomial envelope instead
of a cosine makes forces and their derivatives smooth at the cutoff; the length of a vector is
taken by a function that is smooth at zero, where perfect crystals sit.
"""

import math
from collections.abc import Callable
from typing import Self

import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn

from nvalchemi.data.batch import Batch
from nvalchemi.data.neighbors import edge_vectors
from nvalchemi.data.pairs import COINCIDENT
from nvalchemi.models.base import EnergyModel, NeighborConfig
from nvalchemi.models.pair_sums import PairSums
from nvalchemi.models.reference_energies import MAX_ATOMIC_NUMBER


class PaiNN(EnergyModel):
    """The potential.

    Parameters
    ----------
    cutoff : float
        In Angstrom. Neighbour lists of batches must reach at least as far; edges beyond it count
        for nothing. A list that is known to be too short is refused; one of unknown cutoff (not
        from `add_neighbor_list` or a store that remembers) is trusted.
    num_features : int
        Scalars and vectors of an atom, F.
    num_interactions : int
        Rounds of message passing.
    num_radial : int
        Radial basis functions, K.
    atomic_energies : array [119], optional
        Energy in eV that each atom of element Z adds, as `fit_atomic_energies` returns it; zero
        if not given. NaN marks an element that was not fitted: a batch that has it raises on the
        CPU, and gets a NaN energy on an accelerator, where looking would stall the device. So does
        a batch of a neighbour list made elsewhere that has two atoms in one place.
    energy_scale : float
        Factor in eV from the network's output to energy. The root mean square of the forces is a
        good choice: then the network has to produce numbers of order one.
    outputs : iterable of str
        Any of "energy", "forces", "stress".

    Raises
    ------
    ValueError
        If a size is not positive and finite, or `atomic_energies` has another shape or is infinite.

    Notes
    -----
    The network computes in the dtype of its parameters; vectors between atoms are formed, and
    energies returned, in the dtype of the positions. Reference energies stay in float64 whatever
    the parameters are cast to, and the energies of the atoms are summed in float64 (in float32 on
    devices without it, such as Apple's MPS).
    """

    atomic_energies: Tensor
    energy_scale: Tensor

    def __init__(
        self,
        cutoff: float = 5.0,
        num_features: int = 64,
        num_interactions: int = 2,
        num_radial: int = 8,
        atomic_energies: ArrayLike | None = None,
        energy_scale: float = 1.0,
        outputs: tuple[str, ...] | frozenset[str] = ("energy", "forces"),
    ) -> None:
        super().__init__(outputs, NeighborConfig(cutoff))
        sizes = (num_features, num_interactions, num_radial)
        if min(sizes) < 1 or not 0 < energy_scale < math.inf:
            raise ValueError(
                "num_features, num_interactions, num_radial and energy_scale must be positive and "
                f"finite: got {num_features}, {num_interactions}, {num_radial}, {energy_scale}"
            )
        self.cutoff = float(cutoff)
        self.num_radial = num_radial
        self.embedding = nn.Embedding(MAX_ATOMIC_NUMBER + 1, num_features)
        self.messages = nn.ModuleList(
            Message(num_features, num_radial, first=i == 0) for i in range(num_interactions)
        )
        self.updates = nn.ModuleList(
            Update(num_features, last=i == num_interactions - 1) for i in range(num_interactions)
        )
        # No bias at the end: forces would not depend on it, and reference energies do its work.
        self.readout = nn.Sequential(
            nn.Linear(num_features, num_features // 2 + 1),
            nn.SiLU(),
            nn.Linear(num_features // 2 + 1, 1, bias=False),
        )
        self.register_buffer("atomic_energies", _reference_energies(atomic_energies))
        self.register_buffer("energy_scale", torch.tensor(float(energy_scale)))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """What `to`, `double`, `half`, `cuda` call: reference energies move, but keep float64."""
        energies = self.atomic_energies

        def keep(tensor: Tensor) -> Tensor:
            if tensor is not energies:
                return fn(tensor)
            device = fn(tensor.float()).device  # where they go; MPS would refuse float64
            if tensor.is_meta:
                return torch.empty_like(tensor, device=device)
            return tensor.to("cpu" if _wide(device) != torch.float64 else device)

        applied: Self = super()._apply(keep, recurse)
        return applied

    def energy(self, batch: Batch, positions: Tensor, cell: Tensor | None) -> Tensor:
        """Energy [B, 1] in eV; see `EnergyModel.energy`."""
        numbers = batch.atomic_numbers.long()
        vectors = edge_vectors(batch, positions, cell).to(self.embedding.weight.dtype)
        wide = _wide(positions.device)
        atomic = (self.energy_scale * self._atomic_outputs(batch, numbers, vectors)).to(wide)
        atomic = atomic + self._offsets(numbers).to(wide)
        total = atomic.new_zeros(batch.num_graphs, 1).index_add(0, batch.batch_idx, atomic)
        return total.to(positions.dtype)

    def _atomic_outputs(self, batch: Batch, numbers: Tensor, vectors: Tensor) -> Tensor:
        distances = vectors.pow(2).sum(1).sqrt()
        if distances.device.type == "cpu":
            _refuse_coincident(batch, distances)
        radial = bessel_basis(distances, self.cutoff, self.num_radial)
        directions = vectors / distances.unsqueeze(1)
        angular = directions.unsqueeze(2) * radial.unsqueeze(1)
        pairs = PairSums(batch)
        by_radius, by_direction = pairs.matrices(radial), pairs.matrices(angular.flatten(1))

        scalars: Tensor = self.embedding(numbers)
        arrows: Tensor | None = None
        for message, update in zip(self.messages, self.updates, strict=True):
            scalars, arrows = message(pairs, by_radius, by_direction, scalars, arrows)
            scalars, arrows = update(scalars, arrows)
        outputs: Tensor = self.readout(scalars)
        return outputs

    def _offsets(self, numbers: Tensor) -> Tensor:
        energies = self.atomic_energies
        if energies.device != numbers.device:  # kept on the CPU for a device without float64
            energies = energies.float().to(numbers.device)
        offsets = energies.index_select(0, numbers).unsqueeze(1)
        if offsets.device.type == "cpu" and bool(offsets.isnan().any()):
            unknown = sorted(set(numbers[offsets.isnan().squeeze(1)].tolist()))
            raise ValueError(
                f"no reference energy for atomic numbers {unknown}: fit atomic_energies on "
                "structures that have them"
            )
        return offsets


class Message(nn.Module):
    """What the neighbours add to an atom's scalars and vectors.

    With filters ``W(r) = sum over k of w_k basis_k(r)``: scalars get ``sum W_s(r) phi_s(j)``,
    vectors get ``sum W_v(r) phi_v(j) v_j + W_d(r) phi_d(j) direction``. In the first interaction
    vectors are zero, so the term with v_j and its parameters are left out.
    """

    def __init__(self, num_features: int, num_radial: int, first: bool) -> None:
        super().__init__()
        self.num_features = num_features
        self.num_radial = num_radial
        self.senders = nn.Sequential(
            nn.Linear(num_features, num_features),
            nn.SiLU(),
            nn.Linear(num_features, (2 if first else 3) * num_features),
        )
        shape, deviation = (num_radial, num_features), num_radial**-0.5
        self.scalar_filter = nn.Parameter(torch.randn(shape) * deviation)
        self.direction_filter = nn.Parameter(torch.randn(shape) * deviation)
        self.vector_filter = None if first else nn.Parameter(torch.randn(shape) * deviation)

    def forward(
        self,
        pairs: PairSums,
        by_radius: list[Tensor],
        by_direction: list[Tensor],
        scalars: Tensor,
        arrows: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """New scalars [V, F] and vectors [V, 3, F]."""
        count, radial = self.num_features, self.num_radial
        of_scalar, of_direction, *of_vector = self.senders(scalars).split(count, 1)
        along = pairs.sum(by_direction, of_direction).view(-1, 3, radial, count)
        new_arrows = (along * self.direction_filter).sum(2)
        if arrows is None or self.vector_filter is None:
            around = pairs.sum(by_radius, of_scalar)
            return scalars + (around * self.scalar_filter).sum(1), new_arrows
        gated = (of_vector[0].unsqueeze(1) * arrows).flatten(1)
        around = pairs.sum(by_radius, torch.cat([of_scalar, gated], 1)).view(-1, radial, 4, count)
        filters = torch.stack((self.scalar_filter, *3 * (self.vector_filter,)), 1)
        added = (around * filters).sum(1)
        of_scalars, of_arrows = added.split([1, 3], 1)
        return scalars + of_scalars.squeeze(1), arrows + new_arrows + of_arrows


class Update(nn.Module):
    """Mix scalars and vectors of one atom; the last one leaves the vectors as they are."""

    def __init__(self, num_features: int, last: bool) -> None:
        super().__init__()
        self.num_features = num_features
        self.mix = nn.Linear(num_features, 2 * num_features, bias=False)
        self.gates = nn.Sequential(
            nn.Linear(2 * num_features, num_features),
            nn.SiLU(),
            nn.Linear(num_features, (2 if last else 3) * num_features),
        )

    def forward(self, scalars: Tensor, arrows: Tensor) -> tuple[Tensor, Tensor]:
        """New scalars [V, F] and vectors [V, 3, F]."""
        left, right = self.mix(arrows).split(self.num_features, 2)
        squares = right.pow(2).sum(1)
        # sqrt(1 + x^2) - 1 grows as the length and is smooth at zero; written to keep digits.
        lengths = squares / (1 + (1 + squares).sqrt())
        gates = self.gates(torch.cat([scalars, lengths], 1)).split(self.num_features, 1)
        scalars = scalars + gates[0] + gates[1] * (left * right).sum(1)
        if len(gates) == 3:
            arrows = arrows + gates[2].unsqueeze(1) * left
        return scalars, arrows


def bessel_basis(distances: Tensor, cutoff: float, num_radial: int) -> Tensor:
    """Radial basis [E, K] that goes to zero at the cutoff with two derivatives.

    Functions sqrt(2/c) sin(k pi r/c)/r for k = 1..K (J. Gasteiger, J. Groß and S. Günnemann,
    "Directional message passing for molecular graphs", ICLR 2020) times 1 - 10x^3 + 15x^4 - 6x^5.

    Parameters
    ----------
    distances : Tensor [E]
        In Angstrom.
    cutoff : float
        c, in Angstrom; beyond it all is zero.
    num_radial : int
        K.
    """
    fraction = distances / cutoff
    envelope = 1 + fraction**3 * (-10 + fraction * (15 - 6 * fraction))
    envelope = torch.where(fraction < 1, envelope, 0.0)
    waves = torch.arange(1, num_radial + 1, device=distances.device) * (math.pi / cutoff)
    radial = torch.sin(distances.unsqueeze(1) * waves.to(distances.dtype))
    return radial * (math.sqrt(2 / cutoff) * envelope / distances).unsqueeze(1)


def _wide(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64


def _refuse_coincident(batch: Batch, distances: Tensor) -> None:
    if bool((distances < COINCIDENT).any()):
        edge = int(distances.argmin())
        first, second = batch.neighbor_list[edge].tolist()
        structure = int(batch.batch_idx[first])
        start = int(batch.batch_ptr[structure])
        raise ValueError(
            f"atoms {first - start} and {second - start} of structure {structure} of the batch lie "
            f"in one place (neighbour list row {edge}): no energy is defined there; remove one of "
            "them, or leave the structure out"
        )


def _reference_energies(values: ArrayLike | None) -> Tensor:
    """In float64: totals of heavy elements are large, and what is learnt is small."""
    if values is None:
        return torch.zeros(MAX_ATOMIC_NUMBER + 1, dtype=torch.float64)
    energies = torch.as_tensor(values, dtype=torch.float64).detach().clone()
    if energies.shape != (MAX_ATOMIC_NUMBER + 1,):
        raise ValueError(
            f"atomic_energies must be [{MAX_ATOMIC_NUMBER + 1}], indexed by atomic number: got "
            f"shape {list(energies.shape)}"
        )
    infinite = energies.isinf().nonzero().flatten().tolist()
    if infinite:
        raise ValueError(
            f"atomic_energies must be finite, or NaN for elements without one: those of atomic "
            f"numbers {infinite} are infinite"
        )
    return energies
