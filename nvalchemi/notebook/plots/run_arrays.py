"""What is drawn of runs: curves thinned so that no spike is lost, work of ranks, key numbers."""

import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nvalchemi.notebook.plots.facts import Facts, Number, compact
from nvalchemi.notebook.run import Lag, Run
from nvalchemi.notebook.run_state import duration, in_place_of
from nvalchemi.notebook.tail import Floats

RunLike = Run | str | os.PathLike[str]
CELLS = 400  # of a curve that has many points; each shows its lowest and its highest
RANKS = 8  # drawn one by one; of more, the median and the range
_SIGNS = {"failed", "lost", "stopped"}


@dataclass(frozen=True)
class Curve:
    """Points of a curve, without those that are not finite.

    Attributes
    ----------
    x, y : arrays
    broken : array
        Where y is not finite.
    thinned : bool
        Whether these are the extremes of cells.
    """

    x: Floats
    y: Floats
    broken: Floats
    thinned: bool

    @classmethod
    def of(cls, x: Floats, y: Floats) -> "Curve":
        good = np.isfinite(y)
        x, y, broken = x[good], y[good], x[~good]
        if len(x) <= 2 * CELLS:
            return cls(x, y, broken[:CELLS], False)
        edges = np.arange(CELLS) * len(x) // CELLS
        ends = np.append(edges[1:], len(x))
        extremes = [
            first + np.sort([y[first:end].argmin(), y[first:end].argmax()])
            for first, end in zip(edges, ends)
        ]
        kept = np.unique(np.concatenate([[0], *extremes, [len(x) - 1]]))
        return cls(x[kept], y[kept], broken[:CELLS], True)


@dataclass(frozen=True)
class RankCurves:
    """A quantity of each rank by step.

    Attributes
    ----------
    curves : dict of str to Curve
        "rank 3", or of many ranks "lowest", "median" and "highest".
    """

    curves: dict[str, Curve]

    @classmethod
    def of(cls, named: Sequence[tuple[int, Floats, Floats]]) -> "RankCurves":
        named = [(rank, x, y) for rank, x, y in named if np.isfinite(y).any()]
        if len(named) <= RANKS:
            return cls({f"rank {rank}": Curve.of(x, y) for rank, x, y in named})
        # ranks write at moments of their own: all are read at the same steps
        start, end = max(x[0] for _, x, _ in named), min(x[-1] for _, x, _ in named)
        grid = np.linspace(start, max(end, start), CELLS)
        table = np.array([np.interp(grid, x, y) for _, x, y in named])
        rows = zip(("lowest", "median", "highest"), np.quantile(table, [0, 0.5, 1], axis=0))
        return cls({name: Curve.of(grid, row) for name, row in rows})


@dataclass(frozen=True)
class OneRun:
    """One run as it is drawn.

    Attributes
    ----------
    name, state, sentence : str
    losses, validations : dict of str to Curve
        Total first, by name.
    rates, norms : list of Curve, Curve
        Learning rate of each group of parameters; norm of the gradient.
    throughput, load, memory : RankCurves
        Structures per second; atoms per batch; MB (of the GPU where there is one).
    on_gpu : bool
        Whose memory it is.
    lag : Lag, optional
    restarts : array
        Steps at which a later session began.
    lines : int
        Rows of the losses.
    """

    name: str
    state: str
    sentence: str
    losses: dict[str, Curve]
    validations: dict[str, Curve]
    rates: list[Curve]
    norms: Curve
    throughput: RankCurves
    load: RankCurves
    memory: RankCurves
    on_gpu: bool
    lag: Lag | None
    restarts: NDArray[np.float64]
    lines: int


@dataclass(frozen=True)
class RunArrays:
    """All that `draw_run` draws."""

    facts: Facts
    runs: tuple[OneRun, ...]


def compute_run(runs: RunLike | Sequence[RunLike]) -> RunArrays:
    """Arrays of one run or several, read on from where they were read last.

    Parameters
    ----------
    runs : Run, path, or a sequence of them
        A `Run` is refreshed; a path is read as a whole.

    Raises
    ------
    ValueError
        If there are none, or one is a file.
    FileNotFoundError
        If there is no folder at a path.
    TypeError
        For anything else.
    """
    many = runs if isinstance(runs, list | tuple) else [runs]
    if not many:
        raise ValueError("a picture needs at least one run: got an empty list")
    opened = [_opened(run) for run in many]
    for run in opened:
        run.refresh()
    names = names_of(opened)
    drawn = tuple(_one(run, name) for run, name in zip(opened, names))
    return RunArrays(_facts(opened, drawn), drawn)


def _opened(run: object) -> Run:
    if isinstance(run, Run):
        return run
    if isinstance(run, str | os.PathLike):
        opened = Run(run)
        if not opened.folder.exists():
            raise FileNotFoundError(
                f"{opened.folder} is not there{in_place_of(opened.folder)}; Run(folder) is drawn "
                "before it is there"
            )
        return opened
    raise TypeError(
        f"a run must be a Run or the path of a run folder: got {type(run).__name__}; several are "
        "given as a list"
    )


