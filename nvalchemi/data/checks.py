"""Checks of single tensors against the table of fields, shared by AtomicData and Batch."""

from collections.abc import Mapping

import torch
from torch import Tensor

from nvalchemi.data.fields import FIELDS, Field, Level

_COUNTED: dict[Level, str] = {"atom": "atoms", "edge": "edges", "system": "structures"}
# Attributes of instances that are no fields.
_ATTRIBUTES = ("info", "metadata")
# Atom numbers grow when structures are joined: smaller integers would overflow in silence.
_ATOM_NUMBERS = ("neighbor_list", "neighbor_matrix")
# Key of `Batch.metadata`: the distance (Angstrom, float64) up to which the list of a structure is
# complete, where that is known. Whatever replaces the list without saying so removes it.
NEIGHBOR_CUTOFF = "neighbor_cutoff"


def kind_of(dtype: torch.dtype) -> str:
    """Return "bool", "float" or "int" (everything else, complex included, is "other")."""
    if dtype == torch.bool:
        return "bool"
    if dtype.is_floating_point:
        return "float"
    return "other" if dtype.is_complex else "int"


def check_tensor(name: str, value: Tensor, level: Level, count: int | None) -> None:
    """Refuse a tensor whose kind, shape or leading count does not fit its field.

    Parameters
    ----------
    name : str
        Name of the field; one that the table lacks is checked for its count alone.
    value : Tensor
        The tensor.
    level : {"atom", "edge", "system"}
        What its leading axis counts.
    count : int or None
        How many of those there are; None when this tensor is the first to tell.

    Raises
    ------
    TypeError
        If it is no tensor.
    ValueError
        If level, kind, rank, trailing shape or count is wrong.
    """
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor: got {type(value).__name__}")
    if value.dim() == 0:
        raise ValueError(f"{name} must have a leading axis over {_COUNTED[level]}: got a scalar")
    if name in FIELDS:
        _check_field(FIELDS[name], value, level, count)
    if count is not None and value.shape[0] != count:
        raise ValueError(
            f"Inconsistent number of {_COUNTED[level]} in {name}: "
            f"expected {count}, got {value.shape[0]}"
        )


def _check_field(field: Field, value: Tensor, level: Level, count: int | None) -> None:
    if level != field.level:
        raise ValueError(f"{field.name} is a field of the {field.level}: it can not be of {level}s")
    kind = kind_of(value.dtype)
    if kind != field.kind:
        raise ValueError(f"{field.name} must be {field.kind}: got {value.dtype}")
    if field.name in _ATOM_NUMBERS and value.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"{field.name} must be int32 or int64, so that it can count the atoms of a batch: "
            f"got {value.dtype}; convert it with .long()"
        )
    shape = tuple(value.shape[1:])
    fits = len(shape) == len(field.shape) and all(
        want is None or want == got for want, got in zip(field.shape, shape, strict=True)
    )
    if not fits:
        wanted = ", ".join("*" if size is None else str(size) for size in field.shape)
        # of one structure the leading axis is the 1 that is forgotten most often
        lead = {"atom": "V", "edge": "E", "system": "1" if count == 1 else "B"}[level]
        raise ValueError(
            f"{field.name} must have shape [{lead}{', ' + wanted if wanted else ''}]: "
            f"got {list(value.shape)}"
        )


def is_free_name(name: str, owner: type) -> bool:
    """Whether attribute access would find a field of that name, and no attribute of the class."""
    if name in FIELDS:
        return True
    return bool(name) and not (name.startswith("_") or name in _ATTRIBUTES or hasattr(owner, name))


def check_name(name: str, owner: type) -> None:
    """Refuse a custom name that attribute access would hide behind one of the class's own."""
    if not is_free_name(name, owner):
        raise ValueError(
            f"{name!r} can not name a field: {owner.__name__} uses it, or it begins with an "
            "underscore; choose another name"
        )


def check_device(name: str, value: Tensor, others: Mapping[str, Tensor]) -> None:
    """Refuse a tensor that lies on another device than the fields that are there."""
    # those agree with each other, so one is enough
    other = next((key for key in others if key != name), None)
    if other is not None and value.device != others[other].device:
        raise ValueError(
            f"all fields must be on one device: {name} is on {value.device}, {other} on "
            f"{others[other].device}; move it before"
        )


def check_metadata(metadata: Mapping[str, Tensor], size: int) -> None:
    """Refuse bookkeeping that has not one entry for each of the `size` structures."""
    for name, value in metadata.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"metadata[{name!r}] must be a tensor: got {type(value).__name__}")
        if value.dim() == 0 or value.shape[0] != size:
            raise ValueError(
                f"metadata[{name!r}] must have one entry for each of {size} structures: "
                f"got shape {list(value.shape)}"
            )


def check_counts(counts: Mapping[str, Tensor]) -> None:
    """Refuse negative numbers of edges or atoms, and structures without atoms.

    A structure without atoms has no energy per atom, and no forces to learn.
    """
    for name, count in counts.items():
        least = 1 if name == "num_nodes" else 0
        if bool((count < least).any()):
            first = int((count < least).nonzero()[0])
            remedy = "; leave it out" if name == "num_nodes" else ""
            raise ValueError(
                f"{name} must be >= {least}: got {int(count[first])} for structure {first}{remedy}"
            )


def check_atomic_numbers(numbers: Tensor) -> None:
    """Refuse atomic numbers outside 1..118 (0 is ASE's dummy atom X, which no model knows)."""
    if numbers.numel() == 0:
        return
    low, high = int(numbers.min()), int(numbers.max())
    if low < 1 or high > 118:
        bad = low if low < 1 else high
        raise ValueError(f"atomic_numbers must lie in 1..118: got {bad}")


def check_neighbors(neighbor_list: Tensor, num_nodes: int) -> None:
    """Refuse neighbour indices that point outside the atoms."""
    if neighbor_list.numel() == 0:
        return
    low, high = int(neighbor_list.min()), int(neighbor_list.max())
    if low < 0 or high >= num_nodes:
        bad = low if low < 0 else high
        raise ValueError(f"neighbor_list must hold atom indices in 0..{num_nodes - 1}: got {bad}")


def neighbor_list_remedy(cutoff: float | None = None) -> str:
    """How a training comes to neighbour lists: the end of a sentence that misses them."""
    reach = "..." if cutoff is None else f"{cutoff:g}"
    return (
        f"import the data with cutoff={reach}, or build lists on the fly with DataLoader(..., "
        f"batch_transforms=[functools.partial(add_neighbor_list, cutoff={reach})]), where "
        "add_neighbor_list is that of nvalchemi.data.neighbors"
    )


def check_edges_inside(neighbor_list: Tensor, batch_idx: Tensor, owner: Tensor) -> None:
    """Refuse edges of a batch whose atoms are not both of the structure that owns the edge.

    Parameters
    ----------
    neighbor_list : Tensor
        Atom indices of the batch, [E, 2].
    batch_idx : Tensor
        Structure of each atom, [V].
    owner : Tensor
        Structure of each edge, [E].
    """
    if not neighbor_list.shape[0]:
        return
    check_neighbors(neighbor_list, batch_idx.shape[0])
    wrong = (batch_idx[neighbor_list.long()].long() != owner.unsqueeze(1)).any(1)
    if bool(wrong.any()):
        which = int(owner[wrong.nonzero()[0, 0]])
        raise ValueError(
            f"neighbor_list of structure {which} of the batch points to atoms of another"
        )
