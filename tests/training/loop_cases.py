"""Small structures, models, loaders and hooks for tests of the training loop."""

import torch
from torch import nn

from nvalchemi.data import AtomicData, Batch
from nvalchemi.data.datapipes import DataLoader, InMemoryDataset
from nvalchemi.training import (
    EnergyMSELoss,
    OptimizerConfig,
    TrainingStage,
    TrainingStrategy,
    default_training_fn,
)

# Stages of one batch, in their order.
STEP = [
    TrainingStage.BEFORE_BATCH,
    TrainingStage.BEFORE_FORWARD,
    TrainingStage.AFTER_FORWARD,
    TrainingStage.BEFORE_LOSS,
    TrainingStage.AFTER_LOSS,
    TrainingStage.BEFORE_BACKWARD,
    TrainingStage.DO_BACKWARD,
    TrainingStage.AFTER_BACKWARD,
    TrainingStage.BEFORE_OPTIMIZER_STEP,
    TrainingStage.DO_OPTIMIZER_STEP,
    TrainingStage.AFTER_OPTIMIZER_STEP,
    TrainingStage.AFTER_BATCH,
]
SGD = OptimizerConfig(optimizer_cls=torch.optim.SGD, optimizer_kwargs={"lr": 0.05})
ADAM = OptimizerConfig(optimizer_cls=torch.optim.Adam, optimizer_kwargs={"lr": 0.05})


def structure(number, num_atoms=None):
    """Float64 structure with labels; its size and values follow from its number."""
    g = torch.Generator().manual_seed(number)
    atoms = 1 + number % 4 if num_atoms is None else num_atoms
    return AtomicData(
        atomic_numbers=torch.full((atoms,), 6),
        positions=torch.randn(atoms, 3, generator=g, dtype=torch.float64),
        energy=torch.randn(1, 1, generator=g, dtype=torch.float64),
        forces=torch.randn(atoms, 3, generator=g, dtype=torch.float64),
    )


def batches(*sizes):
    """Batches of consecutive structures."""
    numbers = iter(range(sum(sizes)))
    return [Batch.from_data_list([structure(next(numbers)) for _ in range(size)]) for size in sizes]


def loader(size, batch_size=1, **options):
    """Our loader over `size` structures; batches carry metadata["index"]."""
    whole = Batch.from_data_list([structure(number) for number in range(size)])
    return DataLoader(InMemoryDataset(whole), batch_size=batch_size, **options)


class Net(nn.Module):
    """Energy as a sum over atoms of a small network; with dropout to tell modes apart."""

    def __init__(self, dropout=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Dropout(dropout), nn.Tanh(), nn.Linear(4, 1))
        self.double()

    def forward(self, batch):
        atomic = self.net(batch.positions)
        energy = atomic.new_zeros(batch.num_graphs, 1).index_add(0, batch.batch_idx, atomic)
        return {"energy": energy}


class Recorder:
    """Observes all stages and says yes to each."""

    frequency = 1
    stage = None

    def __init__(self):
        self.stages = []
        self.indices = []

    def _runs_on_stage(self, stage):
        return True

    def __call__(self, ctx, stage):
        self.stages.append(stage)
        if stage is TrainingStage.AFTER_BATCH:
            self.indices += ctx.batch.metadata.get("index", torch.empty(0)).tolist()


class At:
    """Calls a function at one stage."""

    def __init__(self, stage, function, frequency=1):
        self.stage = stage
        self.frequency = frequency
        self.function = function

    def __call__(self, ctx, stage):
        self.function(ctx)


class Context(Recorder):
    """Notes when it is entered and left, and raises when told to."""

    def __init__(self, name, log, fail=None):
        super().__init__()
        self.name, self.log, self.fail = name, log, fail

    def __enter__(self):
        if self.fail == "enter":
            raise OSError(f"{self.name} can not enter")
        self.log.append(f"+{self.name}")
        return self

    def __exit__(self, *error):
        self.log.append(f"-{self.name}")
        if self.fail == "exit":
            raise OSError(f"{self.name} can not leave")


class Failing(Exception):
    """What tests raise."""


def raise_failing(ctx):
    raise Failing


def strategy(**fields):
    """A strategy that trains a Net for two epochs, unless told otherwise."""
    defaults = {
        "models": Net(),
        "optimizer_configs": SGD,
        "training_fn": default_training_fn,
        "loss_fn": EnergyMSELoss(),
    }
    if "num_steps" not in fields:
        defaults["num_epochs"] = 2
    return TrainingStrategy(**{**defaults, **fields})


def weights(module):
    """All parameters in one vector."""
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])
