"""TrainingMonitor: how a training goes, read from its run folder while it runs and ever after."""

import asyncio
import html
import os
import threading
import time
import uuid
import weakref
from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

import ipywidgets

from nvalchemi.notebook.explorers.audit_strip import as_list
from nvalchemi.notebook.explorers.pane import TEXT_COLOUR, Pane, complaint, sentence_of
from nvalchemi.notebook.handle import LaunchHandle
from nvalchemi.notebook.monitor_words import (
    RankTable,
    Standing,
    standing_of,
    standing_of_launch,
    table_of,
)
from nvalchemi.notebook.plots import View
from nvalchemi.notebook.plots.run_arrays import RunLike, names_of
from nvalchemi.notebook.run import Run
from nvalchemi.notebook.run_health import findings_of
from nvalchemi.notebook.threads import cores
from nvalchemi.sharding.finding import Finding

PAUSE = 0.5  # s between two looks
SHARE, SHARE_OF_FULL = 1 / 5, 1 / 300  # of a core for drawing; where ranks need all cores
YOUNG = 5  # parts of what has been followed so far that may be without a picture
_NO_CURVES = (
    "A launch alone has no curves: put RunFolder(folder) among the hooks of the strategy and give "
    "TrainingMonitor(folder, handle=handle)"
)
_NO_HANDLE = (
    "no handle: what was not started by launch(..., block=False) here is stopped where it was "
    "started; a launch of this kernel is given as handle=..."
)


