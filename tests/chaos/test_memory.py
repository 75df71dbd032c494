"""A large captured tensor is in memory once."""

import trials
from faults import ours

SIZE = "torch.ones(100_000_000)"  # 400 MB


def test_400_megabytes_travel_through_shared_memory(kernels):
    def launched(data: str) -> tuple[float, float]:
        """Return the largest private memory of a rank in MB, and the seconds of the launch."""
        cell = kernel.check(
            f"max({ours('LAMBDA').replace('LAMBDA', f'lambda: private_megabytes({data})')})"
        )
        return float(cell.result), cell.seconds

    kernel = kernels.get()
    kernel.check(f"large, small = {SIZE}, torch.ones(1000)")
    launched("small")
    extra_seconds = []

    def trial(number: int) -> float:
        (usual, seconds), (private, longer) = launched("small"), launched("large")
        extra_seconds.append(longer - seconds)
        assert private - usual < 40, "a tenth of the tensor is private to a rank"
        return max(0.0, private - usual)

    trials.run(
        "400 MB captured tensor: private memory of a rank",
        trial,
        short=1,
        share=0.1,
        limit=10,
        unit="MB",
    )
    trials.run(
        "400 MB captured tensor: longer than with 4 kB",
        extra_seconds.__getitem__,
        short=1,
        share=0.1,
        limit=1,
    )
