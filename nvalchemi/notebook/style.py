"""How pictures look: colours, second cues, fonts, and settings that no user's style changes.

Pictures are dark text on a light panel of their own, not transparent: one PNG is read on light and
dark pages, in papers and in mail, and a transparent one would lose its text on one of them.
Colours are those of Okabe and Ito and cividis, which are told apart with any colour vision; each
is joined by a hatch, a marker or a text.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import matplotlib as mpl
from matplotlib.colors import LinearSegmentedColormap, ListedColormap

# Okabe and Ito, "Color Universal Design" (2008), without black and yellow, which is faint on light
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#7F7F7F")
HATCHES = ("", "///", "...", "xxx", "\\\\\\", "+++", "---")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
WRONG = "#B00020"
TEXT, FAINT, PANEL, EMPTY, LINE = "#1A1A1A", "#595959", "#FFFFFF", "#F2F2F2", "#BFBFBF"
SEQUENTIAL = mpl.colormaps["cividis"]
DEVIATION_LIMIT = 4.0
"""Standard deviations at which the colour of a deviation ends, in all pictures of all plans."""
# within two of them chance is grey: a good shuffle must look flat
DEVIATION = LinearSegmentedColormap.from_list(
    "deviation",
    [(0, "#0072B2"), (0.25, "#E4E4E4"), (0.75, "#E4E4E4"), (1, "#D55E00")],
    N=255,
).with_extremes(bad=PANEL)
CATEGORIES = ListedColormap(list(PALETTE))

SETTINGS: dict[str, Any] = {
    "font.family": ["DejaVu Sans"],  # comes with matplotlib: the same letters everywhere
    "font.size": 8.0,
    "text.color": TEXT,
    "text.usetex": False,
    "axes.edgecolor": FAINT,
    "axes.facecolor": PANEL,
    "axes.labelcolor": TEXT,
    "axes.labelsize": 8.0,
    "axes.linewidth": 0.6,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 8.5,
    "figure.facecolor": PANEL,
    "hatch.linewidth": 0.5,
    "image.interpolation": "nearest",
    "legend.fontsize": 7.5,
    "legend.frameon": False,
    "savefig.facecolor": PANEL,
    "svg.fonttype": "path",
    "svg.hashsalt": "nvalchemi",
    "xtick.color": FAINT,
    "xtick.labelsize": 7.5,
    "ytick.color": FAINT,
    "ytick.labelsize": 7.5,
}
_KEPT = ("backend", "backend_fallback", "interactive", "timezone")


@contextmanager
def styled() -> Iterator[None]:
    """Matplotlib's own settings with ours over them, and the user's back at the end."""
    defaults = {k: v for k, v in mpl.rcParamsDefault.items() if k not in _KEPT}
    settings: Any = {**defaults, **SETTINGS}
    with mpl.rc_context(settings):
        yield


def colour(number: int) -> str:
    """Of the data set with this number."""
    return PALETTE[number % len(PALETTE)]


def hatch(number: int) -> str:
    """Second cue of the data set with this number; differs where the colours begin anew."""
    return HATCHES[(number + number // len(PALETTE)) % len(HATCHES)]


def marker(number: int) -> str:
    """Second cue of points of the data set with this number."""
    return MARKERS[(number + number // len(PALETTE)) % len(MARKERS)]
