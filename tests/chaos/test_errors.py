"""A failing rank, a killed rank: named in the cell, and the next launch works."""

import faults
import trials
from faults import ours


def test_an_error_beside_a_barrier_is_named_at_once(kernels):
    def trial(number: int) -> float:
        failing = number % 2
        cell, seconds = faults.error(kernels.get(), ours, failing)
        assert cell.ename == "RankError"
        assert cell.evalue.startswith(f"rank {failing}: KeyError: 'energy at ")
        assert 'raise KeyError(f"energy' in cell.evalue  # the cell's own line
        return seconds

    trials.run(
        "error on one rank while the other waits in a barrier, right rank named",
        trial,
        short=2,
        limit=0.5,
        after_failure=kernels.discard,
    )


def test_a_killed_rank_is_named_and_the_next_launch_works(kernels):
    def trial(number: int) -> float:
        kernel, victim = kernels.get(), number % 2
        cell, seconds = faults.sigkill(kernel, ours, victim)
        assert cell.ename == "RankError"
        assert cell.evalue.startswith(f"rank {victim}: ") and "SIGKILL" in cell.evalue
        again = kernel.check(f"list({ours('train_once', timeout=60)})")
        assert again.result == "[0, 1]"
        return seconds

    trials.run(
        "SIGKILL of a rank: named, and the next launch works",
        trial,
        short=1,
        limit=0.3,
        after_failure=kernels.discard,
    )
