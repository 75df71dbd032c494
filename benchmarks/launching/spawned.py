"""Bare ``torch.multiprocessing.spawn`` of functions that are imported from a file."""

import os
import socket
from typing import Any

import rank_functions  # type: ignore[import-not-found]  # in tests/chaos
import torch


def run(name: str, *args: Any) -> None:
    """Run a function of rank_functions on two ranks."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    torch.multiprocessing.spawn(_call, (port, name, args), nprocs=2)


def _call(rank: int, port: int, name: str, args: tuple) -> None:
    os.environ.update(
        {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
    )
    getattr(rank_functions, name)(*args)
