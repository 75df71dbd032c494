"""The frame of every picture: question, truth, panels, key numbers, and the line about the plan."""

import base64
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PathCollection
from matplotlib.colors import Colormap
from matplotlib.figure import Figure
from numpy.typing import NDArray

from nvalchemi.notebook.export import alt_text, png
from nvalchemi.notebook.plots.facts import SIGN, Facts
from nvalchemi.notebook.stamps import StampedText
from nvalchemi.notebook.style import (
    DEVIATION,
    DEVIATION_LIMIT,
    FAINT,
    LINE,
    TEXT,
    WRONG,
)

SIZE, DPI = (9.0, 5.2), 100
TOP, BOTTOM = 0.80, 0.27  # of the panels
BELOW = 21  # points from a panel to the middle of its label
SIGNS = 400  # in one picture
A_ROW = 8  # numbers in a row
WIDE = 132  # letters of a line of small text
Rect = tuple[float, float, float, float]


class Picture(Figure):
    """A figure that a notebook shows by itself, without pyplot, and with its alt text."""

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> tuple[dict, dict]:
        encoded = base64.b64encode(png(self)).decode()
        words = {"image/png": {"alt": alt_text(self)}}
        return {"image/png": encoded, "text/plain": repr(self)}, words


def start(figure: Figure | None, view: str, rects: Mapping[str, Rect]) -> tuple[Figure, list[Axes]]:
    """A figure with a panel at each place (left, bottom, width, height; bottom and height of 1).

    Axes that the figure has for the same panels are emptied and kept: making new ones takes longer
    than all the rest.
    """
    if figure is None:
        figure = Picture(figsize=SIZE, dpi=DPI)
        FigureCanvasAgg(figure)
    names = [f"{view}: {name}" for name in rects]
    if [axes.get_label() for axes in figure.axes] != names:
        figure.clear()
        for name, (left, bottom, width, height) in zip(names, rects.values()):
            place = (left, BOTTOM + bottom * (TOP - BOTTOM), width, height * (TOP - BOTTOM))
            figure.add_axes(place, label=name)
    for artist in [*figure.texts, *figure.artists]:
        artist.remove()
    panels = list(figure.axes)
    for axes in panels:
        empty(axes)
    return figure, panels


def empty(axes: Axes) -> None:
    artists = [*axes.lines, *axes.patches, *axes.collections, *axes.images, *axes.texts]
    for artist in artists:
        artist.remove()
    legend = axes.get_legend()
    if legend is not None:
        legend.remove()
    axes.containers.clear()  # of bars, which a legend would name again
    axes.set_prop_cycle(None)


def finish(figure: Figure, facts: Facts) -> Figure:
    """Write what is asked, what to look for, how true it is, the numbers, and the plan."""
    write(figure, 0.02, 0.955, facts.question, TEXT, 11.5, "bold")
    write(figure, 0.02, 0.918, facts.look_for, FAINT, 8.0)
    word, _, rest = facts.truth.partition(":")
    box = {"boxstyle": "round,pad=0.25", "facecolor": "none", "edgecolor": FAINT, "linewidth": 0.8}
    figure.text(0.025, 0.868, word.upper(), fontweight="bold", fontsize=7.5, bbox=box)
    write(figure, 0.04 + 0.0088 * len(word), 0.868, rest.strip(), FAINT, 7.5)
    write_numbers(figure, facts)
    write(figure, 0.02, 0.02, textwrap.shorten(facts.plan, WIDE), FAINT, 7.0)
    figure.set_label(facts.alt)
    return figure


def write(
    figure: Figure, x: float, y: float, words: str, ink: str, size: float, weight: str = "normal"
) -> None:
    """A line of text, from this place of the figure on."""
    text = StampedText(x, y, words, color=ink, fontsize=size, fontweight=weight)
    figure.add_artist(text)


def write_numbers(figure: Figure, facts: Facts) -> None:
    numbers = facts.numbers[:A_ROW]
    for number, left in zip(numbers, np.linspace(0.02, 0.98, len(numbers) + 1)):
        value = f"{SIGN} {number.value}" if number.wrong else number.value
        size = 11 if len(value) < 12 else 8.5 if len(value) < 15 else 7
        write(figure, left, 0.112, value, WRONG if number.wrong else TEXT, size, "bold")
        write(figure, left, 0.075, number.name, WRONG if number.wrong else FAINT, 7.5)


