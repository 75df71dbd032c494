"""The part of a plan that a check looks at: all of it where that is quick, else a sample."""

from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from nvalchemi.data.datapipes.order import Indices
from nvalchemi.sharding.composition import Composition, measure_composition
from nvalchemi.sharding.coverage import COUNT_LIMIT, Coverage
from nvalchemi.sharding.finding import counted
from nvalchemi.sharding.load import Load, measure_load
from nvalchemi.sharding.sources import spread_ranks
from nvalchemi.sharding.view import sample_steps

if TYPE_CHECKING:
    from nvalchemi.sharding.plan import ShardPlan

DRAWS = 2**18  # looked at in an epoch, some 0.1 s for our samplers
ITERATED = 2**22  # samples that may be iterated for a check, some seconds in Python


class Look:
    """What the checks share; each part is computed once, when it is first asked for.

    Attributes
    ----------
    ranks, steps : int64 arrays
        Looked at.
    window : int64 array (S, R, B) or None
        Their samples in `epoch`, by default the first; None where the order would take long to
        draw.
    complete : bool
        Whether the window is the whole epoch of the ranks looked at.
    """

    def __init__(
        self, plan: "ShardPlan", max_imbalance: float, seed: int, epoch: int | None = None
    ) -> None:
        self.plan, self.max_imbalance, self.seed = plan, max_imbalance, seed
        source = plan.source
        epochs = [int(e) for e in getattr(source, "epochs", [0, 1])[:2]] or [0]
        epochs = epochs if epoch is None else [epoch]
        self.epochs = epochs
        self.drawn = source.cheap or source.dealing() is None
        affordable = plan.world_size
        if not source.cheap and source.dealing() is None:
            affordable = max(2, ITERATED // len(plan.samples))
        self.ranks = spread_ranks(plan.world_size, affordable)
        self.steps_of_rank = source.steps(self.ranks, epochs[0])
        total = int(self.steps_of_rank.max(initial=0))
        limit = DRAWS if source.cheap else ITERATED
        self.steps = sample_steps(plan, total, limit, len(self.ranks))
        self.complete = len(self.steps) == total
        self.inside = self.steps[:, None] < self.steps_of_rank

    @cached_property
    def window(self) -> Indices | None:
        return self._window(self.epochs[0]) if self.drawn else None

    def _window(self, epoch: int) -> Indices:
        if not self.steps.size:
            return np.empty((0, len(self.ranks), self.plan.batch_size), dtype=np.int64)
        return self.plan.source.window(self.steps, self.ranks, epoch)

    @cached_property
    def distinct(self) -> int:
        """Different samples in the window."""
        return 0 if self.window is None else np.unique(self.window[self.window >= 0]).size

    @cached_property
    def orders(self) -> list[int | None]:
        """A number for the order of each rank, equal for equal orders; None for no samples."""
        if self.window is None:
            return [None] * len(self.ranks)
        rows = [row[row >= 0] for row in np.moveaxis(self.window, 1, 0)]
        return [hash(self.steps.tobytes() + row.tobytes()) if row.size else None for row in rows]

    def variety(self, column: int | None = None) -> int:
        """Samples, or batches where these keep together, that may come in another order."""
        if self.window is None:
            return 0
        window = self.window if column is None else self.window[:, column : column + 1]
        dealing = self.plan.source.dealing()
        if dealing is not None and not dealing.even:
            return len(np.unique(window.reshape(-1, window.shape[-1]), axis=0))
        return np.unique(window[window >= 0]).size

    @cached_property
    def padding(self) -> int:
        """Draws that come again as the padding of an unknown sampler would have them; else 0."""
        if self.window is None or not self.complete or self.plan.source.dealing() is not None:
            return 0
        plan, draws = self.plan, int((self.window >= 0).sum())
        again, ranks = draws - self.distinct, plan.world_size
        if len(self.ranks) < ranks:
            return again if again < ranks else 0
        number = len(plan.samples)
        # to a multiple of the ranks, or to whole batches on all of them, after every sample
        padded = {-(-number // unit) * unit for unit in (ranks, plan.global_batch)}
        return again if self.distinct == number and draws in padded else 0

    @cached_property
    def unshuffled(self) -> bool:
        """Whether the order is that of the data set, by the sampler's word or by its looks."""
        if self.plan.source.shuffled is not None or self.window is None:
            return self.plan.source.shuffled is False
        rows = np.moveaxis(self.window, 1, 0).reshape(len(self.ranks), -1)
        # descents are ends of a pass over the data at most
        descents = [int((np.diff(row[row >= 0]) < 0).sum()) for row in rows]
        return max(descents, default=0) <= 1

    @property
    def looked_at(self) -> str:
        if self.complete:
            return ""
        return f" of the {len(self.steps)} looked at" if len(self.steps) > 1 else " looked at"

    @property
    def counted_in(self) -> str:
        composition = self.composition
        sampled = composition is not None and composition.method == "sampled"
        return f" in {counted(len(self.steps), 'step')} looked at" if sampled else " in an epoch"

    @cached_property
    def composition(self) -> Composition | None:
        """None where there is one data set, or nothing to look at."""
        if self.window is None or not self.window.size or len(self.plan.samples.lengths) < 2:
            return None
        return measure_composition(self.plan, self.epochs[0], self.steps, self.ranks, self.complete)

    @cached_property
    def load(self) -> Load | None:
        if self.window is None or not self.window.size or self.plan.samples.costs is None:
            return None
        return measure_load(self.plan, self.epochs[0], self.steps, self.ranks, self.complete)

    @cached_property
    def coverage(self) -> Coverage | None:
        """None where it would have to be enumerated at length."""
        plan, epochs = self.plan, list(range(self.plan.epochs))
        if plan.source.dealing() is None:
            epochs = [int(e) for e in getattr(plan.source, "epochs", epochs)]
            draws = int(self.steps_of_rank.max(initial=0)) * plan.global_batch * len(epochs)
            whole = len(self.ranks) == plan.world_size
            if draws > COUNT_LIMIT or not (plan.source.cheap or whole):
                return None
        return plan.coverage(epochs)
