"""Ranks that meet again: several starts in one process, over each launcher's store."""

import os
import socket
import subprocess
import sys

import pytest

from nvalchemi.notebook import launch


def _sum() -> float:
    import torch
    import torch.distributed as dist

    total = torch.ones(1)
    dist.all_reduce(total)
    return total.item()


def _start_again() -> list[float]:
    import torch.distributed as dist

    from nvalchemi.distributed import DistributedManager
    from nvalchemi.distributed.collectives import destroy_distributed, init_distributed

    sums = []
    for _ in range(2):
        DistributedManager.initialize()
        sums.append(_sum())
        DistributedManager.cleanup()
        dist.init_process_group("gloo")
        sums.append(_sum())
        dist.destroy_process_group()
        assert init_distributed(backend="gloo")
        sums.append(_sum())
        destroy_distributed()
    # a port of one's own, as tutorials have it
    rank, port = int(os.environ["RANK"]), os.environ["OWN_PORT"]
    os.environ["MASTER_PORT"] = port
    dist.init_process_group("gloo", rank=rank, world_size=2)
    sums.append(_sum())
    dist.destroy_process_group()
    DistributedManager.setup(rank, 2, addr="127.0.0.1", port=port, backend="gloo")
    sums.append(_sum())
    return sums


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_communication_can_be_started_again_inside_launch():
    """A second start over the launcher's store waited for the addresses of the first."""
    env = {"OWN_PORT": str(_free_port())}
    assert list(launch(_start_again, nprocs=2, env=env, timeout=100)) == [[2.0] * 8] * 2


AGAIN = """
import torch, torch.distributed as dist
from nvalchemi.distributed import DistributedManager
for _ in range(3):
    DistributedManager.initialize()
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == 2
    DistributedManager.cleanup()
print("three starts", flush=True)
"""


def _environment(**variables: str) -> dict[str, str]:
    launchers = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_", "SLURM_", "OMPI_", "TORCHELASTIC")
    clean = {k: v for k, v in os.environ.items() if not k.startswith(launchers)}
    return {**clean, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **variables}


def test_communication_can_be_started_again_under_torchrun(tmp_path):
    script = tmp_path / "again.py"
    script.write_text(AGAIN)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*torchrun, "--nproc_per_node=2", str(script)],
        env=_environment(),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("three starts") == 2  # two ranks may share a line


@pytest.mark.parametrize("names", [("SLURM_PROCID", "SLURM_NTASKS"), ("RANK", "WORLD_SIZE")])
def test_communication_can_be_started_again_where_rank_0_holds_the_store(names):
    port = str(_free_port())
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", AGAIN],
            env=_environment(
                **{names[0]: str(rank), names[1]: "2"}, MASTER_ADDR="127.0.0.1", MASTER_PORT=port
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    for process in ranks:
        out, err = process.communicate(timeout=100)
        assert process.returncode == 0, err
        assert out == "three starts\n"


ALONE = """
from nvalchemi.distributed import DistributedManager, rendezvous
rendezvous._PATIENCE = 0.5
DistributedManager.initialize()
"""


def test_a_rank_that_waits_for_others_says_so():
    port = str(_free_port())
    process = subprocess.Popen(
        [sys.executable, "-c", ALONE],
        env=_environment(SLURM_PROCID="0", SLURM_NTASKS="4", MASTER_PORT=port),
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    try:
        said = process.stderr.readline()
        assert said.startswith(
            "rank 0 of 4 has waited 0.5 s for ranks 1, 2, 3 at localhost:" + port
        )
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def test_a_connection_that_stalls_is_told_from_ranks_that_come_late(capsys):
    import time

    import torch.distributed as dist

    from nvalchemi.distributed import rendezvous

    def tell(rank: int, *ago: float) -> str:
        store = dist.HashStore()
        for other, seconds in enumerate(ago):
            store.set(f"arrived/{other}", repr(time.time() - seconds))
        rendezvous._tell_of_a_stall(store, rank, len(ago))
        return capsys.readouterr().err

    assert tell(0, 5.1, 5.2).startswith("the ranks took 5.1 s to connect although all were there")
    assert tell(0, 5.1, 0.1) == "" and tell(0, 0.1, 5.1) == ""
    assert tell(1, 5.1, 5.2) == ""  # one rank tells
