"""The Stop button: the cell is back, no process, socket or shared memory is left."""

import random
import time

import faults
import pytest
import trials
from faults import ours
from kernels import Kernel

warmed: list[Kernel] = []


@pytest.fixture
def kernel(kernels):
    """A kernel after a first launch, which may open what a kernel keeps."""

    def warm() -> Kernel:
        kernel = kernels.get()
        if kernel not in warmed:
            kernel.check(ours("train_once", timeout=60))
            time.sleep(5)  # ranks that wait for the next launch have come
            warmed.append(kernel)
        return kernel

    return warm


@pytest.mark.parametrize("where", ["Python code", "a collective", "a DataLoader"])
def test_an_interrupt_ends_all(kernels, kernel, where):
    def trial(number: int) -> float:
        pause = random.Random(number).random() * 0.3
        outcome = faults.interrupt(kernel(), ours, where, pause)
        assert outcome.cell.ename == "KeyboardInterrupt"
        assert outcome.left == [], "processes"
        assert outcome.shared == set(), "shared memory"
        assert outcome.kept == [], "open in the kernel"
        return outcome.seconds

    trials.run(
        f"interrupt in {where}: nothing left",
        trial,
        short=1,
        limit=1.5,
        after_failure=kernels.discard,
    )


def test_the_kernel_goes_on(kernels):
    cell = kernels.get().check(f"list({ours('train_once', timeout=60)})")
    assert cell.result == "[0, 1]"
