"""What a worker prints, as whole lines, as it prints them."""

from __future__ import annotations

import os
from collections.abc import Callable

_CHUNK = 1 << 16  # bytes; what a Linux pipe holds


class LineReader:
    """The parent's end of one worker's stdout or stderr.

    Parameters
    ----------
    descriptor
        The reading end of a pipe; closed by :meth:`close`.
    on_line
        Called with each line, without its line break.
    """

    def __init__(self, descriptor: int, on_line: Callable[[str], None]) -> None:
        os.set_blocking(descriptor, False)
        self._descriptor = descriptor
        self._on_line = on_line
        self._parts: list[bytes] = []  # of the line that has not ended
        self.at_end = False  # closed by the writer

    def fileno(self) -> int:
        return self._descriptor

    def read(self) -> bool:
        """Take what there is, one chunk at most; return False if nothing is left for now."""
        try:
            chunk = b"" if self.at_end else os.read(self._descriptor, _CHUNK)
        except BlockingIOError:
            return False
        self.at_end = not chunk
        if b"\n" not in chunk and b"\r" not in chunk:
            self._parts.append(chunk)  # joined once: a line can be longer than memory is fast
            return bool(chunk)
        *lines, rest = b"".join([*self._parts, chunk]).split(b"\n")
        for line in lines:
            self._on_line(_visible(line))
        # a progress bar redraws its line: keep the last drawing
        self._parts = [rest[rest.rstrip(b"\r").rfind(b"\r") + 1 :]]
        return bool(chunk)

    def close(self) -> None:
        """Take the tail, also a last line without a line break, and close the pipe, once."""
        if self._descriptor < 0:
            return
        while self.read():
            pass
        os.close(self._descriptor)
        self._descriptor, self.at_end = -1, True
        rest = b"".join(self._parts)
        if rest:
            self._on_line(_visible(rest))


def _visible(line: bytes) -> str:
    """Return the last drawing of a line that was redrawn."""
    return line.rstrip(b"\r").rsplit(b"\r", 1)[-1].decode("utf-8", errors="replace")
