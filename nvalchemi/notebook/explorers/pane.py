"""One picture in an explorer, with its key numbers as a table, or a sentence in its place."""

import html
from collections.abc import Callable, Iterator
from typing import Any

import ipywidgets
from matplotlib.figure import Figure

from nvalchemi.notebook.export import bundle, png
from nvalchemi.notebook.plots import View
from nvalchemi.notebook.plots.facts import SIGN, Facts

Arguments = Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]
# a page gives the colour of its text, and Jupyter the one of its theme
TEXT_COLOUR = "color:var(--jp-content-font-color1,currentColor)"


class Pane:
    """A view of something, drawn into a widget.

    Parameters
    ----------
    view : View
    arguments : callable
        Arguments of the view's compute and refine functions, as they are now; what it raises is
        shown as a sentence.

    Attributes
    ----------
    widget : ipywidgets.HTML
        Its value is the static HTML too.
    arrays
        What is drawn; None where there is a sentence.
    picture : bytes
        The PNG, or nothing.
    error : Exception or None
        Why there is no picture.
    """

    def __init__(self, view: View, arguments: Arguments) -> None:
        self.view, self._arguments = view, arguments
        self.widget = ipywidgets.HTML()
        self.arrays: Any = None
        self.picture = b""
        self.error: Exception | None = None
        self._figure: Figure | None = None

    @property
    def facts(self) -> Facts | None:
        return None if self.arrays is None else self.arrays.facts

    @property
    def text(self) -> str:
        """The picture in words."""
        return str(self.facts) if self.facts is not None else sentence_of(self.error)

    def draw(self) -> None:
        """Draw what can be had quickly."""
        try:
            args, options = self._arguments()
            self._show(self.view.compute(*args, **options))
        except Exception as error:
            self.refuse(error)

    def refine(self) -> Iterator[None]:
        """Draw better ones in its place, one a step, the last exact."""
        try:
            args, options = self._arguments()
            for arrays in self.view.refine(*args, **options):
                self._show(arrays)
                yield
        except Exception as error:
            self.refuse(error)

    def refuse(self, error: Exception) -> None:
        """Show a sentence in the place of the picture."""
        self.arrays, self.picture, self.error = None, b"", error
        self.widget.value = complaint(error)

    def _show(self, arrays: Any) -> None:
        self._figure = self.view.draw(arrays, self._figure)
        self.picture, self.arrays, self.error = png(self._figure), arrays, None
        shown = bundle(self._figure, arrays.facts.numbers, picture=self.picture)
        self.widget.value = f'<div style="{TEXT_COLOUR}">{shown["text/html"]}</div>'


def sentence_of(error: Exception | None) -> str:
    """What an error says to the user; where it is none of ours, with its kind."""
    if error is None:
        return ""
    said = str(error).strip() or "no message"
    return said if isinstance(error, ValueError | TypeError) else f"{type(error).__name__}: {said}"


def complaint(error: Exception) -> str:
    """The sentence as HTML, with a sign and a frame."""
    return (
        f'<div role="alert" style="{TEXT_COLOUR};border-left:4px solid #B00020;'
        f'padding:0.4em 0.8em">'
        f"{SIGN} {html.escape(sentence_of(error))}</div>"
    )
