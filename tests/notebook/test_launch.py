"""launch() from plain Python: real ranks, few launches with many assertions each."""

import functools
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from nvalchemi.notebook import RankError, RankResults, launch

OFFSET = 10
REPOSITORY = Path(__file__).resolve().parents[2]


class Scale:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor * self.factor


def _traces() -> tuple:
    """What a launch must leave as it was."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    return (
        dict(os.environ),
        handlers,
        threading.enumerate(),
        psutil.Process().children(recursive=True),
        len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0,
        signal.pthread_sigmask(signal.SIG_BLOCK, set()),
        torch.distributed.is_initialized(),
    )


class Squares(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.tensor(i * i)


def _work(captured: torch.Tensor, view: torch.Tensor, array: np.ndarray, *, scale: Scale) -> dict:
    import ctypes

    import torch.distributed as dist

    from nvalchemi.distributed import DistributedManager

    DistributedManager.initialize()
    manager = DistributedManager()
    print("hello", end=" ")
    print("from", manager.rank)
    sys.stderr.write("\r10%\r100%\n" + "x" * 1_000_000 + "\n")
    os.system("echo from a shell")
    ctypes.CDLL(None).printf(b"%s", b"C without a line break")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))
    model(torch.ones(2, 3)).sum().backward()
    captured += manager.rank + 1  # this rank's own copy
    array += 1
    total = torch.ones(1)
    dist.all_reduce(total)
    loader = torch.utils.data.DataLoader(Squares(), batch_size=2, num_workers=1)
    names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MY_OWN".split()
    dist.destroy_process_group()  # with the DDP model alive: hangs by itself in plain processes
    return {
        "environment": [os.environ[name] for name in names],
        "scaled": scale(torch.ones(2)),
        "sum": total.item() + OFFSET,
        "captured": captured,
        "view": view.clone(),
        "array": array,
        "scale": scale,
        "loaded": [batch.tolist() for batch in loader],
        "threads": os.environ["OMP_NUM_THREADS"],
    }


def test_ranks_print_train_and_return(capfd, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    captured = torch.zeros(4)
    array = np.zeros(3)
    launch(int, nprocs=1)  # what the first launch imports is not a trace of the second
    before = _traces()
    scale = Scale(2.0)
    work = functools.partial(_work, captured, captured[1:3], scale=scale)
    results = launch(work, array, nprocs=2, env={"MY_OWN": "7"}, timeout=100)
    out, err = capfd.readouterr()

    assert isinstance(results, RankResults) and len(results) == 2
    assert results.rank0 is results[0] and list(results) == [results[0], results[1]]
    assert "rank 1: {'environment'" in repr(results)
    for rank, result in enumerate(results):
        expected = [str(rank), "2", str(rank), "2", "127.0.0.1", "7"]
        assert result["environment"] == expected
        assert result["scaled"].tolist() == [2, 2] and result["sum"] == 2 + OFFSET
        assert result["captured"].tolist() == [rank + 1] * 4
        assert result["view"].tolist() == [rank + 1] * 2  # still a view on the rank
        assert result["array"].tolist() == [1, 1, 1]
        assert type(result["scale"]) is Scale  # the very class, though it travelled by value
        assert result["loaded"] == [[0, 1], [4, 9]]
        assert result["threads"] == str(max(1, len(os.sched_getaffinity(0)) // 2))
        lines = [line for line in out.splitlines() if line.startswith(f"[rank {rank}] ")]
        assert [line.removeprefix(f"[rank {rank}] ") for line in lines] == [
            f"hello from {rank}",
            "from a shell",
            "C without a line break",
        ]
        assert f"[rank {rank}] 100%\n" in err and "10%\r" not in err
        assert f"[rank {rank}] " + "x" * 5000 in err  # a megabyte
    assert captured.tolist() == [0] * 4 and array.tolist() == [0] * 3
    del results, result
    assert _traces() == before


def _fail_on_rank_1(how: str) -> object:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        if how == "raise":
            try:
                {}["energy"]
            finally:
                dist.destroy_process_group()  # the peer notices before we are heard
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "unsendable":
            return threading.Lock()
        if how == "exit":
            sys.exit(3)
    dist.barrier()
    return 0


@pytest.mark.parametrize(
    "how, start, cause",
    [
        ("raise", "rank 1: KeyError: 'energy'\n", KeyError),
        ("kill", "rank 1: killed by SIGKILL", type(None)),
        (
            "unsendable",
            "rank 1: the value could not be sent back: TypeError: result is a lock",
            TypeError,
        ),
    ],
)
def test_the_rank_that_failed_is_named(how, start, cause):
    before = psutil.Process().children(recursive=True)
    with pytest.raises(RankError) as caught:
        launch(_fail_on_rank_1, how, nprocs=2, timeout=100)
    assert str(caught.value).startswith(start)
    assert caught.value.rank == 1
    assert type(caught.value.__cause__) is cause
    if how == "raise":
        assert '{}["energy"]' in str(caught.value)  # the line itself
        assert "nvalchemi/distributed" not in str(caught.value)  # and none of ours
    assert psutil.Process().children(recursive=True) == before


class _Stubborn:
    def __reduce__(self) -> tuple:
        return int, ("no integer",)


def test_a_function_that_cannot_be_loaded_is_not_its_own_failure():
    stubborn = _Stubborn()
    with pytest.raises(RankError, match="^rank 0: the function could not be loaded: ValueError"):
        launch(lambda: stubborn, nprocs=1)


def _stay(marker: str) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    Path(marker, os.environ["RANK"]).write_text(str(os.getpid()))
    if dist.get_rank() == 0:
        dist.recv(torch.zeros(1), src=1)  # blocked in C++ for ever
    time.sleep(1000)


def test_timeout_ends_blocked_ranks(tmp_path):
    with pytest.raises(TimeoutError, match="after 8 s: ranks 0, 1 had not returned"):
        launch(_stay, str(tmp_path), nprocs=2, timeout=8)
    pids = [int(file.read_text()) for file in tmp_path.iterdir()]
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_wrong_arguments_are_refused_before_any_process(monkeypatch):
    lock = threading.Lock()
    started = []
    module = sys.modules[launch.__module__]  # the package's attribute is the function
    monkeypatch.setattr(module.standby_ranks, "take", lambda *a: started.append(a))
    cases = [
        (lambda: launch(int, nprocs=0), ValueError, "nprocs must be at least 1: 0"),
        (lambda: launch(int, nprocs="2"), TypeError, "nprocs must be an integer or None: '2'"),
        (lambda: launch(int, nprocs=2.5), TypeError, "nprocs must be an integer or None: 2.5"),
        (lambda: launch(int, nprocs=True), TypeError, "nprocs must be an integer or None: True"),
        (lambda: launch(int, backend="mpi"), ValueError, "backend must be 'gloo', 'nccl'"),
        (lambda: launch(int, nprocs=999, backend="nccl"), ValueError, "one GPU per rank: 0 GPUs"),
        (lambda: launch(int, timeout=-1), ValueError, "timeout must be positive: -1"),
        (lambda: launch(int, timeout="1"), TypeError, "timeout must be a number of seconds"),
        (lambda: launch(int, stall=0), ValueError, "stall must be positive: 0"),
        (lambda: launch(int, block=1), TypeError, "block must be True or False: 1"),
        (lambda: launch(int, output="all"), ValueError, "output must be one of 'stream', 'rank0'"),
        (lambda: launch(int, standby=-1), ValueError, "standby must not be negative: -1"),
        (lambda: launch(int, standby=10**6), ValueError, "standby must be at most"),
        (lambda: launch(int, standby=1.5), TypeError, "standby must be a number of ranks"),
        (lambda: launch(int, threads=0), ValueError, "threads must be at least 1: 0"),
        (lambda: launch(int, devices=[99]), ValueError, "99"),
        (lambda: launch(int, env={"RANK": "1"}), ValueError, "env must not set RANK"),
        (lambda: launch(int, env={"A": 1}), TypeError, "env must map names to strings"),
        (lambda: launch(3), TypeError, "needs a function as its first argument: 3"),
        (lambda: launch(lambda: lock), TypeError, "lock is a lock, which cannot be sent"),
        (lambda: launch(int, lock), TypeError, "argument 0 is a lock, which cannot be sent"),
    ]
    for call, kind, sentence in cases:
        with pytest.raises(kind) as caught:
            call()
        assert sentence in str(caught.value)
    assert not started


UNGUARDED = """
import sys, threading
from nvalchemi.notebook.launch import launch, RankError

