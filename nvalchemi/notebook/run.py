"""Run: a run folder as arrays, read on while it is written."""

import os
import re
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from nvalchemi.notebook.run_state import RunState, state_of
from nvalchemi.notebook.tail import Columns, Floats, Tail
from nvalchemi.training.hooks.run_files import CONFIG, METRICS, STATUS, read_whole

_RANK = re.compile(r"rank(\d+)\.jsonl")
_RECENT = 0.2  # of a session; the speed that the time left is told from


@dataclass(frozen=True)
class Session:
    """From a start, or a restart, to the next.

    Attributes
    ----------
    number, step, ranks : int
        Its number, the steps that were done before it, and its world size.
    time : float
        When it began, in seconds since 1970.
    """

    number: int
    step: int
    ranks: int
    time: float


@dataclass(frozen=True)
class RankWork:
    """What one rank did, each entry over about a second of training.

    Attributes
    ----------
    rank : int
    steps, times : arrays
        Steps done by the end of the entry, and when that was, in seconds since 1970.
    seconds : array
        Time of training in the entry: validation and what is done between epochs is not in it.
    structures_per_second, atoms_per_second : arrays
        Of that time.
    step_seconds : array
        Mean duration of a step, waiting for data included.
    waiting : array
        Part of that time in which it waited for its batch, 0 to 1.
    atoms_per_batch, largest_batch : arrays
        Load in atoms: mean and maximum.
    memory, gpu_memory, gpu_peak : arrays
        In MB; NaN where it is not known.
    """

    rank: int
    steps: Floats
    times: Floats
    seconds: Floats
    structures_per_second: Floats
    atoms_per_second: Floats
    step_seconds: Floats
    waiting: Floats
    atoms_per_batch: Floats
    largest_batch: Floats
    memory: Floats
    gpu_memory: Floats
    gpu_peak: Floats

    @classmethod
    def of(cls, rank: int, sums: Columns) -> Self:
        with np.errstate(divide="ignore", invalid="ignore"):
            seconds, steps = sums["seconds"], sums["steps"]
            return cls(
                rank=rank,
                steps=sums["step"],
                times=sums["time"],
                seconds=seconds,
                structures_per_second=sums["structures"] / seconds,
                atoms_per_second=sums["atoms"] / seconds,
                step_seconds=seconds / steps,
                waiting=sums["wait"] / seconds,
                atoms_per_batch=sums["atoms"] / steps,
                largest_batch=sums["largest"],
                memory=sums["rss"],
                gpu_memory=sums["cuda"],
                gpu_peak=sums["cuda_peak"],
            )


@dataclass(frozen=True)
class Lag:
    """How far ranks are behind the first one; times by the clock of each rank's machine.

    Attributes
    ----------
    step : int
        The last step that every rank is known to have done.
    seconds : array
        By how much later than the first each rank had done it.
    steps : array
        How many steps each rank was behind at the last moment that is known of all.
    """

    step: int
    seconds: Floats
    steps: Floats


