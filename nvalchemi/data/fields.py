"""The one table of fields: what a structure can carry, at which level, in which shape and unit.

Every other part (validation, batching, the store, conversion) reads this table. A field that it
does not name is a custom field; its owner says at which level it lives.
"""

from dataclasses import dataclass
from typing import Literal

Level = Literal["atom", "edge", "system"]
Kind = Literal["int", "float", "bool"]

LEVELS: tuple[Level, ...] = ("atom", "edge", "system")

# The peer calls the atom level "node" in code and "atom" on disk; both spellings are accepted.
LEVEL_ALIASES: dict[str, Level] = {
    "atom": "atom",
    "node": "atom",
    "edge": "edge",
    "system": "system",
}


@dataclass(frozen=True, slots=True)
class Field:
    """One quantity of a structure.

    Parameters
    ----------
    name : str
        Attribute name on `AtomicData` and `Batch`, array name in the store.
    level : {"atom", "edge", "system"}
        What the leading axis counts: V atoms, E edges, or 1 structure (B in a batch).
    shape : tuple
        Axes after the leading one; None is a free size.
    kind : {"int", "float", "bool"}
        Family of the dtype.
    unit : str
        Unit, empty for pure numbers.
    doc : str
        One line.
    """

    name: str
    level: Level
    shape: tuple[int | None, ...]
    kind: Kind
    unit: str
    doc: str


_TABLE: tuple[Field, ...] = (
    # atoms, leading axis V
    Field("atomic_numbers", "atom", (), "int", "", "atomic number Z of each atom"),
    Field("positions", "atom", (3,), "float", "Angstrom", "Cartesian positions"),
    Field("atomic_masses", "atom", (), "float", "amu", "masses"),
    Field("atom_categories", "atom", (), "int", "", "category label of each atom"),
    Field("forces", "atom", (3,), "float", "eV/Angstrom", "forces, -dE/dpositions"),
    Field("charges", "atom", (), "float", "e", "partial charges"),
    Field("node_attrs", "atom", (None,), "float", "", "attributes of atoms, e.g. one-hot elements"),
    Field("node_alpha_spins", "atom", (1,), "float", "", "alpha spin population"),
    Field("node_beta_spins", "atom", (1,), "float", "", "beta spin population"),
    Field("node_embeddings", "atom", (None,), "float", "", "embedding of each atom"),
    Field("velocities", "atom", (3,), "float", "Angstrom/fs", "velocities"),
    Field("momenta", "atom", (3,), "float", "amu*Angstrom/fs", "momenta"),
    Field("kinetic_energies", "atom", (1,), "float", "eV", "kinetic energy of each atom"),
    Field("neighbor_matrix", "atom", (None,), "int", "", "padded neighbours of each atom"),
    Field("neighbor_matrix_shifts", "atom", (None, 3), "int", "", "cell images of the padded list"),
    Field("num_neighbors", "atom", (), "int", "", "valid entries in each row of the matrix"),
    # edges, leading axis E
    Field("neighbor_list", "edge", (2,), "int", "", "pairs (centre i, neighbour j)"),
    Field("shifts", "edge", (3,), "float", "Angstrom", "Cartesian image shift of each edge"),
    Field("neighbor_list_shifts", "edge", (3,), "int", "", "cell image of j, in lattice vectors"),
    Field("edge_embeddings", "edge", (None,), "float", "", "embedding of each edge"),
    # structures, leading axis 1 (B in a batch)
    Field("energy", "system", (1,), "float", "eV", "total potential energy"),
    Field("stress", "system", (3, 3), "float", "eV/Angstrom^3", "Cauchy stress, tension positive"),
    Field("virial", "system", (3, 3), "float", "eV", "virial, -volume * stress"),
    Field("dipole", "system", (3,), "float", "e*Angstrom", "dipole moment"),
    Field("charge", "system", (1,), "float", "e", "total charge"),
    Field("spin", "system", (1,), "float", "", "total spin"),
    Field("graph_alpha_spins", "system", (1,), "float", "", "alpha electrons"),
    Field("cell", "system", (3, 3), "float", "Angstrom", "lattice vectors as rows"),
    Field("pbc", "system", (3,), "bool", "", "periodic along each lattice vector"),
    Field("graph_embeddings", "system", (None,), "float", "", "embedding of each structure"),
)

FIELDS: dict[str, Field] = {field.name: field for field in _TABLE}

# Labels are what a model is trained on: they are never invented, filled or dropped in silence.
LABELS: tuple[str, ...] = ("energy", "forces", "stress", "virial", "dipole", "charges")


def level_of(name: str) -> Level:
    """Level of a known field.

    Raises
    ------
    ValueError
        If the table has no such field.
    """
    if name not in FIELDS:
        raise ValueError(f"unknown field {name!r}: known fields are {', '.join(sorted(FIELDS))}")
    return FIELDS[name].level


def resolve_level(level: str) -> Level:
    """Turn "node" or "atom", "edge", "system" into a level of the table.

    Raises
    ------
    ValueError
        For any other word.
    """
    if level not in LEVEL_ALIASES:
        raise ValueError(f"level must be 'atom' (or 'node'), 'edge' or 'system': got {level!r}")
    return LEVEL_ALIASES[level]
