"""What RunFolder costs a training: part of a step's time, and bytes of the folder a step.

The time is that which the hook itself takes, measured around each of its calls, start and end
included, less what the measurement takes, with steps of about 10 ms: by the clock, of several
turns the least, because another load on the machine only adds to it, and in processor time, which
other loads change less. Beside it the difference of the medians of whole steps with and without
the hook, in turns, which is noisier. Bytes are what is appended in a step, on two ranks whose
steps are so slow that each has lines of its own, which is the most that there can be. Wanted: at
most 0.5 % and 1000 bytes.

    OMP_NUM_THREADS=1 python benchmarks/run_folder.py
"""

import json
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from time import perf_counter, thread_time
from typing import Any

import torch
from torch import nn

from nvalchemi.data import AtomicData, Batch
from nvalchemi.data.datapipes import DataLoader, InMemoryDataset
from nvalchemi.distributed import DistributedManager
from nvalchemi.models import MLPPotential
from nvalchemi.notebook import launch
from nvalchemi.training import (
    DDPHook,
    EnergyMSELoss,
    ForceMSELoss,
    OptimizerConfig,
    RunFolder,
    TrainingStage,
    TrainingStrategy,
    default_training_fn,
)

MOST_PERCENT, MOST_BYTES = 0.5, 1000
SLOW = 1.1  # s of a slow step


class TimedRunFolder(RunFolder):
    """Adds up the time that the hook takes."""

    spent = worked = 0.0

    def __call__(self, ctx: Any, stage: Any) -> None:
        begin, worked = perf_counter(), thread_time()
        super().__call__(ctx, stage)
        self.worked += thread_time() - worked
        self.spent += perf_counter() - begin


class TimedNothing(TimedRunFolder):
    """What the measurement itself takes in a training: the same clocks around nothing."""

    def __call__(self, ctx: Any, stage: Any) -> None:
        begin, worked = perf_counter(), thread_time()
        self.worked += thread_time() - worked
        self.spent += perf_counter() - begin

    def __exit__(self, *error: Any) -> None:
        pass


class Clock:
    """A loader of one batch over and over that notes when each was asked for."""

    def __init__(self, batch: Batch, steps: int) -> None:
        self.batch, self.steps = batch, steps
        self.times: list[float] = []

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[Batch]:
        for _ in range(self.steps):
            self.times.append(perf_counter())
            yield self.batch

    def per_step(self) -> list[float]:
        return [b - a for a, b in zip(self.times[1:], self.times[2:])]


def make_batch(structures: int, atoms: int = 20) -> Batch:
    generator = torch.Generator().manual_seed(0)
    return Batch.from_data_list(
        [
            AtomicData(
                atomic_numbers=torch.full((atoms,), 6),
                positions=torch.randn(atoms, 3, generator=generator),
                energy=torch.randn(1, 1, generator=generator),
                forces=torch.randn(atoms, 3, generator=generator),
            )
            for _ in range(structures)
        ]
    )


def train(loader: Any, hooks: list[Any], width: int = 64, manager: Any = None) -> None:
    model: nn.Module = MLPPotential(hidden_features=width)
    TrainingStrategy(
        models=model,
        optimizer_configs=OptimizerConfig(optimizer_cls=torch.optim.AdamW),
        num_epochs=1,
        training_fn=default_training_fn,
        loss_fn=EnergyMSELoss() + ForceMSELoss(),
        hooks=hooks,
        distributed_manager=manager,
    ).run(loader)


def measure_time(steps: int, turns: int, structures: int) -> dict[str, float]:
    """Part of the time of a training, in percent, and what that is made of."""
    batch = make_batch(structures)
    bare: list[float] = []
    watched: list[float] = []
    shares, processor, hooks = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(turns + 1):
            without, with_it = Clock(batch, steps), Clock(batch, steps)
            hook = TimedRunFolder(Path(folder) / str(turn))
            train(without, [])
            worked = thread_time()
            nothing = TimedNothing("")
            train(with_it, [nothing, hook])
            worked = thread_time() - worked
            if turn:  # the first turn warms up
                bare += without.per_step()
                watched += with_it.per_step()
                spent = hook.spent - nothing.spent
                shares.append(100 * spent / (with_it.times[-1] - with_it.times[0]))
                own = hook.worked - nothing.worked
                hooks.append(1e6 * own / steps)
                processor.append(100 * own / worked)
    return {
        "step_ms": 1e3 * median(bare),
        "processor_us_a_step": min(hooks),
        "percent": min(shares),
        "percent_of_processor_time": min(processor),
        "percent_by_medians": 100 * (median(watched) / median(bare) - 1),
    }


class Pause:
    """A hook that makes each step slow."""

    frequency, stage = 1, TrainingStage.BEFORE_FORWARD

    def __call__(self, ctx: Any, stage: Any) -> None:
        time.sleep(SLOW)


def train_slowly(folder: str, steps: int) -> None:
    DistributedManager.initialize()
    manager = DistributedManager()
    loader = DataLoader(InMemoryDataset(make_batch(manager.world_size * steps)), batch_size=1)
    train(loader, [DDPHook(), Pause(), RunFolder(folder)], 8, manager)


def measure_bytes(steps: int, ranks: int = 2) -> dict[str, float]:
    """Bytes that are appended in a slow step, and those that are there once."""
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "run"
        launch(train_slowly, str(folder), steps, nprocs=ranks)
        lines = sum(path.stat().st_size for path in folder.glob("*.jsonl"))
        once = sum(path.stat().st_size for path in folder.glob("*.json"))
    return {"bytes_a_step": lines / steps, "bytes_once": float(once)}


def measure(steps: int = 1000, turns: int = 4, slow_steps: int = 12) -> dict[str, float]:
    """All figures by name.

    Returns
    -------
    dict
        ``percent`` of a step's time (at most `MOST_PERCENT` wanted), ``bytes_a_step`` (at most
        `MOST_BYTES`), and what is beside them.
    """
    torch.set_num_threads(1)
    return measure_time(steps, turns, structures=128) | measure_bytes(slow_steps)


def main() -> None:
    figures = measure()
    print(json.dumps({name: round(value, 3) for name, value in figures.items()}, indent=1))
    for structures in (32, 1):
        quick = measure_time(3000, 3, structures)
        print(
            f"of a step of {quick['step_ms']:.2f} ms: {quick['percent']:.2f} % "
            f"({quick['processor_us_a_step']:.1f} us)"
        )


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
