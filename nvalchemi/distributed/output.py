"""What a worker prints, as whole lines, as it prints them."""

from __future__ import annotations

import codecs
import os
from collections.abc import Callable

_CHUNK = 1 << 16  # bytes; what a Linux pipe holds
_FULLEST = 1 << 20  # bytes; the most that a pipe can be made to hold
_UP = b"\x1b[A"  # the cursor goes up: nested bars return so to the line above theirs


class LineReader:
    """The parent's end of one worker's stdout or stderr.

    A line that is redrawn with carriage returns, as progress bars are, is one line: its last
    drawing. Bytes that are no UTF-8 become U+FFFD.

    Parameters
    ----------
    descriptor
        The reading end of a pipe; closed by :meth:`close`.
    on_lines
        Called with the whole lines of one chunk, without their line breaks, ``\\n`` or ``\\r\\n``.
    on_redraw
        Called with the present drawing of a line that is being redrawn and has not ended, at most
        once a :meth:`read`; blank when the line was wiped.
    """

    def __init__(
        self,
        descriptor: int,
        on_lines: Callable[[list[str]], object],
        on_redraw: Callable[[str], object],
    ) -> None:
        os.set_blocking(descriptor, False)
        self._descriptor = descriptor
        self._on_lines = on_lines
        self._on_redraw = on_redraw
        self._parts: list[bytes] = []  # of the line that has not ended
        self.at_end = False  # closed by the writer

    def fileno(self) -> int:
        return self._descriptor

    def read(self) -> bool:
        """Take what there is, one chunk at most; return False if nothing is left for now."""
        return self._take() > 0

    def close(self) -> None:
        """Take the tail, also a last line without a line break, and close the pipe, once."""
        if self._descriptor < 0:
            return
        try:
            # no more than was there: something that a worker left behind may write for ever
            room = _FULLEST
            while room > 0 and (count := self._take()):
                room -= count
            self.end_line()
        finally:
            os.close(self._descriptor)
            self._descriptor, self.at_end, self._parts = -1, True, []

    def end_line(self) -> None:
        """Pass on a line without a line break as if it had ended."""
        rest, self._parts = b"".join(self._parts), []
        text = _drawing(rest).decode("utf-8", "replace")
        if text.strip() or (rest and not _is_redrawn(rest)):
            self._on_lines([text])

    def _take(self) -> int:
        try:
            chunk = b"" if self.at_end else os.read(self._descriptor, _CHUNK)
        except BlockingIOError:
            return 0
        self.at_end = not chunk
        end = chunk.rfind(b"\n")
        if end >= 0:
            whole, rest = b"".join([*self._parts, chunk[:end]]), chunk[end + 1 :]
            self._parts = [rest]
            if lines := _split(whole):
                self._on_lines(lines)
        else:
            self._parts.append(chunk)  # joined once: a line can be longer than memory is fast
            rest = chunk
        if _is_redrawn(rest):
            self._redraw()
        return len(chunk)

    def _redraw(self) -> None:
        drawn = b"".join(self._parts)
        shown = _drawing(drawn)
        # only this drawing is kept, with what says that it is one, and how it was left
        left = _UP if _goes_up(drawn) else b"\r" if drawn.endswith(b"\r") else b""
        self._parts = [b"\r" + shown + left]
        # a character whose bytes have not all come is left out
        text, _ = codecs.utf_8_decode(shown, "replace", False)
        self._on_redraw(text)


def _split(whole: bytes) -> list[str]:
    """Return the lines, each as it looked when it ended."""
    if not _is_redrawn(whole):
        return whole.decode("utf-8", "replace").split("\n")
    whole = whole.replace(b"\r\n", b"\n").removesuffix(b"\r")
    lines = whole.split(b"\n")
    if b"\r" in whole or _UP in whole:
        # the line break after "up" leads back into the same line, which is drawn again
        lines = [_drawing(line) for line in lines if not _goes_up(line)]
    return [line.decode("utf-8", "replace") for line in lines]


def _is_redrawn(line: bytes) -> bool:
    return b"\r" in line or _UP in line


def _goes_up(line: bytes) -> bool:
    return line.rstrip(b"\r").endswith(_UP)


def _drawing(line: bytes) -> bytes:
    """Return what was drawn last on a line."""
    if _UP in line:
        line = line.replace(_UP, b"\r")
    return line.rstrip(b"\r").rsplit(b"\r", 1)[-1]
