"""DistributedManager in real processes, started the way each launcher starts them."""

import os
import socket
import subprocess
import sys
import textwrap

import pytest

from nvalchemi.distributed.environment import read_backend, read_device, read_place

# a DDP training whose model is alive when the interpreter ends: with torch 2.13 the plain exit
# aborts one run in four
TRAIN = """
import torch, torch.distributed as dist
from physicsnemo.distributed import DistributedManager as PhysicsNeMoManager
from nvalchemi.distributed import DistributedManager

DistributedManager.initialize()
manager = DistributedManager()
assert isinstance(manager, PhysicsNeMoManager) and PhysicsNeMoManager.is_initialized()
assert PhysicsNeMoManager().rank == manager.rank == dist.get_rank()
assert manager.world_size == dist.get_world_size() == 2
assert manager.distributed and manager.device == torch.device("cpu") and not manager.cuda
assert manager.local_rank == manager.rank and manager.group() is None
assert manager.group_size() == 2 and manager.group_rank() == manager.rank
assert manager.broadcast_buffers is manager.find_unused_parameters is False
assert dist.get_backend() == "gloo"
DistributedManager.initialize()  # a second time
assert DistributedManager().world_size == 2

torch.manual_seed(manager.rank)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
parts = [torch.empty(1, 4) for _ in range(2)]
dist.all_gather(parts, model.module.weight.detach())
assert torch.equal(*parts)
said = f"method {manager._initialization_method} rank {manager.rank} trained\\n"
print(said, end="", flush=True)  # in one piece, also where output is not buffered
"""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _environment(**variables: str) -> dict[str, str]:
    ours = ("PHYSICSNEMO_", "NVALCHEMI_")
    launchers = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_", "SLURM_", "OMPI_", *ours)
    clean = {k: v for k, v in os.environ.items() if not k.startswith(launchers)}
    return {**clean, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **variables}


def _run(code: str, *options: str, **variables: str) -> str:
    done = subprocess.run(
        [sys.executable, *options, "-c", textwrap.dedent(code)],
        env=_environment(**variables),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_torchrun_starts_cpu_ranks_and_they_leave_quietly(tmp_path):
    """W1: the peer's manager cannot start two CPU ranks and raises again at exit."""
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*torchrun, "--nproc_per_node=2", str(script)],
        env=_environment(),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"method env rank {r} trained" for r in (0, 1)]
    for trouble in ("Traceback", "terminate called", "arning"):
        assert trouble not in done.stderr


