"""The strip above all tabs: what an epoch has too much or too little of, and what a check finds."""

import html
from collections.abc import Sequence
from typing import TYPE_CHECKING

import ipywidgets

from nvalchemi.notebook.explorers.pane import TEXT_COLOUR, complaint, sentence_of
from nvalchemi.notebook.export import wrong_style
from nvalchemi.notebook.plots.facts import SIGN, Number, audit
from nvalchemi.sharding.finding import Finding

if TYPE_CHECKING:
    from nvalchemi.sharding.plan import ShardPlan

# a sign and a word beside each colour (Okabe and Ito's), which frame the text and do not carry it
_SIGNS = {"error": ("✖", "#B00020"), "warning": (SIGN, "#E69F00"), "info": ("ℹ", "#0072B2")}
_CELL = "text-align:left;padding:0 1em 0 0"


class AuditStrip:
    """Numbers of an epoch of a plan, and its findings with their remedies.

    Attributes
    ----------
    widget : ipywidgets.HTML
    numbers : tuple of Number
    findings : list of Finding, or None
        None until they are known.
    """

    def __init__(self) -> None:
        self.widget = ipywidgets.HTML()
        self.numbers: tuple[Number, ...] = ()
        self.findings: list[Finding] | None = None
        self._plan: ShardPlan | None = None
        self._epoch = 0

    def show(self, plan: "ShardPlan", epoch: int) -> None:
        """Show the numbers; findings of another plan are left out until `check`."""
        if plan is not self._plan:
            self.findings = None
        self._plan, self._epoch = plan, epoch
        self.numbers = (Number("ranks", f"{plan.world_size:,}"), *audit(plan, epoch))
        self._write()

    def check(self) -> None:
        """Look for findings, once for each plan."""
        if self._plan is None or self.findings is not None:
            return
        try:
            self.findings = self._plan.check()
        except Exception as error:
            sentence = f"The plan could not be checked: {sentence_of(error)}"
            self.findings = [Finding("warning", sentence, "Look at the pictures.", {"check": "no"})]
        self._write()

    def refuse(self, error: Exception) -> None:
        """Show a sentence in the place of numbers of a plan that can not be made."""
        self.numbers, self.findings, self._plan = (), None, None
        self.widget.value = complaint(error)

    def _write(self) -> None:
        assert self._plan is not None
        words = "findings: being looked for" if self.findings is None else said(self.findings)
        plan = html.escape(f"epoch {self._epoch}, plan {self._plan.hash}")
        self.widget.value = (
            f'<div style="{TEXT_COLOUR}">{as_row(self.numbers)}<div>{plan}; {words}</div>'
            f"{as_list(self.findings or [])}</div>"
        )


def said(findings: Sequence[Finding]) -> str:
    """How many findings of each kind there are."""
    kinds = [(kind, sum(f.severity == kind for f in findings)) for kind in _SIGNS]
    words = [f"{_SIGNS[k][0]} {number} {k}{'s'[: number - 1]}" for k, number in kinds if number]
    return "findings: " + (", ".join(words) or "none")


def as_row(numbers: Sequence[Number]) -> str:
    """Numbers side by side as a table, wrong ones red and with a sign."""
    names = "".join(
        f'<th scope="col" style="{_CELL};font-weight:normal">{html.escape(number.name)}</th>'
        for number in numbers
    )
    values = "".join(
        f'<td style="{_CELL};font-size:120%"><b{wrong_style(number)}>'
        f"{SIGN + ' ' if number.wrong else ''}{html.escape(number.value)}</b></td>"
        for number in numbers
    )
    return f'<table aria-label="audit of the epoch"><tr>{names}</tr><tr>{values}</tr></table>'


def as_list(findings: Sequence[Finding]) -> str:
    """Errors and warnings at once, what is only worth knowing folded up."""
    grave = [finding for finding in findings if finding.severity != "info"]
    rest = [finding for finding in findings if finding.severity == "info"]
    shown = "".join(map(as_item, grave))
    if rest:
        shown += f"<details><summary>{len(rest)} to know</summary>"
        shown += "".join(map(as_item, rest)) + "</details>"
    return shown


def as_item(finding: Finding) -> str:
    sign, colour = _SIGNS[finding.severity]
    return (
        f'<div style="border-left:4px solid {colour};padding-left:0.6em;margin:0.3em 0">'
        f"{sign} <b>{finding.severity}</b>: {html.escape(finding.sentence)} "
        f"<i>{html.escape(finding.remedy)}</i></div>"
    )
