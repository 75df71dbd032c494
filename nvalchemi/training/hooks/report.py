"""RunFolder: a hook that writes down how a training goes, for whoever wants to look at it."""

import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from time import perf_counter
from typing import Any, Self

from nvalchemi.distributed.collectives import get_rank, get_world_size
from nvalchemi.training.hooks.run_claim import claim_folder
from nvalchemi.training.hooks.run_config import describe_run, length_of
from nvalchemi.training.hooks.run_files import (
    CONFIG,
    STATUS,
    LineFile,
    plain,
    process_start,
    rank_file,
    read_whole,
    write_whole,
)
from nvalchemi.training.hooks.run_metrics import Load, StepLosses, learning_rates
from nvalchemi.training.stages import TrainingStage

Stage = TrainingStage
_STAGES = frozenset(
    {
        Stage.SETUP,
        Stage.BEFORE_TRAINING,
        Stage.BEFORE_EPOCH,
        Stage.BEFORE_BATCH,
        Stage.AFTER_BACKWARD,
        Stage.AFTER_BATCH,
        Stage.AFTER_VALIDATION,
        Stage.AFTER_TRAINING,
    }
)
# those of each step, by a name that is quicker to look up
_BEFORE_BATCH, _AFTER_BACKWARD = Stage.BEFORE_BATCH, Stage.AFTER_BACKWARD
_AFTER_BATCH = Stage.AFTER_BATCH
_LINES_EVERY = (0.1, 1.0)  # s; at first more often, so that a short run has a curve too
_STATUS_EVERY = 0.5  # s
_SHARE, _LONGEST = 1 / 2000, 5.0  # of the time may go into each, where a disk is slow; s
_LINE_BYTES, _BYTES_A_STEP = 200, 500  # of a rank's line; of those of all ranks


