"""Models: what training expects of one, a few small ones, and one real potential."""

from nvalchemi.models.base import (
    BaseModelMixin,
    EnergyModel,
    ModelConfig,
    NeighborConfig,
    NeighborListFormat,
    check_neighbor_reach,
    energy_forces_stress,
)
from nvalchemi.models.demo import DemoModel, DemoModelWrapper
from nvalchemi.models.mlp import MLPPotential
from nvalchemi.models.painn import PaiNN
from nvalchemi.models.reference_energies import (
    composition_energies,
    compositions,
    fit_atomic_energies,
)

__all__ = [
    "BaseModelMixin",
    "EnergyModel",
    "ModelConfig",
    "NeighborConfig",
    "NeighborListFormat",
    "check_neighbor_reach",
    "energy_forces_stress",
    "DemoModel",
    "DemoModelWrapper",
    "MLPPotential",
    "PaiNN",
    "composition_energies",
    "compositions",
    "fit_atomic_energies",
]
