"""Lines of JSON read as they come, and the columns of numbers that they make."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


_HEAD = 200  # bytes at its start by which a file is known


class Tail:
    """What has been appended to a file since the last time.

    A last line without its end is left for the next time; a line that is no JSON object is
    counted. A file that is not there yet is empty.

    Attributes
    ----------
    foreign : int
        Lines that were left out.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.foreign = 0
        self._offset = 0
        self._head = b""  # inode numbers are used again; the start of a run folder's files is not

    def read(self) -> tuple[list[dict[str, Any]], bool]:
        """The new lines, and whether the file was replaced, so that earlier ones do not count."""
        try:
            with open(self.path, "rb") as file:
                head = file.read(_HEAD)
                is_new = not head.startswith(self._head)
                if is_new:
                    self._offset = self.foreign = 0
                self._head = head
                file.seek(self._offset)
                chunk = file.read()
        except (FileNotFoundError, NotADirectoryError):
            return [], False
        whole = chunk[: chunk.rfind(b"\n") + 1]
        self._offset += len(whole)
        return self._objects(whole), is_new

    def _objects(self, text: bytes) -> list[dict[str, Any]]:
        lines = [line for line in text.split(b"\n") if line.strip()]
        try:  # at once, which takes a third of the time
            values = json.loads(b"[" + b",".join(lines) + b"]")
        except ValueError:
            values = []
        if len(values) != len(lines):
            values = [_parsed(line) for line in lines]
        objects = [value for value in values if isinstance(value, dict)]
        self.foreign += len(lines) - len(objects)
        return objects


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None


class Columns:
    """Columns of numbers that grow together; what a row lacks is NaN."""

    def __init__(self) -> None:
        self._columns: dict[str, Floats] = {}
        self._length = 0

    def __len__(self) -> int:
        return self._length

    @property
    def names(self) -> tuple[str, ...]:
        """In the order in which they came."""
        return tuple(self._columns)

    def __getitem__(self, name: str) -> Floats:
        """A column, all NaN if no row had it; not to be written to."""
        if name not in self._columns:
            return np.full(self._length, np.nan)
        column = self._columns[name][: self._length]
        column.flags.writeable = False
        return column

    def add(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Append rows."""
        end = self._length + len(rows)
        for name in dict.fromkeys([*self._columns, *(key for row in rows for key in row)]):
            column = self._columns.get(name, np.empty(0))
            if len(column) < end:
                grown = np.full(max(64, 2 * end), np.nan)
                grown[: self._length] = column[: self._length] if len(column) else np.nan
                self._columns[name] = column = grown
            column[self._length : end] = [_number(row.get(name)) for row in rows]
        self._length = end

    def keep(self, rows: NDArray[np.bool_]) -> None:
        """Drop the other rows."""
        for name, column in self._columns.items():
            kept = column[: self._length][rows]
            self._columns[name] = np.concatenate([kept, np.full(len(column) - len(kept), np.nan)])
        self._length = int(rows.sum())


def _number(value: Any) -> float:
    try:
        return float(value)  # "NaN" and "Infinity" too
    except (TypeError, ValueError):
        return np.nan
