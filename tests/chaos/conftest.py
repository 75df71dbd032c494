"""The fault trials: short in ``make test``, in full by ``make chaos`` with a table at the end."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import trials
from faults import prepared
from kernels import Kernel

REPOSITORY = Path(__file__).resolve().parents[2]


class Kernels:
    """The kernel of the trials, one after the other; after a failure the next gets a new one."""

    def __init__(self) -> None:
        self._kernel: Kernel | None = None

    def get(self) -> Kernel:
        if self._kernel is None:
            kernel = Kernel(quiet=trials.is_full(), PYTHONPATH=str(REPOSITORY))
            self._kernel = prepared(kernel)
        return self._kernel

    def discard(self, now: bool = True) -> list[int]:
        """End the kernel; return which processes outlived it."""
        kernel, self._kernel = self._kernel, None
        return kernel.close(now) if kernel is not None else []


@pytest.fixture(scope="session")
def kernels() -> Iterator[Kernels]:
    kernels = Kernels()
    yield kernels
    assert kernels.discard(now=False) == [], "processes outlived their kernel"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if trials.is_full():
        terminalreporter.write_line(trials.table(trials.load()))
        terminalreporter.write_line(f"in full: {trials.RESULTS}")
