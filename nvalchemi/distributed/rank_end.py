"""How a rank ends: with all that an interpreter does at its end, but for what hangs with torch."""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import io
import logging
import multiprocessing
import os
import stat
import sys
import threading
from typing import Any

_PATIENCE = 10.0  # s; how long a rank waits for its threads before it says so


_first_files: set[tuple[int, int]] = set()  # (device, inode) of what is open before the function


def note_open_files() -> None:
    """Note which files are open before the user's function runs: they are not the user's."""
    _first_files.update(_written_files())


def _written_files() -> set[tuple[int, int]]:
    """Return (device, inode) of the files and pipes that are open for writing to others.

    gloo's are none of these: sockets, nameless ones, and a pipe whose both ends are here.
    """
    read, written = set(), set()
    for name in os.listdir("/dev/fd"):
        try:
            status = os.fstat(int(name))
            mode = fcntl.fcntl(int(name), fcntl.F_GETFL) & os.O_ACCMODE
        except OSError:
            continue  # such as the folder that is being listed
        is_pipe = stat.S_ISFIFO(status.st_mode)
        place = (status.st_dev, status.st_ino)
        if mode == os.O_RDONLY:
            read |= {place} if is_pipe else set()
        elif is_pipe or stat.S_ISREG(status.st_mode) or stat.S_ISCHR(status.st_mode):
            written.add(place)
    return written - read


def finish() -> None:
    """Wait for the threads that are no daemons, and call what was registered with atexit."""
    timer = threading.Timer(_PATIENCE, _tell_what_is_awaited)
    timer.daemon = True
    timer.start()
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # executors first, then their threads
        _keep_communication()
        atexit._run_exitfuncs()
    finally:
        timer.cancel()


def _tell_what_is_awaited() -> None:
    main = threading.main_thread()
    threads = [t.name for t in threading.enumerate() if t is not main and not t.daemon]
    awaited = threads + [child.name for child in multiprocessing.active_children()]
    print(
        f"rank {os.environ.get('RANK')} has returned and has waited {_PATIENCE:g} s for "
        f"{', '.join(awaited) or 'its atexit functions'}",
        file=sys.stderr,
        flush=True,
    )


def _keep_communication() -> None:
    """Take out what ends communication at exit: os._exit does that without a hang."""
    if "physicsnemo.distributed.manager" in sys.modules:
        from physicsnemo.distributed.manager import DistributedManager

        atexit.unregister(DistributedManager.__dict__["cleanup"])
    collectives = sys.modules.get("nvalchemi.distributed.collectives")
    if collectives is not None:
        atexit.unregister(collectives.settle)


def leave(code: int) -> None:
    """End without the interpreter's teardown, in which gloo's threads hang or abort."""
    logging.shutdown()
    for file in (sys.stdout, sys.stderr, *_open_files()):
        try:
            file.flush()
        except Exception:
            pass  # nobody reads any more
    ctypes.CDLL(None).fflush(None)  # what C code printed
    os._exit(code)


def _open_files() -> list[Any]:
    """Return the files that would lose their last lines: the interpreter would close them."""
    if _written_files() <= _first_files:
        return []  # the search below takes a tenth of a second
    files = [obj for obj in gc.get_objects() if type(obj) in (io.TextIOWrapper, io.BufferedWriter)]
    return sorted(files, key=lambda file: type(file) is io.BufferedWriter)
