"""Put a finished folder in the place of another, so that nobody sees it half made."""

import ctypes
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from nvalchemi.data.datapipes.zarr_layout import exclusive

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2  # linux/fs.h


@contextmanager
def replaced_by_rename(path: Path, *, replaces: bool) -> Iterator[Path]:
    """Give a folder beside `path` to build in; it takes that place when the block is left well.

    Where it `replaces`, what was at `path` is removed. If the block raises, the folder is removed
    and `path` is as it was; a killed process leaves the folder, and the next writer removes it.

    Raises
    ------
    FileExistsError
        If it does not replace, and something has appeared at `path`.
    RuntimeError
        If another writer is building there.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.partial")
    with _own_folder(beside, path):
        try:
            yield beside
            if replaces:
                _exchange(beside, path)
            else:
                _move(beside, path)
        except BaseException:
            shutil.rmtree(beside, ignore_errors=True)
            raise
        if replaces:
            shutil.rmtree(beside)  # what was at `path` before


@contextmanager
def _own_folder(beside: Path, path: Path) -> Iterator[None]:
    """Make the folder anew and keep it locked; of several writers one gets it."""
    with ExitStack() as lock:
        try:
            if beside.exists():
                with exclusive(beside):
                    shutil.rmtree(beside)
            beside.mkdir()
            lock.enter_context(exclusive(beside))
        except (FileExistsError, FileNotFoundError, RuntimeError) as error:
            raise RuntimeError(
                f"another writer is making {path} at this moment: wait until it has finished"
            ) from error
        yield


def _move(source: Path, target: Path) -> None:
    try:
        os.rename(source, target)
    except OSError as error:
        if target.exists():
            raise FileExistsError(f"{target} has appeared while it was being written") from error
        raise


def _exchange(first: Path, second: Path) -> None:
    """Swap two folders, in one step where the system can."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
        arguments = (_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second))
        done = rename(*arguments, _RENAME_EXCHANGE) == 0
    except (AttributeError, OSError, TypeError):
        done = False
    if done:
        return
    # elsewhere a reader that opens between these two lines finds no store, never a wrong one
    away = first.with_name(f"{first.name}.old")
    os.rename(second, away)
    os.rename(first, second)
    os.rename(away, first)
