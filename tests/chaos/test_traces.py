"""What launch() leaves in the kernel, loads on a rank and opens to the network: nothing."""

import ast
import subprocess
import sys
import tempfile
import time

import faults
import pytest
from faults import ours
from traces import listening, marked

STATE = """
def _state():
    import multiprocessing, os, random, re, signal, sys, threading, torch
    import psutil
    children = [" ".join(child.cmdline()) for child in psutil.Process().children(recursive=True)]
    hidden = re.compile(r"_(i*|_|___?|\\d+|i\\d+|exit_code|dh|oh|ih|state)$")
    return {
        "variables": sorted(n for n in get_ipython().user_ns if not hidden.match(n)),
        "environment": sorted(os.environ.items()),
        "handlers": [str(signal.getsignal(s)) for s in sorted(signal.valid_signals())],
        "blocked signals": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "group": torch.distributed.is_initialized(),
        "threads": sorted(t.name for t in threading.enumerate()),
        "native threads": len(os.listdir("/proc/self/task")),
        # those that wait for the next launch are allowed
        "processes": [c for c in children if "import spawn_main" not in c],
        "folder": os.getcwd(),
        "path": list(sys.path),
        "start method": multiprocessing.get_start_method(allow_none=True),
        "torch threads": torch.get_num_threads(),
        "random": hash(random.getstate()),
        "torch random": hash(torch.random.get_rng_state().numpy().tobytes()),
        "hooks": [str(sys.excepthook), str(threading.excepthook), str(sys.stdout)],
        "main": sorted(vars(sys.modules["__main__"]).keys() - get_ipython().user_ns.keys()),
    }
"""
LAUNCHES = {
    "a launch": ours("train_once"),
    "a failed launch": ours("fail_beside_a_barrier", 1),
    "a refused launch": ours("train_once", nprocs=0),
    "a launch out of time": ours("train_once", timeout=0.2),
    "a launch in a thread": (
        "import threading\n"
        "thread = threading.Thread(target=lambda: launch(train_once, nprocs=2))\n"
        "thread.start(); thread.join(); del thread, threading"
    ),
}


def _state(kernel) -> dict:
    return ast.literal_eval(kernel.check("_state()").result)


@pytest.mark.parametrize("name", LAUNCHES)
def test_the_kernel_is_as_before_after(kernels, name):
    kernel = kernels.get()
    kernel.check(STATE)
    before = _state(kernel)
    kernel.run(LAUNCHES[name])
    deadline = time.monotonic() + 5  # ranks that will wait for the next launch may be starting
    while (after := _state(kernel)) != before and time.monotonic() < deadline:
        time.sleep(0.1)
    assert {k: after[k] for k in after if after[k] != before[k]} == {}


def test_a_rank_loads_what_its_function_needs(kernels):
    heavy = ["zarr", "matplotlib", "physicsnemo", "ase", "vesin", "scipy", "pandas", "ipywidgets"]
    cell = kernels.get().check(f"list({ours('loaded', heavy)})")
    assert cell.result == "[[], []]"


def test_import_nvalchemi_loads_no_torch():
    code = "import sys, nvalchemi; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_only_the_loopback_address_listens(kernels):
    kernel = kernels.get()
    with tempfile.TemporaryDirectory() as folder:
        cell = kernel.send(ours("wait_for_each_other", folder))
        ranks = faults.ranks_in(kernel, cell, folder)
        addresses = listening(marked(kernel.mark))
        of_ranks = listening([pids[0] for pids in ranks])
        kernel.interrupt()
        kernel.wait(cell)
    assert of_ranks, "gloo listens on each rank"
    assert addresses <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
