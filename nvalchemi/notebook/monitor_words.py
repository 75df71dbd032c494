"""What a monitor says in words: where each run stands, what its ranks do, what is wrong."""

import html
from dataclasses import dataclass

import numpy as np

from nvalchemi.notebook.explorers.pane import TEXT_COLOUR
from nvalchemi.notebook.front_end import CONTROL
from nvalchemi.notebook.handle import LaunchHandle
from nvalchemi.notebook.run import Run
from nvalchemi.notebook.run_health import of_late
from nvalchemi.notebook.run_state import duration, in_place_of

MOST_RANKS = 16  # in the table: those that are the furthest behind
_LINE = 120  # letters of what a rank has printed last
# a sign beside the word beside the colour (Okabe and Ito's), each enough by itself
SIGNS = {
    "waiting": ("…", "#7F7F7F"),
    "running": ("▶", "#0072B2"),
    "done": ("✔", "#009E73"),
    "failed": ("✖", "#D55E00"),
    "lost": ("✖", "#D55E00"),
    "stopped": ("■", "#7F7F7F"),
}
_CELL = "text-align:left;padding:0 1em 0 0;vertical-align:top"


@dataclass(frozen=True)
class Standing:
    """Where a run, or a launch, stands.

    Attributes
    ----------
    state, sentence : str
    progress : float, optional
        Part that is done, 0 to 1.
    """

    state: str
    sentence: str
    progress: float | None = None

    def __str__(self) -> str:
        return f"{SIGNS[self.state][0]} {self.sentence}"

    def html(self) -> str:
        sign, colour = SIGNS[self.state]
        bar = ""
        if self.progress is not None:
            bar = (
                f' <progress aria-label="steps done" max="1" value="{self.progress:.3f}">'
                "</progress>"
            )
        return (
            f'<div style="border-left:4px solid {colour};padding-left:0.6em;margin:0.2em 0">'
            f'<span aria-hidden="true">{sign}</span> {html.escape(self.sentence)}{bar}</div>'
        )


def standing_of(run: Run, name: str, handle: LaunchHandle | None = None) -> Standing:
    """State, steps, time left and last loss of a run; ``handle`` is that of its launch."""
    parts = [f"{name}: {run.state.sentence}" if name else run.state.sentence]
    if run.state.name == "waiting":
        if handle is not None and not handle.running:
            return _never_written(run, handle)
        return Standing("waiting", f"{parts[0]}{in_place_of(run.folder)}")
    progress = run.progress
    if progress is not None and run.state.name != "done":
        parts.append(f"{progress:.0%}")
    left = run.time_left
    if left is not None:
        parts.append(f"{duration(left)} left")
    else:
        parts.append(
            f"{duration(run.seconds)} so far"
            if run.state.name == "running"
            else f"took {duration(run.seconds)}"
        )
    losses = run.losses["loss"]
    if len(losses):
        parts.append(f"loss {losses[-1]:.4g}")
    return Standing(run.state.name, ", ".join(parts), progress)


def standing_of_launch(handle: LaunchHandle) -> Standing:
    """State of the launch, with the first line of the error."""
    ranks = f"{handle.nprocs} rank{'s'[: handle.nprocs - 1]}"
    words = f"launch of {ranks}: {handle.state}, {duration(handle.seconds)}"
    return Standing(handle.state, f"{words}{_why(handle)}")


def _why(handle: LaunchHandle) -> str:
    """The first line of the error of a launch that has failed."""
    if handle.state != "failed":
        return ""
    said = str(handle.error).strip() or type(handle.error).__name__
    return f": {_shortened(said.splitlines()[0], 2 * _LINE)}"


def _never_written(run: Run, handle: LaunchHandle) -> Standing:
    """Nothing will come any more."""
    if handle.state == "done":
        how = f"the launch is done, and {run.folder} holds no run{in_place_of(run.folder)}"
        return Standing("lost", how)
    ended = "has failed" if handle.state == "failed" else "was stopped"
    words = f"the launch {ended} before a run was written to {run.folder}{_why(handle)}"
    return Standing(handle.state, words)


