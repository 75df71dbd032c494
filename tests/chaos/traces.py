"""What a kernel and its ranks leave behind: processes, listening sockets, shared memory."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

MARKER = "NVALCHEMI_CHAOS_MARK"  # a variable that a kernel gives to all that it starts


def marked(mark: str) -> list[int]:
    """Return the living processes that carry a mark; zombies have no environment any more."""
    wanted = f"{MARKER}={mark}".encode()
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):
                if wanted in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
    return found


def in_sessions(pids: list[int], leaders: list[int]) -> list[int]:
    """Return those of ``pids`` that are one of ``leaders`` or in a session of one."""
    found = []
    for pid in pids:
        with suppress(ProcessLookupError):
            if pid in leaders or os.getsid(pid) in leaders:
                found.append(pid)
    return found


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if _is_alive(pid)]


def _is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def end(pids: list[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def seconds_until(empty: Callable[[], list], patience: float) -> tuple[float, list]:
    """Return after how long nothing was left, and what is left after all that patience."""
    start = time.monotonic()
    while (left := empty()) and time.monotonic() - start < patience:
        time.sleep(0.01)
    return time.monotonic() - start, left


def listening(pids: list[int]) -> set[str]:
    """Return the addresses on which these processes listen."""
    found = set()
    for pid in pids:
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            for socket in psutil.Process(pid).net_connections("inet"):
                if socket.status == psutil.CONN_LISTEN:
                    found.add(socket.laddr.ip)
    return found


def held(pid: int) -> Counter[str]:
    """Return how many sockets, pipes and shared-memory files a process has open."""
    kinds: Counter[str] = Counter()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            target = os.readlink(entry)
            if target.startswith(("/memfd:", "/dev/shm")):
                kinds["shared memory"] += 1
            elif target.startswith(("socket:", "pipe:")):
                kinds[target.partition(":")[0]] += 1
    return kinds


def shared_memory(pids: list[int]) -> set[str]:
    """Return the names in /dev/shm that these processes have open or mapped."""
    found: set[str] = set()
    for pid in pids:
        with suppress(OSError):
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
            targets = [os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()]
            found |= {text.partition("/dev/shm/")[2] for text in [*lines, *targets]}
    return found - {""}


def still_there(names: set[str]) -> set[str]:
    return names & {path.name for path in Path("/dev/shm").iterdir()}
