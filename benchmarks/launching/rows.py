"""The figures of each launcher: values of what went well, a few words for what did not."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median


@dataclass
class Figures:
    """What came of the trials of one launcher at one task."""

    values: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        total = len(self.values) + len(self.failures)
        if not total:
            return "-"
        text = f"{median(self.values):.3g}" if self.values else ""
        if self.failures:
            reasons = Counter(_short(failure) for failure in self.failures)
            reason, count = reasons.most_common(1)[0]
            text += f" ({len(self.failures)} of {total} failed; {count} x {reason})"
        return text.strip()


class Rows:
    """All figures of a run by task and launcher."""

    def __init__(self) -> None:
        self._rows: dict[str, dict[str, Figures]] = {}

    def attempt(self, task: str, launcher: str, trial: Callable[[], float]) -> bool:
        """Run a trial, which returns its figure or raises; return whether it went well."""
        figures = self.of(task, launcher)
        try:
            figures.values.append(trial())
        except Exception as error:
            figures.failures.append(f"{type(error).__name__}: {error}")
            print(f"  {launcher}, {task}: {_short(figures.failures[-1])}", file=sys.stderr)
            return False
        return True

    def of(self, task: str, launcher: str) -> Figures:
        return self._rows.setdefault(task, {}).setdefault(launcher, Figures())

    def table(self, launchers: list[str]) -> str:
        lines = [f"| | {' | '.join(launchers)} |", "|---" * (len(launchers) + 1) + "|"]
        for task, row in self._rows.items():
            cells = [str(row.get(name, Figures())) for name in launchers]
            lines.append(f"| {task} | {' | '.join(cells)} |")
        return "\n".join(lines)

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {t: {n: vars(f) for n, f in row.items()} for t, row in self._rows.items()}
        path.write_text(json.dumps(content, indent=1))


def _short(failure: str) -> str:
    first = failure.removeprefix("AssertionError: ").strip().splitlines()[0]
    return re.sub(r"/\S+", "...", first).replace("|", "/")[:70]
