"""What is kept of a step until it is written: losses of rank 0, and the work of any rank.

A step only appends to lists and adds to numbers. Tensors are read when lines are written; those of
a GPU start their way to the CPU then and are read at the next writing, so no step waits for one.
"""

import os
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nvalchemi.training.hooks.run_files import plain

_MEGABYTE = 1e6
_BIN = (0.02, 0.2)  # s; steps that are quicker than this share a line with their mean
_BINS = 100  # so much of what has passed is a bin, until it is as long as it gets


class Readings:
    """Scalars on their way to the CPU."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._event: Any = None
        device = tensors[0].device if tensors else torch.device("cpu")
        if device.type != "cuda":
            self._values: Any = np.array([float(value) for value in tensors])
            return
        # pinned memory and an event: the copy runs behind the steps that are queued
        together = torch.stack([value.reshape(()).to(device, torch.float64) for value in tensors])
        self._values = together.to("cpu", non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record(torch.cuda.current_stream(device))

    @property
    def are_there(self) -> bool:
        return self._event is None or self._event.query()

    def values(self) -> NDArray[np.float64]:
        if self._event is not None:
            self._event.synchronize()
            self._values, self._event = self._values.numpy(), None
        return self._values


class StepLosses:
    """Losses of steps, and what belongs to them, until they are lines."""

    def __init__(self) -> None:
        self._names: tuple[str, ...] = ()
        self._steps: list[
            tuple[float, int, int, list[Any]]
        ] = []  # time, step, epoch, learning rates
        self._tensors: list[Tensor] = []
        self._norms: dict[int, Tensor] = {}  # of the gradient, by row of _steps
        self._weights: dict[str, float] = {}
        self._written_weights: dict[str, float] = {}
        self._underway: tuple[Any, ...] | None = None

    def add(self, now: float, ctx: Any, rates: list[Any]) -> None:
        """Note a step that has been made."""
        losses = ctx.losses
        parts = losses["per_component_unweighted"]
        if len(parts) != len(self._names):
            self._names = tuple(parts)
        self._steps.append((now, ctx.step_count, ctx.epoch, rates))
        self._tensors.append(ctx.loss)
        self._tensors += parts.values()
        self._weights = losses["per_component_weight"]

    def add_norm(self, optimizers: Iterable[Any]) -> None:
        """Note the norm of the gradient of the step that is being made; not of a sparse one."""
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        gradients = [p.grad for group in groups for p in group["params"] if p.grad is not None]
        if gradients and all(gradient.layout is torch.strided for gradient in gradients):
            self._norms[len(self._steps)] = torch.nn.utils.get_total_norm(gradients).detach()

    def lines(self, elapsed: float, offset: float, last: bool = False) -> list[dict[str, Any]]:
        """Lines of the steps whose losses are known by now; of all steps if it is the last time.

        `elapsed` is how long the run lasts, `offset` what makes times of steps those of the clock.
        """
        made = self._turn_into_lines(elapsed, offset, last)
        if self._steps and self._underway is None:
            rows = list(self._norms)
            readings = Readings(self._tensors + list(self._norms.values()))
            weights = self._weights if self._weights != self._written_weights else None
            self._written_weights = self._weights
            self._underway = (readings, self._names, self._steps, rows, weights)
            self._steps, self._tensors, self._norms = [], [], {}
            made += self._turn_into_lines(elapsed, offset, last)
        return made

    def _turn_into_lines(self, elapsed: float, offset: float, last: bool) -> list[dict[str, Any]]:
        if self._underway is None or not (last or self._underway[0].are_there):
            return []
        readings, names, steps, rows, weights = self._underway
        self._underway = None
        values = readings.values()
        losses = values[: len(values) - len(rows)].reshape(len(steps), -1)
        norms = dict(zip(rows, values[len(values) - len(rows) :]))
        width = min(max(elapsed / _BINS, _BIN[0]), _BIN[1])
        bins = np.floor(np.array([step[0] for step in steps]) / width)
        firsts = np.flatnonzero(np.diff(bins, prepend=np.nan))
        ends = [*firsts[1:].tolist(), len(steps)]
        means = np.add.reduceat(losses, firsts) / np.diff([*firsts, len(steps)])[:, None]
        lines = []
        for first, end, mean in zip(firsts.tolist(), ends, means.tolist()):
            now, step, epoch, rates = steps[end - 1]
            line = {"step": step, "epoch": epoch, "time": round(now + offset, 3)}
            if end - first > 1:
                line["steps"] = end - first
            line["loss"] = plain(mean[0])
            line["parts"] = {name: plain(part) for name, part in zip(names, mean[1:])}
            line["lr"] = plain(float(rates[0]) if len(rates) == 1 else [float(r) for r in rates])
            known = [norms[row] for row in range(first, end) if row in norms]
            if known:
                line["grad_norm"] = plain(float(known[-1]))
            lines.append(line)
        if weights is not None:
            lines[-1]["weights"] = plain(weights)
        return lines


class Load:
    """Work of a rank since the last line about it."""

    def __init__(self) -> None:
        self.steps = self.structures = self.atoms = self.largest = 0
        self.seconds = self.waited = 0.0

    def line(self, step: int, now: float, device: torch.device) -> dict[str, Any]:
        """What it did, in sums, so that lines can be added up; memory is in MB."""
        line: dict[str, Any] = {
            "step": step,
            "time": round(now, 3),
            "steps": self.steps,
            "seconds": plain(self.seconds),
            "wait": plain(self.waited),
        }
        if self.structures:
            line |= {"structures": self.structures, "atoms": self.atoms, "largest": self.largest}
        resident = resident_memory()
        if resident is not None:
            line["rss"] = round(resident / _MEGABYTE, 1)
        if device.type == "cuda":
            line["cuda"] = round(torch.cuda.memory_allocated(device) / _MEGABYTE, 1)
            line["cuda_peak"] = round(torch.cuda.max_memory_allocated(device) / _MEGABYTE, 1)
        return line


def resident_memory() -> int | None:
    """Bytes of memory that this process holds; None where the system does not say."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return None


def learning_rates(optimizers: Sequence[Any]) -> list[Any]:
    """Of all groups of parameters, as they are now; a tensor is copied and not read."""
    rates = [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]
    return [rate.clone() if isinstance(rate, Tensor) else rate for rate in rates]
