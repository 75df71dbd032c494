"""Where scripts of the peer look for the helpers of `nvalchemi.distributed.collectives`."""

from nvalchemi.distributed.collectives import (
    agree,
    all_gather_objects,
    all_reduce,
    barrier,
    destroy_distributed,
    distributed_device,
    get_local_rank,
    get_rank,
    get_world_size,
    init_distributed,
    is_distributed_initialized,
)

__all__ = [
    "agree",
    "all_gather_objects",
    "all_reduce",
    "barrier",
    "destroy_distributed",
    "distributed_device",
    "get_local_rank",
    "get_rank",
    "get_world_size",
    "init_distributed",
    "is_distributed_initialized",
]
