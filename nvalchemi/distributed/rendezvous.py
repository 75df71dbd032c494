"""How the ranks of a job meet: as often as they like, and never waiting in silence.

A launcher's store (torchrun's, ``launch``'s) outlives the process groups that met over it. A second
group would find the first one's addresses under the same names and wait for ranks that are not
there, so each start gets a part of the store to itself.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch.distributed as dist

_PATIENCE = 10.0  # s; how long a rank waits for the others before it says so
_STALL = 3.0  # s; connecting takes milliseconds
_SHARED = "TORCHELASTIC_USE_AGENT_STORE"  # torch's switch: the launcher holds the store
_torch_start = dist.init_process_group
_starts = itertools.count()
_launcher_port: str | None = None


def note_launcher() -> None:
    """Note where the launcher's store is, before a function chooses a port of its own."""
    global _launcher_port
    _launcher_port = os.environ.get("MASTER_PORT") if os.environ.get(_SHARED) == "True" else None


note_launcher()


@functools.wraps(_torch_start)
def init_process_group(*args: Any, **kwargs: Any) -> None:
    """Start a process group as ``torch.distributed`` does, any number of times in one process.

    Takes the same arguments. A second start over a launcher's store works, a port that is not the
    launcher's is opened by rank 0, and a rank that waits long for the others says so.
    """
    given = inspect.signature(_torch_start).bind(*args, **kwargs).arguments
    address = _address(given.get("init_method"))
    if given.get("store") is not None or address is None:
        return _torch_start(*args, **kwargs)
    rank, world_size = (_place(given, name) for name in ("rank", "world_size"))
    if rank is None or world_size is None:
        return _torch_start(*args, **kwargs)
    with _told_when_slow(rank, world_size, address):
        if os.environ.get(_SHARED) == "True":
            timeout = given.get("timeout") or dist.distributed_c10d.default_pg_timeout
            given.pop("init_method", None)
            store = given["store"] = _open_store(*address, rank, world_size, timeout)
            given |= {"rank": rank, "world_size": world_size}
            store.set(f"arrived/{rank}", repr(time.time()))
            _torch_start(**given)
            _tell_of_a_stall(store, rank, world_size)
        else:
            _torch_start(**given)


def _address(init_method: str | None) -> tuple[str, int] | None:
    """Return where the ranks meet; None if torch is to find out, or to complain."""
    try:
        if init_method in (None, "env://"):
            return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        url = urlsplit(init_method)
        if url.scheme == "tcp" and not url.query and url.hostname and url.port:
            return url.hostname, url.port
    except (KeyError, ValueError):
        pass
    return None


def _place(given: dict[str, Any], name: str) -> int | None:
    if given.get(name, -1) != -1:
        return int(given[name])
    text = os.environ.get(name.upper(), "")
    return int(text) if text.isdigit() and given.get("init_method") in (None, "env://") else None


def _open_store(
    host: str, port: int, rank: int, world_size: int, timeout: timedelta
) -> dist.PrefixStore:
    """Return this start's part of the store at ``host:port``."""
    start = next(_starts)
    if str(port) == _launcher_port:
        store = dist.TCPStore(host, port, is_master=False, timeout=timeout)
    else:
        store = dist.TCPStore(
            host, port, world_size, is_master=rank == 0, timeout=timeout, multi_tenant=True
        )
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"nvalchemi/{attempt}/{start}", store)


def _tell_of_a_stall(store: dist.Store, rank: int, world_size: int) -> None:
    """Say that all ranks were there and the connection took seconds all the same.

    gloo's first connection stalls for 5 s in about one start of twenty (torch 2.13); a user who
    measures start-up wants to know. Of several machines the clocks must agree to within a second.
    """
    now = time.time()
    if rank != 0 or now - float(store.get("arrived/0")) < _STALL:
        return  # the usual case asks for nothing of the other ranks
    last = max(float(store.get(f"arrived/{other}")) for other in range(world_size))
    if now - last >= _STALL:
        print(
            f"the ranks took {now - last:.1f} s to connect although all were there: gloo's first "
            "connection stalls so in some starts; nothing is wrong with this run",
            file=sys.stderr,
            flush=True,
        )


@contextmanager
def _told_when_slow(rank: int, world_size: int, address: tuple[str, int]) -> Iterator[None]:
    others = [str(other) for other in range(world_size) if other != rank]
    shown = ", ".join(others[:6]) + (", ..." if len(others) > 6 else "")
    text = (
        f"rank {rank} of {world_size} has waited {_PATIENCE:g} s for rank{'s'[: len(others) - 1]} "
        f"{shown} at {address[0]}:{address[1]}; the launcher's variables (RANK, SLURM_PROCID, "
        "OMPI_COMM_WORLD_RANK) announce them: were they all started?\n"
    )
    timer = threading.Timer(_PATIENCE, lambda: print(text, end="", file=sys.stderr, flush=True))
    timer.daemon = True
    if others:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
