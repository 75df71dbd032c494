"""Fault trials: how often each is run, what came of it, and the table of all."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

FULL = "NVALCHEMI_TRIALS"  # the number of trials of each kind in the full form
RESULTS = Path(os.environ.get("NVALCHEMI_CHAOS_RESULTS", "build/chaos.json"))


@dataclass
class Figure:
    """One row: what was tried, how often it went well, and the figure of each time."""

    name: str
    unit: str = "s"
    limit: float | None = None
    trials: int = 0
    values: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    @property
    def over(self) -> list[float]:
        return [v for v in self.values if self.limit is not None and v > self.limit]

    def row(self) -> str:
        within = len(self.values) - len(self.over)
        middle, worst = (f"{f(self.values):.3g}" if self.values else "-" for f in (median, max))
        target = "no failure" if self.limit is None else f"<= {self.limit:g} {self.unit}"
        good = f"{within} of {self.trials}"
        return f"| {self.name} | {target} | {good} | {middle} {self.unit} | {worst} {self.unit} |"


HEADER = (
    "| trial | target | reached | median | worst |\n|---|---|---|---|---|"  # fits docs/launching.md
)


def table(figures: list[Figure]) -> str:
    return "\n".join([HEADER, *(figure.row() for figure in figures)])


def is_full() -> bool:
    return FULL in os.environ


def count(short: int, share: float = 1.0) -> int:
    """Return the number of trials: ``short``, or that share of what the variable asks for."""
    return max(1, round(int(os.environ[FULL]) * share)) if is_full() else short


def run(
    name: str,
    trial: Callable[[int], float],
    *,
    short: int,
    share: float = 1.0,
    limit: float | None = None,
    unit: str = "s",
    after_failure: Callable[[], None] = lambda: None,
) -> None:
    """Run ``trial(number)``, which returns its figure, and keep all figures.

    In the short form a failure ends the test as usual and figures are not judged: a busy machine
    is no fault. In the full form the rest is tried, too, and figures over the limit fail the test.
    """
    figure = Figure(name, unit, limit)
    start = time.monotonic()
    for number in range(count(short, share)):
        figure.trials += 1
        try:
            figure.values.append(trial(number))
        except Exception as error:
            if not is_full():
                raise
            figure.failures.append(f"trial {number}: {type(error).__name__}: {error}"[:2000])
            after_failure()
        if is_full() and (figure.trials % 10 == 0 or figure.trials == count(short, share)):
            spent = time.monotonic() - start
            print(f"  {figure.row()} {spent:.0f} s", file=sys.stderr, flush=True)
            save(figure)
    if is_full():
        assert not figure.failures, "\n".join(figure.failures)
        assert not figure.over, f"{name}: over the limit: {figure.over}"


def save(figure: Figure) -> None:
    """Put a figure into the file of results, in the place of an earlier one of that name."""
    figures = [old for old in load() if old.name != figure.name]
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps([asdict(f) for f in [*figures, figure]], indent=1))


def load() -> list[Figure]:
    if not RESULTS.exists():
        return []
    return [Figure(**entry) for entry in json.loads(RESULTS.read_text())]


if __name__ == "__main__":
    print(table(load()))
