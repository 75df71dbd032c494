"""DistributedManager: PhysicsNeMo's manager, made to start wherever a rank can run.

The subclass holds no state of its own: rank, world size and device stay in the dictionary that
PhysicsNeMo's class shares between its instances, so PhysicsNeMo code sees the same runtime.
Each override names the fault it works around. All of them belong to PhysicsNeMo issue 1936
(multi-process CPU start, seen in 2.2.2); when that is mended, this class shrinks to nothing.
"""

from __future__ import annotations

import atexit
import os

import numpy as np
import torch
import torch.distributed as dist
from physicsnemo.distributed.manager import DistributedManager as _PhysicsNeMoManager
from physicsnemo.distributed.manager import (
    PhysicsNeMoUninitializedDistributedManagerWarning as PhysicsNeMoUninitializedDistributedManagerWarning,  # noqa: E501
)

from nvalchemi.distributed.collectives import settle
from nvalchemi.distributed.environment import (
    DEVICE_VARIABLE,
    METHOD_VARIABLE,
    Place,
    read_backend,
    read_device,
    read_place,
)
from nvalchemi.distributed.rendezvous import init_process_group

_ADOPTED = "existing group"  # whoever made it also destroys it


class DistributedManager(_PhysicsNeMoManager):
    """The distributed runtime of this process: rank, world size, device, groups, DDP defaults.

    Call :meth:`initialize` once, then construct instances freely: all share one state, also with
    ``physicsnemo.distributed.DistributedManager``.

    Examples
    --------
    >>> DistributedManager.initialize()
    >>> manager = DistributedManager()
    >>> manager.rank, manager.world_size
    (0, 1)
    """

    @staticmethod
    def initialize() -> None:
        """Start the runtime; harmless when it has started already.

        A ``torch.distributed`` process group that exists is adopted. Otherwise the launcher's
        variables decide: torchrun's (``RANK``, ``WORLD_SIZE``), SLURM's, OpenMPI's, in this order
        or as ``PHYSICSNEMO_DISTRIBUTED_INITIALIZATION_METHOD`` says. Without any, this is a
        single process and no process group is made. The backend is nccl where there are CUDA
        devices and gloo elsewhere; ``NVALCHEMI_DISTRIBUTED_BACKEND`` chooses another. The device
        is ``cuda:LOCAL_RANK`` with nccl and the CPU with gloo; ``NVALCHEMI_DISTRIBUTED_DEVICE``
        (cpu, cuda:0) chooses another. numpy's global random state is seeded with the rank, as
        PhysicsNeMo's manager does.

        Raises
        ------
        ValueError
            If the launcher's variables contradict each other, or name a GPU that is not there.
            Nothing has been started then.
        """
        # issue 1936: a second call warns there
        if DistributedManager.is_initialized():
            return
        # issue 1936: TORCH_NCCL_ASYNC_ERROR_HANDLING=0 there turns a dead rank into a hang
        if dist.is_available() and dist.is_initialized():
            _adopt_group()
        else:
            # issue 1936: a single process warns there
            place = read_place()
            if place is None:
                device = _local_device(0, _backend())
                if device.index:  # a GPU that was asked for; 0 is torch's current one already
                    torch.cuda.set_device(device)
                _publish(0, 1, 0, device, distributed=False, method="None")
            else:
                _start(place, _backend())
        np.random.seed(DistributedManager().rank)  # noqa: NPY002

    @staticmethod
    def initialize_env() -> None:
        """Start from ``RANK`` and ``WORLD_SIZE``, as torchrun sets them."""
        _start_by("ENV")

    @staticmethod
    def initialize_slurm(port: int | str) -> None:
        """Start from SLURM's variables; rank 0 listens on ``port``."""
        _start_by("SLURM", MASTER_PORT=str(port))

    @staticmethod
    def initialize_open_mpi(addr: str, port: int | str) -> None:
        """Start from OpenMPI's variables; rank 0 listens on ``addr:port``."""
        _start_by("OPENMPI", MASTER_ADDR=addr, MASTER_PORT=str(port))

    @staticmethod
    def setup(
        rank: int = 0,
        world_size: int = 1,
        local_rank: int | None = None,
        addr: str = "localhost",
        port: int | str = "12355",
        backend: str = "nccl",
        method: str = "env",
    ) -> None:
        """Start with everything told by the caller, without any variable."""
        _start(Place(method, rank, world_size, local_rank, f"tcp://{addr}:{port}"), backend)

    @staticmethod
    def cleanup(barrier: bool = False) -> None:
        """Destroy the process group and forget the state; harmless when there is nothing.

        Parameters
        ----------
        barrier
            Wait for all ranks first. A group that was adopted is left to whoever made it.
        """
        state = _PhysicsNeMoManager._shared_state
        # issue 1936: destroying a group that is not there raises at exit over the real error
        ours = state.get("_distributed") and state.get("_initialization_method") != _ADOPTED
        if ours and dist.is_initialized():
            if barrier:
                dist.barrier()
            settle()
            dist.destroy_process_group()
        _PhysicsNeMoManager._shared_state = {}


