"""The label audit of an import as a picture: what is there, what is missing, what looks wrong."""

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from nvalchemi.data.datapipes.order import Indices
from nvalchemi.data.label_audit import LabelAudit
from nvalchemi.notebook.plots.facts import SIGN, Facts, Number
from nvalchemi.notebook.plots.frame import finish, label, note, start
from nvalchemi.notebook.style import FAINT, PALETTE, PANEL, TEXT, WRONG, styled

BINS, ELEMENTS, FINDINGS = 40, 20, 6


@dataclass(frozen=True)
class LabelArrays:
    """What an audit counted.

    Attributes
    ----------
    facts : Facts
    labels : list of str
        Names of the labels with the keys that were asked for.
    present : int64 array, shape (L,)
        Structures that have each.
    structures : int
    elements : dict of str to int
        Atoms of each element, the most frequent first.
    sizes, structures_of_size : int64 arrays, shape (S,)
        Numbers of atoms, and structures of each.
    findings : list of str
    """

    facts: Facts
    labels: list[str]
    present: Indices
    structures: int
    elements: dict[str, int]
    sizes: Indices
    structures_of_size: Indices
    findings: list[str]


def compute_labels(audit: LabelAudit) -> LabelArrays:
    """The numbers of an audit.

    Raises
    ------
    TypeError, ValueError
        For what is no LabelAudit, or one of no structures.
    """
    if not isinstance(audit, LabelAudit):
        raise TypeError(
            f"audit must be the LabelAudit of an import, got {type(audit).__name__}; "
            "nvalchemi.data.convert.audit_labels makes one of a file or of structures"
        )
    if not audit.num_frames:
        raise ValueError(f"a label audit needs structures to be drawn: {audit.source} has none")
    wanted = list(audit.keys.wanted())
    present = np.array([audit.counts[name] for name, _ in wanted], dtype=np.int64)
    findings = audit.findings
    numbers = [
        Number("structures", f"{audit.num_frames:,}"),
        Number("left out", f"{len(audit.refused):,}", bool(audit.refused)),
        Number("findings", f"{len(findings)}", bool(audit.problems)),
        Number("elements", f"{len(audit.elements)}"),
        Number("periodic", ", ".join(f"{k} {n:,}" for k, n in sorted(audit.pbc.items()))),
    ]
    for (name, _), count in zip(wanted, present.tolist()):
        lost = audit.num_frames - count
        numbers.append(Number(f"no {name}", f"{lost:,}", lost > 0))
    facts = Facts(
        view="labels",
        question="Which labels are there?",
        look_for="Look for: labels that are missing (red), keys that were not asked for, units "
        "that can not be. A missing label is never replaced by zeros.",
        exact=True,
        truth=f"exact: all {audit.num_frames:,} structures were looked at",
        numbers=tuple(numbers),
        plan=f"{audit.source}, units {audit.units}",
    )
    sizes = np.array(sorted(audit.sizes), dtype=np.int64)
    return LabelArrays(
        facts=facts,
        labels=[f"{name}\n({key})" if key != name else name for name, key in wanted],
        present=present,
        structures=audit.num_frames,
        elements=dict(sorted(audit.elements.items(), key=lambda pair: (-pair[1], pair[0]))),
        sizes=sizes,
        structures_of_size=np.array([audit.sizes[n] for n in sizes.tolist()], dtype=np.int64),
        findings=findings,
    )


def refine_labels(audit: LabelAudit) -> Iterator[LabelArrays]:
    """As `compute_labels`, which is exact."""
    yield compute_labels(audit)


def draw_labels(arrays: LabelArrays, figure: Figure | None = None) -> Figure:
    """Labels, elements and sizes on top, findings below."""
    rects = {
        "labels": (0.10, 0.5, 0.23, 0.46),
        "elements": (0.41, 0.5, 0.25, 0.46),
        "sizes": (0.73, 0.5, 0.25, 0.46),
        "findings": (0.02, -0.06, 0.96, 0.3),
    }
    with styled():
        figure, (labels, elements, sizes, findings) = start(figure, "labels", rects)
        draw_present(labels, arrays)
        names = list(arrays.elements)[:ELEMENTS]
        counts = [arrays.elements[name] for name in names]
        bars(elements, np.arange(len(names)), np.array(counts), PALETTE[2], "//")
        elements.set_xticks(range(len(names)), names)
        label(elements, "element", "atoms", "elements")
        draw_sizes(sizes, arrays)
        write_findings(findings, arrays.findings)
        return finish(figure, arrays.facts)


def draw_present(axes: Axes, arrays: LabelArrays) -> None:
    for place, count in enumerate(arrays.present.tolist()):
        part, lost = count / arrays.structures, arrays.structures - count
        axes.barh(place, part, 0.5, color=PALETTE[4], edgecolor=PANEL, lw=0)
        axes.barh(place, 1 - part, 0.5, part, color=WRONG, hatch="xx", edgecolor=PANEL, lw=0)
        words = f"{SIGN} {lost:,} missing" if lost else "complete"
        axes.text(0, place + 0.4, words, fontsize=6.5, va="center", color=WRONG if lost else FAINT)
    axes.set_xlim(0, 1)
    axes.set_ylim(max(1.6, len(arrays.labels) - 0.3), -0.5)
    axes.set_yticks(range(len(arrays.labels)), arrays.labels)
    axes.set_xticks([0, 0.5, 1], ["0 %", "50 %", "100 %"])
    label(axes, "structures with the label", "", "labels (red, crossed: missing)")


def draw_sizes(axes: Axes, arrays: LabelArrays) -> None:
    low, high = float(arrays.sizes.min()) - 0.5, float(arrays.sizes.max()) + 0.5
    edges = np.linspace(low, high, min(BINS, int(high - low)) + 1)
    counts, _ = np.histogram(arrays.sizes, edges, weights=arrays.structures_of_size)
    axes.bar(edges[:-1], counts, np.diff(edges), align="edge", color=PALETTE[0])
    axes.set_xlim(low, high)
    axes.set_ylim(0, 1.1 * max(1.0, float(counts.max())))
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
    label(axes, "atoms of a structure", "structures", "sizes")


def bars(axes: Axes, places: Indices, counts: Indices, colour: str, hatch: str) -> None:
    axes.bar(places, counts, 0.7, color=colour, hatch=hatch, edgecolor=PANEL, linewidth=0)
    axes.set_xlim(-0.6, len(places) - 0.4)
    axes.set_ylim(0, 1.1 * max(1, int(counts.max(initial=0))))
    axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))


def write_findings(axes: Axes, findings: list[str]) -> None:
    if not findings:
        note(axes, "Nothing is missing, and nothing looks wrong.", 80)
    else:
        axes.set_xticks([])
        axes.set_yticks([])
        axes.set_xlim(0, 1)
        axes.set_ylim(0, 1)
        shown = [textwrap.shorten(f"{SIGN} {line}", 150) for line in findings[:FINDINGS]]
        if len(findings) > FINDINGS:
            shown.append(f"and {len(findings) - FINDINGS} more")
        axes.text(0.01, 0.93, "\n".join(shown), va="top", fontsize=7, color=TEXT)
    label(axes, "", "", "findings")
    axes.set_axis_off()


def plot_labels(audit: LabelAudit, *, figure: Figure | None = None) -> Figure:
    """The label audit of an import, as a figure.

    Parameters
    ----------
    audit : LabelAudit
        Of `nvalchemi.data.convert.audit_labels`, `import_extxyz` or `import_atoms`.
    figure : Figure, optional
        One of this module, to be drawn anew.
    """
    return draw_labels(compute_labels(audit), figure)
