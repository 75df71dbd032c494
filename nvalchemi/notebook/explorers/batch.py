"""BatchExplorer: what the batches are made of, over steps and epochs, and one of them opened."""

from typing import Any

import ipywidgets
import numpy as np

from nvalchemi.notebook.explorers.controls import choice, number, set_upper
from nvalchemi.notebook.explorers.controls import row as side_by_side
from nvalchemi.notebook.explorers.pane import TEXT_COLOUR, Pane
from nvalchemi.notebook.explorers.planned import PlanExplorer
from nvalchemi.notebook.explorers.structures import batch_table
from nvalchemi.notebook.plots import VIEWS

ALL, ONE = "all ranks together", "one rank"
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class BatchExplorer(PlanExplorer):
    """Shows the mixture of the batches, how often samples come, and what is in one batch.

    The tabs are Composition (shares of the data sets by step, asked and realised, and the first
    step of each), Coverage (how often each sample comes in some epochs) and One batch (its
    structures as a table, their sizes and elements, and a look at a few); only the visible one is
    computed.

    Parameters
    ----------
    source : ShardPlan, loader, or strategy
        What to show, as of `ShardExplorer`.
    loader : optional
        What the strategy is run on.
    world_size : int, optional
        Ranks that a loader or strategy is planned for.

    Attributes
    ----------
    plan : ShardPlan or None
        None if `source` can not be planned, and then the widget shows the reason.
    controls : dict of str to widget
        epoch; of (all ranks or one); rank; step; epochs (that are counted, from the first on).
    """

    def __init__(self, source: Any, loader: Any = None, *, world_size: int | None = None) -> None:
        super().__init__(source, loader, world_size)
        if self.plan is None:
            self.build({}, [], {})
            return
        plan = self.plan
        self._of = choice("batches of", [ALL, ONE], ALL)
        self._rank = number("rank", 0, 0, plan.world_size - 1)
        self._step = number("step", 0, 0, max(0, plan.num_steps() - 1))
        self._epochs = number("epochs counted", plan.epochs, 1, 1000)
        self._opened = Pane(VIEWS["batch"], self._one_batch)
        self._table = ipywidgets.HTML()
        controls = {
            "epoch": self._epoch_control,
            "of": self._of,
            "rank": self._rank,
            "step": self._step,
            "epochs": self._epochs,
        }
        pages = {
            "Composition": [self._of, Pane(VIEWS["composition"], self._composed)],
            "Coverage": [self._epochs, Pane(VIEWS["coverage"], self._covered)],
            "One batch": [self._step, self._opened, self._table],
        }
        self.build(controls, [side_by_side([self._epoch_control, self._rank])], pages)

    def take_over(self) -> None:
        plan = self.current()
        steps = plan.source.steps(np.array([self._rank.value]), self.epoch)
        set_upper(self._step, max(0, int(steps.max(initial=0)) - 1))
        opened = self.tabs.selected_index == 2
        self._rank.disabled = not opened and self._of.value == ALL
        self._rank.tooltip = "only for one rank or one batch" if self._rank.disabled else "rank"

    def drawn(self) -> None:
        if self.plan is not None and self.tabs.selected_index == 2:
            arrays = self._opened.arrays
            table = "" if arrays is None else batch_table(arrays)
            self._table.value = f'<div style="{TEXT_COLOUR}">{table}</div>'

    def _composed(self) -> Arguments:
        ranks = None if self._of.value == ALL else [self._rank.value]
        return (self.current(), self.epoch), {"ranks": ranks}

    def _covered(self) -> Arguments:
        return (self.current(), range(self._epochs.value)), {}

    def _one_batch(self) -> Arguments:
        return (self.current(), self._rank.value, self._step.value, self.epoch), {}
