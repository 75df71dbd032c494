"""Fixtures that tests of data sets and loaders share."""

import gc
import threading
from collections.abc import Callable

import pytest


@pytest.fixture
def new_threads() -> Callable[[], list[threading.Thread]]:
    """Reading threads that this test began and that still live."""
    gc.collect()
    before = set(threading.enumerate())

    def living() -> list[threading.Thread]:
        threads = set(threading.enumerate()) - before
        return [thread for thread in threads if thread.name.startswith("nvalchemi-read")]

    return living
