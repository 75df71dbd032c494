"""Ranks that stay: a group that answers one request after another.

As in a launch, the caller's thread does all of it.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing import reduction
from typing import Any, Protocol

from nvalchemi.distributed import payload
from nvalchemi.distributed.process import Task
from nvalchemi.distributed.rank import Output, Rank, end_all, wait_for_any
from nvalchemi.distributed.rank_error import (
    Call,
    RankError,
    death,
    find_first,
    make_error,
    make_receive_error,
)
from nvalchemi.distributed.rank_pool import Answer, Ready, count_collectives, meet_again
from nvalchemi.distributed.rank_process import Failure
from nvalchemi.distributed.stacks import read_stacks
from nvalchemi.distributed.watch import Watch

_TICK = 0.1  # s; how often deaths are looked for that nothing announces
_STORIES = 0.1  # s; how long ranks may take to tell their own story after one has failed
_REACTION = 0.5  # s; how long an interrupted rank may take before it is looked at
_PATIENCE = 3.0  # s; how long one may take that is in no collective: it writes a checkpoint
_FAREWELL = 2.0  # s; how long ranks may take to leave by themselves
_CHECK = 5.0  # s; how long ranks may take to show that they can communicate
_LOOK_AFTER = 1.0  # s; how long ranks are idle before they are looked at
_TICKS = 0.02  # s; what a rank may use that waits for the network
_CHUNKS = 16  # of output per rank that are taken after an answer; a thread may print for ever


class CallOutput(Output, Protocol):
    """Where the lines of a call go."""

    def say(self, text: str) -> None:
        """Take a text for the user that belongs to no rank."""


@dataclass
class _Ask(Call):
    """A request to one rank, and the descriptor of the value that it has answered."""

    value: int | None = None

    def take_answer(self, answer: Answer) -> None:
        self.take(answer.failure or "returned")
        if answer.failure is None:
            self.value = reduction.recv_handle(self.rank.control)


@dataclass
class ServingRanks:
    """Ranks that have each been given a task that serves.

    Attributes
    ----------
    loss
        Why the ranks can not be asked any more; None while they can.
    busy
        Which ranks have not answered yet, and since when (``time.monotonic``).
    devices
        What each rank has said of itself when it was ready; empty for one that starts.
    """

    ranks: list[Rank]
    loss: str | None = None
    busy: dict[int, float] = field(default_factory=dict)
    devices: list[str] = field(default_factory=list)
    _requests: int = 0
    _reason: str | None = None
    _stop: threading.Event = field(default_factory=threading.Event)
    _owner: int = field(default_factory=os.getpid)

    @classmethod
    def start(cls, ranks: Sequence[Rank], tasks: Sequence[Task], output: Output) -> ServingRanks:
        """Let ranks start to serve; does not wait until they do."""
        nothing = payload.new_file()
        for number, (rank, task) in enumerate(zip(ranks, tasks)):
            rank.give(number, task, nothing, output)
        os.close(nothing)
        return cls(list(ranks), devices=[""] * len(ranks))

    def ask(
        self,
        descriptor: int,
        chosen: Sequence[int],
        output: CallOutput | None,
        limit: float | None = None,
    ) -> list[Any]:
        """Let the chosen ranks run what is in a payload, and return their values in that order.

        Raises
        ------
        RankError
            If a rank has failed or died. `loss` tells whether the others can be asked again.
        TimeoutError
            If one has not answered after ``limit`` seconds; the ranks are lost then.
        KeyboardInterrupt
            When it comes, after the ranks have been interrupted, too.
        """
        for rank in self.ranks:
            rank.output = output
        asks = [_Ask(rank) for rank in self.ranks]
        watch = Watch(None, (lambda text: None) if output is None else output.say)
        try:
            self._become_ready(asks, watch)
            self._send(descriptor, [asks[rank] for rank in chosen])
            self._wait(asks, output, limit, watch)
            return self._values([asks[rank] for rank in chosen])
        except KeyboardInterrupt:
            self._interrupt(asks)
            raise
        finally:
            if self.busy:
                self.loss = self.loss or "a call was left before its end"
                self.busy.clear()
            self._drain()
            for ask in asks:
                ask.rank.output = None
                if ask.value is not None:
                    os.close(ask.value)

    def check(self) -> None:
        """Find out, after a failure, whether the ranks can still communicate; `loss` tells."""
        try:
            counts = self._ask_all(count_collectives)
            if len(set(counts)) > 1:
                told = ", ".join(map(str, counts))
                self.loss = f"they have begun different numbers of collectives: {told}"
            elif counts[0] is not None:
                self._ask_all(meet_again)
        except (RankError, TimeoutError) as error:
            self.loss = f"they can not communicate ({str(error).splitlines()[0]})"

    def _ask_all(self, fn: Callable[[], Any]) -> list[Any]:
        descriptor = payload.new_file()
        try:
            payload.dump_task(fn, (), {}, {}, descriptor)
            return self.ask(descriptor, range(len(self.ranks)), None, _CHECK)
        finally:
            os.close(descriptor)

    def stop(self) -> None:
        """Let `ask`, in another thread, interrupt the ranks and raise KeyboardInterrupt."""
        self._stop.set()

    def kill(self, reason: str) -> None:
        """Let `ask`, in another thread, fail at once for this reason."""
        self.loss = self._reason = reason
        for rank in self.ranks:
            rank.signal(signal.SIGKILL)

    def find_death(self) -> Rank | None:
        """Return a rank that is dead, whoever killed it."""
        return next((rank for rank in self.ranks if rank.exitcode is not None), None)

    def end(self) -> None:
        """End all ranks: those that are idle leave by themselves, the others are killed."""
        if self._owner != os.getpid():
            return  # a fork of the process that they belong to
        if self.loss is None and not self.busy and all(self.devices):
            for rank in self.ranks:
                with suppress(OSError):
                    rank.control.send(None)
            deadline = time.monotonic() + _FAREWELL
            while time.monotonic() < deadline and any(r.exitcode is None for r in self.ranks):
                wait_for_any(self.ranks, 0.005)
                for rank in [r for r in self.ranks if not r.has_ended and r.exitcode is not None]:
                    rank.note_end()
        self.loss = self.loss or "the ranks were ended"
        end_all(self.ranks, [])

    def _become_ready(self, asks: list[_Ask], watch: Watch) -> None:
        """Wait until the ranks have met, which they began when they were started."""
        while not all(self.devices):
            wait_for_any(self.ranks, _TICK)
            self._listen(asks)
            watch.tell_of_stopped([rank for rank in self.ranks if not rank.has_ended])
            first = find_first(asks)
            if first is not None:
                self.loss = "the ranks did not start"
                raise make_error(first, asks)
            if self._stop.is_set():
                raise KeyboardInterrupt

    def _send(self, descriptor: int, asks: list[_Ask]) -> None:
        self._requests += 1
        self._stop.clear()
        for ask in asks:
            self.busy[ask.rank.number] = time.monotonic()
            ask.is_calling = True
            with suppress(BrokenPipeError, ConnectionResetError):  # its end will be noticed
                ask.rank.control.send(self._requests)
                reduction.send_handle(ask.rank.control, descriptor, ask.rank.pid)

    def _late(self, asks: list[_Ask]) -> list[_Ask]:
        return [ask for ask in asks if ask.rank.number in self.busy and not ask.rank.has_ended]

    def _wait(
        self, asks: list[_Ask], output: Output | None, limit: float | None, watch: Watch
    ) -> None:
        """Wait until all have answered; raise if a rank fails, and see what became of the rest."""
        idle = _Idle()
        deadline = None if limit is None else time.monotonic() + limit
        while self._late(asks) or find_first(asks):
            wait_for_any(self.ranks, 0 if find_first(asks) else _TICK)
            self._listen(asks)
            if output is not None:
                output.tick()
            if find_first(asks):
                self._end_failed_call(asks)
            if self._stop.is_set():
                raise KeyboardInterrupt
            late = self._late(asks)
            watch.tell_of_stopped([ask.rank for ask in late])
            is_stopped = any(ask.rank.is_stopped() for ask in late)  # it shows no stack
            if late and not is_stopped and idle.since(late) > _LOOK_AFTER:
                self._look_at(watch, late, asks)
            if late and deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"{_names(late)} did not answer for {limit:g} s")

    def _listen(self, asks: list[_Ask]) -> None:
        """Take the messages that there are, and note the ends that have come."""
        for ask in asks:
            rank = ask.rank
            if rank.has_ended:
                continue
            has_ended = rank.exitcode is not None  # before its last words are read
            for message in rank.messages():
                if isinstance(message, Ready):
                    self.devices[rank.number] = message.device
                elif isinstance(message, Answer):
                    with suppress(EOFError, OSError, RuntimeError):  # killed while it answered
                        ask.take_answer(message)
                        self.busy.pop(rank.number, None)
                else:
                    ask.take(message)
            if has_ended:
                rank.note_end()
                self.loss = self.loss or f"rank {rank.number} is gone"
                if not ask.has_answered:
                    text = self._reason or death(rank.exitcode)
                    ask.failure = Failure("end", text, "", time.monotonic())

    def _look_at(self, watch: Watch, late: list[_Ask], asks: list[_Ask]) -> None:
        """Find ranks that wait in a collective for some that have answered, or were not asked."""
        gone = [ask for ask in asks if ask not in late]
        for ask, stack in zip(late, watch.look([a.rank for a in late], True, bool(gone)) or ()):
            names = ", ".join(str(other.rank.number) for other in gone)
            text = (
                f"waits in {stack.meets} for rank{'s'[: len(gone) - 1]} {names}, which "
                f"{'are' if len(gone) > 1 else 'is'} idle: a collective needs every rank, and must "
                "be called equally often on each"
            )
            ask.failure = Failure("wait", text, f"{stack}\n", time.monotonic())

    def _end_failed_call(self, asks: list[_Ask]) -> None:
        """After the first failure: hear the others, interrupt those that go on, and raise."""
        self._hear(asks, _STORIES)
        interrupted = self._late(asks)
        if interrupted and self.loss is None:
            idle = _Idle()
            idle.since(interrupted)
            self._hear(asks, _STORIES)
            if not (idle.since(interrupted) and self._are_blocked(asks)):
                self._interrupt(asks)
        first = find_first(asks)
        assert first is not None
        for ask in interrupted:
            if ask is not first and ask.failure and ask.failure.summary == "KeyboardInterrupt":
                ask.failure = replace(ask.failure, summary="was interrupted then")
        raise make_error(first, [ask for ask in asks if ask.is_calling or ask.failure])

    def _interrupt(self, asks: list[_Ask]) -> None:
        """Interrupt the ranks that have not answered; those that can not react are lost."""
        try:
            for ask in self._late(asks):
                os.kill(ask.rank.pid, signal.SIGINT)  # not what it started: that serves on
            self._hear(asks, _REACTION)
            if self._late(asks) and not self._are_blocked(asks):
                self._hear(asks, _PATIENCE - _REACTION)
            if late := self._late(asks):
                self.loss = self.loss or f"{_names(late)} did not react to the interrupt"
        except KeyboardInterrupt:
            self.loss = "they were not given the time to react"
            raise

    def _are_blocked(self, asks: list[_Ask]) -> bool:
        """Return whether the ranks that have not answered stand in a collective, and note it."""
        late = self._late(asks)
        stacks = read_stacks([ask.rank for ask in late])
        if not late or not all(stack.meets for stack in stacks):
            return False
        places = ", ".join(dict.fromkeys(stack.meets or "" for stack in stacks))
        self.loss = f"{_names(late)} waited in {places} and could not be interrupted"
        return True

    def _hear(self, asks: list[_Ask], seconds: float) -> None:
        """Listen until all have answered, up to some seconds."""
        deadline = time.monotonic() + seconds
        while self._late(asks) and (left := deadline - time.monotonic()) > 0:
            wait_for_any(self.ranks, min(left, _TICK))
            self._listen(asks)

    def _drain(self) -> None:
        """Take what was printed before the answers came."""
        for rank in self.ranks:
            for reader in rank.readers:
                for _ in range(_CHUNKS):
                    if rank.has_ended or not reader.read():
                        break
                reader.end_line()  # of this call, though another may write on

    def _values(self, asks: list[_Ask]) -> list[Any]:
        values = []
        for ask in asks:
            assert ask.value is not None
            try:
                values.append(payload.load(ask.value))
            except (Exception, SystemExit) as error:
                raise make_receive_error(ask.rank.number, error) from error
        return values


class _Idle:
    """Since when ranks have used no processor time.

    Only such ranks are asked for their stacks: faulthandler can crash one that runs Python code.
    """

    def __init__(self) -> None:
        self._used: list[float | None] = []
        self._since = time.monotonic()

    def since(self, asks: Sequence[Call]) -> float:
        """Return for how many seconds all of them have been idle; 0 if the system does not tell."""
        used = [ask.rank.cpu_seconds() for ask in asks]
        now = time.monotonic()
        steps = [b - a for a, b in zip(self._used, used) if a is not None and b is not None]
        if len(steps) < len(used) or len(used) != len(self._used) or max(steps) > _TICKS:
            self._used, self._since = used, now
        return now - self._since


def _names(asks: Sequence[Call]) -> str:
    return f"rank{'s'[: len(asks) - 1]} {', '.join(str(ask.rank.number) for ask in asks)}"
