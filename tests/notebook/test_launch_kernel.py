"""launch() inside real Jupyter kernels: results, errors with the cell's lines, stop, kill."""

import os
import re
import signal
import time
from pathlib import Path

import nbformat
import psutil
import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import start_new_kernel
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

REPOSITORY = Path(__file__).resolve().parents[2]

DEFINITIONS = """
import sys
import torch
from nvalchemi.notebook import launch

class Net(torch.nn.Linear):
    pass

class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, i):
        return torch.tensor(float(i * i))

STEPS = 3

def train(rate, out):
    from nvalchemi.distributed import DistributedManager
    DistributedManager.initialize()
    rank = DistributedManager().rank
    torch.manual_seed(0)
    net = Net(1, 1)
    model = torch.nn.parallel.DistributedDataParallel(net)
    loader = torch.utils.data.DataLoader(Squares(), batch_size=2, num_workers=1)
    optimizer = torch.optim.SGD(model.parameters(), rate)
    for _ in range(STEPS):
        for batch in loader:
            optimizer.zero_grad()
            model(batch[:, None] + rank).square().mean().backward()
            optimizer.step()
    print("trained on", rank)
    if rank == 0:
        torch.save(net, out)
    return net

def fail():
    torch.distributed.init_process_group()
    if torch.distributed.get_rank() == 1:
        missing = {}
        return missing["energy"]
    torch.distributed.barrier()

def stay(folder):
    import os, pathlib, time
    torch.distributed.init_process_group()
    loader = torch.utils.data.DataLoader(Squares(), num_workers=1, persistent_workers=True)
    next(iter(loader))
    rank = torch.distributed.get_rank()
    for pid in (os.getpid(), *(w.pid for w in torch.multiprocessing.active_children())):
        pathlib.Path(folder, str(pid)).touch()
    pathlib.Path(folder, f"ready{rank}").touch()
    if rank == 0:
        torch.distributed.recv(torch.zeros(1), src=1)  # in C++ for ever
    time.sleep(1000)
"""


@pytest.fixture(autouse=True)
def _importable(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))


def test_a_notebook_trains_and_a_failing_rank_fails_it(tmp_path):
    train = f"results = launch(train, 0.01, {str(tmp_path / 'net.pt')!r}, nprocs=2)"
    check = (
        "assert torch.equal(results[0].weight, results[1].weight)\n"
        "assert type(results.rank0) is Net\n"
        f"assert type(torch.load({str(tmp_path / 'net.pt')!r}, weights_only=False)) is Net\n"
        "import psutil; print(len(psutil.Process().children()), results)"
    )
    cells = [DEFINITIONS, train, check, "launch(fail, nprocs=2)"]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
    with pytest.raises(CellExecutionError) as caught:
        NotebookClient(notebook, timeout=100).execute()

    outputs = ["".join(o.get("text", "") for o in cell.outputs) for cell in notebook.cells]
    outputs = [re.sub(r"\x1b\[[\d;]*m", "", text) for text in outputs]  # colours of the prefix
    assert "[rank 0] trained on 0\n" in outputs[1] and "[rank 1] trained on 1\n" in outputs[1]
    assert outputs[2].startswith("2 2 ranks returned")  # two wait for the next launch
    error = notebook.cells[3].outputs[-1]
    assert error.ename == "RankError"
    assert error.evalue.startswith("rank 1: KeyError: 'energy'")
    assert 'return missing["energy"]' in error.evalue  # the cell's own line
    assert "Cell In[1], line 39, in fail" in error.evalue
    assert "RankError" in str(caught.value) and "rank 1" in str(caught.value)


def _start_staying(folder: Path) -> tuple:
    """Start a kernel whose ranks are blocked for ever; return it, its client and their pids."""
    manager, client = start_new_kernel(kernel_name="python3")
    client.execute(DEFINITIONS)
    client.execute(f"launch(stay, {str(folder)!r}, nprocs=2)")
    deadline = time.monotonic() + 60
    while len(list(folder.glob("ready*"))) < 2:
        assert time.monotonic() < deadline, "the ranks did not come up"
        time.sleep(0.1)
    pids = [int(file.name) for file in folder.iterdir() if file.name.isdigit()]
    assert len(pids) == 4 and all(psutil.pid_exists(pid) for pid in pids)
    return manager, client, pids


def _wait_for_end(pids: list[int], seconds: float) -> list[int]:
    deadline = time.monotonic() + seconds
    while any(map(_is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return [pid for pid in pids if _is_alive(pid)]


def _is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _read_until(client: BlockingKernelClient, text: str) -> None:
    said = ""
    while text not in said:
        content = client.get_iopub_msg(timeout=60)["content"]
        said += content.get("text", "") + content.get("ename", "")


def test_the_stop_button_ends_blocked_ranks_and_the_kernel_goes_on(tmp_path):
    manager, client, pids = _start_staying(tmp_path)
    try:
        manager.interrupt_kernel()
        assert _wait_for_end(pids, 10) == []  # DataLoader workers too
        _read_until(client, "KeyboardInterrupt")
        code, status = "assert list(launch(lambda: 7, nprocs=1)) == [7]", "aborted"
        while status == "aborted":  # what comes just after an error, with the queue
            status = client.execute(code, reply=True, timeout=60)["content"]["status"]
        assert status == "ok"
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def test_a_killed_kernel_leaves_no_rank(tmp_path):
    manager, client, pids = _start_staying(tmp_path)
    try:
        os.kill(manager.provisioner.process.pid, signal.SIGKILL)
        assert _wait_for_end(pids, 2) == []
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
