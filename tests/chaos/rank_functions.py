"""What the ranks of the trials do.

The text of this file runs as a cell, so these are functions of a cell; launchers that take no such
function (bare ``torch.multiprocessing.spawn``) import it. Nothing here depends on the launcher.
"""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset


def join() -> int:
    """Meet the other ranks, unless the launcher has done so, and return the rank."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return dist.get_rank()


def announce(folder: str, rank: int) -> None:
    """Leave a file with the process ids of this rank and of its children."""
    children = torch.multiprocessing.active_children()
    draft = Path(folder, f"draft{rank}")
    draft.write_text(" ".join(map(str, [os.getpid(), *(child.pid for child in children)])))
    draft.rename(Path(folder, f"rank{rank}"))


def train_once() -> int:
    """One step, written as usual: the model lives when its process group is destroyed."""
    rank = join()
    model = DistributedDataParallel(torch.nn.Linear(8, 1))
    model(torch.ones(4, 8)).sum().backward()
    dist.destroy_process_group()
    return rank


def fail_beside_a_barrier(failing: int) -> None:
    if join() == failing:
        raise KeyError(f"energy at {time.time()}")
    dist.barrier()


def wait_for_each_other(folder: str) -> None:
    rank = join()
    announce(folder, rank)
    dist.recv(torch.zeros(1), src=1 - rank)


class Slow(Dataset):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.02)
        return torch.full((8,), float(index))


def stay(folder: str, where: str) -> None:
    """Run for ever in Python code, in a collective or in a DataLoader with two workers."""
    rank = join()
    if where == "a collective":
        announce(folder, rank)
        dist.recv(torch.zeros(1), src=1 - rank)  # which nobody sends
    loader = DataLoader(Slow(), num_workers=2, persistent_workers=True)
    while where == "a DataLoader":
        for index, _ in enumerate(loader):
            if index == 0:
                announce(folder, rank)
    announce(folder, rank)
    while True:
        sum(range(10_000))


def train_until_told(folder: str) -> float:
    """Train from a DataLoader until the file "go" is there, then finish as usual."""
    rank = join()
    model = DistributedDataParallel(torch.nn.Linear(8, 1))
    loss = torch.zeros(())
    while True:
        for index, batch in enumerate(DataLoader(Slow(), batch_size=4, num_workers=1)):
            loss = model(batch).square().mean()
            loss.backward()
            if index == 0:
                announce(folder, rank)
        told = torch.tensor(float(Path(folder, "go").exists()))
        dist.broadcast(told, src=0)
        if told:
            break
    dist.destroy_process_group()
    return loss.item()


def meet(token: int) -> list[int]:
    """Return the tokens of all ranks that met here: only those of one launch may."""
    join()
    tokens = [torch.zeros(1, dtype=torch.long) for _ in range(dist.get_world_size())]
    dist.all_gather(tokens, torch.tensor([token]))
    return [int(t) for t in tokens]


def private_megabytes(data: torch.Tensor) -> float:
    """Read all of ``data``; return the memory in MB that this rank shares with no other process."""
    join()
    total = data.sum().item()
    assert abs(total / data.numel() - 1) < 1e-3
    dist.barrier()  # pages count as private as long as the other rank has not touched them
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    dist.barrier()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) / 1024


def note_private_megabytes(data: torch.Tensor, folder: str) -> None:
    """Leave what ``private_megabytes`` returns in a file: many launchers return no values."""
    Path(folder, f"private{join()}").write_text(str(private_megabytes(data)))


def train_in_place() -> int:
    """One step in a process group that stays, as on ranks that live from call to call."""
    rank = join()
    model = DistributedDataParallel(torch.nn.Linear(8, 1))
    model(torch.ones(4, 8)).sum().backward()
    return rank


def loaded(modules: list[str]) -> list[str]:
    import sys

    return [name for name in modules if name in sys.modules]
