"""What the launcher said about this process: rank, world size and meeting point, from variables.

Reading is kept apart from acting: nothing here starts anything, and every mistake in the variables
is a ValueError that names the variable.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

METHOD_VARIABLE = "PHYSICSNEMO_DISTRIBUTED_INITIALIZATION_METHOD"
"""PhysicsNeMo's variable: ENV, SLURM or OPENMPI forces that way of starting."""

BACKEND_VARIABLE = "NVALCHEMI_DISTRIBUTED_BACKEND"
"""gloo or nccl: the backend that DistributedManager.initialize() and init_distributed() take."""

DEVICE_VARIABLE = "NVALCHEMI_DISTRIBUTED_DEVICE"
"""cpu or cuda:N, of the GPUs that the process sees: the device that DistributedManager takes.

Without it the device is cuda:LOCAL_RANK with nccl and the CPU with gloo.
"""

BACKENDS = ("gloo", "nccl")
_DEFAULT_PORT = 12355  # PhysicsNeMo's, so that ranks started by either meet


@dataclass(frozen=True)
class Place:
    """This process among the ranks of a job.

    ``init_method`` is the URL that ``torch.distributed.init_process_group`` takes.
    """

    method: str
    rank: int
    world_size: int
    local_rank: int | None
    init_method: str


def read_place(variables: Mapping[str, str] = os.environ) -> Place | None:
    """Read this process's place from the launcher's variables; None if there is no launcher.

    ENV (``RANK``, ``WORLD_SIZE``: torchrun, ``launch``) goes before SLURM (``SLURM_PROCID``) and
    OpenMPI (``OMPI_COMM_WORLD_RANK``), unless PHYSICSNEMO_DISTRIBUTED_INITIALIZATION_METHOD says
    which one to read.

    Raises
    ------
    ValueError
        If a variable is missing, is no integer, or does not fit the others.
    """
    forced = variables.get(METHOD_VARIABLE)
    if forced is not None and forced not in _READERS:
        raise ValueError(f"{METHOD_VARIABLE} must be one of ENV, SLURM, OPENMPI: {forced!r}")
    method = forced or _launcher(variables)
    return None if method is None else _READERS[method](variables)


def read_backend(variables: Mapping[str, str] = os.environ) -> str | None:
    """Return the backend asked for by NVALCHEMI_DISTRIBUTED_BACKEND, or None.

    NVALCHEMI_DISTRIBUTED_DEVICE=cpu asks for gloo.
    """
    backend = variables.get(BACKEND_VARIABLE) or None
    if backend is not None and backend not in BACKENDS:
        raise ValueError(f"{BACKEND_VARIABLE} must be gloo or nccl: {backend!r}")
    if read_device(variables) == "cpu":
        if backend == "nccl":
            raise ValueError(
                f"{BACKEND_VARIABLE}=nccl needs a GPU: {DEVICE_VARIABLE}=cpu; unset one of them"
            )
        return "gloo"
    return backend


def read_device(variables: Mapping[str, str] = os.environ) -> str | None:
    """Return the device asked for by NVALCHEMI_DISTRIBUTED_DEVICE, or None."""
    device = variables.get(DEVICE_VARIABLE) or None
    if device is not None and not re.fullmatch(r"cpu|cuda:[0-9]+", device):
        raise ValueError(f"{DEVICE_VARIABLE} must be cpu or cuda:N with a number: {device!r}")
    return device


def _launcher(variables: Mapping[str, str]) -> str | None:
    if "RANK" in variables and "WORLD_SIZE" in variables:
        return "ENV"
    if "SLURM_PROCID" in variables:
        return "SLURM"
    if "OMPI_COMM_WORLD_RANK" in variables:
        return "OPENMPI"
    # half of the pair is a broken launch, not a single process
    return "ENV" if "RANK" in variables or "WORLD_SIZE" in variables else None


def _integer(variables: Mapping[str, str], name: str) -> int:
    if name not in variables:
        raise ValueError(f"{name} is not set: this way of starting needs it")
    try:
        return int(variables[name])
    except ValueError:
        raise ValueError(f"{name} must be an integer: {variables[name]!r}") from None


def _place(
    variables: Mapping[str, str],
    method: str,
    rank_name: str,
    size_name: str,
    local_name: str,
    address: str = "localhost",
) -> Place:
    for here, other in ((rank_name, size_name), (size_name, rank_name)):
        if here in variables and other not in variables:
            raise ValueError(
                f"{here} is set but {other} is not: set both (torchrun does), or neither for a "
                "single process"
            )
    rank, world_size = _integer(variables, rank_name), _integer(variables, size_name)
    if world_size < 1:
        raise ValueError(f"{size_name} must be at least 1: {world_size}")
    if not 0 <= rank < world_size:
        raise ValueError(
            f"{rank_name} must be in 0..{size_name}-1: {rank_name}={rank}, {size_name}={world_size}"
        )
    local_rank = _integer(variables, local_name) if local_name in variables else None
    if local_rank is not None and local_rank < 0:
        raise ValueError(f"{local_name} must not be negative: {local_rank}")
    return Place(method, rank, world_size, local_rank, _url(variables, address, world_size))


def _url(variables: Mapping[str, str], address: str, world_size: int) -> str:
    # a rank on its own meets nobody: any free port (0) will do
    port = _DEFAULT_PORT if world_size > 1 else 0
    if "MASTER_PORT" in variables:
        port = _integer(variables, "MASTER_PORT")
        if not 0 < port < 65536:
            raise ValueError(f"MASTER_PORT must be in 1..65535: {port}")
    host = variables.get("MASTER_ADDR") or address
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def _read_env(variables: Mapping[str, str]) -> Place:
    return _place(variables, "env", "RANK", "WORLD_SIZE", "LOCAL_RANK")


def _read_slurm(variables: Mapping[str, str]) -> Place:
    size_name = "SLURM_NPROCS" if "SLURM_NPROCS" in variables else "SLURM_NTASKS"
    address = variables.get("SLURM_LAUNCH_NODE_IPADDR") or "localhost"
    return _place(variables, "slurm", "SLURM_PROCID", size_name, "SLURM_LOCALID", address)


def _read_open_mpi(variables: Mapping[str, str]) -> Place:
    names = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK")
    return _place(variables, "openmpi", *names)


_READERS = {"ENV": _read_env, "SLURM": _read_slurm, "OPENMPI": _read_open_mpi}
