"""Where ranks stand: their Python stacks, also of ranks that are blocked in C++."""

from __future__ import annotations

import linecache
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass

from nvalchemi.distributed.rank import Rank, wait_for_any
from nvalchemi.distributed.rank_process import MEETS_OTHERS

_PATIENCE = 2.0  # s; a rank answers in milliseconds, unless C++ holds the GIL
_LAST_PATIENCE = 0.5  # s; how long one may take to write its stack at a signal
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
_THREAD = re.compile(r"(?:Current thread|Thread) 0x[0-9a-f]+.* \(most recent call first\):")
_POINT_TO_POINT = ("send", "recv", "batch_isend_irecv")

# files of torch and of this package in which a rank waits for the other ranks
_MEETING_PLACES = (
    "/torch/distributed/distributed_c10d.py",
    "/torch/distributed/c10d_logger.py",
    "/torch/distributed/rendezvous.py",
    "/torch/nn/parallel/distributed.py",
    "/nvalchemi/distributed/rendezvous.py",
    "/nvalchemi/distributed/collectives.py",
)
_PLUMBING = ("/nvalchemi/distributed/rank_process.py", "/nvalchemi/distributed/rank_pool.py")


@dataclass(frozen=True)
class Frame:
    """One call of a stack."""

    file: str
    line: int
    function: str

    @property
    def meets(self) -> bool:
        """Whether it is a call in which ranks wait for each other."""
        places = any(place in self.file for place in _MEETING_PLACES)
        return places or self.function == "_engine_run_backward"

    def __str__(self) -> str:
        text = f'  File "{self.file}", line {self.line}, in {self.function}'
        source = linecache.getline(self.file, self.line).strip()
        return f"{text}\n    {source}" if source else text


@dataclass(frozen=True)
class Stack:
    """The main thread of a rank, its outermost call first; empty where none could be had."""

    frames: tuple[Frame, ...] = ()
    has_group: bool = False
    """Whether the rank has a process group; without one it waits for nobody in backward()."""

    @property
    def meets(self) -> str | None:
        """The collective that the rank may be waiting in, or None where it is at work.

        The hooks of DistributedDataParallel run in C++ below a backward pass, so that counts too.
        """
        names = [frame.function for frame in self.frames[self._own :]]
        called = next((name for name in names if name != "wrapper"), None)
        if called == "_engine_run_backward":
            return "backward" if self.has_group else None
        return called

    @property
    def is_point_to_point(self) -> bool:
        """Whether it waits for one rank, which may be any."""
        return self.meets in _POINT_TO_POINT

    @property
    def _own(self) -> int:
        """How many of the frames are the user's, before those in which a rank meets others."""
        count = len(self.frames)
        while count and self.frames[count - 1].meets:
            count -= 1
        return count

    def __str__(self) -> str:
        if not self.frames:
            return "  (no stack: the rank did not answer)"
        return "\n".join(map(str, self.frames[: max(self._own, 1)]))


def read_stacks(ranks: Sequence[Rank]) -> list[Stack]:
    """Ask ranks where they stand; does not disturb what they do."""
    texts = dict.fromkeys(ranks, "")
    for rank in ranks:
        rank.take_stack()  # an older answer
        rank.ask_for_stack()
    _collect(texts, _PATIENCE)
    for rank in [rank for rank, text in texts.items() if not text]:
        rank.ask_for_stack(by_signal=True)
    _collect(texts, _LAST_PATIENCE)
    return [parse(text) for text in texts.values()]


def _collect(texts: dict[Rank, str], patience: float) -> None:
    """Read stacks as they come; what the ranks print meanwhile is passed on."""
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline and not all(map(_is_whole, texts.values())):
        wait_for_any(list(texts), 0.01)
        for rank in texts:
            texts[rank] += rank.take_stack()


def _is_whole(text: str) -> bool:
    # the main thread's bottom, which is always ours, comes last
    return text.rstrip().endswith("in <module>")


def parse(text: str) -> Stack:
    """Read what faulthandler writes; its last thread is the main one."""
    sections = _THREAD.split(text)
    if len(sections) < 2:
        return Stack()
    found = [_FRAME.fullmatch(line) for line in sections[-1].splitlines()]
    frames = [Frame(m[1], int(m[2]), m[3]) for m in found if m][::-1]
    ours = [k for k, frame in enumerate(frames) if frame.file.endswith(_PLUMBING)]
    has_group = MEETS_OTHERS in text
    return Stack(tuple(frames[ours[-1] + 1 :] if ours else frames), has_group)
