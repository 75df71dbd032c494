"""What all explorers share: controls, tabs of pictures, and outputs that need no kernel."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import ipywidgets

from nvalchemi.notebook.explorers.idle import IdleWork
from nvalchemi.notebook.explorers.pane import Pane

Page = Sequence["Pane | ipywidgets.Widget"]


class Explorer:
    """Controls, something above all tabs, and tabs with pictures, of which the visible is drawn.

    Attributes
    ----------
    controls : dict of str to widget
        By name; setting ``explorer.controls["epoch"].value`` does what moving the slider does.
    widget : ipywidgets.VBox
        What is displayed.
    """

    def __init__(
        self,
        top: ipywidgets.HTML,
        controls: Mapping[str, ipywidgets.Widget],
        rows: Sequence[ipywidgets.Widget],
        pages: Mapping[str, Page],
    ) -> None:
        self.controls = dict(controls)
        self._top, self._pages = top, dict(pages)
        self._quiet = self._forced = False
        self._exactly = ipywidgets.Button(
            description="Count all draws",
            tooltip="Draw this picture exactly, however long that takes",
            icon="check",
        )
        self._exactly.on_click(self._on_exactly)
        self.tabs = ipywidgets.Tab(
            children=[
                ipywidgets.VBox([widget_of(part) for part in page]) for page in pages.values()
            ],
            titles=tuple(pages),
        )
        self.widget = ipywidgets.VBox([top, *rows, self.tabs, self._exactly])
        self._idle = IdleWork(self._work)
        for control in self.controls.values():
            control.observe(self._on_change, "value")
        self.tabs.observe(self._on_change, "selected_index")
        self._idle.begin()

    # What a subclass says.

    def prepare(self) -> None:
        """Take the values of the controls over, before anything is drawn."""

    def drawn(self) -> None:
        """Show what follows from a picture, after each."""

    def inspect(self) -> None:
        """What takes longer than a picture may and is needed all the same."""

    def is_affordable(self, pane: Pane) -> bool:
        """Whether a picture may be made exact without being asked for."""
        return True

    # What a user calls.

    def show(self, page: str) -> Self:
        """Turn to a tab by its title.

        Raises
        ------
        ValueError
            If there is none.
        """
        if page not in self._pages:
            raise ValueError(f"page must be one of {', '.join(self._pages)}, got {page!r}")
        self.tabs.selected_index = list(self._pages).index(page)
        return self

    def refine(self) -> Self:
        """Make the visible pictures exact now, however long that takes."""
        self._forced = True
        self._idle.begin()
        self._idle.finish()
        return self

    def close(self) -> None:
        """Remove the widgets and leave what is being computed."""
        self._idle.stop()
        self.widget.close()

    @property
    def panes(self) -> list[Pane]:
        """The pictures that are visible, up to date."""
        self._idle.settle()
        return self._visible()

    # How it works.

    def _visible(self) -> list[Pane]:
        page = list(self._pages.values())[self.tabs.selected_index or 0]
        return [part for part in page if isinstance(part, Pane)]

    def _on_change(self, change: Any) -> None:
        if not self._quiet:
            self._forced = False
            self._idle.begin()

    def _on_exactly(self, button: Any) -> None:
        self._forced = True
        self._idle.begin()

    def _work(self) -> Iterator[bool]:
        self._redraw()
        yield True
        self.inspect()
        yield False
        for pane in self._visible():
            if self._should_refine(pane):
                for _ in pane.refine():
                    self._after()
                    yield False
        self._after()

    def _should_refine(self, pane: Pane) -> bool:
        if pane.facts is not None and pane.facts.exact:
            return False
        return self._forced or (pane.facts is not None and self.is_affordable(pane))

    def _redraw(self) -> None:
        error = None
        self._quiet = True  # what is set here is no wish of the user's
        try:
            self.prepare()
        except Exception as problem:
            error = problem
        finally:
            self._quiet = False
        for pane in self._visible():
            if error is None:
                pane.draw()
            else:
                pane.refuse(error)
        self._after()

    def _after(self) -> None:
        self._exactly.disabled = all(p.facts is not None and p.facts.exact for p in self._visible())
        self.drawn()

    def html(self) -> str:
        """What is visible as HTML that needs no kernel."""
        self._idle.settle()
        page = list(self._pages.values())[self.tabs.selected_index or 0]
        parts = [self._top, *page]
        values = [widget_of(part).value for part in parts if is_text(part)]
        return "".join(str(value) for value in values)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        view = {"version_major": 2, "version_minor": 0, "model_id": self.widget.model_id}
        return {
            "application/vnd.jupyter.widget-view+json": view,
            "text/html": self.html(),
            "text/plain": repr(self),
        }

    def __repr__(self) -> str:
        return "\n\n".join([type(self).__name__, *(pane.text for pane in self.panes)])


def widget_of(part: "Pane | ipywidgets.Widget") -> ipywidgets.Widget:
    return part.widget if isinstance(part, Pane) else part


def is_text(part: "Pane | ipywidgets.Widget") -> bool:
    return isinstance(part, Pane) or isinstance(part, ipywidgets.HTML)
