"""Where the ranks of a launch run: their devices, backend, threads and variables.

Everything is decided from arguments and from the number of GPUs, which torch counts without
starting CUDA, so every mistake is refused before a rank exists.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from multiprocessing import spawn
from typing import Any

import torch

from nvalchemi.distributed.environment import (
    BACKEND_VARIABLE,
    DEVICE_VARIABLE,
    METHOD_VARIABLE,
)
from nvalchemi.notebook import threads as omp
from nvalchemi.notebook.device_choice import VISIBLE, Devices, choose

_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_REMEDIES = {
    "WORLD_SIZE": "give nprocs= instead",
    "LOCAL_WORLD_SIZE": "give nprocs= instead",
    BACKEND_VARIABLE: "give backend= instead",
    DEVICE_VARIABLE: "give devices= instead",
    VISIBLE: "give devices= instead",
}
_OURS = {
    *_REMEDIES,
    *"RANK LOCAL_RANK GROUP_RANK MASTER_ADDR MASTER_PORT TORCHELASTIC_USE_AGENT_STORE".split(),
    METHOD_VARIABLE,
}
_LONGEST = 100_000  # bytes of a variable; Linux takes 131,071 of each
_OF_INTERPRETER = ("PYTHON", "LD_", "DYLD_")  # may keep it from starting
_PATIENCE = 60.0  # s; how long an interpreter may take to start

PER_LAUNCH: frozenset[str] = frozenset({*_OURS, *_INTERFACES})
"""Variables that a process takes up late, when torch is imported but nothing has started.

torch, gloo, nccl and CUDA read them when a process group or CUDA starts (CUDA_VISIBLE_DEVICES
also when the devices are counted; torch keeps no count before). All others are read when the
interpreter or a library is loaded.
"""


@dataclass(frozen=True)
class Layout:
    """Where each rank of a launch runs; ``str()`` of it is the line shown at the start."""

    backend: str
    """"gloo" or "nccl"."""
    devices: tuple[str, ...]
    """Of each rank: "cpu", or "cuda:1" as this process counts."""
    threads: int
    """OMP_NUM_THREADS of each rank."""
    variables: Mapping[str, str] = field(repr=False, hash=False)
    """What all ranks get and the caller may choose."""
    visible: tuple[str, ...] = field(repr=False)
    """CUDA_VISIBLE_DEVICES of each rank."""

    @property
    def nprocs(self) -> int:
        """Number of ranks."""
        return len(self.devices)

    def environments(self) -> list[dict[str, str]]:
        """Return each rank's variables, over those of this process; MASTER_PORT is missing."""
        return [self._environment(rank) for rank in range(self.nprocs)]

    def _environment(self, rank: int) -> dict[str, str]:
        # ranks that share see one GPU each; else cuda:LOCAL_RANK is the rank's own, as by torchrun
        device = "cuda:0" if self._shared else f"cuda:{rank}"
        return {
            **self.variables,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.nprocs),
            "LOCAL_WORLD_SIZE": str(self.nprocs),
            "GROUP_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            # torch's own switch for "the launcher holds the store": rank 0 opens none
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            METHOD_VARIABLE: "ENV",
            BACKEND_VARIABLE: self.backend,
            DEVICE_VARIABLE: "cpu" if self.devices[rank] == "cpu" else device,
            VISIBLE: self.visible[rank],
        }

    @property
    def _shared(self) -> bool:
        return self.devices[0] != "cpu" and len(set(self.devices)) < self.nprocs

    def __str__(self) -> str:
        ranks = f"{self.nprocs} rank{'s' if self.nprocs > 1 else ''}"
        threads = f"{self.threads} thread{'s' if self.threads > 1 else ''}"
        each = " each" if self.nprocs > 1 else ""
        where = "on CPU"
        if self.devices[0] != "cpu":
            numbers = [int(name.partition(":")[2]) for name in dict.fromkeys(self.devices)]
            where = f"{'sharing' if self._shared else 'on'} cuda:{_listed(numbers)}"
        return f"{ranks} {where}, {self.backend}, {threads}{each}"


