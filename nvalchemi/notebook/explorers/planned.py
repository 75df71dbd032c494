"""What a user has in hand, as a plan; and the part of an explorer that looks at plans."""

from collections.abc import Mapping, Sequence
from typing import Any

import ipywidgets
import torch

from nvalchemi.notebook.explorers.audit_strip import AuditStrip
from nvalchemi.notebook.explorers.controls import slider
from nvalchemi.notebook.explorers.pane import Pane
from nvalchemi.notebook.explorers.shell import Explorer, Page
from nvalchemi.sharding import ShardPlan
from nvalchemi.sharding.coverage import COUNT_LIMIT
from nvalchemi.sharding.loaders import find_distributed

WHOLE_DRAWS = 2**27  # of an epoch that is counted unasked, in pieces of about a second
IN_PIECES = ("assignment", "composition", "load", "order")
EPOCHS = 10  # that can be turned to at least, also where the plan has fewer


def plan_of(source: Any, loader: Any = None, world_size: int | None = None) -> ShardPlan:
    """Plan of a plan, a loader, or a strategy with its loader.

    Raises
    ------
    TypeError, ValueError
        If it is nothing of these, or can not be planned.
    """
    if isinstance(source, ShardPlan):
        if loader is not None or world_size not in (None, source.world_size):
            raise ValueError(
                "a plan has its loader and its world size already: leave loader and world_size out"
            )
        return source
    if hasattr(source, "hooks") and hasattr(source, "run"):
        if loader is None:
            raise ValueError(
                "a strategy is planned together with what it is run on: give the loader as well, "
                f"as in ShardExplorer(strategy, loader); got {type(source).__name__} alone"
            )
        return ShardPlan.from_strategy(source, loader, world_size=world_size or ranks_of(loader))
    if hasattr(source, "dataset") and hasattr(source, "sampler"):
        return ShardPlan.from_loader(source, world_size=world_size or ranks_of(source))
    raise TypeError(
        "an explorer shows a ShardPlan, a loader, or a strategy and its loader, got "
        f"{type(source).__name__}; of a data set make a plan first: "
        "ShardPlan(dataset, world_size=4, batch_size=32)"
    )


def ranks_of(loader: Any) -> int:
    """Ranks that the loader is built for, else as many as `launch` would start."""
    built = find_distributed(loader) if hasattr(loader, "sampler") else None
    return int(built.num_replicas) if built is not None else torch.cuda.device_count() or 2


class PlanExplorer(Explorer):
    """An explorer of a plan: the audit strip on top, and the epoch.

    Attributes
    ----------
    plan : ShardPlan or None
        The one that is shown; None where there is none.
    error : Exception or None
        Why there is none.
    audit : AuditStrip
    """

    def __init__(
        self,
        source: Any,
        loader: Any,
        world_size: int | None,
    ) -> None:
        self.audit = AuditStrip()
        self.plan: ShardPlan | None = None
        self.error: Exception | None = None
        try:
            self.plan = plan_of(source, loader, world_size)
        except Exception as error:  # shown in the place of the pictures
            self.error = error
            self.audit.refuse(error)
        last = max(EPOCHS, self.plan.epochs if self.plan else 0) - 1
        self._epoch_control = slider("epoch", 0, last)

    def build(
        self,
        controls: Mapping[str, ipywidgets.Widget],
        rows: Sequence[ipywidgets.Widget],
        pages: Mapping[str, Page],
    ) -> None:
        """Make the widgets; without a plan only the sentence is shown."""
        if self.plan is None:
            sentence = {"No plan": [ipywidgets.HTML()]}
            super().__init__(self.audit.widget, {}, [], sentence)
            self.tabs.layout.display = self._exactly.layout.display = "none"
        else:
            super().__init__(self.audit.widget, controls, rows, pages)

    @property
    def epoch(self) -> int:
        return int(self._epoch_control.value)

    def current(self) -> ShardPlan:
        """The plan that the pictures are of."""
        assert self.plan is not None, "without a plan there are no pictures"
        return self.plan

    def prepare(self) -> None:
        if self.plan is not None:
            try:
                self.take_over()
                self.audit.show(self.plan, self.epoch)
            except Exception as error:
                self.audit.refuse(error)
                raise

    def take_over(self) -> None:
        """Take the values of the controls over into the plan."""

    def inspect(self) -> None:
        self.audit.check()

    def is_affordable(self, pane: Pane) -> bool:
        plan = self.current()
        if plan.estimated_draws <= COUNT_LIMIT:
            return plan.source.cheap or plan.source.dealing() is not None
        in_pieces = pane.view.name in IN_PIECES and plan.source.cheap
        return in_pieces and plan.estimated_draws <= WHOLE_DRAWS

    def __repr__(self) -> str:
        if self.plan is None:
            return f"{type(self).__name__}: {self.error}"
        self._idle.settle()
        numbers = ", ".join(map(str, self.audit.numbers))
        findings = "\n".join(map(str, self.audit.findings or []))
        return "\n".join(filter(None, [super().__repr__(), numbers, findings]))
