"""Where the ranks of one launch meet: a store that this process holds, on the loopback."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from torch.distributed import TCPStore

LOOPBACK = "127.0.0.1"


@contextmanager
def meeting_point() -> Iterator[int]:
    """Hold the store where the ranks meet, and give its port: bound before anybody is told."""
    listener = socket.create_server((LOOPBACK, 0))
    port = listener.getsockname()[1]
    store = TCPStore(
        LOOPBACK,
        port,
        is_master=True,
        timeout=timedelta(seconds=30),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    try:
        yield port
    finally:
        del store
