"""What TrainingStrategy adds to a step: a tiny MLP, no hooks, against a bare torch loop.

Both do the same maths with the same loss object on the same batches, on one thread, in turns of a
few hundred steps; printed are the medians over all steps and their difference. The wish is at most
50 microseconds.

    OMP_NUM_THREADS=1 python benchmarks/strategy_overhead.py
"""

import argparse
from collections.abc import Iterator
from statistics import median
from time import perf_counter_ns

import torch
from torch import Tensor, nn

from nvalchemi.data import AtomicData, Batch
from nvalchemi.training import (
    EnergyMSELoss,
    OptimizerConfig,
    TrainingStrategy,
    default_training_fn,
)
from nvalchemi.training.losses import ComposedLossFunction

LIMIT = 50.0
LR = 1e-3


class TinyMLP(nn.Module):
    """Energy of a structure from the mean of its positions: next to nothing to compute."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 8), nn.SiLU(), nn.Linear(8, 1))

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        return {"energy": self.net(batch.positions.view(batch.num_graphs, -1, 3).mean(1))}


class Clock:
    """A loader of one batch over and over that notes when each was asked for."""

    def __init__(self, batch: Batch, steps: int) -> None:
        self.batch, self.steps = batch, steps
        self.times: list[int] = []

    def __len__(self) -> int:
        return self.steps + 1

    def __iter__(self) -> Iterator[Batch]:
        for _ in range(self.steps + 1):
            self.times.append(perf_counter_ns())
            yield self.batch

    def per_step(self) -> list[float]:
        """Microseconds from one batch to the next, without the set-up before the first."""
        return [(b - a) / 1e3 for a, b in zip(self.times[1:], self.times[2:])]


def make_batch(structures: int = 4, atoms: int = 3) -> Batch:
    generator = torch.Generator().manual_seed(0)
    return Batch.from_data_list(
        [
            AtomicData(
                atomic_numbers=torch.ones(atoms, dtype=torch.long),
                positions=torch.randn(atoms, 3, generator=generator),
                energy=torch.randn(1, 1, generator=generator),
            )
            for _ in range(structures)
        ]
    )


def bare_loop(clock: Clock, loss_fn: ComposedLossFunction) -> None:
    model = TinyMLP()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for step, batch in enumerate(clock):
        optimizer.zero_grad(set_to_none=True)
        predictions = {"predicted_energy": model(batch)["energy"]}
        loss = loss_fn(predictions, {"energy": batch.energy}, step=step)["total_loss"]
        loss.backward()
        optimizer.step()


def strategy_loop(clock: Clock, loss_fn: ComposedLossFunction) -> None:
    strategy = TrainingStrategy(
        models=TinyMLP(),
        optimizer_configs=OptimizerConfig(
            optimizer_cls=torch.optim.SGD, optimizer_kwargs={"lr": LR}
        ),
        num_epochs=1,
        training_fn=default_training_fn,
        loss_fn=loss_fn,
    )
    strategy.run(clock)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300, help="steps of a turn")
    parser.add_argument("--turns", type=int, default=20, help="turns of each loop")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    batch, loss_fn = make_batch(), ComposedLossFunction([EnergyMSELoss()])
    loops = {"bare torch": bare_loop, "TrainingStrategy": strategy_loop}
    times: dict[str, list[float]] = {name: [] for name in loops}
    for turn in range(arguments.turns + 1):
        for name, loop in loops.items():
            clock = Clock(batch, arguments.steps)
            loop(clock, loss_fn)
            if turn:  # the first turn warms up
                times[name] += clock.per_step()
    for name, values in times.items():
        print(f"{name:<17}{median(values):7.1f} us a step")
    difference = median(times["TrainingStrategy"]) - median(times["bare torch"])
    print(f"{'overhead':<17}{difference:7.1f} us a step (at most {LIMIT:.0f} wanted)")


if __name__ == "__main__":
    main()
