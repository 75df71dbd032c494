"""DDPHook with a dummy MLP: the same script on one process and on many.

    python examples/intermediate/06_ddp_mlp_training.py
    torchrun --standalone --nproc_per_node=2 \
        examples/intermediate/06_ddp_mlp_training.py --backend auto

The structures are made up (clusters in a soft well), so that it runs anywhere in seconds; what
matters is the path: manager, data set, loader, strategy, DDPHook.
"""

import argparse
import os

import torch

from nvalchemi.data import AtomicData, Batch
from nvalchemi.data.datapipes import DataLoader, InMemoryDataset
from nvalchemi.distributed import DistributedManager
from nvalchemi.models import MLPPotential
from nvalchemi.training import (
    EnergyMSELoss,
    ForceMSELoss,
    OptimizerConfig,
    TrainContext,
    TrainingStage,
    TrainingStrategy,
    default_training_fn,
)
from nvalchemi.training.hooks import DDPHook


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", choices=("auto", "gloo", "nccl"), default="auto")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--structures", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=16, help="per rank")
    return parser.parse_args()


def soft_clusters(number: int, seed: int = 0) -> Batch:
    """Clusters of 4 to 8 carbon atoms: E = sum d^2 / (1 + d^2), d the distance from the centre."""
    generator = torch.Generator().manual_seed(seed)
    structures = []
    for index in range(number):
        num_atoms = 4 + index % 5
        positions = torch.randn(num_atoms, 3, generator=generator)
        offsets = positions - positions.mean(0)
        squared = offsets.pow(2).sum(1, keepdim=True)
        slope = 2 * offsets / (1 + squared).pow(2)  # of the energy, at a fixed centroid
        structures.append(
            AtomicData(
                atomic_numbers=torch.full((num_atoms,), 6),
                positions=positions,
                energy=(squared / (1 + squared)).sum().reshape(1, 1),  # eV
                forces=slope.mean(0) - slope,  # eV/Angstrom; the centroid moves along
            )
        )
    return Batch.from_data_list(structures)


class PrintLoss:
    """Print the loss of the last batch after each epoch, on rank 0."""

    frequency = 1
    stage = TrainingStage.AFTER_EPOCH

    def __call__(self, ctx: TrainContext, stage: TrainingStage) -> None:
        if ctx.global_rank == 0:
            print(f"epoch {ctx.epoch}: loss {float(ctx.loss):.4f} after {ctx.step_count} steps")


def main() -> None:
    arguments = parse_arguments()
    if arguments.backend != "auto":
        os.environ["NVALCHEMI_DISTRIBUTED_BACKEND"] = arguments.backend
    DistributedManager.initialize()
    manager = DistributedManager()

    # the same start on every rank; DistributedDataParallel broadcasts rank 0's anyhow
    torch.manual_seed(0)
    dataset = InMemoryDataset(soft_clusters(arguments.structures))
    loader = DataLoader(dataset, batch_size=arguments.batch_size, shuffle=True)
    strategy = TrainingStrategy(
        models=MLPPotential(),
        optimizer_configs=OptimizerConfig(
            optimizer_cls=torch.optim.Adam, optimizer_kwargs={"lr": 1e-2}
        ),
        num_epochs=arguments.epochs,
        training_fn=default_training_fn,
        loss_fn=EnergyMSELoss() + ForceMSELoss(),
        devices=[manager.device],
        distributed_manager=manager,
        hooks=[DDPHook(), PrintLoss()],
    )
    strategy.run(loader)
    print(
        f"rank {manager.rank} of {manager.world_size} on {manager.device}: "
        f"{strategy.step_count} steps"
    )


if __name__ == "__main__":
    main()
