"""All that the ranks of a launch print, in one file per rank that only the user can read."""

from __future__ import annotations

import io
import itertools
import os
import re
import stat
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

_KEPT = 7 * 24 * 3600  # s; a long weekend later one still wants to read what was printed
_FOLDER = re.compile(r"\d{8}-\d{6}-(\d+)-\d+")  # time, process, count
_FILE = re.compile(r"rank\d+\.log")
_count = itertools.count()


class RankLogs:
    """One log file per rank, in a fresh folder under the system's temporary folder.

    Each write goes to the file at once, so that a killed kernel loses nothing. What cannot be
    written ends no training: it is said once, in :attr:`fault`, and the log stops there.

    Parameters
    ----------
    nprocs
        Number of ranks.

    Attributes
    ----------
    folder
        The folder of this launch, None if none could be made.
    fault
        Why the logs are incomplete, None while they are complete.
    """

    def __init__(self, nprocs: int) -> None:
        self.folder: Path | None = None
        self.fault: str | None = None
        self._files: dict[int, io.FileIO] = {}
        self._broken: set[int] = set()
        try:
            parent = _parent()
            _remove_old(parent)
            self.folder = _new_folder(parent)
            for rank in range(nprocs):
                self._files[rank] = io.FileIO(self.folder / f"rank{rank}.log", "xb", opener=_open)
        except OSError as error:
            self._break(range(nprocs), f"what the ranks print is in no log file: {error}")

    def path(self, rank: int) -> Path | None:
        """Return the file that has all that the rank printed, None if some of it is missing."""
        if self.folder is None or rank in self._broken:
            return None
        return self.folder / f"rank{rank}.log"

    @property
    def paths(self) -> tuple[Path, ...]:
        """The file of each rank; empty if none could be made."""
        return tuple(Path(str(file.name)) for file in self._files.values())

    def write(self, rank: int, lines: Sequence[str]) -> None:
        """Append lines to the rank's file."""
        if rank in self._broken:
            return
        data = memoryview(("\n".join(lines) + "\n").encode("utf-8", "backslashreplace"))
        try:
            while data:  # a disk that is nearly full takes a part
                data = data[self._files[rank].write(data) or 0 :]
        except OSError as error:
            self._break([rank], f"the log of rank {rank} is incomplete: {error}")

    def text(self, rank: int) -> str:
        """Return what is in the rank's file, also after :meth:`close`."""
        try:
            return Path(str(self._files[rank].name)).read_text("utf-8", "replace")
        except (OSError, KeyError):
            return ""

    def close(self) -> None:
        """Close the files; they stay for a week."""
        for file in self._files.values():
            file.close()

    def _break(self, ranks: Sequence[int], story: str) -> None:
        self._broken.update(ranks)
        self.fault = self.fault or story


def _open(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_APPEND, 0o600)


def _parent() -> Path:
    """Return the folder of all our logs, which no other user can write to or read."""
    folder = Path(tempfile.gettempdir()) / f"nvalchemi-{_user()}"
    with suppress(FileExistsError):
        folder.mkdir(0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        return Path(tempfile.mkdtemp(prefix="nvalchemi-"))  # somebody else has taken the name
    if found.st_mode & 0o077:
        folder.chmod(0o700)
    return folder


def _user() -> str:
    import pwd  # not on Windows, where nothing is launched but this module can be imported

    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # a container that does not know its user
        return str(os.getuid())


def _new_folder(parent: Path) -> Path:
    start = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    while True:
        try:
            folder = parent / f"{start}-{next(_count)}"
            folder.mkdir(0o700)
            return folder
        except FileExistsError:
            pass


def _remove_old(parent: Path) -> None:
    """Remove the logs of launches that ended more than a week ago, and nothing else."""
    for folder in os.scandir(parent):
        name = _FOLDER.fullmatch(folder.name)
        if not name or not folder.is_dir(follow_symlinks=False) or _is_alive(int(name[1])):
            continue
        try:
            files = list(os.scandir(folder.path))
            last = max(file.stat(follow_symlinks=False).st_mtime for file in [folder, *files])
            if time.time() - last < _KEPT:
                continue
            for file in files:
                if _FILE.fullmatch(file.name) and file.is_file(follow_symlinks=False):
                    os.unlink(file.path)
            os.rmdir(folder.path)
        except OSError:
            pass  # another launch removes it at this moment, or it holds what is not ours


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass
    return True