def label(axes: Axes, x: str, y: str, title: str = "") -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    # places are given, so that matplotlib does not look for one around all ticks
    height = axes.get_position().height * SIZE[1] * 72
    axes.xaxis.set_label_coords(0.5, -BELOW / height)
    axes.set_title(title, loc="left", y=1.01, color=FAINT)


def note(axes: Axes, words: str, width: int = 40) -> None:
    """A sentence in the place of a picture."""
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
    axes.text(
        0.5, 0.5, textwrap.fill(words, width), ha="center", va="center", color=FAINT, fontsize=8.5
    )


def id_ticks(
    edges: Sequence[float] | NDArray[np.int64], number: int = 4
) -> tuple[list[float], list[str]]:
    """Ticks of an axis of bins, labelled with the real numbers at their edges."""
    places = np.unique(np.linspace(0, len(edges) - 1, min(number + 1, len(edges))).astype(int))
    return [float(p) for p in places], [f"{int(edges[p]):,}" for p in places]


def spread_ticks(values: NDArray[np.int64], most: int = 6) -> tuple[list[float], list[str]]:
    """Ticks at the middle of some of the rows of an image, labelled with what they are."""
    places = np.unique(np.linspace(0, len(values) - 1, min(most, len(values))).astype(int))
    return [p + 0.5 for p in places.tolist()], [f"{int(values[p]):,}" for p in places]


def image(
    axes: Axes, values: NDArray[np.float64], limits: tuple[float, float], colours: Colormap
) -> None:
    """An image of cells of size one, the first row on top; nan has the colour for bad values."""
    rows, columns = values.shape
    scaled = np.clip((values - limits[0]) / (limits[1] - limits[0]), 0, 1)
    # coloured cell by cell: matplotlib would do it pixel by pixel
    cells = colours(np.ma.masked_invalid(scaled), bytes=True)
    axes.imshow(cells, extent=(0, columns, rows, 0), aspect="auto")
    axes.set_xlim(0, columns)
    axes.set_ylim(rows, 0)


def deviations(axes: Axes, z: NDArray[np.float64]) -> None:
    """An image of deviations in standard deviations, with a sign where the colour ends."""
    image(axes, z, (-DEVIATION_LIMIT, DEVIATION_LIMIT), DEVIATION)
    for far, sign in ((z >= DEVIATION_LIMIT, "+"), (z <= -DEVIATION_LIMIT, "_")):
        rows, columns = np.nonzero(far)
        every = -(-rows.size // SIGNS) or 1
        rows, columns = rows[::every], columns[::every]
        if rows.size:
            axes.scatter(columns + 0.5, rows + 0.5, s=9, marker=sign, c=TEXT, linewidths=0.6)


def deviation_key(axes: Axes) -> None:
    """The fixed scale of all deviations, as a strip."""
    ramp = np.linspace(DEVIATION_LIMIT, -DEVIATION_LIMIT, 64)[:, None]
    image(axes, ramp, (-DEVIATION_LIMIT, DEVIATION_LIMIT), DEVIATION)
    axes.set_xticks([])
    axes.set_yticks([0, 32, 64], ["+4 σ, +", "0", "-4 σ, −"])
    axes.yaxis.tick_right()
    label(axes, "", "", "found")


def sequential_key(axes: Axes, top: float, bottom: float, title: str, colours: Colormap) -> None:
    """The scale of an image, as a strip."""
    image(axes, np.linspace(1, 0, 64)[:, None], (0, 1), colours)
    axes.set_xticks([])
    axes.set_yticks([0, 64], [f"{top:,.4g}", f"{bottom:,.4g}"])
    axes.yaxis.tick_right()
    label(axes, "", "", title)


def crosses(axes: Axes, x: NDArray[Any], y: NDArray[Any]) -> PathCollection:
    """Marks of what is wrong."""
    return axes.scatter(x, y, s=26, marker="x", c=WRONG, linewidths=1.2)


def rule(axes: Axes, places: NDArray[Any]) -> None:
    """Lines between steps."""
    for place in places.tolist():
        axes.axvline(place, color=LINE, linewidth=0.6)
