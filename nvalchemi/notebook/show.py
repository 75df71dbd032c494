"""What a cell shows of its ranks: their lines and progress bars, but never a flood."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import dropwhile, groupby
from operator import attrgetter
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
        self._live_share = _LIVE // max(1, shown)
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
        live = self._show_live(one, stream, lines) if one.is_shown else 0
        one.take(stream, [self._cut(rank, line) for line in lines[-_LAST:]], len(lines), live)
        if one.is_shown:
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
        kept = "".join(f"{line.text}\n" for line in list(self._ranks[rank].last))
        return f"{text}[{self._fault}; the last lines were:]\n{kept}"

    def last_lines(self) -> list[str]:
        """Return for each rank the bar that it draws and the last line that it printed."""
        lines = [one.last[-1].text if one.last else "" for one in self._ranks]
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

    def _show_live(self, one: _Rank, stream: str, lines: Sequence[str]) -> int:
        """Show the first lines, as many as the rank may still show at once; return how many."""
        count = _fitting(lines, self._live_share - one.spent)
        if count:
            self._show(one, [_Line(stream, self._cut(one.rank, line)) for line in lines[:count]])
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
        one.tokens -= self._show(one, newest)
        one.waiting = 0

    def _show_last(self, one: _Rank) -> None:
        """Show the last lines from the first on that was not shown, so that they can be read."""
        last = list(dropwhile(attrgetter("is_shown"), one.last))
        missing = sum(not line.is_shown for line in last)
        if hidden := one.count - one.shown - missing:
            where = self._logs.path(one.rank)
            story = f"all of them are in {where}" if where else "not all of them are in a log"
            again = "; the last lines, in order:" if missing < len(last) else ""
            note = f"... {_lines(hidden)} {_are(hidden)} not shown here; {story}{again}"
            self._front_end.lines(one.rank, "stdout", [note])
        self._show(one, last)

    def _show(self, one: _Rank, lines: Sequence[_Line]) -> int:
        """Show lines of a rank; return what they count."""
        for stream, group in groupby(lines, attrgetter("stream")):
            shown = list(group)
            self._front_end.lines(one.rank, stream, [line.text for line in shown])
            for line in shown:
                line.is_shown = True
        cost = sum(_cost(line.text) for line in lines)
        one.spent += cost
        one.shown += len(lines)
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


@dataclass(slots=True)
class _Line:
    """A line that may be shown later."""

    stream: str
    text: str
    is_shown: bool = False


class _Rank:
    """What is known of one rank's output."""

    def __init__(self, rank: int, is_shown: bool) -> None:
        self.rank = rank
        self.is_shown = is_shown
        self.count = 0  # lines so far
        self.shown = 0  # of them
        self.waiting = 0  # of them, the newest, after the last that was shown
        self.spent = 0  # what those that were shown count
        self.last: deque[_Line] = deque(maxlen=_LAST)
        self.drawings: dict[str, str] = {}  # by stream
        self.tokens = float(_SAMPLED)  # lines that may be shown now
        self._refilled = 0.0

    def drawing(self) -> str:
        return " ".join(filter(None, self.drawings.values()))

    def refill(self, rate: float, most: float, now: float) -> None:
        self.tokens = min(self.tokens + rate * (now - self._refilled), max(most, 1.0))
        self._refilled = now

    def take(self, stream: str, last: Sequence[str], count: int, live: int) -> None:
        """Note so many new lines, of which the first ones are shown already."""
        begin = count - len(last)
        self.last.extend(_Line(stream, text, begin + k < live) for k, text in enumerate(last))
        self.count += count
        self.waiting += count - live

    def newest(self, budget: float) -> list[_Line]:
        """Return the newest waiting lines that the budget allows, the last of them overdrawn."""
        taken: list[_Line] = []
        for line in reversed(self.last):
            if budget < 1 or len(taken) == self.waiting:
                break
            taken.append(line)
            budget -= _cost(line.text)
        return taken[::-1]


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