print("top level", flush=True)
def work():
    import os
    return os.environ["RANK"], __name__
def nested():
    from nvalchemi.notebook.launch import launch
    launch(work)
values = []
def start():
    values.append(list(launch(work, nprocs=1, output="quiet")))
threads = [threading.Thread(target=start)
           for _ in range(2)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(values)
try:
    launch(nested, nprocs=1, output="quiet")
except RankError as error:
    print(str(error).splitlines()[0])
"""


def test_a_script_without_guard_runs_once_and_launches_from_threads(tmp_path):
    script = tmp_path / "plain.py"
    script.write_text(UNGUARDED)
    command = [sys.executable, str(script)]
    path = {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        command, env={**os.environ, **path}, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    top, values, refused = done.stdout.splitlines()
    assert top == "top level"
    assert values == "[[('0', '__main__')], [('0', '__main__')]]"
    assert refused.startswith("rank 0: RuntimeError: launch() was called on a rank")


def test_arguments_that_the_function_does_not_take_are_refused_before_any_process():
    def train(epochs, **options):
        return epochs, options

    with pytest.raises(TypeError, match="no argument 'nproc'.*did you mean 'nprocs'"):
        launch(train, 10, nproc=2)
    with pytest.raises(TypeError, match=r"train\(epochs, \*\*options\) can not be called so"):
        launch(train, nprocs=2)


def test_ranks_of_torchrun_do_not_launch_ranks_of_their_own(monkeypatch):
    for name, value in (("TORCHELASTIC_RUN_ID", "none"), ("RANK", "1"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    with pytest.raises(RuntimeError, match="torchrun's rank 1 of 2"):
        launch(lambda: None, nprocs=2)
