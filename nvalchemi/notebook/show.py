"""What a cell shows of its ranks: their lines and progress bars, but never a flood."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path

from nvalchemi.notebook.front_end import CONTROL, FrontEnd
from nvalchemi.notebook.rank_logs import RankLogs

# A front end takes a few thousand lines well; what is printed by mistake is a million.
_LIVE = 2000  # lines of a launch that are shown as they come
_SAMPLED = 20  # lines/s after that, fewer the more were shown: 17,000 lines in the first hour
_LAST = 200  # lines per rank that are shown at the end if they were not before: a traceback, tables
_LONGEST = 10_000  # characters of a line: several screens
_PER_LINE = 1000  # characters; a line counts once more for each, or long ones would be a flood too


class RankOutput:
    """Shows what ranks print, and keeps all of it in one log file per rank.

    Parameters
    ----------
    nprocs
        Number of ranks.
    mode
        Show every rank ("stream"), only rank 0 ("rank0") or none ("quiet").
    live
        Whether lines that are being redrawn, as progress bars are, are drawn before they end.
    """

    def __init__(self, nprocs: int, mode: str, *, live: bool = True) -> None:
        shown = {"stream": nprocs, "rank0": 1, "quiet": 0}[mode]
        self._ranks = [_Rank(rank, rank < shown) for rank in range(nprocs)]
        self._rate = _SAMPLED / max(1, shown)
        self._spent = 0  # lines that were shown
        self._live = live
        self._front_end = FrontEnd()
        self._logs = RankLogs(nprocs)
        self._fault: str | None = None
        self._has_cut = self._is_closed = False
        self._say_fault()

    @property
    def logs(self) -> tuple[Path, ...]:
        """The log file of each rank; empty if none could be made."""
        return self._logs.paths

    def lines(self, rank: int, stream: str, lines: Sequence[str]) -> None:
        """Take whole lines that a rank has printed on "stdout" or "stderr"."""
        if not lines:
            return
        one = self._ranks[rank]
        self._logs.write(rank, lines)
        self._say_fault()
        one.drawings.pop(stream, None)
        one.count += len(lines)
        one.last.extend([(stream, self._cut(rank, line)) for line in lines[-_LAST:]])
        if one.is_shown:
            live = self._show_live(rank, stream, lines)
            one.waiting += len(lines) - live
            self.tick()

    def redraw(self, rank: int, stream: str, text: str) -> None:
        """Take the present drawing of a line that has not ended; a blank one was wiped."""
        text = CONTROL.sub("", text).strip()
        self._ranks[rank].drawings[stream] = text
        self._draw()

    def say(self, text: str, stream: str = "stdout") -> None:
        """Show a text of the launch itself, which belongs to no rank."""
        self._front_end.write(stream, f"{text}\n")

    def tick(self) -> None:
        """Show what had to wait; to be called several times a second."""
        now = time.monotonic()
        for one in self._ranks:
            if one.is_shown and one.waiting:
                self._show_sample(one, now)
        self._draw()

    def text(self, rank: int) -> str:
        """Return all that the rank has printed; where its log is incomplete, that and the end."""
        text = self._logs.text(rank)
        if self._logs.path(rank) is not None:
            return text
        kept = "".join(f"{line}\n" for _, line in list(self._ranks[rank].last))
        return f"{text}[{self._fault}; the last lines were:]\n{kept}"

    def last_lines(self) -> list[str]:
        """Return for each rank the bar that it draws and the last line that it printed."""
        lines = [one.last[-1][1] if one.last else "" for one in self._ranks]
        bars = [one.drawing() for one in self._ranks]
        return [" | ".join(filter(None, pair)) for pair in zip(bars, lines)]

    def close(self) -> None:
        """Show the last lines, say how many are not shown and where they are, once."""
        if self._is_closed:
            return
        self._is_closed = True
        self._front_end.write("stdout", "")  # wipes the bars
        for one in self._ranks:
            if one.is_shown:
                self._show_last(one)
        hidden = [one for one in self._ranks if one.count and not one.is_shown]
        if hidden:
            ranks = f"rank{'s'[: len(hidden) - 1]} {', '.join(str(one.rank) for one in hidden)}"
            count = sum(one.count for one in hidden)
            where = self._logs.folder if len(hidden) > 1 else self._logs.path(hidden[0].rank)
            story = f"in {where}" if where else "not shown"
            self._front_end.write("stdout", f"{_lines(count)} of {ranks} {_are(count)} {story}\n")
        self._logs.close()

    def _show_live(self, rank: int, stream: str, lines: Sequence[str]) -> int:
        """Show the first lines, as many as the launch may still show at once; return how many."""
        count = _fitting(lines, _LIVE - self._spent)
        if count:
            self._show(rank, [(stream, self._cut(rank, line)) for line in lines[:count]])
        return count

    def _show_sample(self, one: _Rank, now: float) -> None:
        """Show the newest lines, as many as the rate allows."""
        one.refill(self._rate * _LIVE / max(self._spent, _LIVE), self._rate, now)
        newest = one.newest(one.tokens)
        if not newest:
            return
        if len(newest) < one.waiting and not self._has_cut:
            self._has_cut = True
            where = f"; all are in {self._logs.folder}" if self._logs.folder else ""
            note = f"... only some of the next lines are shown{where}\n"
            self._front_end.write("stdout", note)
        one.tokens -= self._show(one.rank, newest)
        one.pass_over(len(newest))

    def _show_last(self, one: _Rank) -> None:
        newest = one.newest(_LAST)
        one.pass_over(len(newest))
        if one.hidden:
            where = self._logs.path(one.rank)
            story = f"all of them are in {where}" if where else "not all of them are in a log"
            note = f"... {_lines(one.hidden)} {_are(one.hidden)} not shown here; {story}"
            self._front_end.lines(one.rank, "stdout", [note])
        self._show(one.rank, newest)

    def _show(self, rank: int, lines: Sequence[tuple[str, str]]) -> int:
        """Show lines with their streams; return what they count."""
        for stream, group in groupby(lines, itemgetter(0)):
            self._front_end.lines(rank, stream, [line for _, line in group])
        cost = sum(_cost(line) for _, line in lines)
        self._spent += cost
        return cost

    def _draw(self) -> None:
        if self._live:
            bars = {one.rank: one.drawing() for one in self._ranks if one.is_shown}
            self._front_end.draw({rank: bar for rank, bar in bars.items() if bar})

    def _cut(self, rank: int, line: str) -> str:
        if len(line) <= _LONGEST:
            return line
        where = self._logs.path(rank)
        half, story = _LONGEST // 2, f" here; all of them are in {where}" if where else ""
        note = f" ... {len(line) - 2 * half:,} characters are not shown{story} ... "
        return line[:half] + note + line[-half:]

    def _say_fault(self) -> None:
        """Say once that a log is incomplete: that is no reason to end a training."""
        if self._fault is None and self._logs.fault is not None:
            self._fault = self._logs.fault
            self._front_end.write("stderr", f"launch(): {self._fault}\n")


class _Rank:
    """What is known of one rank's output."""

    def __init__(self, rank: int, is_shown: bool) -> None:
        self.rank = rank
        self.is_shown = is_shown
        self.count = 0  # lines so far
        self.waiting = 0  # of them, the newest, after the last that was shown
        self.hidden = 0  # of them, before the last that was shown
        self.last: deque[tuple[str, str]] = deque(maxlen=_LAST)  # with their streams
        self.drawings: dict[str, str] = {}  # by stream
        self.tokens = float(_SAMPLED)  # lines that may be shown now
        self._refilled = 0.0

    def drawing(self) -> str:
        return " ".join(filter(None, self.drawings.values()))

    def refill(self, rate: float, most: float, now: float) -> None:
        self.tokens = min(self.tokens + rate * (now - self._refilled), max(most, 1.0))
        self._refilled = now

    def newest(self, budget: float) -> list[tuple[str, str]]:
        """Return the newest waiting lines that the budget allows, the last of them overdrawn."""
        taken: list[tuple[str, str]] = []
        for line in reversed(self.last):
            if budget < 1 or len(taken) == self.waiting:
                break
            taken.append(line)
            budget -= _cost(line[1])
        return taken[::-1]

    def pass_over(self, shown: int) -> None:
        """Note that the newest lines were shown and those before them will not be."""
        self.hidden += self.waiting - shown
        self.waiting = 0


def _cost(line: str) -> int:
    return 1 + len(line) // _PER_LINE


def _fitting(lines: Sequence[str], budget: int) -> int:
    """Return how many of the first lines the budget allows."""
    for count, line in enumerate(lines):
        if budget < 1:
            return count
        budget -= 1 + min(len(line), _LONGEST) // _PER_LINE
    return len(lines)


def _lines(count: int) -> str:
    return f"{count:,} line{'s'[: count - 1]}"


def _are(count: int) -> str:
    return "is" if count == 1 else "are"
