"""launch() beside bare torch.multiprocessing.spawn and the other launchers, in one run.

Two CPU ranks with gloo, real Jupyter kernels; launchers take turns, in alternating order. Printed
are medians in seconds (of memory in MB) of what went well, and what did not. The others are tried
when an interpreter that has them is named (accelerate, lightning, torchrunx, jupyter-distributed,
ipykernel). The fault trials of launch() alone, a hundred each, are run by `make chaos`.

    python benchmarks/launch.py [--peers ENVIRONMENT/bin/python] [--json build/launch.json]
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "chaos"))

import faults  # type: ignore[import-not-found]
from launching.launchers import Launcher, Name, known
from launching.rows import Rows

PATIENCE = 30.0  # s; what takes longer hangs
STARTUP = 2.5  # s, about what a first launch takes until its ranks train
REPL = "jupyter-distributed"  # has ranks that live from cell to cell, and no launches
POOL = "nvalchemi, WorkerPool"
_RANK = re.compile(r"(?:rank|process)\s*:?\s*(\d)", re.IGNORECASE)


def turns(launchers: list[Launcher], rounds: int) -> Iterator[Launcher]:
    """Yield each launcher once a round, in alternating order."""
    for number in range(rounds):
        yield from launchers if number % 2 == 0 else reversed(launchers)


def time_launches(rows: Rows, launchers: list[Launcher], rounds: int, later: int) -> None:
    """New kernels: their first launch, and later ones after the pause of a user who reads."""
    for launcher in turns([one for one in launchers if one.name != REPL], rounds):
        for number in range(1 + later):
            task = "later launches" if number else "first launch in a kernel"
            time.sleep(3 if number else 0)
            if not rows.attempt(task, launcher.name, partial(launch_once, launcher)):
                break
        launcher.discard()


def launch_once(launcher: Launcher) -> float:
    return launcher.get().check(launcher.call("train_once"), 2 * PATIENCE).seconds


def time_warm_calls(rows: Rows, launchers: list[Launcher], calls: int) -> None:
    """Calls on ranks that live, with a process group that stays: the pool, and the REPL."""
    warm = [launcher for launcher in launchers if launcher.name in ("nvalchemi", REPL)]
    for launcher in warm:
        start_living(launcher)
    for number, launcher in enumerate(turns(warm, calls + 3)):
        task = (
            "later calls on living ranks"
            if number >= 3 * len(warm)
            else "first three calls on living ranks"
        )
        rows.attempt(task, living(launcher), partial(call_living, launcher))
    for launcher in warm:
        launcher.discard()


def living(launcher: Launcher) -> str:
    return launcher.name if launcher.name == REPL else POOL


def start_living(launcher: Launcher) -> None:
    kernel = launcher.get()
    if launcher.name != REPL:
        kernel.check("from nvalchemi.notebook import WorkerPool")
        kernel.check("pool = WorkerPool(nprocs=2)", PATIENCE)


def call_living(launcher: Launcher) -> float:
    code = "train_in_place()" if launcher.name == REPL else "pool.run(train_in_place)"
    return launcher.get().check(code, PATIENCE).seconds


def try_faults(rows: Rows, launchers: list[Launcher], trials: int) -> None:
    """Every fault on every launcher; what fails gets a new kernel."""
    for number, launcher in enumerate(turns(launchers, trials)):
        trial = number // len(launchers)
        tasks: dict[str, Callable[[], float]] = {
            "error beside a barrier: right rank": partial(error, launcher, trial % 2),
            "SIGKILL of a rank; next launch works": partial(sigkill, launcher, trial % 2),
        }
        for where in ("Python code", "a collective", "a DataLoader"):
            task = f"interrupt in {where}: nothing left"
            tasks[task] = partial(interrupt, launcher, where, trial)
        for how in ("restart", "kill -9"):
            for phase in faults.PHASES:
                task = f"{how} of the kernel, {phase}: nothing left"
                tasks[task] = partial(end, launcher, how, phase, trial)
        for task, fault in tasks.items():
            if not rows.attempt(task, launcher.name, fault):
                launcher.discard()
        if launcher.name != REPL:
            take_memory(rows, launcher)


def error(launcher: Launcher, failing: int) -> float:
    cell, seconds = faults.error(launcher.get(), launcher.call, failing, timeout=PATIENCE)
    said = cell.evalue + cell.traceback
    assert "energy at" in said, f"the error is not shown: {cell.ename}"
    named = _RANK.search(cell.evalue)
    assert named, "no rank is named"
    assert int(named[1]) == failing, "the other rank is named"
    return seconds


def sigkill(launcher: Launcher, victim: int) -> float:
    cell, seconds = faults.sigkill(launcher.get(), launcher.call, victim, timeout=PATIENCE)
    assert cell.status == "error", "the cell succeeds"
    assert "SIGKILL" in cell.evalue, f"no SIGKILL is named: {cell.ename}"
    again = launcher.get().run(launcher.call("train_once"), PATIENCE)
    assert again.status == "ok", f"the next launch fails: {again.ename}"
    return seconds


def interrupt(launcher: Launcher, where: str, trial: int) -> float:
    pause = random.Random(trial).random() * 0.3
    outcome = faults.interrupt(launcher.get(), launcher.call, where, pause, timeout=PATIENCE)
    if launcher.name != REPL:  # its ranks live on
        assert not outcome.left, f"{len(outcome.left)} processes left"
    assert not outcome.shared, "shared memory left"
    return outcome.seconds


def end(launcher: Launcher, how: str, phase: str, trial: int) -> float:
    chance = random.Random(f"{phase}{trial}").random()
    kernel = launcher.get()
    seconds, left, shared = faults.end_of_kernel(kernel, launcher.call, how, phase, chance, STARTUP)
    launcher.discard()
    assert not left, f"{len(left)} processes left after 10 s"
    assert not shared, "shared memory left"
    return seconds


def take_memory(rows: Rows, launcher: Launcher) -> None:
    """What 400 MB more cost: private memory of a rank, and seconds of the launch."""
    figures: dict[str, tuple[float, float]] = {}

    def seconds() -> float:
        kernel = launcher.get()
        kernel.check("large, small = torch.ones(100_000_000), torch.ones(1000)")
        for data in ("small", "small", "large"):  # the first may run on colder ranks
            time.sleep(3)
            with tempfile.TemporaryDirectory() as folder:
                code = launcher.call("note_private_megabytes", Name(data), folder)
                spent = kernel.check(code, 2 * PATIENCE).seconds
                private = max(float(f.read_text()) for f in Path(folder).glob("private*"))
            figures[data] = private, spent
        return figures["large"][1] - figures["small"][1]

    if rows.attempt("400 MB captured: seconds more", launcher.name, seconds):
        private = figures["large"][0] - figures["small"][0]
        rows.attempt("400 MB captured: private MB more per rank", launcher.name, lambda: private)
    else:
        launcher.discard()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--peers", help="interpreter of an environment with the other launchers")
    parser.add_argument("--json", type=Path, default=Path("build/launch.json"))
    parser.add_argument("--rounds", type=int, default=3, help="new kernels of each launcher")
    parser.add_argument("--later", type=int, default=5, help="later launches in each kernel")
    parser.add_argument("--calls", type=int, default=30, help="calls on warm ranks")
    parser.add_argument("--faults", type=int, default=2, help="trials of each fault")
    arguments = parser.parse_args()
    launchers, rows = known(arguments.peers), Rows()
    try:
        time_launches(rows, launchers, arguments.rounds, arguments.later)
        time_warm_calls(rows, launchers, arguments.calls)
        try_faults(rows, launchers, arguments.faults)
    finally:
        for launcher in launchers:
            launcher.discard()
        rows.save(arguments.json)
        names = [launcher.name for launcher in launchers]
        print(rows.table([names[0], POOL, *names[1:]]))


if __name__ == "__main__":
    main()
