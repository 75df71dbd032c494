"""A kernel that is restarted or killed at any moment leaves nothing."""

import random

import faults
import pytest
import trials
from faults import FUNCTIONS, PHASES, ours

STARTUP = 2.5  # s, about what a first launch takes until its ranks train


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("how", ["kill -9", "restart"])
def test_nothing_is_left(kernels, how, phase):
    def trial(number: int) -> float:
        kernel = kernels.get()
        chance = random.Random(f"{phase}{number}").random()
        seconds, left, shared = faults.end_of_kernel(kernel, ours, how, phase, chance, STARTUP)
        if how == "restart":
            kernel.connect_again()
            kernel.check("from nvalchemi.notebook import launch")
            kernel.check(FUNCTIONS)
        else:
            kernels.discard()
        assert left == [] and shared == set()
        return seconds

    trials.run(
        f"{how} of the kernel during {phase}: nothing left",
        trial,
        short=1,
        limit=2,
        after_failure=kernels.discard,
    )
