"""Samples by name: formula, atoms, data set, and where they are drawn."""

import html
from typing import Any

import numpy as np
from ase import Atoms

from nvalchemi.data.datapipes.order import Indices
from nvalchemi.notebook.plots.batch import BatchArrays, read_structures
from nvalchemi.notebook.plots.looked_at import QUICK
from nvalchemi.sharding import ShardPlan

PLACES, ROWS = 4, 64  # that are listed


def describe_sample(plan: ShardPlan, sample: int, epoch: int) -> str:
    """A sample in a sentence: what it is, where it is from, and which ranks take it when."""
    owner = int(plan.samples.dataset_of(np.array([sample]))[0])
    own = sample - int(plan.samples.offsets[owner])
    where = f"number {own:,} of data set {owner}" if plan.samples.several else "of the data set"
    parts = [f"Sample {sample:,}: {what_it_is(plan, sample)}, {where}"]
    return "; ".join([*parts, drawn_at(plan, sample, epoch)]) + "."


def what_it_is(plan: ShardPlan, sample: int) -> str:
    """Formula and atoms, from the data where there are any, else as much as is known."""
    try:
        read: list[Atoms] = read_structures(plan.samples.dataset, np.array([sample]))
    except Exception as error:
        return f"a structure that can not be read ({type(error).__name__}: {error})"
    if read:
        return f"{read[0].get_chemical_formula()}, {atoms_in(len(read[0]))}"
    if plan.samples.atoms is not None:
        return f"{atoms_in(int(plan.samples.atoms[sample]))}, formula not known"
    return "a structure of which the plan has only the number"


def atoms_in(number: int) -> str:
    return f"{number} atom{'s' if number != 1 else ''}"


def drawn_at(plan: ShardPlan, sample: int, epoch: int) -> str:
    """Steps and ranks of the sample in the epoch."""
    if plan.estimated_draws > QUICK:
        return f"where it is drawn is searched for in epochs of at most {QUICK:,} draws"
    found: Indices = np.argwhere(plan.window(None, None, epoch) == sample)
    if not len(found):
        return f"in epoch {epoch} no rank takes it"
    places = [f"rank {rank} at step {step}" for step, rank, _ in found[:PLACES].tolist()]
    more = f" and {len(found) - PLACES} times more" if len(found) > PLACES else ""
    return f"in epoch {epoch} taken by {', '.join(places)}{more}"


def batch_table(arrays: BatchArrays) -> str:
    """The structures of a batch as an HTML table."""
    columns: dict[str, Any] = {
        "sample": [f"{sample:,}" for sample in arrays.samples.tolist()],
        "data set": arrays.datasets.tolist(),
    }
    if arrays.formulas:
        columns["formula"] = arrays.formulas
    for name, values in (("atoms", arrays.atoms), ("edges", arrays.edges), ("cost", arrays.costs)):
        if values is not None and not (name == "cost" and values is arrays.atoms):
            columns[name] = [f"{value:,.6g}" for value in values.tolist()]
    head = "".join(f'<th scope="col">{name}</th>' for name in columns)
    number = min(ROWS, len(arrays.samples))
    rows = "".join(
        "<tr>"
        + "".join(
            f"<td>{html.escape(str(values[i])) if i < len(values) else ''}</td>"
            for values in columns.values()
        )
        + "</tr>"
        for i in range(number)
    )
    left = len(arrays.samples) - number
    more = f"<p>and {left:,} more</p>" if left else ""
    table = f'<table aria-label="structures of the batch"><tr>{head}</tr>{rows}</table>{more}'
    return f'<div style="max-height:20em;overflow:auto">{table}</div>'
