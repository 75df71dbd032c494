"""Several data sets: DDPHook installs a MultiDatasetBatchSampler."""

import sys

import torch

from nvalchemi.data.datapipes import AtomicDataZarrReader, DataLoader, Dataset, MultiDataset
from nvalchemi.distributed import DistributedManager
from nvalchemi.models import MLPPotential
from nvalchemi.training import EnergyMSELoss, OptimizerConfig, TrainingStrategy, default_training_fn
from nvalchemi.training.hooks import DDPHook


def program(folder, recorder):
    DistributedManager.initialize()
    manager = DistributedManager()

    dataset = MultiDataset(
        Dataset(AtomicDataZarrReader(f"{folder}/dataset_a.zarr"), device=manager.device),
        Dataset(AtomicDataZarrReader(f"{folder}/dataset_b.zarr"), device=manager.device),
    )
    train_loader = DataLoader(
        dataset,
        batch_size=4,
        prefetch_factor=16,
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
            DDPHook(
                sampler_kwargs={
                    "epoch_policy": "max_size",
                    "replacement": True,
                    "seed": 1234,
                },
            ),
            recorder,
        ],
    )
    strategy.run(train_loader)
    return recorder.report(manager, strategy, train_loader)


if __name__ == "__main__":
    from recording import Recorder, save

    save(program(sys.argv[1], Recorder()), sys.argv[2])
