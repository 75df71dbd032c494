"""All that a rank has started: ended with it, but for the process that cleans up after them."""

from __future__ import annotations

import os
import signal
import sys

_CLEANERS = (b"multiprocessing.resource_tracker", b"torch_shm_manager")


def kill_group(leader: int) -> None:
    """Kill a rank and the processes of its group, and let those live that clean up after them.

    Python's resource tracker and torch's manager of shared memory end by themselves when all who
    use them are gone, and unlink the semaphores and the memory that these had no time to unlink.
    Killed with them, they would leave both until the next boot.
    """
    if sys.platform != "linux":
        os.killpg(leader, signal.SIGKILL)
        return
    os.killpg(leader, 0)  # raises if nobody is left, which spares the search
    for _ in range(3):  # one may have started another meanwhile
        members = _members(leader)
        for pid in members:
            _kill(pid)
        if not members:
            return


def _members(leader: int) -> list[int]:
    """Return the processes of a group that run and are no cleaners, the leader last."""
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat") as file:
                state, _, group = file.read().rpartition(")")[2].split()[:3]
            if int(group) != leader or state in "ZX":
                continue
            with open(f"/proc/{name}/cmdline", "rb") as file:
                command = file.read()
                if not any(cleaner in command for cleaner in _CLEANERS):
                    found.append(int(name))
        except OSError:
            continue  # it ended meanwhile
    return sorted(found, key=lambda pid: pid == leader)


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
