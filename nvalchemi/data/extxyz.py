"""Structures of a file in extended XYZ, one after the other, with the place of what is wrong.

The file is cut into structures here and ASE parses each: its own reader of whole files stops at a
blank line and leaves the rest unread, and its errors do not say where.
"""

import io
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from ase import Atoms


class _Lines:
    """Lines of a text file, counted from 1."""

    def __init__(self, file: TextIO, path: str | Path) -> None:
        self.path = path
        self.number = 0
        self._file = file
        self._kept: str | None = None

    def next(self) -> str:
        """The next line with its end; empty behind the last one."""
        self.number += 1
        if self._kept is not None:
            line, self._kept = self._kept, None
            return line
        try:
            return self._file.readline()
        except (EOFError, OSError, UnicodeError) as error:
            raise ValueError(f"{self.path}, near line {self.number}: {error}") from error

    def put_back(self, line: str) -> None:
        self.number -= 1
        self._kept = line


def iterate_extxyz(path: str | Path) -> Iterator[Atoms]:
    """Structures of a file, which may be compressed (.gz, .bz2, .xz).

    Parameters
    ----------
    path : path
        The file.

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    ValueError
        If it holds no structure, one can not be parsed, or anything but blank lines follows a blank
        line; with the number of the structure and of the line.
    """
    from ase.io.formats import open_with_compression

    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no file {path}")
    index = 0
    with open_with_compression(str(path)) as file:
        lines = _Lines(file, path)
        while True:
            first = lines.number + 1
            text = _next_structure(lines, index)
            if text is None:
                break
            yield _parse(text, path, index, first)
            index += 1
    if index == 0:
        raise ValueError(f"{path} holds no structure")


def _next_structure(lines: _Lines, index: int) -> str | None:
    """Text of the next structure; None at the end of the file."""
    header = lines.next()
    if not header.strip():
        if header:
            _refuse_rest(lines, index)
        return None
    try:
        num_atoms = int(header)
        if num_atoms < 0:
            raise ValueError
    except ValueError:
        raise ValueError(
            f"{lines.path}: line {lines.number} must hold the number of atoms of structure "
            f"{index}, got {header.strip()[:60]!r}; does the structure before have as many lines "
            "as its number of atoms says?"
        ) from None
    body = [lines.next() for _ in range(num_atoms + 1)]
    if not body[-1]:
        there = len(body) - body.count("")
        raise ValueError(
            f"{lines.path}: structure {index} can not be read: the file ends after {there} of the "
            f"{len(body)} lines that its number of atoms, {num_atoms}, announces; was it cut off?"
        )
    # ASE's other way to write a cell: up to three lines VEC1, VEC2, VEC3 behind the atoms.
    line = lines.next()
    while line.lstrip().startswith("VEC"):
        body.append(line)
        line = lines.next()
    lines.put_back(line)
    return header + "".join(body)


def _refuse_rest(lines: _Lines, index: int) -> None:
    blank = lines.number
    while line := lines.next():
        if line.strip():
            raise ValueError(
                f"{lines.path}: line {blank} is blank, where the file may only end or structure "
                f"{index} begin, and line {lines.number} holds {line.strip()[:60]!r}: remove blank "
                "lines between structures"
            )


def _parse(text: str, path: str | Path, index: int, first: int) -> Atoms:
    from ase.io import iread

    try:
        (atoms,) = iread(io.StringIO(text), ":", format="extxyz")
    except Exception as error:
        # ASE's parser lets through whatever its parts raise
        raise ValueError(
            f"{path}: structure {index} can not be read: {_reason(error)} (line {first} holds its "
            f"number of atoms, line {first + 1} its key=value pairs, those after it the columns "
            "that Properties names)"
        ) from error
    return atoms


def _reason(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"{error} is no chemical symbol, or no known key"
    if isinstance(error, AttributeError | TypeError | IndexError):
        return f"a key lacks its value or a line has other columns ({error})"
    return str(error)
