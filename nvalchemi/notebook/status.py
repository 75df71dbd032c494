"""The live view of a launch that runs in the background."""

from __future__ import annotations

import html
import sys
import time
from typing import Any, Protocol

from nvalchemi.notebook.front_end import CONTROL, FrontEnd

_PAUSE = 0.5  # s between two updates; each is a message to the front end
_LONGEST = 200  # characters of a rank's last line; more than a row of the table can show
# a sign beside the word beside the colour (Okabe and Ito's), each enough by itself
_STATES = {
    "running": ("▶", "#0072B2"),
    "done": ("✔", "#009E73"),
    "failed": ("✖", "#D55E00"),
    "stopped": ("■", "#999999"),
}
_CELL = "text-align:left;padding:0 1em 0 0;vertical-align:top"
_LINE = f"{_CELL};font-family:monospace;white-space:pre-wrap;overflow-wrap:anywhere"


class Watched(Protocol):
    """What is shown of a launch."""

    nprocs: int
    error: BaseException | None

    @property
    def state(self) -> str:
        """One of "running", "done", "failed" and "stopped"."""

    @property
    def seconds(self) -> float:
        """How long it has run, or ran."""

    def last_lines(self) -> list[str]:
        """Return the last line of each rank."""

    def stop(self) -> None:
        """End the ranks."""


class LaunchStatus:
    """Shows a launch from now on: in Jupyter with a Stop button, elsewhere a line at each end.

    It has no thread of its own: who runs the launch calls :meth:`update` now and then, and
    :meth:`finish` when the last rank is gone.

    Parameters
    ----------
    handle
        The launch.
    """

    def __init__(self, handle: Watched) -> None:
        self._handle = handle
        self._has_finished = False
        self._updated = -_PAUSE
        self._panel: _Panel | None = None
        if _is_in_jupyter():
            self._panel = _Panel(self)
            self._panel.show()
        else:
            ranks = f"{handle.nprocs} rank{'s'[: handle.nprocs - 1]}"
            self._say(f"launch: {ranks} started in the background")

    def update(self) -> None:
        """Show the present state, at most twice a second."""
        now = time.monotonic()
        if self._panel is not None and now >= self._updated + _PAUSE:
            self._updated = now
            self._panel.update()

    def finish(self) -> None:
        """Show how the launch ended, once."""
        if self._has_finished:
            return
        self._has_finished = True
        if self._panel is not None:
            self._panel.finish()
        else:
            self._say(f"launch: {self.headline()}")

    def stop(self) -> None:
        """End the ranks."""
        self._handle.stop()

    def headline(self) -> str:
        """Return the state in one line."""
        handle = self._handle
        text = f"{handle.state}, {_duration(handle.seconds)}"
        if handle.state == "failed" and handle.error is not None:
            story = str(handle.error).strip() or type(handle.error).__name__
            text += f": {_shortened(story.splitlines()[0])}"
        return text

    def _say(self, text: str) -> None:
        FrontEnd().write("stdout", f"{text}\n")

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        bundle: dict[str, Any] = {"text/plain": repr(self), "text/html": self.html()}
        if self._panel is not None:
            bundle["application/vnd.jupyter.widget-view+json"] = self._panel.view()
        return bundle

    def __repr__(self) -> str:
        rows = [f"  rank {rank}: {line}" for rank, line in enumerate(self._lines())]
        return "\n".join([f"launch: {self.headline()}", *rows])

    def html(self) -> str:
        """Return the state and each rank's last line as a table that needs no kernel."""
        sign, colour = _STATES[self._handle.state]
        rows = "".join(
            f'<tr><th scope="row" style="{_CELL}">rank {rank}</th>'
            f'<td style="{_LINE}">{html.escape(line)}</td></tr>'
            for rank, line in enumerate(self._lines())
        )
        return (
            f'<div style="border-left:4px solid {colour};padding-left:0.6em">'
            f'<div><span aria-hidden="true">{sign}</span> '
            f"<b>{html.escape(self.headline())}</b></div>"
            f'<table aria-label="last line of each rank">{rows}</table></div>'
        )

    def _lines(self) -> list[str]:
        return [_shortened(CONTROL.sub("", line)) for line in self._handle.last_lines()]


class _Panel:
    """The widgets of a status, and the output of the cell that holds them."""

    def __init__(self, status: LaunchStatus) -> None:
        import ipywidgets

        self._status = status
        self._text = ipywidgets.HTML(status.html())
        self._button = ipywidgets.Button(
            description="Stop the ranks", icon="stop", tooltip="End all ranks of this launch"
        )
        self._button.on_click(self._stop)
        self._box = ipywidgets.VBox([self._text, self._button])
        self._output: Any = None

    def show(self) -> None:
        from IPython.display import display

        self._output = display(self._status, display_id=True)

    def view(self) -> dict[str, Any]:
        return {"version_major": 2, "version_minor": 0, "model_id": self._box.model_id}

    def update(self) -> None:
        self._text.value = self._status.html()  # sent only if it has changed

    def finish(self) -> None:
        self.update()
        self._box.children = (self._text,)
        self._output.update(self._status)  # what a front end without widgets shows

    def _stop(self, button: Any) -> None:
        button.disabled, button.description = True, "Stopping"
        self._status.stop()


def _is_in_jupyter() -> bool:
    """Return whether there is a kernel that can show widgets."""
    if "IPython" not in sys.modules:
        return False
    from IPython import get_ipython

    if getattr(get_ipython(), "kernel", None) is None:
        return False
    try:
        import ipywidgets  # noqa: F401
    except ImportError:
        return False
    return True


def _duration(seconds: float) -> str:
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {whole % 60} s"


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
