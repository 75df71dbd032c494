"""Samplers on one rank of many, beside torch's DistributedSampler, and a peer's where one is named.

    OMP_NUM_THREADS=1 python benchmarks/samplers.py
    python benchmarks/samplers.py --peer-python /path/to/its/environment/bin/python

The peer has the same import name, so it runs in an interpreter of its own (or that of the variable
NVALCHEMI_PEER_PYTHON). Every measurement is made in a fresh process, one after the other; printed
are medians, and how many times as much the others take. Times are those of the CPU, which what else
the machine does hardly touches. torch keeps a list of all samples, some 48 bytes each: where memory
is short it gets fewer samples, and the table says so.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import accumulate, islice
from statistics import median
from time import process_time
from typing import Any

BATCH = 64
RANKS = 1024
FURTHER = 1200  # batches after the first of which the mean is taken
ENOUGH = 15.0  # CPU seconds after which a slow measurement is not repeated
ROWS = {
    "first": ("first batch", "ms", 1.0),
    "further": ("each further own batch of 64", "us", 20.0),
    "memory": ("memory of a rank above import", "MB", 5.0),
    "seek": ("seek to the middle of an epoch", "ms", 1.0),
}


# --- one measurement, in a process of its own ---------------------------------------------------


class Data:
    """Three data sets that hold nothing but their lengths."""

    def __init__(self, total: int) -> None:
        self.datasets = [range(total * part // 10) for part in (6, 3, 1)]
        self.starts = [0, *accumulate(map(len, self.datasets))]

    def __len__(self) -> int:
        return sum(map(len, self.datasets))

    def to_global_index(self, dataset: int, index: int) -> int:
        """The peer's sampler asks for every sample; kept as cheap as it can be."""
        return self.starts[dataset] + index


