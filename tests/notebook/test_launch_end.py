"""The ends of launch(): what a rank does after its function, and what the caller sees of it."""

import glob
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch

from nvalchemi.notebook import RankError, launch

REPOSITORY = Path(__file__).resolve().parents[2]


def _leave_work_behind(folder: str) -> list:
    import atexit

    values: list = []

    def late() -> None:
        time.sleep(0.5)
        values.append("from a thread")

    threading.Thread(target=late).start()
    atexit.register(lambda: Path(folder, "atexit").write_text("ran"))
    global _log
    _log = open(Path(folder, "log"), "w")
    _log.write("never closed")
    return values


def test_threads_atexit_functions_and_open_files_are_finished(tmp_path):
    assert launch(_leave_work_behind, str(tmp_path), nprocs=1)[0] == ["from a thread"]
    assert (tmp_path / "atexit").read_text() == "ran"
    assert (tmp_path / "log").read_text() == "never closed"


def test_the_environment_is_there_before_the_interpreter_starts():
    results = launch(lambda: hash("energy"), nprocs=2, env={"PYTHONHASHSEED": "0"})
    command = [sys.executable, "-c", "print(hash('energy'))"]
    env = {**os.environ, "PYTHONHASHSEED": "0"}
    expected = int(subprocess.run(command, env=env, capture_output=True).stdout)
    assert list(results) == [expected, expected]


def _fail_oddly() -> None:
    error = SyntaxError("odd")
    error.text = 5  # type: ignore[assignment]
    error.lineno, error.filename = "abc", 7  # type: ignore[assignment]
    raise error


def test_an_exception_that_cannot_be_shown_is_named():
    with pytest.raises(RankError, match="^rank 0: SyntaxError .*which cannot be shown"):
        launch(_fail_oddly, nprocs=1)


def _skip_a_collective() -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    dist.barrier()
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1))


def test_ranks_that_had_returned_before_a_collective_are_named():
    with pytest.raises(RankError) as caught:
        launch(_skip_a_collective, nprocs=2, timeout=100)
    assert caught.value.rank == 0
    assert "rank 0: lost its peer: rank 1 had returned already. A collective needs" in str(
        caught.value
    )


SCRIPT = """
import time
from nvalchemi.notebook import launch
def work(seconds):
    print("loss \\u2713", flush=True)
    time.sleep(seconds)
launch(work, 0, nprocs=1)
print("interrupt me", flush=True)
launch(work, 1000, nprocs=2)
"""


def test_an_interrupt_is_short_and_ascii_ends_nothing(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    process = subprocess.Popen(
        [sys.executable, str(script)],
        env={
            **os.environ,
            "PYTHONPATH": str(REPOSITORY),
            "PYTHONIOENCODING": "ascii",
            "OMP_NUM_THREADS": "1",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(4)]
    assert lines == [
        "1 rank on CPU, gloo, 1 thread\n",
        "[rank 0] loss \\u2713\n",
        "interrupt me\n",
        "2 ranks on CPU, gloo, 1 thread each\n",
    ]
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert "launch() was interrupted: 2 ranks ended" in out
    assert err.splitlines()[-1] == "KeyboardInterrupt" and len(err.splitlines()) < 10
    assert "selectors" not in err


def _load() -> int:
    class Squares(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, i: int) -> torch.Tensor:
            return torch.tensor(i * i)

    loader = torch.utils.data.DataLoader(Squares(), num_workers=1)
    return sum(int(batch) for batch in loader)


@pytest.mark.skipif(sys.platform != "linux", reason="no fork server by default there")
def test_workers_of_ranks_know_the_classes_of_a_cell_where_a_fork_server_is_the_default():
    import multiprocessing

    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("forkserver", force=True)
    try:
        assert launch(_load, nprocs=1)[0] == 14
    finally:
        multiprocessing.set_start_method(before, force=True)


def _leave_a_slow_thread() -> None:
    from nvalchemi.distributed import rank_end

    rank_end._PATIENCE = 0.1
    threading.Thread(target=time.sleep, args=(1,), name="slow writer").start()


def test_a_rank_that_waits_for_its_threads_says_so(capfd):
    launch(_leave_a_slow_thread, nprocs=1)
    said = capfd.readouterr().err
    assert "rank 0 has returned and has waited 0.1 s for slow writer" in said


class _Numbers(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> int:
        return i


def _die_with_spawned_workers(folder: str) -> None:
    loader = torch.utils.data.DataLoader(
        _Numbers(), num_workers=1, multiprocessing_context="spawn", persistent_workers=True
    )
    next(iter(loader))
    worker = loader._iterator._workers[0].pid  # type: ignore[union-attr]
    Path(folder, "worker").write_text(str(worker))
    Path(folder, "names").write_text(" ".join(os.listdir("/dev/shm")))
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="semaphores have no names there")
def test_a_killed_rank_leaves_neither_workers_nor_semaphores(tmp_path):
    before = set(os.listdir("/dev/shm"))
    folders = set(glob.glob(tempfile.gettempdir() + "/pymp-*"))
    with pytest.raises(RankError, match="killed by SIGKILL"):
        launch(_die_with_spawned_workers, str(tmp_path), nprocs=1)
    worker = Path("/proc", (tmp_path / "worker").read_text(), "cmdline")
    assert not worker.exists() or not worker.read_bytes()  # gone, or waits to be reaped
    made = set((tmp_path / "names").read_text().split()) - before
    assert any(name.startswith("sem.mp-") for name in made)
    assert not set(glob.glob(tempfile.gettempdir() + "/pymp-*")) - folders
    deadline = time.monotonic() + 5
    while made & set(os.listdir("/dev/shm")) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not {name for name in made if name.startswith("sem.mp-")} & set(os.listdir("/dev/shm"))


def _fork_and_fail(how: str) -> str:
    if os.fork() == 0:
        if how == "raise":
            raise ValueError("of the child")
        return "of the child"
    os.wait()
    return "of the rank"


@pytest.mark.parametrize("how", ["raise", "return"])
def test_a_child_that_a_function_forks_does_not_answer_for_its_rank(how):
    assert list(launch(_fork_and_fail, how, nprocs=1)) == ["of the rank"]


def _ask() -> str:
    return input("your name? ")


def _raise(error: BaseException) -> None:
    raise error


def test_texts_of_errors_can_be_shown():
    with pytest.raises(RankError, match="rank 0: EOFError: a rank has no standard input"):
        launch(_ask, nprocs=1)
    with pytest.raises(RankError) as caught:
        launch(_raise, ValueError("x" * 10**7), nprocs=1)
    assert len(str(caught.value)) < 100_000 and "characters ..." in str(caught.value)
    with pytest.raises(RankError) as caught:
        launch(_raise, ValueError("\ud800"), nprocs=1)
    assert str(caught.value).encode()
    with pytest.raises(RankError, match="^rank 0: .*SyntaxError: invalid syntax"):
        launch(exec, "1 +* 2", nprocs=1)


def test_a_directory_that_is_gone_is_named(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(FileNotFoundError, match="the working directory of this process is gone"):
        launch(int, nprocs=1)
