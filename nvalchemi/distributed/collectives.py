"""Where this rank stands, and the collectives that the library needs, with or without a manager.

A manager is anything that tells its rank and world size by attribute or method (``rank`` or
``global_rank`` or ``get_rank()``, ...): DistributedManager, a user's own class, a stand-in of a
test. Without one, ``torch.distributed`` is asked, then the launcher's variables.
"""

from __future__ import annotations

import inspect
import os
import sys
import time
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from nvalchemi.distributed.environment import read_backend
from nvalchemi.distributed.rank_process import is_worker
from nvalchemi.distributed.rendezvous import init_process_group

_MISSING = object()


def _ask(manager: Any, *names: str) -> Any:
    """Return the first of ``names`` that the manager has, called if it is a method."""
    for name in names:
        value = getattr(manager, name, None) if manager is not None else None
        if value is not None:
            return value() if callable(value) else value
    return _MISSING


def _variable(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name} must be an integer: {text!r}") from None


def _has_group() -> bool:
    return dist.is_available() and dist.is_initialized()


def _running_manager() -> Any:
    """Return the initialised DistributedManager, without importing PhysicsNeMo to find out."""
    module = sys.modules.get("physicsnemo.distributed.manager")
    if module is None or not module.DistributedManager.is_initialized():
        return None
    return module.DistributedManager()


def get_rank(manager: Any = None) -> int:
    """Return this process's rank: from the manager, ``torch.distributed``, ``RANK``, or 0."""
    value = _ask(manager, "global_rank", "rank", "get_rank")
    if value is not _MISSING:
        return int(value)
    return dist.get_rank() if _has_group() else _variable("RANK", 0)


def get_world_size(manager: Any = None) -> int:
    """Return the number of ranks: from the manager, ``torch.distributed``, ``WORLD_SIZE``, or 1."""
    value = _ask(manager, "world_size", "get_world_size")
    if value is not _MISSING:
        return int(value)
    return dist.get_world_size() if _has_group() else _variable("WORLD_SIZE", 1)


def get_local_rank(manager: Any = None) -> int:
    """Return the rank within this machine: from the manager, ``LOCAL_RANK``, or 0."""
    value = _ask(manager, "local_rank", "get_local_rank")
    return int(value) if value is not _MISSING else _variable("LOCAL_RANK", 0)


def resolve_world_size() -> int:
    """Return the number of ranks of this run; 1 if nothing says otherwise."""
    return get_world_size(_running_manager())


def resolve_global_rank(global_rank: int | None = None) -> int:
    """Return ``global_rank`` if given, else this process's rank; 0 if nothing says otherwise."""
    return get_rank(_running_manager()) if global_rank is None else int(global_rank)


def is_distributed_initialized(manager: Any = None) -> bool:
    """Return whether communication is up, as the manager or ``torch.distributed`` says."""
    value = _ask(manager, "is_initialized", "initialized")
    return bool(value) if value is not _MISSING else _has_group()


def distributed_device(
    manager: Any = None,
    fallback: torch.device | str = "cpu",
    *,
    prefer_cuda: bool = True,
) -> torch.device:
    """Return this rank's device: the manager's, else ``cuda:local_rank``, else ``fallback``."""
    value = _ask(manager, "device")
    if value is not _MISSING:
        return torch.device(value)
    if prefer_cuda and torch.cuda.is_available():
        return torch.device("cuda", get_local_rank(manager) % torch.cuda.device_count())
    return torch.device(fallback)


def collective_device(fallback: torch.device | str = "cpu") -> torch.device:
    """Return where a tensor must lie to take part in a collective of the default group.

    The CPU unless the group speaks nccl alone; then this rank's GPU.
    """
    if _has_group() and str(dist.get_backend()) != "nccl":
        return torch.device("cpu")
    return distributed_device(_running_manager(), fallback)


def init_distributed(manager: Any = None, *, backend: str | None = None, **kwargs: Any) -> bool:
    """Bring communication up if it is not; return whether this call did it.

    A manager is asked to (``init_process_group``, ``initialize``, ``init`` or ``setup``, the
    first that it has). Without one the launcher's variables decide, and a single process is left
    as it is.

    Parameters
    ----------
    backend
        "gloo" or "nccl"; by default NVALCHEMI_DISTRIBUTED_BACKEND, else nccl where there are
        CUDA devices and gloo elsewhere.
    """
    if _has_group() or is_distributed_initialized(manager):
        return False
    for name in ("init_process_group", "initialize", "init", "setup"):
        start = getattr(manager, name, None)
        if callable(start):
            options = {**kwargs, **({"backend": backend} if backend else {})}
            _call_with_what_it_takes(start, options)
            return True
    if get_world_size(manager) <= 1:
        return False
    if backend is None:
        cuda = torch.cuda.is_available() and dist.is_nccl_available()
        backend = read_backend() or ("nccl" if cuda else "gloo")
    if backend == "nccl":
        torch.cuda.set_device(distributed_device(manager))
    init_process_group(backend, **kwargs)
    return True


