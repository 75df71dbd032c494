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
