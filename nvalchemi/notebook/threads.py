"""How many threads each rank computes with: its share of the cores that this process may use."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping
from operator import index
from pathlib import Path
from typing import Any

VARIABLE = "OMP_NUM_THREADS"
"""What torch reads when it is imported: a number, or one for each level of nesting ("4,2")."""

_FEW = 64  # ranks, or threads of a rank, that any machine may be asked for


def thread_variable(threads: Any, nprocs: int, env: Mapping[str, str]) -> str:
    """Return OMP_NUM_THREADS of each rank: as asked for, or cores // nprocs.

    Parameters
    ----------
    threads
        Threads of each rank; None takes OMP_NUM_THREADS from ``env``, from this process, or the
        rank's share of the cores.

    Raises
    ------
    TypeError, ValueError
        If ``threads`` is no integer of at least 1, is far more than there are cores, or
        contradicts ``env``, or if the variable that holds is no such number.
    """
    if threads is not None:
        return str(_asked(threads, env))
    for variables, where in ((env, "env"), (os.environ, "this process's environment")):
        text = variables.get(VARIABLE, "").strip()
        if text or (variables is env and VARIABLE in env):
            if not re.fullmatch(r"0*[1-9][0-9]*(\s*,\s*0*[1-9][0-9]*)*", text):
                raise ValueError(
                    f"{VARIABLE} must be a positive integer: {text!r} in {where}; correct it "
                    "there, or give threads= instead"
                )
            _refuse_too_many(max(map(int, text.split(","))), f"{VARIABLE} in {where}")
            return text
    return str(max(1, cores() // nprocs))


def first_level(text: str) -> int:
    """Return the threads of the outermost level, which is where torch computes."""
    return int(text.split(",")[0])


def cores() -> int:
    """Return how many cores this process may use: its affinity, or its cgroup's share of time."""
    if hasattr(os, "sched_getaffinity"):
        allowed = len(os.sched_getaffinity(0))
    else:
        allowed = os.cpu_count() or 1
    return max(1, math.floor(min(allowed, _quota())))


def most_threads() -> int:
    """Return how many threads a rank may have: more start no training on this machine."""
    return max(_FEW, 4 * (os.cpu_count() or 1))


def most_ranks() -> int:
    """Return how many ranks on the CPU may be asked for by their number."""
    return max(_FEW, 4 * cores())


def _refuse_too_many(threads: int, name: str) -> None:
    if threads > most_threads():
        raise ValueError(
            f"{name} must be at most {most_threads()} on this machine: {threads}; cores // ranks "
            "is what computes fastest"
        )


def _asked(threads: Any, env: Mapping[str, str]) -> int:
    try:
        number = None if isinstance(threads, bool) else index(threads)
    except TypeError:
        number = None
    if number is None:
        raise TypeError(f"threads must be an integer or None: {threads!r}")
    if number < 1:
        raise ValueError(f"threads must be at least 1: {number}; None shares out the cores")
    _refuse_too_many(number, "threads")
    if VARIABLE in env:
        raise ValueError(
            f"threads and env must not both set the threads: threads={number}, "
            f"{VARIABLE}={env[VARIABLE]!r} in env; leave one out"
        )
    return number


def _quota(groups: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")) -> float:
    """Return the CPU seconds per second that this process's cgroups (v1 or v2) allow it."""
    try:
        lines = groups.read_text().splitlines()
    except OSError:  # not Linux
        return math.inf
    return min((_limit(folder) for folder in _folders(lines, mount)), default=math.inf)


def _folders(lines: list[str], mount: Path) -> Iterator[Path]:
    """Yield this process's groups for CPU time and all above them: the least of them holds."""
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = mount / controllers  # v2 names no controller and has one tree
        own = root / path.lstrip("/")
        # inside a container the path may be the host's: then only the root is there
        yield from (f for f in (own, *own.parents) if f.is_relative_to(root))


def _limit(folder: Path) -> float:
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text()
            period = (folder / "cpu.cfs_period_us").read_text()
        return int(quota) / int(period) if int(quota) > 0 else math.inf
    except (OSError, ValueError):  # no such group; "max"
        return math.inf
