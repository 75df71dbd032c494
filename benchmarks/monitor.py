"""What TrainingMonitor takes of the machine: time of an update, memory, and of the training.

It reads files and no trainer, so its only cost to a training is the time of a core that ranks
may need. An update of the words (each half second) and of the picture (as often as that takes a
fifth of a core, or 1/300 where the ranks need all cores) are measured as time of the CPU, which
other work on the machine hardly changes; medians. Wanted where the ranks need all cores: at most
0.5 % of one core, by which the rank there, and so the training, is slower at most.

    OMP_NUM_THREADS=1 python benchmarks/monitor.py
"""

import json
import resource
import socket
import tempfile
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any

import numpy as np

MOST_PERCENT, MOST_MB = 0.5, 200
SIZES = {"1e3 lines, 2 ranks": (1000, 2), "1e5 lines, 8 ranks": (100_000, 8)}
TURNS = 15


def write_run(folder: Path, lines: int, ranks: int) -> Path:
    """A run folder that goes on, a line a second."""
    folder.mkdir()
    mark = {"session": 0, "step": 0, "ranks": ranks, "time": 0.0}
    losses = np.exp(-np.arange(lines) / lines * 5).tolist()
    rows: list[dict[str, Any]] = [mark]
    for step, loss in enumerate(losses, 1):
        parts = {"EnergyMSELoss": loss / 2, "ForceMSELoss": loss}
        rows.append({"step": step, "epoch": 0, "loss": loss, "parts": parts, "lr": 1e-3,
                     "time": float(step), "grad_norm": loss})  # fmt: skip
    append(folder / "metrics.jsonl", rows)
    for rank in range(ranks):
        append(folder / f"rank{rank}.jsonl", [mark, *(work(step) for step in range(1, lines + 1))])
    write_status(folder, lines)
    return folder


def work(step: int) -> dict[str, Any]:
    return {"step": step, "steps": 1, "time": float(step), "seconds": 1.0, "wait": 0.01,
            "structures": 8, "atoms": 160, "largest": 40, "rss": 500.0}  # fmt: skip


def append(path: Path, rows: list[dict[str, Any]]) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def write_status(folder: Path, step: int) -> None:
    values = {"state": "running", "step": step, "steps": 10**6, "session": 0, "started": 0.0}
    place = {"host": socket.gethostname() + "-not", "updated": float(step)}
    (folder / "status.json").write_text(json.dumps(values | place))


def measure_monitor(lines: int = 1000, ranks: int = 2) -> dict[str, float]:
    """Milliseconds of the CPU of updates, part of a core in percent, and memory that came with it.

    Parameters
    ----------
    lines, ranks : int
        Of the run folder; a line stands for a second or a slow step.

    Returns
    -------
    dict
        "first_ms" (all is read), "words_ms", "picture_ms", "percent" (of a core, of a full
        machine), "mb".
    """
    from nvalchemi.notebook.monitor import PAUSE, SHARE_OF_FULL, TrainingMonitor

    with tempfile.TemporaryDirectory() as parent:
        TrainingMonitor(write_run(Path(parent) / "first", 10, 2))  # what is imported is no part
        folder = write_run(Path(parent) / "run", lines, ranks)
        before, begin = resident(), process_time()
        monitor = TrainingMonitor(folder)
        first = process_time() - begin
        words, pictures = [], []
        for step in range(lines + 1, lines + 1 + TURNS):
            grow(folder, step, ranks)
            monitor._picture_due = float("inf")
            begin = process_time()
            monitor._look()
            words.append(process_time() - begin)
            begin = process_time()
            monitor.update()
            pictures.append(process_time() - begin)
        memory = resident() - before
        del monitor
    word, picture = median(words), median(pictures)
    percent = 100 * (word / (PAUSE + word) + SHARE_OF_FULL)
    return {
        "first_ms": 1e3 * first,
        "words_ms": 1e3 * word,
        "picture_ms": 1e3 * picture,
        "percent": percent,
        "mb": memory,
    }


def grow(folder: Path, step: int, ranks: int) -> None:
    append(folder / "metrics.jsonl", [{"step": step, "loss": 0.1, "lr": 1e-3, "time": float(step)}])
    for rank in range(ranks):
        append(folder / f"rank{rank}.jsonl", [work(step)])
    write_status(folder, step)


def resident() -> float:
    """Highest memory of this process so far, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    for name, (lines, ranks) in SIZES.items():
        figures = measure_monitor(lines, ranks)
        print(
            f"{name}: first {figures['first_ms']:.0f} ms, words {figures['words_ms']:.2f} ms, "
            f"picture {figures['picture_ms']:.0f} ms, {figures['percent']:.2f} % of a core on a "
            f"full machine (at most {MOST_PERCENT}), {figures['mb']:.0f} MB (at most {MOST_MB})"
        )