def lay_out(
    nprocs: int | None = None,
    devices: Any = None,
    backend: str | None = None,
    threads: int | None = None,
    env: Mapping[str, str] | None = None,
) -> Layout:
    """Decide where the ranks of a launch run.

    Parameters
    ----------
    nprocs
        Number of ranks; by default one for each of ``devices``, or one per GPU, or 2 on the CPU.
    devices
        "cpu", "cuda" (the first ``nprocs`` GPUs), or a CUDA device for each rank: a number as
        torch counts in this process, "cuda:1", a ``torch.device``, or a sequence of these. By
        default the GPUs where there are any and the backend is not gloo. A GPU that is named
        several times is shared, which needs ``backend="gloo"``.
    backend
        "gloo" or "nccl"; by default nccl on GPUs and gloo on the CPU.
    threads
        Threads of each rank; by default OMP_NUM_THREADS of ``env`` or of this process, or else
        the cores that this process may use, divided by the ranks.
    env
        Further environment variables of the ranks.

    Raises
    ------
    TypeError, ValueError
        If an argument is wrong, contradicts another, or asks for devices that are not there.
    """
    own = _environment(env)
    asked, speaks = choose(nprocs, devices, backend)
    text = omp.thread_variable(threads, len(asked), own)
    loopback = "lo" if sys.platform == "linux" else "lo0"
    # ranks of one machine talk over no other interface, unless the user chose one
    interfaces = {name: os.environ.get(name, loopback) for name in _INTERFACES}
    return Layout(
        backend=speaks,
        devices=tuple("cpu" if each == "cpu" else f"cuda:{each}" for each in asked),
        threads=omp.first_level(text),
        variables={**interfaces, **own, omp.VARIABLE: text},
        visible=_visible(asked),
    )


def _environment(env: Any) -> dict[str, str]:
    if env is not None and not isinstance(env, Mapping):
        raise TypeError(f"env must be a mapping of names to strings or None: {env!r}")
    for name, value in (env or {}).items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise TypeError(f"env must map names to strings: {name!r}: {value!r}")
        if not name or "=" in name or "\0" in name + value:
            raise ValueError(
                f"env must hold names without '=' and no null character: {name!r}: {value!r}"
            )
        if name in _OURS:
            remedy = _REMEDIES.get(name, "leave it out")
            raise ValueError(f"env must not set {name}: launch() sets it for each rank; {remedy}")
        _check_bytes(name, value)
    own = dict(env or {})
    if any(name.startswith(_OF_INTERPRETER) and os.environ.get(name) != own[name] for name in own):
        _check_that_python_starts(own)
    return own


def _check_bytes(name: str, value: str) -> None:
    try:
        size = len(os.fsencode(value)) + len(os.fsencode(name))
    except UnicodeEncodeError as error:
        raise ValueError(
            f"env must hold text that {error.encoding} can encode: {name!r}: {value!r}"
        ) from None
    if size > _LONGEST:
        raise ValueError(
            f"env must hold at most {_LONGEST:,} bytes for each name: {name!r} has {size:,}; pass "
            "it to the function as an argument"
        )


def _check_that_python_starts(own: dict[str, str]) -> None:
    """Let an interpreter start with these variables: some of them it refuses, or breaks at."""
    done = subprocess.run(
        [os.fsdecode(spawn.get_executable()), "-c", ""],
        env={**os.environ, **own},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        timeout=_PATIENCE,
    )
    if done.returncode:
        names = ", ".join(f"{n}={own[n]!r}" for n in own if n.startswith(_OF_INTERPRETER))
        told = done.stderr.decode(errors="replace").splitlines()
        reason = next((line for line in told if "rror" in line), f"exit code {done.returncode}")
        raise ValueError(f"env must let Python start: it does not with {names} ({reason.strip()})")


def _visible(asked: Devices) -> tuple[str, ...]:
    """Return CUDA_VISIBLE_DEVICES of each rank."""
    numbers = [each for each in asked if not isinstance(each, str)]
    if not numbers:
        return ("",) * len(asked)  # a rank on the CPU starts no CUDA by mistake
    there = torch.cuda.device_count()
    names = [str(number) for number in range(there)]
    if VISIBLE in os.environ:  # numbers or UUIDs; ours count through them
        parts = (part.strip() for part in os.environ[VISIBLE].split(","))
        names = list(takewhile(lambda part: part and not part.startswith("-"), parts))
    if len(names) < there:
        raise ValueError(
            f"{VISIBLE} must stay as it was when CUDA started: {os.environ[VISIBLE]!r} now, but "
            f"torch counts {there} GPUs; set it back, or restart the kernel and set it first"
        )
    if len(set(numbers)) < len(numbers):
        return tuple(names[number] for number in numbers)
    return (",".join(names[number] for number in numbers),) * len(numbers)


def _listed(numbers: list[int]) -> str:
    if len(numbers) > 2 and numbers == list(range(numbers[0], numbers[0] + len(numbers))):
        return f"{numbers[0]}-{numbers[-1]}"
    return ",".join(map(str, numbers))