SLURM = {"SLURM_NPROCS": "2", "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1"}
OMPI = {"OMPI_COMM_WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    "method, rank_names, shared",
    [
        ("slurm", ("SLURM_PROCID", "SLURM_LOCALID"), SLURM),
        ("openmpi", ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"), OMPI),
    ],
)
def test_cluster_launchers_start_cpu_ranks(method, rank_names, shared):
    """W1 again: by SLURM's and OpenMPI's variables the peer divides by the number of GPUs."""
    shared = {**shared, "MASTER_PORT": str(_free_port())}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", TRAIN],
            env=_environment(**shared, **dict.fromkeys(rank_names, str(rank))),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    for rank, process in enumerate(ranks):
        out, err = process.communicate(timeout=100)
        assert process.returncode == 0, err
        assert out == f"method {method} rank {rank} trained\n"
        assert "Traceback" not in err


def test_single_process_is_a_first_class_case():
    said = _run(
        """
        import warnings
        from nvalchemi.distributed import DistributedManager
        from nvalchemi.distributed import PhysicsNeMoUninitializedDistributedManagerWarning
        try:
            DistributedManager()
            raise SystemExit("an uninitialised manager was given out")
        except PhysicsNeMoUninitializedDistributedManagerWarning:
            pass
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            DistributedManager.initialize()
            DistributedManager.initialize()
        manager = DistributedManager()
        print(manager.rank, manager.local_rank, manager.world_size, manager.distributed)
        manager.broadcast_buffers = True
        assert DistributedManager().broadcast_buffers
        manager.cleanup()
        manager.cleanup()
        assert not DistributedManager.is_initialized()
        """
    )
    assert said == "0 0 1 False\n"


def test_an_existing_group_is_adopted_and_left_to_its_maker():
    said = _run(
        """
        import torch.distributed as dist
        from nvalchemi.distributed import DistributedManager
        dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
        DistributedManager.initialize()
        manager = DistributedManager()
        assert manager.distributed and manager.device.type == "cpu"
        print(manager.rank, manager.world_size, manager.local_rank)
        manager.cleanup()
        assert dist.is_initialized() and not DistributedManager.is_initialized()
        """,
        RANK="7",  # the group knows better than stale variables
        WORLD_SIZE="9",
        LOCAL_RANK="3",
    )
    assert said == "0 1 3\n"


def test_a_failed_start_leaves_nothing_behind():
    said = _run(
        """
        import os, socket
        import torch.distributed as dist
        from physicsnemo.distributed import DistributedManager as PhysicsNeMoManager
        from nvalchemi.distributed import DistributedManager

        def fails(kind):
            before = dict(os.environ)
            try:
                DistributedManager.initialize()
                raise SystemExit("started")
            except kind as error:
                print(error)
            assert os.environ == before
            assert not PhysicsNeMoManager.is_initialized() and not dist.is_initialized()

        os.environ.update(RANK="0", WORLD_SIZE="abc")
        fails(ValueError)
        taken = socket.create_server(("127.0.0.1", 0))
        os.environ.update(WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
        os.environ["MASTER_PORT"] = str(taken.getsockname()[1])
        fails(RuntimeError)
        taken.close()
        DistributedManager.initialize()
        assert DistributedManager().distributed and dist.get_world_size() == 1
        DistributedManager.cleanup(barrier=True)
        assert not dist.is_initialized()
        DistributedManager.initialize()
        assert dist.is_initialized()
        """
    )
    assert "WORLD_SIZE must be an integer: 'abc'" in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    "variables, sentence",
    [
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK must be in 0..WORLD_SIZE-1: RANK=2, WORLD_SIZE=2"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK must be in"),
        ({"RANK": "0"}, "RANK is set but WORLD_SIZE is not"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is set but RANK is not"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE must be at least 1: 0"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK must be an integer: 'x'"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "0"}, "MASTER_PORT must be in 1..65535"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "a"}, "LOCAL_RANK must be an integer"),
        ({"SLURM_PROCID": "0"}, "SLURM_PROCID is set but SLURM_NTASKS is not"),
        ({"PHYSICSNEMO_DISTRIBUTED_INITIALIZATION_METHOD": "mpi"}, "ENV, SLURM, OPENMPI: 'mpi'"),
        ({"PHYSICSNEMO_DISTRIBUTED_INITIALIZATION_METHOD": "SLURM"}, "SLURM_PROCID is not set"),
    ],
)
def test_broken_variables_are_refused_with_the_rule(variables, sentence):
    with pytest.raises(ValueError) as caught:
        read_place(variables)
    assert sentence in str(caught.value)


