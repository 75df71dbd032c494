"""The basic pattern: a manager, a strategy, DDPHook; the loader is torch's."""

import sys

import torch

from nvalchemi.data import Batch
from nvalchemi.data.datapipes import AtomicDataZarrReader, Dataset
from nvalchemi.distributed import DistributedManager
from nvalchemi.models import MLPPotential
from nvalchemi.training import EnergyMSELoss, OptimizerConfig, TrainingStrategy, default_training_fn
from nvalchemi.training.hooks import DDPHook


def program(folder, recorder):
    DistributedManager.initialize()
    manager = DistributedManager()

    dataset = Dataset(AtomicDataZarrReader(f"{folder}/dataset_a.zarr"), device=manager.device)

    def collate(samples):
        batch = Batch.from_data_list([data for data, _ in samples])
        batch.metadata["index"] = torch.tensor([metadata["index"] for _, metadata in samples])
        return batch

    train_loader = torch.utils.data.DataLoader(
        dataset, batch_size=4, shuffle=True, collate_fn=collate
    )
    strategy = TrainingStrategy(
        models=MLPPotential(outputs=("energy",)),
        optimizer_configs=OptimizerConfig(optimizer_cls=torch.optim.Adam),
        training_fn=default_training_fn,
        loss_fn=EnergyMSELoss(),
        num_epochs=2,
        distributed_manager=manager,
        hooks=[
            DDPHook(),
            recorder,
        ],
    )
    strategy.run(train_loader)
    return recorder.report(manager, strategy, train_loader)


if __name__ == "__main__":
    from recording import Recorder, save

    save(program(sys.argv[1], Recorder()), sys.argv[2])
