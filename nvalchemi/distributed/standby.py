"""Ranks that wait ahead: spawned when nobody waits for them, with torch imported.

Nothing of one launch reaches the next: each rank runs one task. One that waits is taken only where
a rank spawned now would be the same: same variables, same files of this package.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from nvalchemi.distributed.process import Task
from nvalchemi.distributed.rank import Rank, end_all

_waiting: list[tuple[object, Rank]] = []
_owner = os.getpid()  # a fork of this process has the list, but not the ranks
_lock = threading.Lock()


def take(environments: Sequence[Mapping[str, str]], late: frozenset[str]) -> list[Rank]:
    """Return a rank for each environment: one that waits where there is one, else a new one.

    Parameters
    ----------
    environments
        All variables of each rank that differ from this process's own.
    late
        Names of those that a rank can still take up when it gets its task.
    """
    if not _has_directory():
        raise FileNotFoundError(
            "the working directory of this process is gone: os.chdir() to one that exists, where "
            "the ranks can start"
        )
    found: list[Rank] = []
    try:
        for environment in environments:
            rank = _take_one(_key(environment, late))
            found.append(rank or Rank(_early(environment, late)))
    except BaseException:
        end_all(found, [])
        raise
    return found


def make_task(environment: Mapping[str, str], late: frozenset[str], serves: bool = False) -> Task:
    """Return the task that brings a rank to its environment."""
    chosen = {**os.environ, **environment}
    return Task({name: chosen.get(name) for name in sorted(late)}, serves=serves)


def keep(count: int, environment: Mapping[str, str], late: frozenset[str]) -> None:
    """Let so many ranks wait that fit this environment, and none that do not."""
    key = _key(environment, late)
    with _lock:
        _forget_lost()
        fitting = [entry for entry in _waiting if entry[0] == key][:count]
        others = [rank for entry in _waiting if entry not in fitting for rank in [entry[1]]]
        _waiting[:] = fitting
        end_all(others, [])
        while len(_waiting) < count:
            _waiting.append((key, Rank(_early(environment, late), ahead=True)))


def _has_directory() -> bool:
    try:
        return bool(os.getcwd())
    except FileNotFoundError:
        return False


def _take_one(key: object) -> Rank | None:
    with _lock:
        _forget_lost()
        for entry in _waiting:
            if entry[0] == key:
                _waiting.remove(entry)
                return entry[1]
    return None


def _forget_lost() -> None:
    """Drop ranks that have ended while they waited, and those of the process that forked this."""
    global _owner
    if _owner != os.getpid():
        _waiting.clear()
        _owner = os.getpid()
    lost = [entry for entry in _waiting if entry[1].exitcode is not None]
    for entry in lost:
        _waiting.remove(entry)
        entry[1].close()


def _early(environment: Mapping[str, str], late: frozenset[str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name not in late}


def _key(environment: Mapping[str, str], late: frozenset[str]) -> object:
    """What makes two ranks that wait for a task the same."""
    variables = {**os.environ, **environment}
    files = Path(__file__).parent.glob("*.py")
    return (
        frozenset(item for item in variables.items() if item[0] not in late),
        max(file.stat().st_mtime_ns for file in files),
    )


def _end() -> None:
    if _owner == os.getpid():
        end_all([rank for _, rank in _waiting], [])


atexit.register(_end)