@dataclass(frozen=True)
class RankTable:
    """What each rank does, as a table.

    Attributes
    ----------
    head : tuple of str
    rows : list of tuple of str
        Those of at most MOST_RANKS ranks.
    left_out : int
        Ranks that are not in it.
    """

    head: tuple[str, ...]
    rows: list[tuple[str, ...]]
    left_out: int = 0

    def html(self) -> str:
        if not self.rows:
            return ""
        head = "".join(f'<th scope="col" style="{_CELL}">{html.escape(h)}</th>' for h in self.head)
        rows = "".join(
            f'<tr><th scope="row" style="{_CELL}">{row[0]}</th>'
            + "".join(f'<td style="{_CELL}">{html.escape(cell)}</td>' for cell in row[1:])
            + "</tr>"
            for row in self.rows
        )
        more = f"<div>{self._more()}</div>" if self.left_out else ""
        table = f'<table aria-label="ranks"><tr>{head}</tr>{rows}</table>{more}'
        return f'<div style="{TEXT_COLOUR};overflow-x:auto">{table}</div>'

    def __str__(self) -> str:
        if not self.rows:
            return ""
        widths = [max(map(len, column)) for column in zip(self.head, *self.rows)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip()
            for row in (self.head, *self.rows)
        ]
        return "\n".join([*lines, *([self._more()] if self.left_out else [])])

    def _more(self) -> str:
        return f"and {self.left_out:,} ranks that are less far behind"


def table_of(run: Run | None, handle: LaunchHandle | None, name: str = "") -> RankTable:
    """Of late: steps, lag, throughput, waiting, load and memory; and the last printed line."""
    head, rows = _work_rows(run) if run is not None else ((), {})
    lines = handle.last_lines() if handle is not None else []
    printed = [_shortened(CONTROL.sub("", line)) for line in lines]
    ranks = sorted({*rows, *range(len(printed))})
    if any(printed):
        head += ("printed last",)
    if not head:
        return RankTable((), [])
    table = []
    for rank in ranks:
        cells = rows.get(rank, ("",) * (len(head) - any(printed)))
        line = (printed[rank] if rank < len(printed) else "",) if any(printed) else ()
        table.append((f"rank {rank}", *cells, *line))
    if len(table) <= MOST_RANKS or run is None:
        return RankTable((name, *head), table[:MOST_RANKS], max(0, len(table) - MOST_RANKS))
    lag = run.lag()
    behind = np.zeros(len(ranks)) if lag is None else np.resize(lag.seconds, len(ranks))
    kept = np.sort(np.argsort(-behind, kind="stable")[:MOST_RANKS])
    return RankTable((name, *head), [table[i] for i in kept], len(table) - MOST_RANKS)


def _work_rows(run: Run) -> tuple[tuple[str, ...], dict[int, tuple[str, ...]]]:
    works = [work for work in run.ranks if work.rank < run.world_size and len(work.steps)]
    if not works:
        return (), {}
    lag = run.lag()
    gpu = any(np.isfinite(work.gpu_peak).any() for work in works)
    head = ("step", "behind, s", "structures/s", "waits for data", "atoms a batch", "largest")
    rows: dict[int, tuple[str, ...]] = {}
    for work in works:
        waiting = of_late(work, work.waiting)
        rows[work.rank] = (
            f"{work.steps[-1]:,.0f}",
            "-" if lag is None else f"{lag.seconds[work.rank]:.2f}",
            _number(of_late(work, work.structures_per_second)),
            "-" if np.isnan(waiting) else f"{waiting:.0%}",
            _number(of_late(work, work.atoms_per_batch)),
            _number(float(work.largest_batch[-1])),
            _number(float((work.gpu_peak if gpu else work.memory)[-1])),
        )
    return (*head, "GPU peak, MB" if gpu else "memory, MB"), rows


def _number(value: float) -> str:
    return "-" if not np.isfinite(value) else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _shortened(text: str, most: int = _LINE) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."