class ManyData(Data):
    """Two thousand of them, of different lengths."""

    def __init__(self, total: int) -> None:
        mean = total // 2000
        self.datasets = [range(mean // 2 + mean * j // 2000) for j in range(2000)]


def ours(total: int, data: Callable[[int], Data] = Data) -> Any:
    from nvalchemi.data.datapipes import MultiDatasetBatchSampler

    dataset = data(total)
    return lambda: MultiDatasetBatchSampler(
        dataset, batch_size=BATCH, num_replicas=RANKS, rank=RANKS - 1
    )


def many(total: int) -> Any:
    return ours(total, ManyData)


def torchs(total: int) -> Any:
    from torch.utils.data import BatchSampler, DistributedSampler

    dataset: Any = range(total)  # torch asks for no more than a length
    return lambda: BatchSampler(
        DistributedSampler(dataset, num_replicas=RANKS, rank=RANKS - 1), BATCH, False
    )


def peer(total: int, **options: Any) -> Any:
    from nvalchemi.data.datapipes.samplers import MultiDatasetBatchSampler

    return lambda: MultiDatasetBatchSampler(
        Data(total), batch_size=BATCH, num_replicas=RANKS, rank=RANKS - 1, **options
    )


def peer_once(total: int) -> Any:
    return peer(total, replacement=False, epoch_policy="min_size")


CASES = {"ours": ours, "many": many, "torch": torchs, "peer": peer, "peer_once": peer_once}


def measure(case: str, total: int) -> dict[str, float]:
    """Figures of one case; the first batch includes making the sampler."""
    make = CASES[case](total)
    CASES[case](10_000)()  # imports and first calls
    found: dict[str, list[float]] = {"first": [], "seek": []}
    before = peak_memory()
    begun = process_time()
    while len(found["first"]) < 3 or process_time() - begun < 0.5:
        start = process_time()
        batches = iter(make())
        next(batches)
        found["first"].append(1e3 * (process_time() - start))
        if process_time() - begun > ENOUGH:
            break
    figures = {"further": 1e6 * seconds_a_batch(batches), "memory": peak_memory() - before}
    del batches
    begun = process_time()
    while len(found["seek"]) < 3 or process_time() - begun < 0.5:
        sampler = make()
        middle = len(sampler) // 2
        start = process_time()
        if hasattr(sampler, "set_epoch_step"):
            sampler.set_epoch_step(middle)
            next(iter(sampler))
        else:
            next(islice(iter(sampler), middle, None))
        found["seek"].append(1e3 * (process_time() - start))
        if process_time() - begun > ENOUGH:
            break
    return {**figures, **{name: median(values) for name, values in found.items()}}


def seconds_a_batch(batches: Iterator[Any]) -> float:
    """The mean, since some samplers compute many batches at once and then hand them out."""
    start = process_time()
    number = sum(1 for _ in islice(batches, FURTHER))
    return (process_time() - start) / max(number, 1)


def peak_memory() -> float:
    """Largest resident memory so far in MB; on Linux since the last call."""
    try:
        with open("/proc/self/status") as status:
            peak = next(line for line in status if line.startswith("VmHWM"))
        with open("/proc/self/clear_refs", "w") as reset:
            reset.write("5")
        return int(peak.split()[1]) / 1024
    except OSError:
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20


# --- the table ----------------------------------------------------------------------------------


def run(python: str, case: str, total: int) -> dict[str, float] | None:
    command = [python, os.path.abspath(__file__), "--case", case, "--samples", str(total)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        print(f"{case} could not be measured: {last}")
        return None
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def samples_for_torch(total: int) -> int:
    """As many as fit: at 48 bytes each in a third of the memory of this machine."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    while 48 * total > memory / 3:
        total //= 10
    return total


def sampler_rows(total: int, peer_python: str | None) -> None:
    torch_total = samples_for_torch(total)
    columns = {
        "ours": run(sys.executable, "ours", total),
        "2000 sets": run(sys.executable, "many", total),
        "torch": run(sys.executable, "torch", torch_total),
    }
    if peer_python:
        columns["peer"] = run(peer_python, "peer", total)
        columns["peer once"] = run(peer_python, "peer_once", total)
    table = {name: found for name, found in columns.items() if found is not None}
    print(f"{total:.0e} samples in 3 data sets, rank {RANKS - 1} of {RANKS}, batches of {BATCH}")
    if torch_total != total:
        print(f"torch has {torch_total:.0e} samples for want of memory")
    header = "".join(f"{name:>25}" for name in table)
    print(f"{'':<34}{'target':>10}{header}")
    for key, (title, unit, target) in ROWS.items():
        own = table["ours"][key] if "ours" in table else None
        cells = []
        for name, found in table.items():
            ratio = f" ({found[key] / own:,.3g}x)" if own and name != "ours" else ""
            cells.append(f"{found[key]:,.4g} {unit}{ratio}")
        print(f"{title:<34}{f'{target:g} {unit}':>10}" + "".join(f"{cell:>25}" for cell in cells))


def balanced_row() -> None:
    """Balanced ranks: 16 structures a rank on 1024 ranks, sizes with a heavy tail."""
    try:
        from nvalchemi.data.datapipes import BalancedBatchSampler
    except (ImportError, AttributeError) as error:
        print(f"balanced ranks: skipped ({error})")
        return
    import numpy as np

    size, steps = 16, 20
    rng = np.random.default_rng(0)
    atoms = np.minimum(np.exp(rng.normal(3.2, 0.85, 10**6)), 400).astype(np.int64) + 1
    sampler = BalancedBatchSampler(
        range(len(atoms)), batch_size=size, sizes=atoms, num_replicas=RANKS, rank=0
    )
    times, efficiencies = [], []
    for step in range(steps):
        start = process_time()
        dealt = sampler.window([step], np.arange(RANKS))[0]
        times.append(1e3 * (process_time() - start))
        load = np.where(dealt >= 0, atoms[dealt], 0).sum(axis=1)
        efficiencies.append(load.mean() / load.max())
    print(
        f"balanced ranks: efficiency {np.mean(efficiencies):.4f} (at least 0.985 wanted), "
        f"{median(times):.1f} ms a step (at most 10)"
    )


def plan_row(total: int) -> None:
    """ShardPlan.check() on all ranks."""
    try:
        from nvalchemi.data.datapipes import MultiDatasetBatchSampler
        from nvalchemi.sharding import ShardPlan
    except (ImportError, AttributeError) as error:
        print(f"plan.check(): skipped ({error})")
        return
    plan = ShardPlan(
        Data(total), sampler=MultiDatasetBatchSampler, world_size=RANKS, batch_size=BATCH
    )
    start = process_time()
    findings = plan.check()
    seconds = process_time() - start
    print(f"plan.check(): {seconds:.3f} s (at most 1 wanted), {len(findings)} findings")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=lambda text: int(float(text)), default=10**8)
    parser.add_argument(
        "--peer-python",
        default=os.environ.get("NVALCHEMI_PEER_PYTHON"),
        help="interpreter of an environment that has the peer",
    )
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        print(json.dumps(measure(arguments.case, arguments.samples)))
        return
    sampler_rows(arguments.samples, arguments.peer_python)
    balanced_row()
    plan_row(arguments.samples)


if __name__ == "__main__":
    main()
