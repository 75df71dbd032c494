"""The magics of ranks in a real Jupyter kernel."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager, start_new_kernel

DEFINITIONS = """%%ranks
import torch

def double(x):
    return 2 * x

class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 3
    def __getitem__(self, i):
        return i * i
"""
BLOCKED = """%%ranks
import torch, torch.distributed as d
if d.get_rank():
    d.recv(torch.ones(1), src=0)
"""
REPOSITORY = Path(__file__).resolve().parents[2]


class Kernel:
    """A kernel that runs cells and returns what they show."""

    def __init__(self, manager: KernelManager, client: BlockingKernelClient) -> None:
        self.manager, self.client = manager, client
        self.status = ""

    def run(self, code: str) -> str:
        shown: list[str] = []

        def take(message: dict) -> None:
            content = message["content"]
            text = content.get("data", {}).get("text/plain", "")
            shown.append(content.get("text", text) + content.get("evalue", ""))

        self.status = "aborted"
        while self.status == "aborted":  # what comes just after an error, with the queue
            reply = self.client.execute_interactive(
                code, allow_stdin=False, timeout=120, output_hook=take
            )
            self.status = reply["content"]["status"]
        return re.sub(r"\x1b\[[0-9;]*m", "", "".join(shown))

    def pids(self) -> list[int]:
        return [int(n) for n in self.run("print(*(r.pid for r in _status()))").split()]

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


def start() -> Kernel:
    kernel = Kernel(*start_new_kernel(kernel_name="python3"))
    kernel.run("%load_ext nvalchemi.notebook\nfrom nvalchemi.notebook.pool import newest_pool")
    kernel.run("def _status(): return newest_pool().status()")
    return kernel


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(REPOSITORY))
        kernel = start()
    yield kernel
    kernel.close()


def is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for_end(pids: list[int]) -> list[int]:
    deadline = time.monotonic() + 10
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return [pid for pid in pids if is_alive(pid)]


def test_a_cell_runs_on_every_rank_and_the_first_is_not_lost(kernel):
    shown = kernel.run(
        "%%ranks\nimport os\nrank = int(os.environ['RANK'])\nprint('at', rank)\nrank"
    )
    assert kernel.status == "ok", shown
    lines = shown.splitlines()
    assert lines[0].startswith("2 ranks on CPU, gloo")
    assert [line for line in lines if line.startswith("[rank 0]")] == [
        "[rank 0] at 0",
        "[rank 0] 0",
    ]
    assert [line for line in lines if line.startswith("[rank 1]")] == [
        "[rank 1] at 1",
        "[rank 1] 1",
    ]


def test_functions_and_classes_of_cells_serve_later_ones(kernel):
    kernel.run(DEFINITIONS)
    loader = "torch.utils.data.DataLoader(Squares(), num_workers=1)"
    shown = kernel.run(f"%%ranks 1\n[double(int(batch)) for batch in {loader}]")
    assert kernel.status == "ok" and shown.strip() == "[rank 1] [0, 2, 8]"


def test_a_failing_cell_fails_with_rank_and_its_own_line(kernel):
    shown = kernel.run("%%ranks\nkept = 5\nif rank == 1:\n    {}['energy']")
    assert kernel.status == "error"
    assert "rank 1: KeyError: 'energy'" in shown
    assert ", line 4, in <module>" in shown and "{}['energy']" in shown  # as the cell counts
    assert kernel.run("%%ranks 0\nkept").strip() == "[rank 0] 5"


def test_pull_and_push_leave_the_kernels_variables_alone(kernel):
    kernel.run("loss = object(); mine = [1, 2]\n_own = id(loss)")
    kernel.run("%%ranks\nloss = torch.tensor(float(rank))")
    names = "print(sorted(k for k in globals() if not k.startswith('_')), id(loss) == _own)"
    before = kernel.run(names)
    assert "rank 1: tensor(1.)" in kernel.run("%ranks_pull loss")
    assert "True" in kernel.run("get_ipython().run_line_magic('ranks_push', 'mine') is None")
    assert kernel.run(names) == before and before.strip().endswith("True")
    assert kernel.run("%%ranks 1\nmine").strip() == "[rank 1] [1, 2]"
    assert kernel.run("x = %ranks_pull loss + 1\nprint(*map(float, x))").strip() == "1.0 2.0"
    kernel.run("%%ranks 0\nalone = 7")
    assert kernel.run("%ranks_pull alone 0").strip() == "{0: 7}"
    assert kernel.run("x = %ranks_pull alone + 1 0\nprint(x)").strip() == "{0: 8}"
    assert kernel.run("%ranks_pull rank 0-1").strip() == "{0: 0, 1: 1}"
    assert "rank 1: 1" in kernel.run("%ranks_pull rank - 0")  # an expression
    assert "this kernel has no variable nowhere" in kernel.run("%ranks_push nowhere")


@pytest.mark.parametrize(
    ("cell", "said"),
    [
        ("%%ranks\nx = 1\n!ls", "line 3: '!ls' is IPython's syntax"),
        ("%%ranks\nawait f()", "no event loop"),
        ("%%ranks\nx = = 1", "invalid syntax"),
        ("%%ranks 7\n1", "there are ranks 0 to 1"),
        ("%%ranks 1-0\n1", "there are ranks 0 to 1"),
        ("%%ranks all\n1", "takes ranks like"),
        ("%ranks_push", "needs names"),
        ("%ranks_pull", "needs a name"),
        ("%ranks_pull x 7", "%ranks_pull 7: there are ranks 0 to 1"),
        ("%ranks_pull x =", "needs a name or an expression"),
        ("%ranks_start --threads many", "invalid int value"),
        ("%ranks_start -n 0", "nprocs must be at least 1"),
        ("%ranks_start -n '2", "No closing quotation: -n '2"),
    ],
)
def test_mistakes_are_said_before_anything_runs(kernel, cell, said):
    shown = kernel.run(cell)
    assert said in shown and kernel.status == "error"


@pytest.mark.parametrize(
    ("cell", "number", "line"),
    [
        ("return 3", 2, "return 3"),
        ("1\nyield 3\n", 3, "yield 3"),
        ("for i in 1, 2:\n  1\nbreak", 4, "break"),
        ("def f():\n  x = 1\n  global x", 4, "global x"),
        ("x = = 1", 2, "x = = 1"),
    ],
)
def test_a_syntax_error_shows_the_line_that_is_wrong(kernel, cell, number, line):
    reply = kernel.client.execute_interactive(
        f"%%ranks\n{cell}", timeout=120, output_hook=lambda message: None
    )["content"]
    shown = re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(reply["traceback"]))
    assert reply["ename"] == "SyntaxError"
    assert re.search(rf"<%%ranks In\[\d+\]>:{number}\n    {re.escape(line)}\n", shown), shown


def interrupt_while_busy(kernel: Kernel, cell: str, after: float) -> str:
    timer = threading.Timer(after, kernel.manager.interrupt_kernel)
    timer.start()
    try:
        return kernel.run(cell)
    finally:
        timer.cancel()


def test_the_stop_button_interrupts_python_and_keeps_namespaces(kernel):
    kernel.run("%%ranks\nimport time\nkept = 6")
    before = kernel.pids()
    cell = "%%ranks\ntry:\n    time.sleep(1000)\nfinally:\n    print('tidied')"
    shown = interrupt_while_busy(kernel, cell, 1.5)
    assert kernel.status == "error" and "[rank 1] tidied" in shown
    assert kernel.run("%%ranks 1\nkept").strip() == "[rank 1] 6" and kernel.pids() == before


def test_the_stop_button_restarts_only_the_ranks_out_of_a_collective(kernel):
    kernel.run("variable = 17")
    before = kernel.pids()
    cell = "%%ranks\nimport torch.distributed as d\nd.recv(torch.ones(1), src=1 - rank)"
    shown = interrupt_while_busy(kernel, cell, 2.0)
    assert kernel.status == "error" and "their namespaces are lost" in shown
    assert kernel.run("variable").strip() == "17"
    assert wait_for_end(before) == []
    assert kernel.run("%%ranks 0\n'rank' in globals()").strip() == "[rank 0] False"


def test_a_killed_rank_is_named_at_once(kernel):
    shown = kernel.run("%%ranks\nimport os\nif os.environ['RANK'] == '1': os.kill(os.getpid(), 9)")
    assert kernel.status == "error"
    assert "rank 1: killed by SIGKILL (out of memory?)" in shown
    kernel.run("%%ranks\n1")
    os.kill(kernel.pids()[0], signal.SIGKILL)
    deadline = time.monotonic() + 10
    while "dead: killed by SIGKILL" not in kernel.run("%ranks_status"):
        assert time.monotonic() < deadline
    assert "nothing was run" in kernel.run("%%ranks\n1") and kernel.status == "error"
    assert kernel.run("%%ranks 1\n2").strip() == "[rank 1] 2"


def test_restart_empties_namespaces_and_start_takes_options(kernel):
    kernel.run("%%ranks\nkept = 1")
    assert "restarted" in kernel.run("%ranks_restart")
    assert kernel.run("%%ranks 1\n'kept' in globals()").strip() == "[rank 1] False"
    before = kernel.pids()
    shown = kernel.run("named = %ranks_start -n 1 --devices cpu --threads 1")
    assert "namespaces are lost" in shown and "1 rank on CPU" in shown
    assert kernel.run("%%ranks\nimport torch; torch.get_num_threads()").strip() == "[rank 0] 1"
    assert kernel.run("named.run(lambda: 3).rank0").strip() == "3"
    assert wait_for_end(before) == []
    kernel.run("named.close()")
    assert kernel.run("%ranks_status").strip() == "no ranks"


def test_a_killed_kernel_leaves_no_rank(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    kernel = start()
    try:
        kernel.run("%%ranks\n1")
        pids = kernel.pids()
        kernel.client.execute(BLOCKED)
        time.sleep(0.5)
        os.kill(kernel.manager.provisioner.process.pid, signal.SIGKILL)
        assert wait_for_end(pids) == []
    finally:
        kernel.close()


def test_nbconvert_ends_with_an_error_code(tmp_path):
    cells = ["%load_ext nvalchemi.notebook", "%%ranks\nraise ValueError('mine')"]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
    nbformat.write(notebook, tmp_path / "failing.ipynb")
    command = "nbconvert --to notebook --execute failing.ipynb --output done.ipynb".split()
    done = subprocess.run(
        [sys.executable, "-m", "jupyter", *command],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode != 0 and "rank 0: ValueError: mine" in done.stderr
