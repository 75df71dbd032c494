"""What a sampler costs each rank: time until its first batch, and memory."""

import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from nvalchemi.sharding.iterated import IteratedSource
from nvalchemi.sharding.sources import TorchSource

if TYPE_CHECKING:
    from nvalchemi.sharding.plan import ShardPlan

PROBE = 2**18  # samples for which torch's start is measured
# int64 tensor, pointers of the list, and its int objects (torch 2.13: 4.5 GB measured at 1e8)
TORCH_BYTES = 48


@dataclass(frozen=True)
class Startup:
    """Cost of the sampler on one rank at the beginning of an epoch.

    Attributes
    ----------
    seconds : float
        Until the first batch, on this machine.
    bytes : int
        Memory that its order takes.
    method : {"measured", "scaled from a smaller order"}
    """

    seconds: float
    bytes: int
    method: str

    def __str__(self) -> str:
        size = self.bytes / 2**20
        return f"first batch after {self.seconds:.3g} s, {size:.3g} MiB ({self.method})"


def measure_startup(plan: "ShardPlan") -> Startup:
    source = plan.source
    if isinstance(source, TorchSource):
        return scale_torch(len(plan.samples), bool(source.shuffled))
    if isinstance(source, IteratedSource):
        return measure(lambda: source.iterate(0, 0))
    return measure(lambda: source.window(np.arange(1), np.arange(1), 1))


def scale_torch(length: int, shuffled: bool) -> Startup:
    """torch makes a list of all indices on every rank, so time goes with the length."""
    probe = min(PROBE, length)
    start = time.perf_counter()
    indices = torch.randperm(probe).tolist() if shuffled else list(range(probe))
    seconds = (time.perf_counter() - start) * length / len(indices)
    how = "measured" if probe == length else "scaled from a smaller order"
    return Startup(seconds, TORCH_BYTES * length, how)


def measure(first_batch: Callable[[], object]) -> Startup:
    start = time.perf_counter()
    first_batch()
    seconds = time.perf_counter() - start
    traced = tracemalloc.is_tracing()
    if not traced:
        tracemalloc.start()
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    first_batch()
    peak = tracemalloc.get_traced_memory()[1] - before
    if not traced:
        tracemalloc.stop()
    return Startup(seconds, peak, "measured")
