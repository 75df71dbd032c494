"""Samplers that have every sample once, in batches of different sizes."""

from typing import Any

import numpy as np

from nvalchemi.data.datapipes.order import Indices
from nvalchemi.sharding.samples import SampleSet
from nvalchemi.sharding.sources import Dealing, WindowSource


def varies(sampler: Any) -> bool:
    return all(hasattr(sampler, name) for name in ("length", "num_padded", "num_dropped"))


class VaryingSource(WindowSource):
    """A sampler with ``window`` whose every sample has one place in an epoch.

    Its ``num_padded`` batches at the end are those at the beginning, for ranks of equal length, or
    ``num_dropped`` batches after the end are left out. Only these are drawn to know all counts.
    """

    def __init__(self, sampler: Any, samples: SampleSet) -> None:
        super().__init__(sampler, samples, None, False)
        self._ends: dict[int, tuple[Indices, Indices]] = {}

    def dealing(self, epoch: int = 0) -> Dealing:
        padding, left_out = self._end(epoch)
        samples = sum(self._lengths)
        return Dealing(
            positions=samples,
            emitted=samples + padding.size - left_out.size,
            unit=self.batch_size,
            draws=np.array(self._lengths, dtype=np.int64),
            independent=False,
            even=False,
        )

    def order(self, positions: Indices, epoch: int) -> Indices:
        """Samples at the beginning, which come again, or at the end, which are left out."""
        padding, left_out = self._end(epoch)
        if padding.size:
            return padding[positions]
        return left_out[positions - (sum(self._lengths) - left_out.size)]

    def _end(self, epoch: int) -> tuple[Indices, Indices]:
        """Samples that come again, and those that are left out."""
        if epoch not in self._ends:
            padded, dropped = int(self.sampler.num_padded), int(self.sampler.num_dropped)
            first = self._steps - -(-padded // self.world_size)
            last = self._units_of(np.arange(first, self._steps), epoch)
            beyond = self._units_of(np.array([self._steps]), epoch) if dropped else last[:0]
            parts = (last[len(last) - padded :], beyond[:dropped])
            self._ends[epoch] = (parts[0][parts[0] >= 0], parts[1][parts[1] >= 0])
        return self._ends[epoch]

    def _units_of(self, steps: Indices, epoch: int) -> Indices:
        """Batches of all ranks one after the other, shape (steps * ranks, batch_size)."""
        window: Indices = self.sampler.window(steps, np.arange(self.world_size), epoch)
        return window.reshape(-1, self.batch_size)
