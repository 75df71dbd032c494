"""What hangs: ranks that wait for one that is gone, and launches in which nothing moves."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from nvalchemi.distributed.rank import Rank
from nvalchemi.distributed.stacks import Stack, read_stacks

_LOOK_EVERY = 1.0  # s; of ranks whose peer has returned
_IDLE = 0.05  # of a core; what a wait for the network takes at most
_GRACE_IDLE = 5.0  # s; how long idle ranks may stand in a collective that lacks a rank
_GRACE_BUSY = 60.0  # s; the same where they use the processor, as a wait for a GPU does


@dataclass
class Watch:
    """Looks at the ranks of a call from time to time.

    Parameters
    ----------
    stall
        Seconds without a line printed and without a move of any rank's main thread after which
        `report` gets every rank's stack; None for never.
    report
        Called with a text for the user.
    """

    stall: float | None
    report: Callable[[str], None]
    _heard: float = field(default_factory=time.monotonic)
    _moved: float = field(default_factory=time.monotonic)
    _looked: float = 0.0
    _stacks: list[Stack] = field(default_factory=list)
    _busy: list[float | None] = field(default_factory=list)
    _stuck_since: float | None = None
    _is_idle: bool = True
    _told: bool = False
    _checked: float = 0.0
    _stopped: set[Rank] = field(default_factory=set)

    def hear(self) -> None:
        """Note that a rank has printed or answered."""
        self._heard = self._moved = time.monotonic()
        self._stuck_since, self._told = None, False

    def tell_of_stopped(self, late: Sequence[Rank]) -> None:
        """Report ranks that a signal has stopped: they neither move nor end."""
        now = time.monotonic()
        if now < self._checked + _LOOK_EVERY:
            return
        self._checked = now
        for rank in late:
            if rank.is_stopped() and rank not in self._stopped:
                self.report(
                    f"rank {rank.number} (process {rank.pid}) was stopped by a signal, and goes on "
                    f"when it gets SIGCONT: kill -CONT {rank.pid}"
                )
                self._stopped.add(rank)

    def look(self, late: Sequence[Rank], started: bool, some_returned: bool) -> list[Stack] | None:
        """Look at the ranks that have not returned.

        Parameters
        ----------
        late
            These ranks.
        started
            Whether all of them have begun with the function.
        some_returned
            Whether a rank has returned already.

        Returns
        -------
        list of Stack or None
            Where each waits, if all wait in a collective that can not be completed.
        """
        every = math.inf if self.stall is None else min(self.stall / 10, _LOOK_EVERY)
        every = min(every, _LOOK_EVERY) if some_returned else every
        now = time.monotonic()
        if now < max(self._heard, self._looked) + every:
            return None
        before, since = self._stacks, now - self._looked
        self._looked, self._stacks = now, read_stacks(late)
        if self._stacks != before or not (started or all(s.frames for s in self._stacks)):
            self._moved, self._stuck_since, self._told = now, None, False
            self._busy = [rank.cpu_seconds() for rank in late]
            return None
        self._tell_of_a_stall(late, now)
        return self._stacks if some_returned and self._is_deadlock(late, now, since) else None

    def _tell_of_a_stall(self, late: Sequence[Rank], now: float) -> None:
        if self.stall is None or self._told or now < self._moved + self.stall:
            return
        self._told = True
        places = [
            f"rank {rank.number} stands at{f' {stack.meets}' if stack.meets else ''}\n{stack}"
            for rank, stack in zip(late, self._stacks)
        ]
        seconds = f"{now - self._moved:.0f} s (they go on)"
        self.report("\n".join([f"no rank has printed or moved for {seconds}:", *places]))

    def _is_deadlock(self, late: Sequence[Rank], now: float, since: float) -> bool:
        busy = [rank.cpu_seconds() for rank in late]
        used = [b - a if a is not None and b is not None else since
                for a, b in zip(self._busy, busy)]  # fmt: skip
        self._busy = busy
        idle = all(u <= _IDLE * since for u in used)
        # a backward pass may compute for long, and those that send to each other need no third
        harmless = any(
            (stack.meets == "backward" and not idle) or (stack.is_point_to_point and len(late) > 1)
            for stack in self._stacks
        )
        if harmless or not all(stack.meets for stack in self._stacks):
            self._stuck_since = None
            return False
        if self._stuck_since is None:
            self._stuck_since, self._is_idle = now, True
        self._is_idle &= idle
        return now - self._stuck_since >= (_GRACE_IDLE if self._is_idle else _GRACE_BUSY)
