"""Whether a run goes on, and if not, why: told from what it last wrote and from its process."""

import os
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from typing import Any

from nvalchemi.training.hooks.run_files import METRICS, STATUS, process_start

_LOOK = 200  # entries of a folder that is no run
_QUIET = 15.0  # s without a word after which it is said; the status is written twice a second


@dataclass(frozen=True)
class RunState:
    """State of a run.

    Attributes
    ----------
    name : str
        "waiting" (nothing is there yet), "running", "done", "failed", "stopped", or "lost" (it
        says that it runs, but its process is gone).
    sentence : str
        The same for people, with what is known about it.
    """

    name: str
    sentence: str

    @property
    def is_lost(self) -> bool:
        return self.name == "lost"

    @property
    def has_ended(self) -> bool:
        return self.name in ("done", "failed", "stopped", "lost")


def state_of(
    folder: Path,
    status: Mapping[str, Any],
    ends: Mapping[int, Mapping[str, Any]],
    launch_end: str | None = None,
) -> RunState:
    """The state from status.json and from the last lines of the ranks that have ended.

    ``launch_end`` is how the launch has ended that wrote them, where that is known: its ranks may
    have been killed before they could write it.
    """
    if not status:
        missing = "has no run yet" if folder.is_dir() else "is not there yet"
        return RunState("waiting", f"waiting: {folder} {missing}")
    name = str(status.get("state"))
    at = f"at step {_steps(status)}"
    failed = [
        rank
        for rank, end in sorted(ends.items())
        if end.get("end") == "failed" and end.get("session") == status.get("session")
    ]
    if name == "running" and launch_end is not None and not (failed and launch_end == "failed"):
        return RunState(launch_end, f"{launch_end} {at}, as its launch tells")
    if failed and name in ("running", "failed"):
        # a rank that failed by itself knows more than one that was told, or killed for it
        errors = {rank: str(ends[rank].get("error")) for rank in failed}
        rank = next((r for r in failed if not _is_about_another(errors[r])), failed[0])
        silent = _without_end(status, ends)
        if silent and _is_about_another(errors[rank]):
            gone = f"rank {silent[0]} is" if len(silent) == 1 else f"{len(silent)} ranks are"
            killed = f"{gone} gone without a word, as after being killed"
            return RunState("failed", f"failed {at}: {killed}; rank {rank} lost the connection")
        return RunState("failed", f"failed {at}: rank {rank}: {errors[rank]}")
    if name == "running":
        return _running(status, at)
    if name in ("done", "failed", "stopped"):
        error = f": {status['error']}" if "error" in status else ""
        return RunState(name, f"{name} {at}{error}")
    return RunState("waiting", f"waiting: {folder} has a status that is not understood: {name!r}")


def _without_end(status: Mapping[str, Any], ends: Mapping[int, Mapping[str, Any]]) -> list[int]:
    """Ranks of this session that have not said how they ended."""
    session = status.get("session")
    known = {rank for rank, end in ends.items() if end.get("session") == session}
    return [rank for rank in range(int(status.get("ranks") or 0)) if rank not in known]


def _running(status: Mapping[str, Any], at: str) -> RunState:
    quiet = max(time.time() - float(status.get("updated") or 0), 0.0)
    process = f"process {status.get('pid')}"
    for_long = f"nothing has been written for {duration(quiet)}"
    if status.get("host") != socket.gethostname():
        if quiet < _QUIET:
            return RunState("running", f"running, {at}")
        unknown = f"whether {process} on {status.get('host')} lives can not be seen from here"
        return RunState("running", f"running {at}, but {for_long}, and {unknown}")
    if not _lives(status):
        return RunState("lost", f"running {at}, but {for_long}: {process} is gone")
    if quiet < _QUIET:
        return RunState("running", f"running, {at}")
    why = f"{process} lives, so it may be a long step, a validation, or a hang"
    return RunState("running", f"running {at}, but {for_long}: {why}")


def _lives(status: Mapping[str, Any]) -> bool:
    """Whether the process is the one that wrote, not a later one of the same number."""
    try:
        start = process_start(int(status["pid"]))
    except (KeyError, TypeError, ValueError):
        return True
    return start is not None and start == status.get("pid_start", start)


def _is_about_another(error: str) -> bool:
    """Whether a rank only tells that it has lost another one."""
    words = ("connection", "peer", "failed on rank", "gloo", "nccl", "rank 0 does not say")
    return any(word in error.lower() for word in words)


def _steps(status: Mapping[str, Any]) -> str:
    total = status.get("steps")
    return f"{status.get('step')}" if total is None else f"{status.get('step')} of {total}"


def in_place_of(folder: Path) -> str:
    """What is to be done where there is no run, and what there is in its place."""
    how = "RunFolder(folder) among the hooks of the strategy writes one"
    if not folder.exists():
        beside = [name for name in _entries(folder.parent) if _is_run(folder.parent / name)]
        if not beside:
            return f"; {how}"
        close = get_close_matches(folder.name, beside, n=3, cutoff=0.5)
        listed = _listed([*close, *(name for name in beside if name not in close)])
        return f"; beside it there are the runs {listed}; {how}"
    names = _entries(folder)
    runs = [name for name in names if _is_run(folder / name)]
    if runs:
        return f"; there are runs in its folders {_listed(runs)}"
    return f", but {_listed(names)}; {how}" if names else f"; {how}"


def _entries(folder: Path) -> list[str]:
    with suppress(OSError), os.scandir(folder) as found:
        return sorted(entry.name for entry in islice(found, _LOOK))
    return []


def _is_run(folder: Path) -> bool:
    return (folder / STATUS).is_file() or (folder / METRICS).is_file()


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def duration(seconds: float) -> str:
    """A time in one or two units."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    hours, minutes = divmod(whole // 60, 60)
    if hours >= 48:
        return f"{hours // 24} d {hours % 24} h"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {whole % 60} s"
