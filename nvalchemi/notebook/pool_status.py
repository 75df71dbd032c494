"""How the ranks of a pool are."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(frozen=True)
class RankStatus:
    """One rank.

    ``state`` is "starting", "idle", "busy for 3.0 s: ...", "stopped by a signal (SIGSTOP): ..." or
    "dead: ...".
    """

    rank: int
    pid: int
    alive: bool
    state: str
    device: str
    memory: int | None = field(init=False)
    """Bytes of main memory in use (resident set); None where the system does not tell."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "memory", _resident(self.pid) if self.alive else None)

    def __str__(self) -> str:
        memory = "" if self.memory is None else f", {self.memory / 2**20:,.0f} MiB"
        return f"rank {self.rank}: {self.state} (process {self.pid}, {self.device}{memory})"


@dataclass(frozen=True)
class PoolStatus:
    """All ranks of a pool."""

    ranks: tuple[RankStatus, ...]

    def __iter__(self) -> Iterator[RankStatus]:
        return iter(self.ranks)

    def __getitem__(self, rank: int) -> RankStatus:
        return self.ranks[rank]

    def __len__(self) -> int:
        return len(self.ranks)

    def __repr__(self) -> str:
        return "\n".join(map(str, self.ranks)) or "no ranks"


def _resident(pid: int) -> int | None:
    try:
        with open(f"/proc/{pid}/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return None
