"""How lines and progress bars are written to a notebook, a terminal, a file or a pipe."""

from __future__ import annotations

import io
import os
import re
import shutil
import sys
import time
from collections.abc import Sequence
from typing import Any

CONTROL = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"  # colours, movements of the cursor, wiping
    # strings for the terminal, such as its title; one that does not end is shown as text
    r"|(?:\x1b[]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)"
    r"|\x1b[ -/]*[0-Z\\^-~]"
    r"|[\x00-\x1f\x7f-\x9f]"
)
"""Whatever a terminal obeys instead of showing it, which a line of bars and a table cannot take."""

_COLOUR = re.compile(r"\x1b\[[0-9;:]*m")
_RESET = re.compile(r"\x1b\[[0;]*m")

# Okabe and Ito's hues, in the shades of the 256 colours that can be read on white and on black
_COLOURS = (32, 166, 29, 132, 136)
_WIDTH = 160  # columns of all bars together
_NARROWEST = 16  # columns of one rank's bar, of "[rank 0]  45%|█"
_REDRAW = 0.25  # s between two drawings of the bars; quicker ones cannot be read
_DRAWINGS = 150  # a notebook keeps each one: 1/150 of the time since the first; 850 in an hour


class FrontEnd:
    """Writes to this process's stdout and stderr as they are at that moment.

    Each call is one write. Bars share one line below the others, which is wiped before anything
    else is written; where nothing can be wiped, they are not drawn.
    """

    def __init__(self) -> None:
        self._stream = "stdout"  # written to last
        self._row = ""  # the bars as they are drawn now
        self._first: float | None = None
        self._last = 0.0

    def lines(self, rank: int, stream: str, lines: Sequence[str]) -> None:
        """Write lines of a rank to "stdout" or "stderr"."""
        prefix = f"[rank {rank}]"
        lines = [_harmless(line) for line in lines]
        if _has_colour(_target(stream)):
            prefix = f"\x1b[38;5;{_COLOURS[rank % len(_COLOURS)]}m{prefix}\x1b[0m"
        between = f"\n{prefix} "
        self.write(stream, f"{prefix} {between.join(lines)}\n")

    def write(self, stream: str, text: str) -> None:
        """Write a text below the lines and above the bars."""
        wipe, self._row = "\r" + " " * len(self._row) + "\r" if self._row else "", ""
        if wipe and stream != "stdout":
            _put(_target("stdout"), wipe)
            wipe = ""
        if stream != self._stream:
            _flush_kernel(_target(self._stream))  # its two streams overtake each other
            self._stream = stream
        _put(_target(stream), wipe + text)

    def draw(self, bars: dict[int, str]) -> None:
        """Draw each rank's bar, unless it is too early for that."""
        target = _target("stdout")
        now = time.monotonic()
        if bars and self._first is None:
            self._first = now
        if now < self._last + self._pause(target, now) or not (
            _is_kernel(target) or _is_tty(target)
        ):
            return
        row = _joined(bars, _width(target))
        if row == self._row:
            return
        self._last = now
        if not row:
            self.write("stdout", "")
            return
        if self._stream != "stdout":
            _flush_kernel(_target(self._stream))
            self._stream = "stdout"
        _put(target, "\r" + row.ljust(len(self._row)))
        self._row = row

    def _pause(self, target: Any, now: float) -> float:
        if self._first is None or not _is_kernel(target):
            return _REDRAW
        return max(_REDRAW, (now - self._first) / _DRAWINGS)


def _harmless(line: str) -> str:
    """Return a line that changes nothing of what is around it: its colours stay, but end with it.

    The rest of what a terminal obeys would write over lines of others, or clear them.
    """
    if CONTROL.search(line) is None:
        return line
    line = CONTROL.sub(lambda m: m[0] if m[0] == "\t" or _COLOUR.fullmatch(m[0]) else "", line)
    used = _COLOUR.findall(line)
    return f"{line}\x1b[0m" if used and not _RESET.fullmatch(used[-1]) else line


def _target(stream: str) -> Any:
    return sys.stdout if stream == "stdout" else sys.stderr


def _put(target: Any, text: str) -> None:
    if target is None or not text:
        return
    try:
        target.write(text)
    except UnicodeEncodeError as error:  # a terminal or log file that is not utf-8
        target.write(text.encode(error.encoding, "backslashreplace").decode(error.encoding))
    if isinstance(target, io.TextIOWrapper):  # a kernel's streams go out by themselves
        target.flush()


def _flush_kernel(target: Any) -> None:
    if _is_kernel(target):
        target.flush()


def _is_kernel(target: Any) -> bool:
    iostream = sys.modules.get("ipykernel.iostream")
    return iostream is not None and isinstance(target, iostream.OutStream)


def _is_tty(target: Any) -> bool:
    try:
        return bool(target.isatty()) and os.environ.get("TERM") != "dumb"
    except (AttributeError, ValueError):
        return False


def _has_colour(target: Any) -> bool:
    return not os.environ.get("NO_COLOR") and (_is_kernel(target) or _is_tty(target))


def _width(target: Any) -> int:
    """Return the columns for all bars: a line that wraps cannot be wiped."""
    if _is_kernel(target):
        return _WIDTH
    return min(_WIDTH, shutil.get_terminal_size((80, 24)).columns - 1)


def _joined(bars: dict[int, str], width: int) -> str:
    shown = min(len(bars), max(1, width // _NARROWEST))
    more = f" | {len(bars) - shown} more" if shown < len(bars) else ""
    each = (width - len(more) - 3 * (shown - 1)) // max(1, shown)
    parts = [f"[rank {rank}] {bars[rank]}"[:each].rstrip() for rank in sorted(bars)[:shown]]
    return " | ".join(parts) + more
