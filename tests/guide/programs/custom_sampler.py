"""A sampler class of one's own that takes the usual arguments."""

import sys

import torch
from torch.utils.data import DistributedSampler

from nvalchemi.data.datapipes import AtomicDataZarrReader, DataLoader, Dataset
from nvalchemi.distributed import DistributedManager
from nvalchemi.models import MLPPotential
from nvalchemi.training import EnergyMSELoss, OptimizerConfig, TrainingStrategy, default_training_fn
from nvalchemi.training.hooks import DDPHook


class MyDistributedSampler(DistributedSampler):
    """Backwards, so that it can be told from the default."""

    def __iter__(self):
        return reversed(list(super().__iter__()))


def program(folder, recorder):
    DistributedManager.initialize()
    manager = DistributedManager()

    dataset = Dataset(AtomicDataZarrReader(f"{folder}/dataset_a.zarr"), device=manager.device)
    train_loader = DataLoader(
        dataset,
        batch_size=4,
        shuffle=True,
        pin_memory=True,
    )

    strategy = TrainingStrategy(
        models=MLPPotential(outputs=("energy",)),
        optimizer_configs=OptimizerConfig(optimizer_cls=torch.optim.Adam),
        training_fn=default_training_fn,
        loss_fn=EnergyMSELoss(),
        num_epochs=2,
        distributed_manager=manager,
        hooks=[
            DDPHook(sampler_cls=MyDistributedSampler, sampler_kwargs={"seed": 1234}),
            recorder,
        ],
    )
    strategy.run(train_loader)
    return recorder.report(manager, strategy, train_loader)


if __name__ == "__main__":
    from recording import Recorder, save

    save(program(sys.argv[1], Recorder()), sys.argv[2])
