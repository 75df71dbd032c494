"""What ranks return."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload


class RankResults(Sequence[Any]):
    """What each rank returned: ``results[r]`` is the value of rank r."""

    def __init__(self, values: Sequence[Any]) -> None:
        self._values = tuple(values)

    @property
    def rank0(self) -> Any:
        """The value of rank 0."""
        return self._values[0]

    @overload
    def __getitem__(self, rank: int) -> Any: ...
    @overload
    def __getitem__(self, rank: slice) -> Sequence[Any]: ...
    def __getitem__(self, rank: int | slice) -> Any:
        return self._values[rank]

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        lines = [f"  rank {rank}: {shortened(repr(value))}" for rank, value in enumerate(self)]
        return "\n".join([f"{len(self)} rank{'s' if len(self) > 1 else ''} returned", *lines])


def shortened(text: str) -> str:
    """Return the beginning of a text that may be long."""
    return text if len(text) <= 100 else text[:97] + "..."
