"""What a pool may be asked: plain Python, names and ranks that there are; all else is refused."""

from __future__ import annotations

import ast
import keyword
import re
from collections.abc import Iterable
from operator import index
from typing import Any

# a line of IPython's own language: !command, %magic, name = !command, name?
_IPYTHON = re.compile(r"\s*([\w.,\s*\[\]()]+=\s*)?[!%]|.*\?\s*$|\s*\?")


def check_code(code: Any, filename: Any) -> None:
    """Refuse source text that ranks cannot run.

    Raises
    ------
    TypeError
        If it is no text.
    SyntaxError
        If it is no Python.
    ValueError
        If it holds IPython's syntax, ``await`` outside of a function, or a null character.
    """
    if not isinstance(code, str):
        raise TypeError(f"execute() needs source text: {code!r}; a function is called by run()")
    if not isinstance(filename, str):
        raise TypeError(f"filename must be a string or None: {filename!r}")
    if "\0" in code + filename:
        raise ValueError("source text and filename must hold no null character")
    try:
        compile(code, filename, "exec", dont_inherit=True)
    except SyntaxError as error:
        lines = code.splitlines()
        number = min(error.lineno or 1, len(lines))
        line = lines[number - 1] if lines else ""
        if _IPYTHON.match(line):
            raise ValueError(
                f"line {number}: {line.strip()!r} is IPython's syntax, and ranks run plain Python; "
                "run it in a cell of its own, or use subprocess.run"
            ) from None
        if _awaits(code, filename):
            raise ValueError(
                "ranks have no event loop: await needs a function here; call it by "
                "asyncio.run(function())"
            ) from None
        error.text = error.text or line  # the compiler looks for it in a file of that name
        raise


def check_expression(name: Any) -> None:
    """Refuse what is no name or expression.

    Raises
    ------
    TypeError, ValueError
        If it is no text, or another text.
    """
    if not isinstance(name, str):
        raise TypeError(f"pull() needs a name or an expression as a string: {name!r}")
    try:
        compile(name, "<pulled>", "eval", dont_inherit=True)
    except (SyntaxError, ValueError):
        raise ValueError(f"pull() needs a name or an expression: {name!r}") from None


def check_names(names: Iterable[str]) -> None:
    """Refuse names that no variable can have.

    Raises
    ------
    ValueError
        If there is one.
    """
    wrong = [name for name in names if not name.isidentifier() or keyword.iskeyword(name)]
    if wrong:
        listed = ", ".join(map(repr, wrong))
        raise ValueError(f"push() needs names that a variable can have: {listed}")


def choose_ranks(ranks: Any, nprocs: int) -> list[int]:
    """Return the ranks that ``ranks`` names, in order; None names all.

    Raises
    ------
    TypeError, ValueError
        If it holds no integers, or others than there are ranks.
    """
    if ranks is None:
        return list(range(nprocs))
    rule = f"ranks must be some of 0 to {nprocs - 1}"
    if isinstance(ranks, (str, bytes)) or not isinstance(ranks, Iterable):
        raise TypeError(f"{rule} in a list: {ranks!r}; for rank 0 write ranks=[0]")
    chosen = set()
    for rank in ranks:
        try:
            number = None if isinstance(rank, bool) else index(rank)
        except TypeError:
            number = None
        if number is None:
            raise TypeError(f"{rule}: {rank!r} is no integer")
        if not 0 <= number < nprocs:
            raise ValueError(f"{rule}: {number} is none; leave it out for all")
        chosen.add(number)
    if not chosen:
        raise ValueError(f"{rule}: it is empty; leave it out for all")
    return sorted(chosen)


def _awaits(code: str, filename: str) -> bool:
    try:
        flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        compile(code, filename, "exec", flags=flags, dont_inherit=True)
    except SyntaxError:
        return False
    return True
