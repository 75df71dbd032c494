"""What fields the data sets of a MultiDataset have, and which every batch of them can have."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from nvalchemi.data.batch import Batch
from nvalchemi.data.checks import kind_of
from nvalchemi.data.datapipes.dataset import Dataset
from nvalchemi.data.datapipes.in_memory_dataset import InMemoryDataset
from nvalchemi.data.fields import Level

# Without them a structure is not periodic; they may be on some data sets and not on others.
MAY_DIFFER = frozenset({"cell", "pbc"})


class FieldForm(NamedTuple):
    """Level, dtype, and the axes after the first of a field."""

    level: Level
    dtype: torch.dtype
    row_shape: tuple[int, ...]


Forms = dict[str, FieldForm]


def fields_of(dataset: Any) -> Forms:
    """Fields of a data set with samples: as it or its reader says, else those of the first."""
    if isinstance(dataset, InMemoryDataset):
        return _fields_of_batch(dataset.batch)
    known = getattr(dataset, "_forms", None)  # a MultiDataset
    if known is not None:
        return dict(known)
    if isinstance(dataset, Dataset) and hasattr(dataset.reader, "schema"):
        if not dataset.transforms:
            return {
                name: FieldForm(level, torch.from_numpy(np.empty(0, dtype)).dtype, tuple(shape))
                for name, (level, dtype, shape) in dataset.reader.schema().items()
            }
    data, _ = dataset[0]
    return _fields_of_batch(Batch.from_data_list([data]))


def _fields_of_batch(batch: Batch) -> Forms:
    levels: tuple[Level, ...] = ("atom", "edge", "system")
    return {
        name: FieldForm(level, value.dtype, tuple(value.shape[1:]))
        for level in levels
        for name, value in batch.fields(level).items()
    }


def common_fields(children: Mapping[int, tuple[str, Forms]], strict: bool) -> Forms:
    """Fields of every batch, integers in the widest type that one of the data sets has.

    Parameters
    ----------
    children : mapping
        Name and fields of the data sets, by their place in the MultiDataset.
    strict : bool
        Whether all must have the same, cell and pbc aside. If not, a floating-point field that one
        lacks can be marked as NaN; any other can not.

    Raises
    ------
    ValueError
        Naming the field, two data sets and the remedy.
    """
    common: Forms = {}
    for name in dict.fromkeys(name for _, forms in children.values() for name in forms):
        having = {i: forms[name] for i, (_, forms) in children.items() if name in forms}
        lacking = [i for i in children if i not in having]
        first = next(iter(having))
        merged = having[first]
        for i, form in having.items():
            merged = _merge(
                name, merged, form, f"{_said(children, first)} and {_said(children, i)}"
            )
        common[name] = merged
        if lacking and name not in MAY_DIFFER:
            _refuse_lacking(
                name, merged, strict, _said(children, first), _said(children, lacking[0])
            )
    return common


def _said(children: Mapping[int, tuple[str, Forms]], i: int) -> str:
    return f"datasets[{i}] ({children[i][0]})"


def _merge(name: str, first: FieldForm, second: FieldForm, where: str) -> FieldForm:
    if first == second:
        return first
    if first.level != second.level:
        levels, remedy = (first.level, second.level), "give it another name in one of them"
        raise ValueError(_differ(name, "level", levels, where, remedy))
    if first.row_shape != second.row_shape:
        shapes = (str(list(first.row_shape)), str(list(second.row_shape)))
        remedy = "pad it, or leave it out of both"
        raise ValueError(_differ(name, "shape after the first axis", shapes, where, remedy))
    if kind_of(first.dtype) == kind_of(second.dtype) == "int":
        return first._replace(dtype=torch.promote_types(first.dtype, second.dtype))
    if first.dtype != second.dtype:
        dtypes = (str(first.dtype), str(second.dtype))
        remedy = (
            "precision is not changed in silence: write one of the stores again, or give its "
            "Dataset a transform with data.to(dtype=...)"
        )
        raise ValueError(_differ(name, "dtype", dtypes, where, remedy))
    return first


def _differ(name: str, what: str, found: tuple[str, str], where: str, remedy: str) -> str:
    return (
        f"{name} must have one {what} in all data sets: got {found[0]} and {found[1]} in {where}; "
        f"{remedy}"
    )


def _refuse_lacking(name: str, form: FieldForm, strict: bool, has: str, lacks: str) -> None:
    label = form.dtype.is_floating_point and form.level != "edge"
    if label and not strict:
        return
    remedy = "leave it out of all (AtomicDataZarrReader(..., fields=[...])) or give it to all"
    if label:
        remedy += "; output_strict=False marks what a data set lacks as NaN"
    why = "" if label else ", and nothing can stand for an absent one"
    raise ValueError(
        f"all data sets must carry the same fields: {has} has {name!r}, {lacks} has not{why}; "
        f"{remedy}"
    )


def describe(dataset: Any) -> str:
    """A data set by its kind and where it comes from, in few words."""
    source = getattr(getattr(dataset, "reader", None), "store", None)
    kind = type(dataset).__name__
    return kind if source is None else f"{kind} of {source}"


def widened(batch: Batch, forms: Forms) -> Batch:
    """Batch whose integers have the types that all batches have."""
    narrow = [
        name
        for name, form in forms.items()
        if name in batch
        and batch[name].dtype != form.dtype
        and kind_of(batch[name].dtype) == kind_of(form.dtype) == "int"
    ]
    known = batch.metadata
    for name in narrow:
        form = forms[name]
        batch = batch.with_fields(form.level, {name: batch[name].to(form.dtype)})
    if narrow:
        batch.metadata = known  # the lists are the same, so their cutoff stays known
    return batch
