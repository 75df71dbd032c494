"""The files of a run folder: their names, JSON in one piece, lines that are appended, one writer.

=================  ===============================================================================
``config.json``    what is trained, on what, by which ranks; of the latest session
``status.json``    where the run stands; replaced by rename, so it is never seen half written
``metrics.jsonl``  rank 0: losses, learning rates, gradient norms, validations
``rank0.jsonl``    one file per rank: work, waiting and memory of about a second
=================  ===============================================================================

A line is a JSON object. Its first key of importance tells what it is: ``session`` (a run starts or
goes on here), ``end`` (it ended, and how), ``validation``, or none of these: measurements up to
``step``. A run that is killed leaves at most a last line that is cut off.
"""

import json
import math
import os
import warnings
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # not on Windows, where a folder is not locked
    fcntl = None  # type: ignore[assignment]

CONFIG, STATUS, METRICS = "config.json", "status.json", "metrics.jsonl"
RANK_FILES = "rank*.jsonl"


def rank_file(rank: int) -> str:
    """Name of the file of a rank."""
    return f"rank{rank}.jsonl"


def process_start(pid: int) -> int | None:
    """When a process of this machine began, in clock ticks since boot; None if there is none.

    With it a process is told from a later one of the same number, and from a zombie. Where the
    system does not say (no /proc), a process that lives has begun at 0.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        return None if fields[0] in (b"Z", b"X") else int(fields[19])
    except OSError:
        pass
    if os.path.exists("/proc/self/stat"):
        return None
    try:
        os.kill(pid, 0)
    except PermissionError:
        return 0
    except OSError:
        return None
    return 0


def plain(value: Any) -> Any:
    """A value as JSON knows it: six digits, numbers that are not finite as words."""
    if isinstance(value, bool | int | str) or value is None:
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return float(f"{value:.6g}")
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:197]}..."


def write_whole(path: Path, value: Mapping[str, Any], indent: int | None = None) -> None:
    """Replace a JSON file; who reads it sees the old one or the new one."""
    new = path.with_name(f".{path.name}.{os.getpid()}")
    new.write_text(json.dumps(value, indent=indent) + "\n")
    new.replace(path)


def read_whole(path: Path) -> dict[str, Any]:
    """A JSON object, empty where there is none that can be read."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


class LineFile:
    """A file to which lines of JSON are appended, several by one write.

    A disk that is full does not end the training: it is said once, and what could not be written
    is missing.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = open(path, "ab", buffering=0)
        # a line that was cut off stays one of its own, and hides none of ours
        self._starts_anew = self._file.tell() == 0 or self._last_byte() == b"\n"
        self._has_warned = False

    def _last_byte(self) -> bytes:
        with open(self.path, "rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1)

    def write(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Append lines, whose values are plain."""
        text = "".join(f"{json.dumps(line, separators=(',', ':'))}\n" for line in lines)
        if not text:
            return
        data = text.encode() if self._starts_anew else b"\n" + text.encode()
        try:
            written = self._file.write(data)
        except OSError as error:
            self.complain(error)
            written = 0
        self._starts_anew = written == len(data)

    def complain(self, error: OSError) -> None:
        """Say once that something can not be written."""
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"the run folder can not be written to, so it has gaps from here on: {error}",
                UserWarning,
                stacklevel=2,
            )

    def claim(self) -> bool:
        """Lock the file until it is closed or the process ends; False if another has it."""
        if fcntl is None:
            return True
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:  # a file system without locks
            return True
        return True

    def close(self) -> None:
        """Give the lock back, also for forked children that have the file too, and close."""
        if fcntl is not None:
            with suppress(OSError):
                fcntl.flock(self._file, fcntl.LOCK_UN)
        self._file.close()
