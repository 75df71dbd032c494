"""Checks that need an NVIDIA GPU, as one script: python tests/gpu/check_gpu.py

One GPU is enough (one rank with nccl); with two or more the ranks are real. Prints a line for each
check and exits with 1 if one fails. It is not collected by pytest, which runs where there is none.
"""

import sys
import time
import traceback

import torch

from nvalchemi.data import Batch
from nvalchemi.data.convert import from_ase
from nvalchemi.data.datapipes import DataLoader, InMemoryDataset
from nvalchemi.data.demo_sets import alloys
from nvalchemi.data.neighbors import add_neighbor_list
from nvalchemi.distributed import DistributedManager
from nvalchemi.models import PaiNN
from nvalchemi.notebook import launch
from nvalchemi.training import (
    DDPHook,
    EnergyMSELoss,
    ForceMSELoss,
    OptimizerConfig,
    TrainingStrategy,
    ValidationConfig,
    default_training_fn,
)

CUTOFF = 4.5


def structures(number: int = 32, dtype: torch.dtype = torch.float64) -> Batch:
    batch = Batch.from_data_list([from_ase(atoms, dtype=dtype) for atoms in alloys(number)])
    return add_neighbor_list(batch, CUTOFF)


def check_model_on_cuda_equals_cpu() -> str:
    batch, outputs = structures(), ("energy", "forces", "stress")
    torch.manual_seed(0)
    model = PaiNN(CUTOFF, outputs=outputs).double()
    on_cpu = model(batch)
    on_cuda = model.cuda()(batch.to("cuda"))
    for name in outputs:
        torch.testing.assert_close(on_cuda[name].cpu(), on_cpu[name], rtol=1e-8, atol=1e-8)
    return "energy, forces and stress to 1e-8 in float64"


def check_loader_moves_pinned_batches() -> str:
    dataset = InMemoryDataset(structures(), device="cuda")
    loader = DataLoader(dataset, batch_size=4, pin_memory=True, prefetch_factor=4)
    seen = torch.cat([batch.metadata["index"] for batch in loader])
    assert seen.tolist() == list(range(32))
    assert all(batch.device.type == "cuda" for batch in loader)
    whole = Batch.concat([batch.cpu() for batch in loader])
    assert whole == structures(), "what came over is what was sent"
    return "32 structures in order, bit by bit"


def train() -> dict:
    DistributedManager.initialize()
    manager = DistributedManager()
    torch.manual_seed(manager.rank)
    model = PaiNN(CUTOFF).double()
    data = structures()
    strategy = TrainingStrategy(
        models=model,
        optimizer_configs=OptimizerConfig(optimizer_cls=torch.optim.Adam),
        num_epochs=2,
        training_fn=default_training_fn,
        loss_fn=EnergyMSELoss(per_atom=True) + ForceMSELoss(),
        distributed_manager=manager,
        devices=[manager.device],
        hooks=[DDPHook()],
        validation_config=ValidationConfig(
            validation_data=DataLoader(InMemoryDataset(data), batch_size=5)
        ),
    )
    strategy.run(DataLoader(InMemoryDataset(data), batch_size=4, shuffle=True, pin_memory=True))
    backend = torch.distributed.get_backend() if torch.distributed.is_initialized() else "none"
    return {
        "device": str(next(model.parameters()).device),
        "backend": backend,
        "loss": strategy.last_validation["total_loss"],
        "sum": float(sum(p.detach().sum() for p in model.parameters())),
    }


def check_launch_after_cuda_is_in_use() -> str:
    torch.zeros(1, device="cuda")  # a forked rank would die of this
    ranks = torch.cuda.device_count()
    results = list(launch(train, nprocs=ranks))
    assert [result["device"] for result in results] == [f"cuda:{r}" for r in range(ranks)]
    assert all(result["backend"] == "nccl" for result in results)
    assert len({result["sum"] for result in results}) == 1, "replicas differ"
    assert len({result["loss"] for result in results}) == 1
    return f"{ranks} rank(s) with nccl, validation loss {results[0]['loss']:.4f}"


def check_tensors_come_back_on_the_cpu() -> str:
    (value,) = launch(lambda: torch.arange(3, device="cuda"), nprocs=1)
    assert value.device.type == "cpu" and value.tolist() == [0, 1, 2]
    return "a CUDA tensor returned by a rank is on the CPU"


def main() -> int:
    if not torch.cuda.is_available():
        print("no GPU here: nothing was checked")
        return 1
    failed = 0
    for check in (
        check_model_on_cuda_equals_cpu,
        check_loader_moves_pinned_batches,
        check_launch_after_cuda_is_in_use,
        check_tensors_come_back_on_the_cpu,
    ):
        start = time.monotonic()
        try:
            said = check()
        except Exception:
            failed += 1
            said = "FAILED\n" + traceback.format_exc()
        print(f"{check.__name__} ({time.monotonic() - start:.1f} s): {said}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
