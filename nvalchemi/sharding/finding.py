"""What a check of a plan finds."""

from dataclasses import dataclass, field
from typing import Any, Literal

Severity = Literal["error", "warning", "info"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "info")


@dataclass(frozen=True)
class Finding:
    """Something about a plan that its owner should know.

    Attributes
    ----------
    severity : {"error", "warning", "info"}
        error: training hangs, or trains on something else than was asked for.
    sentence, remedy : str
    data : dict
        The numbers; "check" names what was checked.
    """

    severity: Severity
    sentence: str
    remedy: str
    data: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.severity}: {self.sentence} {self.remedy}"


def counted(number: int, noun: str) -> str:
    """A number of something, as a sentence has it."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def amount(cost: float, unit: str) -> str:
    """What a batch has: so many atoms, or a cost in a unit of the caller's."""
    if unit == "cost":
        return f"a cost of {cost:.6g}"
    return f"{cost:.6g} {unit[:-1] if cost == 1 else unit}"
