"""ShardExplorer: which rank sees which samples, and what is wrong with that."""

import html
from typing import Any

import ipywidgets
import numpy as np

from nvalchemi.notebook.explorers.controls import choice, chosen, interval, number, row, set_upper
from nvalchemi.notebook.explorers.pane import TEXT_COLOUR, Pane
from nvalchemi.notebook.explorers.planned import PlanExplorer
from nvalchemi.notebook.explorers.settings import SettingsControls
from nvalchemi.notebook.explorers.structures import describe_sample
from nvalchemi.notebook.plots import VIEWS
from nvalchemi.notebook.plots.facts import whole_ranks
from nvalchemi.sharding import ShardPlan
from nvalchemi.sharding.replan import replan

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class ShardExplorer(PlanExplorer):
    """Shows which samples each rank takes at each step, and what an audit of the plan says.

    The strip on top counts what is padded, repeated, dropped and never seen, and lists the findings
    of `ShardPlan.check` with their remedies. Below are the tabs Assignment, Who saw what, Load and
    Resume; only the visible one is computed. Settings that the plan's sampler does not know are
    disabled, with the reason.

    Parameters
    ----------
    source : ShardPlan, loader, or strategy
        What to show. A loader or a strategy stays as it is.
    loader : optional
        What the strategy is run on.
    world_size : int, optional
        Ranks that a loader or strategy is planned for at first; by default those that its sampler
        is built for, else one for each GPU, else 2.

    Attributes
    ----------
    plan : ShardPlan or None
        As the controls ask for; None if `source` can not be planned, and then the widget shows the
        reason.
    controls : dict of str to widget
        world_size, batch_size, epoch, seed, shuffle, drop_last, epoch_policy; ranks, steps and
        samples (intervals to zoom); sample (named below the picture); by (what is work);
        ranks_after, batch_size_after, stop (for Resume).
    """

    def __init__(self, source: Any, loader: Any = None, *, world_size: int | None = None) -> None:
        super().__init__(source, loader, world_size)
        if self.plan is None:
            self.build({}, [], {})
            return
        plan = self.plan
        self._settings = SettingsControls(plan)
        self._zoom = {
            "ranks": interval("ranks shown", plan.world_size - 1),
            "steps": interval("steps shown", max(0, plan.num_steps() - 1)),
            "samples": interval("samples shown", len(plan.samples) - 1),
        }
        self._whole = ipywidgets.Button(
            description="Whole epoch", tooltip="Show all ranks, steps and samples", icon="expand"
        )
        self._whole.on_click(self._on_whole)
        self._sample = number("name sample", 0, 0, len(plan.samples) - 1)
        self._named = ipywidgets.HTML()
        self._by = choice("work", ["cost", *known_work(plan)], "cost")
        self._resume = ResumeControls(plan)
        self._build()

    def _build(self) -> None:
        settings = {**self._settings.controls, "epoch": self._epoch_control}
        self._page = {
            "Assignment": [
                Pane(VIEWS["assignment"], self._zoomed),
                row([*self._zoom.values(), self._whole]),
                self._sample,
                self._named,
            ],
            "Who saw what": [
                Pane(VIEWS["overlap"], self._plain),
                Pane(VIEWS["order"], self._plain),
            ],
            "Load": [self._by, Pane(VIEWS["load"], self._work_of)],
            "Resume": [
                row(list(self._resume.controls.values())),
                Pane(VIEWS["resume"], self._resumed),
            ],
        }
        others = {**self._zoom, "sample": self._sample, "by": self._by, **self._resume.controls}
        rows = [row(list(settings.values())), self._settings.reasons]
        self.build({**settings, **others}, rows, self._page)

    def take_over(self) -> None:
        plan = self.plan = self._settings.asked(self.current())
        set_upper(self._zoom["ranks"], plan.world_size - 1)
        # all ranks of an iterated sampler take long: its first one says how many steps there are
        ranks = np.arange(plan.world_size if whole_ranks(plan) else 1)
        steps = int(plan.source.steps(ranks, self.epoch).max(initial=0))
        set_upper(self._zoom["steps"], max(0, steps - 1))
        self._resume.limit(plan, steps)

    def inspect(self) -> None:
        super().inspect()
        # the epoch is searched for the sample: after the picture, not before it
        if self.plan is not None and self.tabs.selected_index == 0:
            words = describe_sample(self.plan, self._sample.value, self.epoch)
            self._named.value = f'<div style="{TEXT_COLOUR}">{html.escape(words)}</div>'

    def _plain(self) -> Arguments:
        return (self.current(), self.epoch), {}

    def _zoomed(self) -> Arguments:
        low, high = self._zoom["samples"].value
        options = {name: chosen(self._zoom[name]) for name in ("ranks", "steps")}
        return (self.current(), self.epoch), {**options, "samples": (low, high + 1)}

    def _work_of(self) -> Arguments:
        options = {name: chosen(self._zoom[name]) for name in ("ranks", "steps")}
        return (self.current(), self.epoch), {**options, "by": self._by.value}

    def _resumed(self) -> Arguments:
        other, options = self._resume.asked(self.current(), self.epoch)
        return (self.current(), other, self.epoch), options

    def _on_whole(self, button: Any) -> None:
        self._quiet = True
        for control in self._zoom.values():
            control.value = (control.min, control.max)
        self._quiet = False
        self._on_change(None)


class ResumeControls:
    """The ranks that go on after a stop, and where it is.

    Attributes
    ----------
    controls : dict of str to widget
        ranks_after, batch_size_after and stop.
    """

    def __init__(self, plan: ShardPlan) -> None:
        ranks = max(1, plan.world_size // 2)
        self._ranks = number("ranks after", ranks, 1)
        self._batch = number("batch size after", kept_batch(plan, ranks), 1)
        self._stop = number("stop after step", plan.num_steps() // 2, 0, plan.num_steps())
        self.controls: dict[str, ipywidgets.Widget] = {
            "ranks_after": self._ranks,
            "batch_size_after": self._batch,
            "stop": self._stop,
        }
        self._seen = (plan, ranks)

    def limit(self, plan: ShardPlan, steps: int) -> None:
        """Keep the global batch where the ranks have changed, and the stop inside the epoch."""
        if (plan, self._ranks.value) != self._seen:
            self._batch.value = kept_batch(plan, self._ranks.value)
            self._seen = (plan, self._ranks.value)
        set_upper(self._stop, steps)

    def asked(self, plan: ShardPlan, epoch: int) -> tuple[ShardPlan, dict[str, Any]]:
        """The plan that goes on, and where the one stops and the other begins."""
        wish = {"world_size": self._ranks.value, "batch_size": self._batch.value}
        now = {"world_size": plan.world_size, "batch_size": plan.batch_size}
        changes = {name: value for name, value in wish.items() if value != now[name]}
        other = replan(plan, **changes) if changes else plan
        done = self._stop.value * plan.global_batch
        # no step may be left out: where the sizes do not fit, some samples come again
        start = min(done // other.global_batch, other.num_steps(epoch))
        return other, {"stop": self._stop.value, "start": start}


def kept_batch(plan: ShardPlan, ranks: int) -> int:
    """Batch size of so many ranks with the global batch of the plan, as nearly as it goes."""
    return max(1, plan.global_batch // ranks)


def known_work(plan: ShardPlan) -> list[str]:
    known = {"atoms": plan.samples.atoms, "edges": plan.samples.edges}
    return [name for name, sizes in known.items() if sizes is not None]
