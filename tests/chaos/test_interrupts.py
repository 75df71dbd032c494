"""The Stop button: the cell is back, no process, socket or shared memory is left."""

import random

import faults
import pytest
import trials
from faults import ours


@pytest.mark.parametrize("where", ["Python code", "a collective", "a DataLoader"])
def test_an_interrupt_ends_all(kernels, where):
    def trial(number: int) -> float:
        pause = random.Random(number).random() * 0.3
        outcome = faults.interrupt(kernels.get(), ours, where, pause)
        assert outcome.cell.ename == "KeyboardInterrupt"
        assert outcome.left == [], "processes"
        assert outcome.shared == set(), "shared memory"
        if number:  # the first launch of a kernel may open what the kernel keeps
            assert outcome.kept == {}, "open in the kernel"
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
