"""One batch opened: its samples, sizes, elements, and a look at a few of its structures."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from ase import Atoms
from ase.data import chemical_symbols
from ase.visualize.plot import Matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from nvalchemi.data.datapipes.order import Indices
from nvalchemi.data.datapipes.weights import check_integer
from nvalchemi.notebook.plots.facts import Facts, Number, compact, plan_line
from nvalchemi.notebook.plots.frame import finish, label, note, start
from nvalchemi.notebook.style import LINE, PALETTE, PANEL, TEXT, styled

if TYPE_CHECKING:
    from nvalchemi.sharding.plan import ShardPlan

STRUCTURES = 4  # that are drawn
READ = 256  # structures that are read for their elements
COMPARED = 2**16  # sizes of the whole data that those of the batch are compared with
BINS, ELEMENTS = 16, 14
ROTATION = "-75x,15y,10z"


@dataclass(frozen=True)
class BatchArrays:
    """What is in one batch.

    Attributes
    ----------
    facts : Facts
    epoch, step, rank : int
    samples : int64 array, shape (B,)
        In the order of the batch.
    datasets : int64 array, shape (B,)
        The data set of each.
    atoms, edges, costs : arrays, shape (B,), or None
        Of each, where they are known.
    all_atoms : array or None
        Atoms of samples of the whole data, at most 65,536 of them, to compare with.
    formulas : list of str
        Of each structure that was read.
    elements : dict
        Atoms of each element in the structures that were read, by symbol.
    structures : list of ase.Atoms
        Some of them: the largest, the smallest, and others between.
    drawn : int64 array
        Place in the batch of each of these.
    """

    facts: Facts
    epoch: int
    step: int
    rank: int
    samples: Indices
    datasets: Indices
    atoms: NDArray[Any] | None
    edges: NDArray[Any] | None
    costs: NDArray[Any] | None
    all_atoms: NDArray[Any] | None
    formulas: list[str]
    elements: dict[str, int]
    structures: list[Atoms]
    drawn: Indices


def compute_batch(
    plan: "ShardPlan", rank: int = 0, step: int = 0, epoch: int = 0, *, dataset: Any = None
) -> BatchArrays:
    """Open one batch; its structures are read where there is a data set.

    Parameters
    ----------
    plan : ShardPlan
    rank, step, epoch : int
    dataset : optional
        What the structures are read from (``dataset[i]`` is an AtomicData, alone or with a dict);
        by default the plan's own data set.

    Raises
    ------
    ValueError, TypeError
        For a batch that the plan does not have.
    """
    places = [check_integer(n, v, 0) for n, v in (("rank", rank), ("step", step), ("epoch", epoch))]
    samples = plan.batch(*places)
    if not samples.size:
        raise ValueError(
            f"a picture needs a batch with samples: rank {rank} has none at step {step} of epoch "
            f"{epoch}"
        )
    known = [
        None if sizes is None else np.asarray(sizes[samples])
        for sizes in (plan.samples.atoms, plan.samples.edges, plan.samples.costs)
    ]
    read = read_structures(plan.samples.dataset if dataset is None else dataset, samples[:READ])
    if known[0] is None and len(read) == len(samples):
        known[0] = np.array([len(atoms) for atoms in read])
    return assemble(plan, (rank, step, epoch), samples, known, read)


def refine_batch(
    plan: "ShardPlan", rank: int = 0, step: int = 0, epoch: int = 0, *, dataset: Any = None
) -> Iterator[BatchArrays]:
    """As `compute_batch`, which is exact."""
    yield compute_batch(plan, rank, step, epoch, dataset=dataset)


def assemble(
    plan: "ShardPlan",
    place: tuple[int, int, int],
    samples: Indices,
    known: list[NDArray[Any] | None],
    read: list[Atoms],
) -> BatchArrays:
    rank, step, epoch = place
    atoms, edges, costs = known
    datasets = plan.samples.dataset_of(samples)
    again = len(samples) - np.unique(samples).size
    numbers = [
        Number("samples", f"{len(samples):,}"),
        Number("twice in the batch", f"{again:,}", again > 0),
        Number("data sets", mixture(datasets)),
    ]
    for name, values in (("atoms", atoms), ("edges", edges), ("cost", costs)):
        if values is not None and (name != "cost" or plan.samples.unit == "cost"):
            numbers.append(Number(name, compact(float(values.sum()))))
    elements: dict[str, int] = {}
    for structure in read:
        for number in structure.numbers.tolist():
            elements[chemical_symbols[number]] = elements.get(chemical_symbols[number], 0) + 1
    drawn = choose_structures(read)
    facts = Facts(
        view="batch",
        question=f"What is in the batch of rank {rank} at step {step}?",
        look_for="Look for: one structure that is most of the work, elements that are missing, "
        "a structure that is not what its formula says.",
        exact=True,
        truth=f"exact: all {len(samples):,} samples"
        + (f"; elements of the first {READ}" if len(read) < len(samples) and read else ""),
        numbers=tuple(numbers),
        plan=plan_line(plan, epoch),
    )
    return BatchArrays(
        facts=facts,
        epoch=epoch,
        step=step,
        rank=rank,
        samples=samples,
        datasets=datasets,
        atoms=atoms,
        edges=edges,
        costs=costs,
        all_atoms=some_sizes(plan.samples.atoms),
        formulas=[structure.get_chemical_formula() for structure in read],
        elements=dict(sorted(elements.items(), key=lambda pair: (-pair[1], pair[0]))),
        structures=[read[i] for i in drawn.tolist()],
        drawn=drawn,
    )


def mixture(datasets: Indices) -> str:
    numbers, counts = np.unique(datasets, return_counts=True)
    words = [f"{j}: {count}" for j, count in zip(numbers.tolist(), counts.tolist())]
    return ", ".join(words[:4]) + (", ..." if len(words) > 4 else "")


def some_sizes(sizes: NDArray[Any] | None) -> NDArray[Any] | None:
    if sizes is None or len(sizes) <= COMPARED:
        return sizes
    return np.asarray(sizes[np.sort(np.random.default_rng(0).integers(0, len(sizes), COMPARED))])


def read_structures(dataset: Any, samples: Indices) -> list[Atoms]:
    """Structures of some samples; none where the data set only stands for its length."""
    if not hasattr(dataset, "__getitem__"):
        return []
    read = []
    for sample in samples.tolist():
        item = dataset[sample]
        data = item[0] if isinstance(item, tuple) else item
        if not hasattr(data, "atomic_numbers"):
            return []
        read.append(as_atoms(data))
    return read


def as_atoms(data: Any) -> Atoms:
    cell, pbc = getattr(data, "cell", None), getattr(data, "pbc", None)
    return Atoms(
        numbers=np.asarray(data.atomic_numbers).astype(int).ravel(),
        positions=np.asarray(data.positions).reshape(-1, 3),
        cell=None if cell is None else np.asarray(cell).reshape(3, 3),
        pbc=None if pbc is None else np.asarray(pbc).ravel(),
    )


def choose_structures(read: list[Atoms]) -> Indices:
    """The largest, the smallest, and some between them by size."""
    order = np.argsort([-len(structure) for structure in read], kind="stable")
    at = np.unique(np.linspace(0, len(read) - 1, min(STRUCTURES, len(read))).astype(int))
    return order[at].astype(np.int64)


def draw_batch(arrays: BatchArrays, figure: Figure | None = None) -> Figure:
    """Sizes and elements on top, structures below."""
    rects = {"sizes": (0.075, 0.56, 0.37, 0.4), "elements": (0.56, 0.56, 0.42, 0.4)}
    width = 0.96 / STRUCTURES
    for number in range(len(arrays.structures)):
        rects[f"structure {number}"] = (0.02 + number * width, -0.08, 0.9 * width, 0.36)
    with styled():
        figure, panels = start(figure, f"batch with {len(arrays.structures)}", rects)
        draw_sizes(panels[0], arrays)
        draw_elements(panels[1], arrays)
        for axes, atoms, place in zip(panels[2:], arrays.structures, arrays.drawn.tolist()):
            draw_structure(axes, atoms, f"{arrays.samples[place]:,}: {arrays.formulas[place]}")
        return finish(figure, arrays.facts)


def draw_sizes(axes: Axes, arrays: BatchArrays) -> None:
    if arrays.atoms is None:
        note(axes, "The sizes of the structures are not known: give ShardPlan(sizes=atoms).")
        label(axes, "atoms of a structure", "structures")
        return
    everything = arrays.atoms if arrays.all_atoms is None else arrays.all_atoms
    low = min(float(arrays.atoms.min()), float(everything.min())) - 0.5
    high = max(float(arrays.atoms.max()), float(everything.max())) + 0.5
    edges = np.linspace(low, high, min(BINS, int(high - low)) + 1)
    own, _ = np.histogram(arrays.atoms, edges)
    usual, _ = np.histogram(everything, edges)
    usual = usual * len(arrays.samples) / max(1, usual.sum())
    axes.bar(edges[:-1], own, np.diff(edges), align="edge", color=PALETTE[0], label="this batch")
    axes.stairs(usual, edges, color=TEXT, linestyle="--", label="all samples, as many")
    axes.set_xlim(low, high)
    axes.set_ylim(0, 1.35 * max(1.0, float(own.max()), float(usual.max())))
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
    axes.legend(loc="upper right", ncols=2, borderpad=0.1)
    label(axes, "atoms of a structure", "structures", "sizes")


def draw_elements(axes: Axes, arrays: BatchArrays) -> None:
    if not arrays.elements:
        note(axes, "No structures were read: the plan was made of lengths; give dataset=.")
        label(axes, "element", "atoms")
        return
    names = list(arrays.elements)[:ELEMENTS]
    counts = [arrays.elements[name] for name in names]
    if len(arrays.elements) > ELEMENTS:
        counts.append(sum(arrays.elements.values()) - sum(counts))
        names.append("other")
    places = np.arange(len(names))
    axes.bar(places, counts, 0.7, color=PALETTE[2], hatch="//", edgecolor=PANEL, linewidth=0)
    axes.set_xlim(-0.6, len(names) - 0.4)
    axes.set_ylim(0, 1.2 * max(counts))
    axes.set_xticks(places, names)
    axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
    label(axes, "element", "atoms", "elements of the batch")


def draw_structure(axes: Axes, atoms: Atoms, name: str) -> None:
    Matplotlib(atoms, axes, rotation=ROTATION).write()
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set_visible(True)
        spine.set_color(LINE)
    axes.set_title(name if len(name) < 30 else name[:27] + "...", y=1.01, fontsize=7.5, color=TEXT)


def plot_batch(
    plan: "ShardPlan",
    rank: int = 0,
    step: int = 0,
    epoch: int = 0,
    *,
    dataset: Any = None,
    figure: Figure | None = None,
) -> Figure:
    """One batch opened, as a figure: sizes, elements, and some structures.

    Parameters
    ----------
    plan, rank, step, epoch, dataset
        As of `compute_batch`.
    figure : Figure, optional
        One of this module, to be drawn anew.
    """
    return draw_batch(compute_batch(plan, rank, step, epoch, dataset=dataset), figure)