class TrainingMonitor:
    """Shows curves, ranks and progress of a training, from the files of its run folder alone.

    It is the same for a training that runs, has ended, was started by ``torchrun`` in another
    terminal, or has not begun. In a notebook it follows the run by itself about twice a second
    while no cell is running, and leaves a picture and tables that need no kernel; `wait` follows
    it while a cell waits. Elsewhere call `update`, and print it.

    Parameters
    ----------
    run : path, Run, or LaunchHandle
        Run folder that a `nvalchemi.training.RunFolder` writes, or will. A handle alone has states
        and output, and no curves.
    handle : LaunchHandle, optional
        The launch that makes the run: what its ranks printed last is shown, and the button stops
        them.
    compare : sequence of path or Run
        Other runs, drawn over it.

    Attributes
    ----------
    widget : ipywidgets.VBox
        What is displayed until the end.
    runs : list of Run
        The run, and those compared with it.
    handle : LaunchHandle or None
    standings : list of Standing
        Where the launch and each run stand.
    findings : list of Finding
        What looks wrong in the runs, with remedies; of the last picture.
    error : Exception or None
        Why nothing can be shown; the widget says it.
    """

    def __init__(
        self,
        run: RunLike | LaunchHandle,
        *,
        handle: LaunchHandle | None = None,
        compare: Sequence[RunLike] = (),
    ) -> None:
        self.runs: list[Run] = []
        self.handle: LaunchHandle | None = None
        self.standings: list[Standing] = []
        self.findings: list[Finding] = []
        self.error: Exception | None = None
        self._names: list[str] = []
        self._top, self._below = ipywidgets.HTML(), ipywidgets.HTML()
        self._pane = Pane(View("run"), self._drawn_runs)
        self._make_button()
        self.widget = ipywidgets.VBox([self._top, self._controls, self._pane.widget, self._below])
        self._timer: asyncio.TimerHandle | None = None
        self._display_id: str | None = None
        self._is_final = self._is_stale = False
        self._began, self._picture_due = perf_counter(), 0.0
        try:
            self._open(run, handle, compare)
        except (TypeError, ValueError) as problem:
            self.error = problem
        self.update()

    def _open(self, run: Any, handle: Any, compare: Any) -> None:
        if isinstance(run, LaunchHandle):
            if handle is not None or compare:
                raise ValueError(
                    "a handle alone has no curves to compare: give the run folder first, as in "
                    "TrainingMonitor(folder, handle=handle)"
                )
            self.handle = run
            return
        if handle is not None and not isinstance(handle, LaunchHandle):
            raise TypeError(
                "handle must be what launch(..., block=False) has returned: got "
                f"{type(handle).__name__}"
            )
        if isinstance(compare, str | os.PathLike | Run):
            raise TypeError(f"compare must be a list of run folders: got {compare!r} alone")
        self.handle = handle
        self.runs = [_opened(one) for one in (run, *compare)]
        self._names = names_of(self.runs) if len(self.runs) > 1 else [""]

    def _make_button(self) -> None:
        self._button = ipywidgets.Button(
            description="Stop the ranks", icon="stop", tooltip="End all ranks of this launch"
        )
        self._reason = ipywidgets.HTML()
        self._controls = ipywidgets.Box(
            [self._button, self._reason],
            layout=ipywidgets.Layout(flex_flow="row wrap", align_items="center", grid_gap="0.6em"),
        )
        own = weakref.ref(self)  # widgets are kept for ever, a monitor is not

        def stop(button: Any) -> None:
            monitor = own()
            if monitor is not None:
                monitor.stop()

        self._button.on_click(stop)

    # What a user calls.

    @property
    def has_ended(self) -> bool:
        """Whether nothing more will come, of what was last read."""
        if self.error is not None:
            return True
        if self.handle is not None and self.handle.running:
            return False
        own, others = self.runs[:1], self.runs[1:]
        if self.handle is None and not all(run.state.has_ended for run in own):
            return False
        return not any(run.state.name == "running" for run in others)

    def update(self) -> None:
        """Read what is new and draw it, now."""
        self._picture_due, self._is_stale = 0.0, True
        self._look()
        self._follow()

    def wait(self, timeout: float | None = None) -> None:
        """Follow the run until it has ended, while the cell waits; an interrupt leaves it.

        Raises
        ------
        TimeoutError
            If it goes on after ``timeout`` seconds.
        KeyboardInterrupt
            When it comes; the ranks go on.
        """
        end = None if timeout is None else time.monotonic() + timeout
        while not self._look():
            if end is not None and time.monotonic() > end:
                raise TimeoutError(
                    f"the run goes on after {timeout:g} s of waiting: call wait() again, or stop()"
                )
            time.sleep(PAUSE)

    def stop(self) -> None:
        """End the ranks of the handle; returns at once.

        Raises
        ------
        ValueError
            If there is no handle.
        """
        if self.handle is None:
            raise ValueError(f"the monitor can stop no ranks: {_NO_HANDLE}")
        self._button.disabled, self._button.description = True, "Stopping"
        # it takes a while, in which the kernel is free
        threading.Thread(target=self.handle.stop, name="stop", daemon=True).start()

    def close(self) -> None:
        """Remove the widgets and follow no longer."""
        self._is_final = True
        if self._timer is not None:
            self._timer.cancel()
        self.widget.close()

    # How it follows.

    def _look(self) -> bool:
        """Read what is new and show it; whether that was the last of it."""
        ended = self.has_ended  # before: what is written until now is read
        begin = perf_counter()
        is_new = self._read()
        self._is_stale |= is_new or not self._pane.widget.value
        self._is_final = ended and not is_new
        if self._is_stale and (self._is_final or begin >= self._picture_due):
            self._draw()
            now = perf_counter()
            self._picture_due = now + _pause_after(now - begin, now - self._began)
        self._write_top()
        self._write_button()
        if self._is_final:
            self._leave()
        return self._is_final

    def _read(self) -> bool:
        if not self.runs and self.handle is None:
            return False
        try:
            is_new = any([run.refresh() for run in self.runs])
            self._tell_end()
            self.standings = self._stand()
            self.error = None
        except Exception as problem:  # files of others, which say something else by the same names
            self.error = _not_understood(self.runs, problem)
            return False
        return is_new

    def _tell_end(self) -> None:
        """What the launch knows wins: its ranks may have been killed before they wrote it."""
        if self.handle is None or self.handle.running or not self.runs:
            return
        run = self.runs[0]
        began = time.time() - (time.monotonic() - self.handle._began)
        # a session from before this launch is not its work
        if run.launch_end is None and run.sessions and run.sessions[-1].time >= began:
            run.launch_end, self._is_stale = self.handle.state, True
            run.refresh()

    def _follow(self) -> None:
        """Look again soon, by the event loop of the kernel; scripts have none."""
        if self._is_final or self._timer is not None:
            return
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return
        self._timer = loop.call_later(PAUSE, _on_time, weakref.ref(self))

    def _look_again(self) -> None:
        self._timer = None
        if not self._is_final:
            self._look()
            self._follow()

    def _leave(self) -> None:
        """Put what needs no kernel in the place of the widget."""
        if self._display_id is None:
            return
        from IPython.display import display

        display(self._static(), raw=True, display_id=self._display_id, update=True)
        self._display_id = None

    # What it shows.

    def _stand(self) -> list[Standing]:
        launch = [] if self.handle is None else [standing_of_launch(self.handle)]
        handles = [self.handle, *[None] * len(self.runs)]  # the launch makes the first run
        return launch + [standing_of(*one) for one in zip(self.runs, self._names, handles)]

    def _write_top(self) -> None:
        if self.error is not None:
            self._top.value = complaint(self.error)
            return
        lines = [standing.html() for standing in self.standings]
        if not self.runs:
            lines.append(f"<div>{html.escape(_NO_CURVES)}</div>")
            self._below.value = self._table().html()
        words = "".join(lines) + as_list(self.findings)
        self._top.value = f'<div style="{TEXT_COLOUR}">{words}</div>'

    def _write_button(self) -> None:
        reason = ""
        if self.handle is None:
            reason = _NO_HANDLE
        elif not self.handle.running:
            reason = "the ranks have ended"
            self._button.description = "Stop the ranks"
        if reason:
            self._button.disabled, self._button.tooltip = True, reason
        self._reason.value = f'<span style="{TEXT_COLOUR}">{html.escape(reason)}</span>'

    def _drawn_runs(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (self.runs if len(self.runs) > 1 else self.runs[0],), {}

    def _draw(self) -> None:
        self._is_stale = False
        if self.error is not None or not any(run.sessions for run in self.runs):
            return  # the sentence above is all there is
        self._pane.draw()
        if self._pane.error is not None:
            self._pane.refuse(_not_understood(self.runs, self._pane.error))
        try:
            self.findings = [
                replace(
                    finding, sentence=f"{name}: {finding.sentence}" if name else finding.sentence
                )
                for run, name in zip(self.runs, self._names)
                for finding in findings_of(run)
            ]
            self._below.value = self._table().html()
        except Exception as problem:
            self._below.value = complaint(_not_understood(self.runs, problem))

    def _table(self) -> RankTable:
        return table_of(self.runs[0] if self.runs else None, self.handle, "".join(self._names[:1]))

    def _static(self) -> dict[str, str]:
        parts = [self._top.value, self._pane.widget.value, self._below.value]
        return {"text/html": "".join(parts), "text/plain": repr(self)}

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        if self._is_final:
            return self._static()
        view = {"version_major": 2, "version_minor": 0, "model_id": self.widget.model_id}
        return {"application/vnd.jupyter.widget-view+json": view, **self._static()}

    def _ipython_display_(self) -> None:
        from IPython.display import display

        self.update()
        if self._is_final:
            display(self._static(), raw=True)
            return
        self._display_id = self._display_id or uuid.uuid4().hex
        display(self._repr_mimebundle_(), raw=True, display_id=self._display_id)

    def __repr__(self) -> str:
        if self.error is not None:
            return f"TrainingMonitor: {sentence_of(self.error)}"
        parts = ["\n".join(["TrainingMonitor", *map(str, self.standings)])]
        if not self.runs:
            parts.append(_NO_CURVES)
        parts += ["\n".join(map(str, self.findings))] if self.findings else []
        parts.append(str(self._table()))
        parts.append(self._pane.text)
        return "\n\n".join(part for part in parts if part)


def _on_time(monitor: "weakref.ref[TrainingMonitor]") -> None:
    followed = monitor()
    if followed is not None:
        followed._look_again()


def _opened(run: Any) -> Run:
    if isinstance(run, Run):
        return run
    if isinstance(run, str | os.PathLike):
        return Run(run)
    raise TypeError(
        "TrainingMonitor shows a run folder: its path, a Run, or with less to see the handle that "
        f"launch(..., block=False) returns; got {type(run).__name__}"
    )


def _not_understood(runs: Sequence[Run], problem: Exception) -> ValueError:
    folders = ", ".join(str(run.folder) for run in runs)
    return ValueError(
        f"the files of {folders} hold what RunFolder does not write ({type(problem).__name__}: "
        f"{problem}): is something else writing there?"
    )


def _pause_after(seconds: float, age: float) -> float:
    """Until the next picture: drawing takes a small part of a core that ranks may need."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else float("inf")
    share = SHARE if load <= cores() - 1 else SHARE_OF_FULL
    # of a short run all is seen all the same
    return max(PAUSE, min(seconds * (1 / share - 1), age / YOUNG))