def _call_with_what_it_takes(start: Any, options: dict[str, Any]) -> None:
    try:
        inspect.signature(start).bind(**options)
    except TypeError:
        options = {}  # a manager that chooses its backend by itself
    except ValueError:
        pass  # no signature to read, as of a builtin
    start(**options)


def destroy_distributed(manager: Any = None) -> None:
    """Take communication down, by the manager's ``cleanup`` if it has one; harmless if down."""
    if callable(getattr(manager, "cleanup", None)):
        manager.cleanup()
    if _has_group():
        settle()
        dist.destroy_process_group()


def settle(seconds: float = 0.1) -> None:
    """Let gloo's threads let go of the last tensors, before the group or the interpreter goes.

    A gloo thread needs the GIL to release the tensors of the last collective. Joining it while
    holding the GIL deadlocks, and finalising the interpreter while it waits aborts the process:
    with torch 2.13 one DDP training in four ended so under torchrun, none with this pause. A rank
    of ``launch`` needs none: it keeps its groups and leaves without finalising.
    """
    if not is_worker() and dist.is_initialized() and "gloo" in str(dist.get_backend_config()):
        time.sleep(seconds)


def barrier(manager: Any = None) -> None:
    """Wait until every rank is here; returns at once without a process group."""
    if _has_group():
        device = collective_device()
        dist.barrier(device_ids=[device.index or 0] if device.type == "cuda" else None)


def all_reduce(
    tensor: torch.Tensor, manager: Any = None, *, op: Any = dist.ReduceOp.SUM
) -> torch.Tensor:
    """Reduce ``tensor`` over all ranks in place and return it; unchanged without a process group.

    A tensor on a device that the group does not serve travels through one that it does.
    """
    if not _has_group():
        return tensor
    device = collective_device(tensor.device)
    moved = tensor if tensor.device.type == device.type else tensor.to(device)
    dist.all_reduce(moved, op=op)
    if moved is not tensor:
        tensor.copy_(moved)
    return tensor


def all_gather_objects(obj: Any, manager: Any = None) -> list[Any]:
    """Return every rank's ``obj`` (picklable), in the order of the ranks."""
    if not _has_group():
        return [obj]
    gathered: list[Any] = [None] * dist.get_world_size()
    device = collective_device()
    if device.type == "cuda":  # nccl sends the pickled bytes from the current device
        with torch.cuda.device(device):
            dist.all_gather_object(gathered, obj)
    else:
        dist.all_gather_object(gathered, obj)
    return gathered


def all_reduce_flags(flag: bool | int, manager: Any = None) -> torch.Tensor:
    """Return every rank's flag as an int64 tensor [world_size] on the CPU."""
    flags = torch.zeros(dist.get_world_size() if _has_group() else 1, dtype=torch.int64)
    flags[dist.get_rank() if _has_group() else 0] = int(flag)
    return all_reduce(flags, manager)


def agree(values: Mapping[str, Any], manager: Any = None) -> None:
    """Check that all ranks hold the same values; all of them fail together if not.

    One gathering of small Python objects; nothing happens without a process group or on one rank.

    Parameters
    ----------
    values
        Plain values (numbers, strings, tuples of them) by what they are called in the message.

    Raises
    ------
    RuntimeError
        On every rank, with the same text, if a value differs: "number of steps per epoch: 4 on
        rank 0, 3 on rank 1".
    """
    if not _has_group() or dist.get_world_size() == 1:
        return
    by_rank = all_gather_objects(dict(values), manager)
    names = list(dict.fromkeys(name for one in by_rank for name in one))
    differing = [_who_has_what(name, by_rank) for name in names]
    sentences = [sentence for sentence in differing if sentence]
    if sentences:
        raise RuntimeError(
            "the ranks do not agree, so training them together would hang or go wrong: "
            + "; ".join(sentences)
        )


def _who_has_what(name: str, by_rank: list[dict[str, Any]]) -> str:
    """Return "name: value on rank 0, value on ranks 1, 2", or "" where all are equal."""
    groups: dict[str, list[int]] = {}
    for rank, one in enumerate(by_rank):
        groups.setdefault(repr(one[name]) if name in one else "nothing", []).append(rank)
    if len(groups) == 1:
        return ""
    parts = [f"{_short(value)} on {_ranks(ranks)}" for value, ranks in groups.items()]
    return f"{name}: " + ", ".join(parts)


def _short(text: str) -> str:
    return text if len(text) <= 120 else text[:117] + "..."


def _ranks(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:6]))
    return f"ranks {shown}" + (f", ... ({len(ranks)} ranks)" if len(ranks) > 6 else "")