def _start_by(method: str, **variables: str) -> None:
    place = read_place({**os.environ, **variables, METHOD_VARIABLE: method})
    assert place is not None
    _start(place, _backend())


def _backend() -> str:
    return read_backend() or DistributedManager.get_available_backend()


def _start(place: Place, backend: str) -> None:
    # issue 1936: local rank modulo zero devices there, where the launcher gives none
    local_rank = place.local_rank
    if local_rank is None:
        local_rank = place.rank % max(1, torch.cuda.device_count())
    device = _local_device(local_rank, backend)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    init_process_group(
        backend,
        init_method=place.init_method,
        rank=place.rank,
        world_size=place.world_size,
        # issue 1936: a CPU device is passed there, which torch refuses; gloo has no use for one
        device_id=device if device.type == "cuda" and "nccl" in backend else None,
    )
    # issue 1936: the state is published there before the group exists, and stays when it fails
    _publish(place.rank, place.world_size, local_rank, device, True, place.method)


def _adopt_group() -> None:
    local_rank = int(os.environ.get("LOCAL_RANK", -1))
    if local_rank < 0:
        local_rank = dist.get_rank() % max(1, torch.cuda.device_count())
    device = _local_device(local_rank, str(dist.get_backend_config()))
    _publish(dist.get_rank(), dist.get_world_size(), local_rank, device, True, _ADOPTED)


def _local_device(local_rank: int, backend: str) -> torch.device:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    asked = read_device()
    if asked is not None:
        device = torch.device(asked)
        if device.type == "cuda" and (device.index or 0) >= count:
            raise ValueError(
                f"{DEVICE_VARIABLE}={asked} must be a GPU that this process sees: there are "
                f"{count}; name another, or unset it"
            )
        return device
    if "nccl" not in backend or count == 0:
        return torch.device("cpu")
    # a launcher that shows each rank one device only (SLURM's gpu binding) calls all of them 0
    if count > 1 and local_rank >= count:
        raise ValueError(
            f"local rank {local_rank} has no GPU of its own: {count} are visible; start at most "
            "one rank per GPU, or set NVALCHEMI_DISTRIBUTED_BACKEND=gloo to train on the CPU"
        )
    return torch.device("cuda", local_rank if count > 1 else 0)


def _publish(
    rank: int,
    world_size: int,
    local_rank: int,
    device: torch.device,
    distributed: bool,
    method: str,
) -> None:
    _PhysicsNeMoManager._shared_state.update(
        _is_initialized=True,
        _rank=rank,
        _world_size=world_size,
        _local_rank=local_rank,
        _device=device,
        _cuda=device.type == "cuda",
        _distributed=distributed,
        _initialization_method=method,
    )


# issue 1936: PhysicsNeMo destroys the group at exit, which hangs or aborts while a DDP model lives
atexit.unregister(_PhysicsNeMoManager.__dict__["cleanup"])
atexit.register(settle)