class RunFolder:
    """Hook that writes a run folder, which can be read while the training runs and ever after.

    Put it into the hooks of every rank. Rank 0 writes what the run is (``config.json``), where it
    stands (``status.json``) and its curves (``metrics.jsonl``); each rank its throughput, load
    and memory (``rank0.jsonl``, ...). The curves are the losses of rank 0's batches: no further
    communication is needed for them. `nvalchemi.notebook.run.Run` reads the folder, and
    `nvalchemi.training.hooks.run_files` says what is in the files.

    Parameters
    ----------
    folder : path
        Made if it is not there. It may hold other things, such as checkpoints.
    resume : bool
        Whether a run that the folder holds is gone on with, as a further session.

    Raises
    ------
    ValueError
        At SETUP, on all ranks: if the folder holds a run that has made a step and `resume` is not
        set, or if another process is writing to it.

    Notes
    -----
    Steps that take less than 0.2 s share a line with their mean, lines are written about once a
    second, and tensors of a GPU are read when they have arrived: no step waits for them. The norm
    of the gradient is that of about one step a second, before hooks change it; it is left out
    under a gradient scaler.
    """

    frequency = 1
    stage = None

    def __init__(self, folder: str | os.PathLike[str], *, resume: bool = False) -> None:
        self.folder = Path(folder)
        self.resume = resume
        self._session: int | None = None
        self._last_step = -1  # that this object has written about
        self._claimed = self._begun = self._is_new = False
        self._metrics: LineFile | None = None  # on rank 0
        self._lines: LineFile | None = None
        self._strategy: Any = None
        self._wants_norm = False
        self._mark = 0.0  # when the work on the current step began

    def _runs_on_stage(self, stage: TrainingStage) -> bool:
        return stage in _STAGES

    def __call__(self, ctx: Any, stage: TrainingStage) -> None:
        """Note what the stage tells; write now and then."""
        if stage is _BEFORE_BATCH:
            self._before_batch(ctx)
        elif stage is _AFTER_BACKWARD:
            if self._wants_norm and ctx.grad_scaler is None:
                self._wants_norm = False
                self._losses.add_norm(ctx.optimizers)
        elif stage is _AFTER_BATCH:
            self._after_batch(ctx)
        elif stage is Stage.SETUP:
            self._claim(ctx)
        elif stage is Stage.BEFORE_TRAINING:
            self._begin(ctx)
        elif self._begun:  # it has not where a validation is made outside of a training
            self._between_steps(ctx, stage)

    # A step: nothing here may take long, or wait for a GPU.

    def _before_batch(self, ctx: Any) -> None:
        if not self._begun:  # train_batch() has no BEFORE_TRAINING
            self._begin(ctx)
        self._load.waited += perf_counter() - self._mark
        if self._metrics is not None:
            self._rates = learning_rates(ctx.optimizers)

    def _after_batch(self, ctx: Any) -> None:
        now, load, batch = perf_counter(), self._load, ctx.batch
        load.steps += 1
        load.seconds += now - self._mark
        structures = getattr(batch, "num_graphs", None)
        if structures is not None:
            atoms = batch.num_nodes
            load.structures += structures
            load.atoms += atoms
            load.largest = max(load.largest, atoms)
        if self._metrics is not None:
            self._losses.add(now, ctx, self._rates)
            if now >= self._status_due:
                self._write_status()
        if now >= self._lines_due and load.steps >= self._least_steps:
            self._write_lines()
        self._mark = perf_counter()

    def _between_steps(self, ctx: Any, stage: TrainingStage) -> None:
        if stage is not Stage.BEFORE_EPOCH:
            self._write_lines(last=stage is Stage.AFTER_TRAINING)
        if self._metrics is not None:
            if stage is Stage.AFTER_VALIDATION:
                self._metrics.write([validation_line(ctx)])
            if stage is not Stage.BEFORE_EPOCH or perf_counter() >= self._status_due:
                self._write_status()
        self._mark = perf_counter()

    # The start.

    def _claim(self, ctx: Any) -> None:
        if self._claimed:
            return
        manager = getattr(ctx.workflow, "distributed_manager", None)
        self._rank, self._world_size = get_rank(manager), get_world_size(manager)
        # a strategy that is run again goes on with its session, unless it is set back
        goes_on = self._session is not None and ctx.step_count >= self._last_step
        resume = self.resume or self._session is not None
        claim = claim_folder(self.folder, self._rank, resume, self._session if goes_on else None)
        self._is_new = not goes_on
        self._session, self._metrics = claim
        self._claimed = True

    def _begin(self, ctx: Any) -> None:
        """Start the files of this session, now that all is known about the run."""
        self._strategy = ctx.workflow
        self._total, _ = length_of(ctx.workflow)
        if not self._begun:
            self._begun = True
            self._load, self._losses = Load(), StepLosses()
            self._least_steps = -(-self._world_size * _LINE_BYTES // _BYTES_A_STEP)
            self._last_step = ctx.step_count
            pid = os.getpid()
            self._place = {"host": socket.gethostname(), "pid": pid}
            self._place["pid_start"] = process_start(pid)
            self._lines = LineFile(self.folder / rank_file(self._rank))
            self._started = self._lines_due = perf_counter()
            self._offset = time.time() - self._started
            if self._is_new:
                self._start_session(ctx)
            self._wants_norm = self._metrics is not None
        if self._metrics is not None:
            self._write_status()
        self._mark = perf_counter()

    def _start_session(self, ctx: Any) -> None:
        assert self._lines is not None
        self._is_new = False
        self._started_at = round(time.time(), 3)
        mark = {"session": self._session, "step": ctx.step_count, "time": self._started_at}
        mark |= {"rank": self._rank, "ranks": self._world_size, **self._place}
        self._lines.write([mark])
        if self._metrics is None:
            return
        self._metrics.write([mark])
        path = self.folder / CONFIG
        before = read_whole(path)
        earlier = before.pop("earlier_sessions", [])
        config: dict[str, Any] = {"session": self._session, "started": self._started_at}
        config |= describe_run(ctx.workflow)
        config["earlier_sessions"] = [*earlier, before] if before else earlier
        write_whole(path, config, indent=1)

    # Writing.

    def _write_lines(self, last: bool = False) -> None:
        begin = perf_counter()
        assert self._lines is not None
        self._last_step = self._strategy.step_count
        if self._load.steps:
            now, device = begin + self._offset, self._strategy.devices[0]
            self._lines.write([self._load.line(self._last_step, now, device)])
            self._load = Load()
        if self._metrics is not None:
            elapsed = begin - self._started
            self._metrics.write(self._losses.lines(elapsed, self._offset, last))
            self._wants_norm = True
        end = perf_counter()
        pause = min(max((end - self._started) / 20, _LINES_EVERY[0]), _LINES_EVERY[1])
        self._lines_due = end + max(pause, min((end - begin) / _SHARE, _LONGEST))

    def _write_status(self, state: str = "running", error: str | None = None) -> None:
        assert self._metrics is not None
        begin = perf_counter()
        status = {
            "state": state,
            "step": self._strategy.step_count,
            "steps": self._total,
            "epoch": self._strategy.epoch_count,
            "epochs": self._strategy.num_epochs,
            "started": self._started_at,
            "updated": round(time.time(), 3),
            "session": self._session,
            "ranks": self._world_size,
            **self._place,
        }
        if error is not None:
            status["error"] = error
        try:
            write_whole(self.folder / STATUS, status)
        except OSError as problem:
            self._metrics.complain(problem)
        end = perf_counter()
        self._status_due = end + max(_STATUS_EVERY, min((end - begin) / _SHARE, _LONGEST))

    # The end.

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, _: object) -> None:
        """Write the rest, and how it ended."""
        if self._begun:
            self._write_end(error)
        if self._lines is not None:
            self._lines.close()
        if self._metrics is not None:
            if self._metrics.path.stat().st_size == 0:  # it came to nothing before it began
                self._metrics.path.unlink()
            self._metrics.close()
        self._metrics = self._lines = self._strategy = None
        self._claimed = self._begun = False

    def _write_end(self, error: BaseException | None) -> None:
        assert self._lines is not None
        state, said = describe_end(error)
        # losses of a GPU that failed can not be read; the error is the one that ended the run
        with suppress(*(() if error is None else (RuntimeError,))):
            self._write_lines(last=True)
        end = {"end": state, "step": self._strategy.step_count, "time": round(time.time(), 3)}
        if said is not None:
            end["error"] = said
        self._lines.write([end])
        if self._metrics is not None:
            self._metrics.write([end])
            self._write_status(state, said)


def describe_end(error: BaseException | None) -> tuple[str, str | None]:
    """State and first line of the error; what a user asked for is no failure."""
    if error is None:
        return "done", None
    lines = str(error).strip().splitlines()
    said = f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__
    return "failed" if isinstance(error, Exception) else "stopped", said


def validation_line(ctx: Any) -> dict[str, Any]:
    """The line of the last validation, which is over all ranks."""
    summary = ctx.validation
    parts = summary["per_component_unweighted"]
    return {
        "validation": summary["name"],
        "step": ctx.step_count,
        "epoch": ctx.epoch,
        "time": round(time.time(), 3),
        "loss": plain(float(summary["total_loss"])),
        "parts": {name: plain(float(value)) for name, value in parts.items()},
    }
