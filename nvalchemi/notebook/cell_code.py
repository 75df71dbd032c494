"""What a cell for ranks may hold: plain Python, refused before anything runs if it is not."""

from __future__ import annotations

import ast
import re

# a line of IPython's own language: !command, %magic, name = !command, name?
_IPYTHON = re.compile(r"\s*([\w.,\s*\[\]()]+=\s*)?[!%]|.*\?\s*$|\s*\?")


def check_code(code: str, filename: str) -> None:
    """Refuse source text that ranks cannot run.

    Raises
    ------
    SyntaxError
        If it is no Python.
    ValueError
        If it holds IPython's syntax, or ``await`` outside of a function.
    """
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
        raise


def _awaits(code: str, filename: str) -> bool:
    try:
        flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        compile(code, filename, "exec", flags=flags, dont_inherit=True)
    except SyntaxError:
        return False
    return True