def test_the_launcher_is_found_from_its_variables():
    assert read_place({}) is None
    slurm = {"SLURM_PROCID": "1", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1"}
    assert read_place(slurm).method == "slurm"
    both = read_place({**slurm, "RANK": "0", "WORLD_SIZE": "2"})
    assert (both.method, both.rank, both.world_size) == ("env", 0, 2)
    forced = {"PHYSICSNEMO_DISTRIBUTED_INITIALIZATION_METHOD": "SLURM"}
    assert read_place({**slurm, **forced, "RANK": "0", "WORLD_SIZE": "2"}).rank == 1
    # half of torchrun's pair, exported by some cluster, does not hide the real launcher
    assert read_place({**slurm, "WORLD_SIZE": "4"}).method == "slurm"


def test_backend_variable():
    assert read_backend({}) is None
    assert read_backend({"NVALCHEMI_DISTRIBUTED_BACKEND": "gloo"}) == "gloo"
    with pytest.raises(ValueError, match="gloo or nccl: 'mpi'"):
        read_backend({"NVALCHEMI_DISTRIBUTED_BACKEND": "mpi"})


def test_device_variable():
    assert read_device({}) is None and read_device({"NVALCHEMI_DISTRIBUTED_DEVICE": ""}) is None
    for device in ("cpu", "cuda:0", "cuda:12"):
        assert read_device({"NVALCHEMI_DISTRIBUTED_DEVICE": device}) == device
    for device in ("cuda", "cuda:", "cuda:-1", "gpu", "cpu:0", "0"):
        with pytest.raises(ValueError, match=f"must be cpu or cuda:N with a number: '{device}'"):
            read_device({"NVALCHEMI_DISTRIBUTED_DEVICE": device})


def test_the_cpu_as_device_means_gloo():
    cpu = {"NVALCHEMI_DISTRIBUTED_DEVICE": "cpu"}
    assert read_backend(cpu) == "gloo"
    assert read_backend({**cpu, "NVALCHEMI_DISTRIBUTED_BACKEND": "gloo"}) == "gloo"
    with pytest.raises(ValueError, match="BACKEND=nccl needs a GPU: NVALCHEMI_DISTRIBUTED_DEVICE="):
        read_backend({**cpu, "NVALCHEMI_DISTRIBUTED_BACKEND": "nccl"})
    assert read_backend({"NVALCHEMI_DISTRIBUTED_DEVICE": "cuda:0"}) is None


# what torch says on a machine with GPUs; nothing is computed on them
GPUS = """
import sys
import torch, torch.distributed as dist
from nvalchemi.distributed import DistributedManager

torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: {count}
current = []
torch.cuda.set_device = lambda device: current.append(str(device))
"""
RANK = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "1", "NVALCHEMI_DISTRIBUTED_BACKEND": "gloo"}


@pytest.mark.parametrize(
    "count, variables, expected",
    [
        (2, RANK, "cpu True []"),  # gloo alone trains on the CPU
        (2, {**RANK, "NVALCHEMI_DISTRIBUTED_DEVICE": "cpu"}, "cpu True []"),
        (2, {**RANK, "NVALCHEMI_DISTRIBUTED_DEVICE": "cuda:1"}, "cuda:1 True ['cuda:1']"),
        # a rank that shares a GPU sees that one alone, whatever its local rank
        (1, {**RANK, "NVALCHEMI_DISTRIBUTED_DEVICE": "cuda:0"}, "cuda:0 True ['cuda:0']"),
        # a single process
        (2, {"NVALCHEMI_DISTRIBUTED_DEVICE": "cpu"}, "cpu False []"),
        (2, {"NVALCHEMI_DISTRIBUTED_DEVICE": "cuda:1"}, "cuda:1 False ['cuda:1']"),
    ],
)
def test_the_device_that_was_asked_for(count, variables, expected):
    said = _run(
        GPUS.format(count=count)
        + """
DistributedManager.initialize()
manager = DistributedManager()
assert manager.cuda == (manager.device.type == "cuda")
if manager.distributed:
    assert dist.get_backend() == "gloo" and dist.group.WORLD.bound_device_id is None
    assert manager.local_rank == 1
print(manager.device, manager.distributed, current)
""",
        **variables,
    )
    assert said == expected + "\n"


def test_an_adopted_group_keeps_the_device_that_was_asked_for():
    said = _run(
        GPUS.format(count=1)
        + """
dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
DistributedManager.initialize()
print(DistributedManager().device, current)
""",
        **{**RANK, "NVALCHEMI_DISTRIBUTED_DEVICE": "cuda:0"},
    )
    assert said == "cuda:0 []\n"


def test_a_gpu_that_is_not_there_is_refused_before_anything_starts():
    said = _run(
        GPUS.format(count=1)
        + """
try:
    DistributedManager.initialize()
except ValueError as error:
    print(error)
assert not dist.is_initialized() and not DistributedManager.is_initialized() and not current
""",
        **{**RANK, "NVALCHEMI_DISTRIBUTED_DEVICE": "cuda:1"},
    )
    assert said.startswith("NVALCHEMI_DISTRIBUTED_DEVICE=cuda:1 must be a GPU that this process ")
