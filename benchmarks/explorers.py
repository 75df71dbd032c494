"""Explorers at two sizes: first picture, step of a slider, memory, and bytes sent for a redraw.

    OMP_NUM_THREADS=1 python benchmarks/explorers.py

Each size is measured in a process of its own. A step is what a front end causes by moving a slider
by one: the value arrives, the visible tab is computed and drawn, and the widgets have sent what has
changed. Printed are medians of elapsed time; where other work runs on the machine they are longer
than what the explorer needs, so the time of the CPU stands beside them.
"""

import argparse
import gc
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

SIZES = {"1e5 x 8": (10**5, 8), "1e8 x 1024": (10**8, 1024)}
BATCH, STEPS = 64, 15
PAGES = ("Assignment", "Who saw what", "Load", "Resume")
LIMITS = {
    "first picture": {"1e5 x 8": 1000, "1e8 x 1024": 1000},
    "step": {"1e5 x 8": 50, "1e8 x 1024": 100},
    "kB": 300,
    "MB": 200,
}


def plan_of(samples: int, ranks: int) -> Any:
    import numpy as np

    from nvalchemi.sharding import ShardPlan

    sizes = np.random.default_rng(0).integers(5, 200, samples).astype(np.uint8)
    lengths = [samples * 6 // 10, samples * 3 // 10, samples // 10]
    return ShardPlan(lengths, world_size=ranks, batch_size=BATCH, epochs=20, sizes=sizes)


class Sent:
    """Bytes of all messages of widgets to the front end."""

    def __init__(self) -> None:
        self.bytes = 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        from ipywidgets import Widget

        before = Widget.send_state
        sent = self

        def send_state(widget: Any, key: Any = None) -> None:
            sent.bytes += len(json.dumps(widget.get_state(key=key), default=str))
            before(widget, key)

        Widget.send_state = send_state
        try:
            yield
        finally:
            Widget.send_state = before


def timed(work: Callable[[], Any]) -> tuple[float, float]:
    """Elapsed and CPU time, in ms."""
    elapsed, cpu = perf_counter(), process_time()
    work()
    return 1e3 * (perf_counter() - elapsed), 1e3 * (process_time() - cpu)


def memory(which: str) -> float:
    """Memory of this process now (VmRSS), or at the highest since `forget_peak` (VmHWM), in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(which)) / 1024


def forget_peak() -> None:
    """Let the kernel note the highest memory from now on."""
    Path("/proc/self/clear_refs").write_text("5")


def step(explorer: Any, control: str, value: int) -> Callable[[], None]:
    """What a front end causes: only the urgent part, as in a kernel; a check comes when idle."""

    def work() -> None:
        explorer._quiet = True  # without a loop the check would follow at once
        explorer.controls[control].value = value
        explorer._quiet = False
        explorer._redraw()

    return work


def measure_size(samples: int, ranks: int) -> dict[str, Any]:
    from nvalchemi.notebook.explorers import BatchExplorer, ShardExplorer

    plan = plan_of(samples, ranks)
    gc.collect()
    forget_peak()
    before, sent = memory("VmRSS"), Sent()
    rows: dict[str, Any] = {}
    # first picture: what a user waits for, with the imports of matplotlib and ipywidgets
    checks = ShardExplorer.inspect
    ShardExplorer.inspect = lambda explorer: None  # type: ignore
    made: list[Any] = []
    rows["first picture"] = timed(lambda: made.append(ShardExplorer(plan)))
    ShardExplorer.inspect = checks  # type: ignore[method-assign]
    explorer = made[0]
    rows["check of the plan, idle"] = timed(explorer.inspect)
    with sent.counted():
        for page in PAGES:
            explorer.show(page)
            rows[f"epoch, {page}"], rows[f"kB, {page}"] = steps(explorer, "epoch", sent, range(20))
        explorer.show("Assignment")
        many = range(ranks - STEPS, ranks)
        rows["world size, Assignment"], _ = steps(explorer, "world_size", sent, many)
        for page in ("Composition", "One batch"):
            batches = BatchExplorer(plan).show(page)
            rows[f"epoch, {page}"], rows[f"kB, {page}"] = steps(batches, "epoch", sent, range(20))
    rows["MB above the plan"] = memory("VmHWM") - before
    return rows


def steps(
    explorer: Any, control: str, sent: Sent, values: range
) -> tuple[tuple[float, float], float]:
    """Median times of steps, and the most kB that one has sent."""
    times, most = [], 0
    for value in values[:STEPS]:
        sent.bytes = 0
        times.append(timed(step(explorer, control, value)))
        assert all(pane.error is None for pane in explorer._visible()), explorer._visible()[0].error
        most = max(most, sent.bytes)
    return (median(t for t, _ in times), median(t for _, t in times)), most / 1000


def run_folder_rows() -> list[str]:
    """Rows of the cost of the monitor, if its benchmark is there."""
    try:
        from run_folder import measure
    except ImportError:
        return []
    return [f"| {name} | {value} |" for name, value in dict(measure()).items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SIZES)
    chosen = parser.parse_args().size
    if chosen:
        print(json.dumps(measure_size(*SIZES[chosen])))
        return
    found = {}
    for name in SIZES:
        command = [sys.executable, __file__, "--size", name]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found[name] = json.loads(done.stdout.splitlines()[-1])
    print("| ms elapsed (CPU), or as said | " + " | ".join(SIZES) + " |")
    print("|---|" + "---|" * len(SIZES))
    for row in found["1e5 x 8"]:
        print(f"| {row} | " + " | ".join(shown(found[size][row]) for size in SIZES) + " |")
    print(f"limits: {json.dumps(LIMITS)}")
    for line in run_folder_rows():
        print(line)


def shown(value: Any) -> str:
    return f"{value[0]:.0f} ({value[1]:.0f})" if isinstance(value, list) else f"{value:.0f}"


if __name__ == "__main__":
    main()
