"""Which device each rank gets and what they speak, from what was asked for and what is there.

torch counts the GPUs without starting CUDA.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Set
from itertools import islice
from operator import index
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from nvalchemi.distributed.environment import BACKENDS
from nvalchemi.notebook.threads import most_ranks

VISIBLE = "CUDA_VISIBLE_DEVICES"
_CPU_RANKS = 2  # where no number is given and there is no GPU to count
_MOST_NAMED = 1024  # ranks whose devices are named one by one

Devices: TypeAlias = tuple[int | str, ...]
"""Of each rank: "cpu", or a GPU's number as torch counts in this process; never both."""


def choose(nprocs: Any, devices: Any, backend: Any) -> tuple[Devices, str]:
    """Return each rank's device and the backend; the arguments are those of ``lay_out``.

    Raises
    ------
    TypeError, ValueError
        If an argument is wrong, contradicts another, or asks for devices that are not there.
    """
    count = _rank_count(nprocs)
    if backend is not None and backend not in BACKENDS:
        kind = ValueError if isinstance(backend, str) else TypeError
        raise kind(f"backend must be 'gloo', 'nccl' or None: {backend!r}")
    there = torch.cuda.device_count()
    asked = _asked(devices)
    if asked is None:
        asked = "cpu" if backend == "gloo" or (there == 0 and backend is None) else "cuda"
    chosen: Devices
    if asked == "cpu":
        _refuse_too_many(count)
        chosen = ("cpu",) * (count or _CPU_RANKS)
    elif isinstance(asked, str):
        chosen = _first_gpus(count, there, backend)
    else:
        chosen = asked
        _check_devices(chosen, count, there)
    return chosen, _backend(backend, chosen)


def _rank_count(nprocs: Any) -> int | None:
    if nprocs is None:
        return None
    count = _integer(nprocs)
    if count is None:
        raise TypeError(f"nprocs must be an integer or None: {nprocs!r}")
    if count < 1:
        raise ValueError(f"nprocs must be at least 1: {count}; None starts one rank per GPU")
    return count


def _refuse_too_many(count: int | None) -> None:
    most = most_ranks()
    if count is not None and count > most:
        named = ", or name a device for each: devices=['cpu'] * " + str(count)
        raise ValueError(
            f"nprocs must be at most {most} on this CPU: {count}; each rank is a process of 200 MB "
            f"and more; use nprocs={most} or fewer{named if count <= _MOST_NAMED else ''}"
        )


def _integer(value: Any) -> int | None:
    try:
        return None if isinstance(value, bool) else index(value)
    except TypeError:
        return None


def _asked(devices: Any) -> str | Devices | None:
    """Return None, "cpu", "cuda", or what each rank gets: "cpu" or the number of a GPU."""
    if devices is None or (isinstance(devices, str) and devices in ("cpu", "cuda")):
        return devices
    if isinstance(devices, torch.device) and devices.index is None:
        return _asked(str(devices))
    if isinstance(devices, (str, bytes, torch.device)) or _integer(devices) is not None:
        one = _entry(devices)
        return one if isinstance(one, str) else (one,)  # "cpu:0" is no single place
    if not isinstance(devices, Iterable) or isinstance(devices, (Mapping, Set)):
        raise TypeError(_devices_must(devices))
    entries = tuple(_entry(each) for each in islice(devices, _MOST_NAMED + 1))
    if len(entries) > _MOST_NAMED:
        raise ValueError(
            f"devices must name one device for each rank, {_MOST_NAMED} at most: there are more"
        )
    if not entries:
        raise ValueError("devices must name a device for each rank: it is empty")
    return entries


def _entry(device: Any) -> int | str:
    number = _integer(device)
    if number is None and not isinstance(device, (str, torch.device)):
        raise TypeError(_devices_must(device))
    text = str(device) if number is None else f"cuda:{number}"
    if text == "cuda":
        raise ValueError("devices must say which GPU each rank gets: 'cuda'; write 'cuda:0'")
    if text in ("cpu", "cpu:0"):
        return "cpu"
    if not re.fullmatch(r"cuda:[0-9]+", text):
        raise ValueError(_devices_must(device))
    return int(text.removeprefix("cuda:"))


def _devices_must(value: Any) -> str:
    return (
        "devices must be 'cpu', 'cuda', or one CUDA device for each rank, as in [0, 1] or "
        f"['cuda:0', 'cuda:1']: {value!r}"
    )


def _first_gpus(count: int | None, there: int, backend: str | None) -> tuple[int, ...]:
    if there == 0:
        what = "backend 'nccl'" if backend == "nccl" else "devices='cuda'"
        raise ValueError(f"{what} needs one GPU per rank: {_found(0)}; use devices='cpu'")
    ranks = count or there
    if ranks > there:
        shared = f"[rank % {there} for rank in range({ranks})]"
        if ranks <= 8:
            shared = str([rank % there for rank in range(ranks)])
        raise ValueError(
            f"each rank needs a GPU of its own: {ranks} ranks, {_found(there)}; use nprocs={there}"
            " or fewer, train on the CPU with devices='cpu', or share the GPUs with "
            f"devices={shared}, backend='gloo'"
        )
    return tuple(range(ranks))


def _check_devices(asked: Devices, count: int | None, there: int) -> None:
    numbers = [each for each in asked if not isinstance(each, str)]
    if numbers and len(numbers) < len(asked):
        raise ValueError(
            f"devices must all be 'cpu' or all be GPUs: {list(asked)}; the ranks of a launch speak "
            "one backend"
        )
    unknown = [number for number in numbers if number >= there]
    if unknown:
        allowed = f"numbers from 0 to {there - 1}" if there else "devices='cpu'"
        many = len(asked) == 1 and count is None and 1 < numbers[0] == there
        hint = f"; for {there} ranks use nprocs={there}" if many else ""
        raise ValueError(
            f"devices must be GPUs that this process sees: {unknown}, {_found(there)}; use "
            f"{allowed}{hint}"
        )
    if count is not None and count != len(asked):
        raise ValueError(
            f"devices must name one device for each rank: {len(asked)} named, nprocs {count}; "
            f"use nprocs={len(asked)}, or name {count} (gloo ranks may share a GPU: name it again)"
        )


def _backend(backend: str | None, asked: Devices) -> str:
    if asked[0] == "cpu":
        if backend == "nccl":
            raise ValueError(
                "backend 'nccl' needs one GPU per rank: devices are 'cpu'; leave backend out, or "
                "name GPUs"
            )
        return "gloo"
    has_nccl = dist.is_available() and dist.is_nccl_available()
    if backend == "nccl" and not has_nccl:
        raise ValueError("backend 'nccl' is not in this build of torch; use backend='gloo'")
    backend = backend or ("nccl" if has_nccl else "gloo")
    if backend == "nccl" and len(set(asked)) < len(asked):
        raise ValueError(
            f"nccl needs a different GPU for each rank: devices={list(asked)}; share them with "
            "backend='gloo', or name each GPU once"
        )
    return backend


def _found(there: int) -> str:
    shown = f" ({VISIBLE}={os.environ[VISIBLE]})" if VISIBLE in os.environ else ""
    return f"{there} GPU{'' if there == 1 else 's'} found{shown}"