class Run:
    """A run folder that `nvalchemi.training.RunFolder` writes, running or finished.

    `refresh` reads what is new; nothing is read twice. A folder that is not there yet, files that
    are being written, a last line that is cut off and lines of others are no errors.

    Parameters
    ----------
    folder : path
        The run folder.

    Attributes
    ----------
    config : dict
        See ``config.json``; empty until it is there.
    sessions : list of Session
    state : RunState
        Whether it runs, and if not why; with a sentence.
    foreign_lines : int
        Lines that could not be read.

    Raises
    ------
    ValueError
        If the folder is a file.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        if self.folder.is_file():
            raise ValueError(
                f"a run is a folder, and {self.folder} is a file: give the folder that RunFolder "
                "was given"
            )
        self.config: dict[str, Any] = {}
        self._status: dict[str, Any] = {}
        self._config_changed = 0.0
        self.launch_end: str | None = None  # state of the launch, told by who has its handle
        self.state: RunState
        self._metrics = Tail(self.folder / METRICS)
        self._tails: dict[int, Tail] = {}
        self._start_anew()
        self.refresh()

    def _start_anew(self) -> None:
        self.sessions: list[Session] = []
        self._losses, self._rates, self._norms = Columns(), Columns(), Columns()
        self._validations = Columns()
        self._work: dict[int, Columns] = {}
        self._rank_starts: dict[int, int] = {}  # first row of the latest session
        self._rank_sessions: dict[int, int] = {}
        self._ends: dict[int, dict[str, Any]] = {}

    def refresh(self) -> bool:
        """Read what is new; return whether anything was."""
        before = (len(self._losses), len(self._validations), str(self._status))
        work = sum(len(columns) for columns in self._work.values())
        self._read_metrics()
        self._read_ranks()
        self._read_config()
        for _ in range(2):  # it may have ended between the two looks
            self._status = read_whole(self.folder / STATUS) or self._status
            self.state = state_of(self.folder, self._status, self._ends, self.launch_end)
            if not self.state.is_lost:
                break
        now = (len(self._losses), len(self._validations), str(self._status))
        return now != before or work != sum(len(columns) for columns in self._work.values())

    def _read_config(self) -> None:
        try:
            changed = (self.folder / CONFIG).stat().st_mtime
        except OSError:
            return
        if changed != self._config_changed:
            self.config, self._config_changed = read_whole(self.folder / CONFIG), changed

    def _read_metrics(self) -> None:
        lines, is_new = self._metrics.read()
        if is_new:
            self._start_anew()
            self._tails.clear()
        pending: list[dict[str, Any]] = []
        for line in lines:
            if _is_session(line):
                self._add_metrics(pending)
                pending = []
                self._add_session(line)
            else:
                pending.append(line)
        self._add_metrics(pending)

    def _add_session(self, line: dict[str, Any]) -> None:
        """A session counts from its first step on: steps beyond that are made again."""
        number, step, ranks = (int(line.get(k, 0)) for k in ("session", "step", "ranks"))
        for columns in (self._losses, self._rates, self._norms, self._validations):
            columns.keep(columns["step"] <= step)
        self.sessions.append(Session(number, step, ranks, float(line.get("time", 0))))

    def _add_metrics(self, lines: list[dict[str, Any]]) -> None:
        measured = [line for line in lines if "step" in line and "loss" in line]
        steps = [line for line in measured if "validation" not in line]
        self._losses.add([_losses_of(line) for line in steps])
        self._rates.add([_rates_of(line) for line in steps])
        self._norms.add(
            [{k: line[k] for k in ("step", "grad_norm")} for line in steps if "grad_norm" in line]
        )
        self._validations.add([_losses_of(line) for line in measured if "validation" in line])

    def _read_ranks(self) -> None:
        try:
            names = os.listdir(self.folder)
        except OSError:
            return
        for name in names:
            match = _RANK.fullmatch(name)
            if match:
                self._read_rank(int(match[1]), name)

    def _read_rank(self, rank: int, name: str) -> None:
        tail = self._tails.setdefault(rank, Tail(self.folder / name))
        lines, is_new = tail.read()
        if is_new:
            for of_rank in (self._work, self._rank_starts, self._rank_sessions, self._ends):
                of_rank.pop(rank, None)
        work = self._work.setdefault(rank, Columns())
        pending: list[dict[str, Any]] = []
        for line in lines:
            if _is_session(line):
                work.add(pending)
                work.keep(work["step"] <= line["step"])
                pending = []
                self._ends.pop(rank, None)
                self._rank_sessions[rank] = line["session"]
                self._rank_starts[rank] = len(work)
            elif "end" in line:
                self._ends[rank] = line | {"session": self._rank_sessions.get(rank)}
            elif "step" in line and "seconds" in line:
                pending.append(line)
        work.add(pending)

    # Curves.

    @property
    def steps(self) -> Floats:
        """The last step of each row of `losses`; quick steps share a row with their mean."""
        return self._losses["step"]

    @property
    def epochs(self) -> Floats:
        """Epoch of each row of `losses`, from 0."""
        return self._losses["epoch"]

    @property
    def times(self) -> Floats:
        """When each row of `losses` was, in seconds since 1970."""
        return self._losses["time"]

    @property
    def losses(self) -> dict[str, Floats]:
        """By name: "loss" is the total, then its parts, unweighted; of rank 0's batches."""
        return _by_name(self._losses)

    @property
    def learning_rates(self) -> Floats:
        """Of each row and group of parameters, [n, groups]."""
        names = [name for name in self._rates.names if name != "step"]
        return np.stack([self._rates[name] for name in names] or [np.empty(0)], axis=1)

    @property
    def gradient_norm(self) -> tuple[Floats, Floats]:
        """Steps at which it was taken, and its values."""
        return self._norms["step"], self._norms["grad_norm"]

    @property
    def validation_steps(self) -> Floats:
        """Step of each row of `validations`."""
        return self._validations["step"]

    @property
    def validations(self) -> dict[str, Floats]:
        """As `losses`, over all ranks."""
        return _by_name(self._validations)

    # Ranks.

    @property
    def ranks(self) -> list[RankWork]:
        """What each rank did, over all sessions; without steps that a restart made again."""
        return [RankWork.of(rank, self._work[rank]) for rank in sorted(self._work)]

    @property
    def world_size(self) -> int:
        """Of the latest session; 0 before there is one."""
        return self.sessions[-1].ranks if self.sessions else 0

    def lag(self) -> Lag | None:
        """How far ranks are behind; None until all of them have written something."""
        known = []
        for rank in range(self.world_size):
            work = self._work.get(rank, Columns())
            first = self._rank_starts.get(rank, 0)
            known.append((work["step"][first:], work["time"][first:]))
        if not known or not all(len(steps) for steps, _ in known):
            return None
        step = min(steps[-1] for steps, _ in known)
        moment = min(times[-1] for _, times in known)
        reached = np.array([np.interp(step, steps, times) for steps, times in known])
        done = np.array([np.interp(moment, times, steps) for steps, times in known])
        return Lag(int(step), reached - reached.min(), done.max() - done)

    # How far.

    @property
    def step(self) -> int:
        """Steps that are done."""
        return int(self._status.get("step") or 0)

    @property
    def total_steps(self) -> int | None:
        """Steps that are wanted; None where nobody knows."""
        return self._status.get("steps")

    @property
    def progress(self) -> float | None:
        """Part that is done, 0 to 1."""
        return min(self.step / self.total_steps, 1.0) if self.total_steps else None

    @property
    def seconds(self) -> float:
        """How long the latest session has run, or ran."""
        started = float(self._status.get("started") or 0)
        running = self.state.name == "running"
        return max((time.time() if running else self._updated) - started, 0.0)

    @property
    def _updated(self) -> float:
        return float(self._status.get("updated") or 0)

    @property
    def time_left(self) -> float | None:
        """Seconds to the end at the speed of late; None where that is not known."""
        if self.state.name != "running" or not self.total_steps or not self.sessions:
            return None
        if socket.gethostname() == self._status.get("host"):
            waited = time.time() - self._updated
        else:
            waited = 0.0  # by another clock
        began = self.sessions[-1].time
        recent = self.times >= began + (1 - _RECENT) * (self._updated - began)
        steps, times = self.steps[recent], self.times[recent]
        if len(steps) < 2 or steps[-1] <= steps[0]:
            return None
        pace = float((times[-1] - times[0]) / (steps[-1] - steps[0]))
        return max((self.total_steps - self.step) * pace - waited, 0.0)

    @property
    def foreign_lines(self) -> int:
        """Lines that could not be read: of others, or cut off by a crash."""
        return sum(tail.foreign for tail in (self._metrics, *self._tails.values()))

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r}: {self.state.sentence})"


def _is_session(line: dict[str, Any]) -> bool:
    """Whether a session begins here, by all that is read of it."""
    numbers = (line.get(key, 0) for key in ("session", "step", "ranks", "time"))
    return "session" in line and all(isinstance(number, int | float) for number in numbers)


def _losses_of(line: dict[str, Any]) -> dict[str, Any]:
    parts = line.get("parts")
    row = {name: line.get(name) for name in ("step", "epoch", "time", "loss")}
    return row | {f"/{name}": v for name, v in (parts if isinstance(parts, dict) else {}).items()}


def _rates_of(line: dict[str, Any]) -> dict[str, Any]:
    rates = line.get("lr")
    rates = rates if isinstance(rates, list) else [rates]
    return {"step": line["step"], **{str(number): rate for number, rate in enumerate(rates)}}


def _by_name(columns: Columns) -> dict[str, Floats]:
    parts = {name[1:]: columns[name] for name in columns.names if name.startswith("/")}
    return {"loss": columns["loss"], **parts}
