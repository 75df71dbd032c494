"""A kernel that is restarted or killed at any moment leaves nothing."""

import random
import time

import faults
import pytest
import trials
from faults import PHASES, ours, prepared
from traces import marked, seconds_until

STARTUP = 2.5  # s, about what a first launch takes until its ranks train


CASES = [(how, phase) for how in ("kill -9", "restart") for phase in PHASES]


@pytest.mark.parametrize("how, phase", CASES if trials.is_full() else CASES[:4])
def test_nothing_is_left_of_a_launch(kernels, how, phase):
    def trial(number: int) -> float:
        kernel = kernels.get()
        if number % 2:  # the ranks of every other trial have waited for their launch
            kernel.check(ours("train_once", timeout=60))
            time.sleep(3)
        chance = random.Random(f"{phase}{number}").random()
        seconds, left, shared = faults.end_of_kernel(kernel, ours, how, phase, chance, STARTUP)
        if how == "restart":
            kernel.connect_again()
            prepared(kernel)
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


def test_nothing_is_left_of_ranks_that_wait_for_a_launch(kernels):
    def trial(number: int) -> float:
        kernel = kernels.get()
        kernel.check(ours("train_once", timeout=60))
        time.sleep(random.Random(number).random() * 4)  # while they start, or have started
        kernel.kill()
        seconds, left = seconds_until(lambda: marked(kernel.mark), 10)
        kernels.discard()
        assert left == []
        return seconds

    trials.run(
        "kill -9 of the kernel while ranks wait for a launch: nothing left",
        trial,
        short=1,
        limit=2,
        after_failure=kernels.discard,
    )
