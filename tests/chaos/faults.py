"""One trial of each fault, in a kernel, for any launcher: what came, after how many seconds."""

from __future__ import annotations

import os
import re
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kernels import Cell, Kernel
from traces import alive, held, in_sessions, marked, seconds_until, shared_memory, still_there

FUNCTIONS = Path(__file__).with_name("rank_functions.py").read_text()
Call = Callable[..., str]
"""Turns a function's name and arguments into the cell that runs it on two ranks."""


def ours(function: str, *args: object, **options: object) -> str:
    given = [
        function,
        *map(repr, args),
        *(f"{k}={v!r}" for k, v in {"nprocs": 2, **options}.items()),
    ]
    return f"launch({', '.join(given)})"


def prepared(kernel: Kernel) -> Kernel:
    kernel.check("from nvalchemi.notebook import launch")
    kernel.check(FUNCTIONS)
    return kernel


@dataclass
class Outcome:
    """How a trial went.

    ``left`` are processes of the launch that still lived when the cell was back, ``shared`` what
    was left of its shared memory, ``kept`` what the kernel has open and had not.
    """

    cell: Cell
    seconds: float
    left: list[int]
    shared: set[str]
    kept: list[tuple[str, int]]


def ranks_in(kernel: Kernel, cell: Cell, folder: str, patience: float = 60) -> list[list[int]]:
    """Wait until both ranks have announced themselves; return the processes of each."""
    files = [Path(folder, "rank0"), Path(folder, "rank1")]
    deadline = time.monotonic() + patience
    while not all(file.exists() for file in files):
        kernel.read(cell, 0.005)
        assert not cell.status, f"the cell ended: {cell.ename}: {cell.evalue}"
        assert time.monotonic() < deadline, "the ranks did not come up"
    return [[int(pid) for pid in file.read_text().split()] for file in files]


def error(kernel: Kernel, call: Call, failing: int, timeout: float = 120) -> tuple[Cell, float]:
    """One rank fails, the other waits in a barrier: the seconds are from raise to reply."""
    cell = kernel.run(call("fail_beside_a_barrier", failing), timeout)
    moment = re.search(r"energy at ([\d.]+)", cell.evalue + cell.traceback)
    return cell, cell.replied - float(moment[1]) if moment else float("nan")


def sigkill(kernel: Kernel, call: Call, victim: int, timeout: float = 120) -> tuple[Cell, float]:
    """One rank is killed while both wait in a collective."""
    with tempfile.TemporaryDirectory() as folder:
        cell = kernel.send(call("wait_for_each_other", folder))
        pid = ranks_in(kernel, cell, folder)[victim][0]
        time.sleep(0.1)
        killed = time.time()
        os.kill(pid, signal.SIGKILL)
        kernel.wait(cell, timeout)
    return cell, cell.replied - killed


def interrupt(
    kernel: Kernel, call: Call, where: str, pause: float, timeout: float = 120
) -> Outcome:
    """Stop ranks that would run for ever; what is left is looked at when the cell is back."""
    with tempfile.TemporaryDirectory() as folder:
        before = held(kernel.pid)
        cell = kernel.send(call("stay", folder, where))
        ranks = ranks_in(kernel, cell, folder)
        time.sleep(pause)
        names = shared_memory(marked(kernel.mark))
        stopped = time.time()
        kernel.interrupt()
        kernel.wait(cell, timeout)
        left = _left(kernel, ranks)
    shared = still_there(names)
    # ranks that will wait for the next launch may just be starting: their ends come and go
    _, kept = seconds_until(lambda: sorted((held(kernel.pid) - before).items()), 10)
    return Outcome(cell, cell.replied - stopped, left, shared, kept)


def _left(kernel: Kernel, ranks: list[list[int]]) -> list[int]:
    known = [pid for pids in ranks for pid in pids]
    leaders = [pids[0] for pids in ranks]
    return sorted({*alive(known), *in_sessions(marked(kernel.mark), leaders)})


PHASES = ("start-up", "training", "shutdown")


def end_of_kernel(
    kernel: Kernel, call: Call, how: str, phase: str, chance: float, startup: float
) -> tuple[float, list[int], set[str]]:
    """End the kernel (``how``: "kill -9" or "restart") at a moment that ``chance`` in 0..1 picks.

    Returns after how long none of its processes lived any more, which are left after 10 s, and
    what is left of its shared memory.
    """
    old = kernel.pid
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        cell = kernel.send(call("train_until_told", folder))
        if phase == "start-up":
            time.sleep(chance * startup)
        else:
            ranks_in(kernel, cell, folder)
            time.sleep(chance * 0.5 if phase == "training" else 0)
        if phase == "shutdown":
            Path(folder, "go").touch()
            time.sleep(chance * 0.3)
        names = shared_memory(marked(kernel.mark))
        if how == "restart":
            kernel.restart()
        else:
            kernel.kill()
        keep = [kernel.pid] if kernel.pid != old else []  # the new kernel
        seconds, left = seconds_until(
            lambda: [pid for pid in marked(kernel.mark) if pid not in keep], 10
        )
    return seconds, left, still_there(names)