def names_of(runs: Sequence[Run]) -> list[str]:
    """Names of the folders, or so much of their paths as tells them apart."""
    parts = [run.folder.absolute().parts for run in runs]
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(path[-depth:]) for path in parts]
        if len(set(names)) == len(set(parts)):
            break
    return names


def _one(run: Run, name: str) -> OneRun:
    ranks = run.ranks
    on_gpu = any(np.isfinite(rank.gpu_peak).any() for rank in ranks)
    memory = [(r.rank, r.steps, r.gpu_peak if on_gpu else r.memory) for r in ranks]
    rates = run.learning_rates
    return OneRun(
        name=name,
        state=run.state.name,
        sentence=run.state.sentence,
        losses={k: Curve.of(run.steps, v) for k, v in run.losses.items()},
        validations={k: Curve.of(run.validation_steps, v) for k, v in run.validations.items()},
        rates=[Curve.of(run.steps, rates[:, group]) for group in range(rates.shape[1])],
        norms=Curve.of(*run.gradient_norm),
        throughput=RankCurves.of([(r.rank, r.steps, r.structures_per_second) for r in ranks]),
        load=RankCurves.of([(r.rank, r.steps, r.atoms_per_batch) for r in ranks]),
        memory=RankCurves.of(memory),
        on_gpu=on_gpu,
        lag=run.lag(),
        restarts=np.array([float(s.step) for s in run.sessions[1:] if s.step]),
        lines=len(run.steps),
    )


def _facts(runs: Sequence[Run], drawn: Sequence[OneRun]) -> Facts:
    several = len(runs) > 1
    question = "How do these runs compare?" if several else "How does the training go?"
    lines = sum(one.lines for one in drawn)
    thin = any(curve.thinned for one in drawn for curve in one.losses.values())
    truth = f"exact: {lines:,} lines; losses of rank 0's batches, validation over all ranks"
    if thin:
        truth = (
            f"extremes: lowest and highest of {CELLS} cells out of {lines:,} lines; losses of "
            "rank 0's batches, validation over all ranks"
        )
    numbers = _compared(runs, drawn) if several else _numbers(runs[0], drawn[0])
    about = "; ".join(f"{one.name}: {one.sentence}" for one in drawn)
    return Facts(
        view="run",
        question=question,
        look_for="Look for: a loss that rises or is not a number, validation that rises while the "
        "loss falls, a rank that does less or is later than the others",
        exact=not thin,
        truth=truth,
        numbers=tuple(numbers),
        plan=f"{about}{_made_of(runs[0]) if not several else ''}",
    )


def _made_of(run: Run) -> str:
    config = run.config
    if not config:
        return ""
    models = ", ".join(str(m["class"]).rpartition(".")[2] for m in config["models"].values())
    data = config.get("data") or {}
    return (
        f"; {models}, {run.world_size} ranks, {data.get('samples')} samples, batch "
        f"{data.get('batch_size')} a rank, {config['ranks']['device']}"
    )


def _numbers(run: Run, one: OneRun) -> list[Number]:
    total = f"{run.step:,}" if run.total_steps is None else f"{run.step:,} of {run.total_steps:,}"
    left = run.time_left
    time = f"{duration(left)} left" if left is not None else duration(run.seconds)
    numbers = [
        Number("state", one.state, one.state in _SIGNS),
        Number("steps", total),
        Number("time", time),
        _last("loss, last", run.losses["loss"]),
    ]
    if len(run.validation_steps):
        best = np.nanmin(run.validations["loss"]) if one.validations["loss"].x.size else np.nan
        numbers.append(Number("validation, best", f"{best:.4g}", not np.isfinite(best)))
    speed = _speed(run)
    if np.isfinite(speed):
        numbers.append(Number("structures/s, all ranks", compact(round(speed, 1))))
    if one.lag is not None and run.world_size > 1:
        worst = int(one.lag.seconds.argmax())
        numbers.append(Number("lag, last", f"{one.lag.seconds[worst]:.2g} s, rank {worst}"))
    if run.foreign_lines:
        numbers.append(Number("lines not understood", f"{run.foreign_lines:,}", True))
    return numbers


def _compared(runs: Sequence[Run], drawn: Sequence[OneRun]) -> list[Number]:
    """Best validation of each run where all have one, else the last loss."""
    validated = all(one.validations["loss"].x.size for one in drawn)
    numbers = []
    for run, one in zip(runs, drawn):
        if validated:
            value = f"{np.nanmin(run.validations['loss']):.4g}"
            numbers.append(Number(f"{one.name}: validation, best", value, one.state in _SIGNS))
        else:
            last = _last(f"{one.name}: loss, last", run.losses["loss"])
            numbers.append(Number(last.name, last.value, last.wrong or one.state in _SIGNS))
    return numbers


def _last(name: str, values: Floats) -> Number:
    if not len(values):
        return Number(name, "none yet")
    return Number(name, f"{values[-1]:.4g}", not np.isfinite(values[-1]))


def _speed(run: Run) -> float:
    """Structures per second of all ranks of the latest session, of late."""
    ranks = [rank for rank in run.ranks if rank.rank < run.world_size]
    last = [float(rank.structures_per_second[-3:].mean()) for rank in ranks if len(rank.steps)]
    return sum(last) if last else np.nan
