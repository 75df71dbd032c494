"""Two real ranks train each model on batches of their own and stay equal (W38: replica drift)."""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from ase import Atoms
from ase.build import bulk, molecule
from torch.nn.parallel import DistributedDataParallel

from nvalchemi.data.atomic_data import AtomicData
from nvalchemi.data.batch import Batch
from nvalchemi.data.neighbors import add_neighbor_list
from nvalchemi.models import DemoModel, DemoModelWrapper, MLPPotential, PaiNN

MODELS = {
    "demo": lambda: DemoModelWrapper(DemoModel()),
    "mlp": MLPPotential,
    "painn": lambda: PaiNN(4.5, 8, 2),
}


def train_on_own_batches(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    group = dist.group.WORLD  # held to the end: a group that goes while DDP lives may hang
    trained = {}
    for name, make in MODELS.items():
        torch.manual_seed(0)
        trained[name] = DistributedDataParallel(make())
        take_steps(trained[name], [bulk("Cu", cubic=True), molecule("H2O")][rank])
    states = {name: model.module.state_dict() for name, model in trained.items()}
    torch.save(states, f"{folder}/rank{rank}.pt")
    dist.barrier(group)
    os._exit(0)


def take_steps(model: DistributedDataParallel, atoms: Atoms) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(3):
        atoms.rattle(0.1, seed=step)
        batch = add_neighbor_list(Batch.from_data_list([AtomicData.from_atoms(atoms)]), 4.5)
        optimizer.zero_grad()
        out = model(batch)
        # a loss on forces alone too must reach every parameter, or DDP raises at the next step
        loss = out["forces"].pow(2).mean()
        (loss if step == 0 else loss + out["energy"].pow(2).mean()).backward()
        optimizer.step()
        with torch.no_grad():
            model(batch)


def test_ranks_hold_the_same_parameters(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(train_on_own_batches, (str(tmp_path),), nprocs=2)
    first, second = (torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2))
    for name, make in MODELS.items():
        torch.manual_seed(0)
        fresh = make().state_dict()
        assert all(torch.equal(first[name][key], second[name][key]) for key in fresh)
        assert not all(torch.equal(first[name][key], fresh[key]) for key in fresh)
