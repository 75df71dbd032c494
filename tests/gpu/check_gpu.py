"""Checks that need an NVIDIA GPU, as one script: python tests/gpu/check_gpu.py

One GPU is enough (one rank with nccl); with two or more the ranks are real. Prints a line for each
check and exits with 1 if one fails. It is not collected by pytest, which runs where there is none.
"""

import os
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


def place() -> dict:
    """Where this rank is, and that ``cuda:LOCAL_RANK`` or, where ranks share, "cuda" is its own."""
    DistributedManager.initialize()
    manager = DistributedManager()
    total = torch.ones(1, device=manager.device)
    torch.distributed.all_reduce(total)
    torch.distributed.barrier()
    uuid = None
    if manager.cuda:
        assert torch.ones(1, device="cuda").device == manager.device, "not the current device"
        uuid = str(torch.cuda.get_device_properties(manager.device).uuid)
    return {
        "device": str(manager.device),
        "uuid": uuid,
        "sum": total.item(),
        "backend": torch.distributed.get_backend(),
        "local_rank": manager.local_rank,
        "cuda": (torch.cuda.device_count(), torch.cuda.is_initialized()),
        "visible": os.environ["CUDA_VISIBLE_DEVICES"],
    }


def uuids() -> list[str]:
    count = torch.cuda.device_count()
    return [str(torch.cuda.get_device_properties(number).uuid) for number in range(count)]


def check_devices_are_those_that_were_named() -> str:
    there = uuids()
    backwards = list(range(len(there)))[::-1]
    for backend in ("nccl", "gloo"):
        ranks = list(launch(place, devices=backwards, backend=backend))
        assert [rank["uuid"] for rank in ranks] == there[::-1], ranks
        assert [rank["device"] for rank in ranks] == [f"cuda:{r}" for r in range(len(there))]
        assert all(rank["sum"] == len(there) and rank["backend"] == backend for rank in ranks)
    (last,) = launch(place, devices=f"cuda:{len(there) - 1}")
    assert last["uuid"] == there[-1] and last["cuda"][0] == 1
    return f"{backwards} with nccl and with gloo; the last one alone"


def check_devices_through_inherited_uuids() -> str:
    there, before = uuids(), os.environ.get("CUDA_VISIBLE_DEVICES")
    # what this process would have been given: CUDA has started and keeps its own count
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(f"GPU-{uuid}" for uuid in there)
    try:
        (rank,) = launch(place, devices=len(there) - 1)
    finally:
        del os.environ["CUDA_VISIBLE_DEVICES"]
        if before is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = before
    assert rank["uuid"] == there[-1] and rank["visible"] == f"GPU-{there[-1]}", rank
    return f"CUDA_VISIBLE_DEVICES={rank['visible']}"


def check_two_ranks_share_a_gpu_with_gloo() -> str:
    ranks = list(launch(place, devices=[0, 0], backend="gloo"))
    assert [rank["local_rank"] for rank in ranks] == [0, 1]
    assert [rank["device"] for rank in ranks] == ["cuda:0"] * 2
    assert [rank["uuid"] for rank in ranks] == uuids()[:1] * 2
    assert all(rank["sum"] == 2 and rank["backend"] == "gloo" for rank in ranks)
    results = list(launch(train, devices=[0, 0], backend="gloo"))
    assert all(result["device"] == "cuda:0" for result in results)
    assert len({result["sum"] for result in results}) == 1, "replicas differ"
    return f"validation loss {results[0]['loss']:.4f}"


def check_cpu_ranks_leave_the_gpus_alone() -> str:
    for options in ({"devices": "cpu"}, {"backend": "gloo"}):
        ranks = list(launch(place, nprocs=2, **options))
        assert all(rank["device"] == "cpu" and rank["sum"] == 2 for rank in ranks), ranks
        assert all(rank["cuda"] == (0, False) for rank in ranks), "a rank saw a GPU"
    return "devices='cpu' and backend='gloo': no rank sees a GPU"


def check_waiting_ranks_take_up_their_device() -> str:
    """A rank that has imported torch before it is told its device must not have asked CUDA yet."""
    there = uuids()
    for number, uuid in enumerate(there[-2:], start=max(0, len(there) - 2)):
        launch(place, nprocs=1, devices="cpu", standby=1)
        time.sleep(5)  # until the one that waits has imported torch
        (rank,) = launch(place, devices=number, standby=1)
        assert rank["uuid"] == uuid and rank["cuda"][0] == 1, rank
        time.sleep(5)
        (rank,) = launch(place, nprocs=1, devices="cpu", standby=0)
        assert rank["device"] == "cpu" and rank["cuda"] == (0, False), rank
    return "from the CPU to a GPU and back"


def check_too_many_ranks_are_refused() -> str:
    there = torch.cuda.device_count()
    said = []
    for options in (
        {"nprocs": there + 1},
        {"devices": there},
        {"devices": [0, 0]},
        {"devices": [0, "cpu"]},
    ):
        try:
            launch(place, **options)
        except ValueError as error:
            said.append(str(error))
    assert len(said) == 4, said
    return said[0]


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
        check_devices_are_those_that_were_named,
        check_devices_through_inherited_uuids,
        check_two_ranks_share_a_gpu_with_gloo,
        check_cpu_ranks_leave_the_gpus_alone,
        check_waiting_ranks_take_up_their_device,
        check_too_many_ranks_are_refused,
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
