"""launch(block=False): a training in the background, watched, waited for and stopped."""

import os
import signal
import threading
import time

import psutil
import pytest

from nvalchemi.distributed.workers import Stopped
from nvalchemi.notebook import RankError, launch


def _count(steps: int) -> str:
    for step in range(steps):
        print("step", step, flush=True)
        time.sleep(0.05)
    return "rank " + os.environ["RANK"]


def test_a_launch_in_the_background_leaves_the_caller_free():
    before = threading.active_count()
    handle = launch(_count, 5, nprocs=2, block=False)
    assert handle.running and handle.state == "running"
    with pytest.raises(TimeoutError, match="still running after 0.01 s of waiting"):
        handle.wait(0.01)
    assert list(handle.wait()) == ["rank 0", "rank 1"]
    assert handle.state == "done" and not handle.running and handle.error is None
    assert handle.output(1) == "".join(f"step {k}\n" for k in range(5))
    assert handle.last_lines() == ["step 4", "step 4"]
    assert list(handle.wait()) == ["rank 0", "rank 1"]  # as often as one likes
    assert threading.active_count() == before and handle.seconds > 0.2
    assert repr(handle).startswith("<launch of 2 ranks: done, ")


def _stay(folder: str) -> None:
    open(os.path.join(folder, str(os.getpid())), "w").close()
    try:
        time.sleep(1000)
    finally:
        open(os.path.join(folder, "finally" + os.environ["RANK"]), "w").close()


def test_stop_ends_the_ranks_and_lets_their_finally_run(tmp_path):
    handle = launch(_stay, str(tmp_path), nprocs=2, block=False)
    while len(list(tmp_path.iterdir())) < 2:
        assert handle.running
        time.sleep(0.05)
    pids = [int(file.name) for file in tmp_path.iterdir()]
    handle.stop()
    assert not any(map(psutil.pid_exists, pids))
    assert {"finally0", "finally1"} <= {file.name for file in tmp_path.iterdir()}
    assert handle.state == "stopped"
    with pytest.raises(Stopped, match="the launch was stopped"):
        handle.wait()
    handle.stop()  # harmless


def _fail() -> None:
    raise KeyError("energy")


def test_a_failure_in_the_background_is_shown_and_raised_by_wait(capfd):
    handle = launch(_fail, nprocs=2, block=False)
    with pytest.raises(RankError, match="KeyError: 'energy'") as caught:
        handle.wait()
    assert isinstance(caught.value.__cause__, KeyError)
    assert handle.state == "failed" and handle.error is caught.value
    told = capfd.readouterr()
    assert "KeyError: 'energy'" in told.out + told.err


def test_two_in_the_background_at_once():
    handles = [launch(_count, 3, nprocs=1, block=False) for _ in range(2)]
    assert [list(handle.wait()) for handle in handles] == [["rank 0"], ["rank 0"]]


def test_an_interrupted_wait_leaves_the_ranks_and_the_handle_as_they_were():
    handle = launch(_count, 60, nprocs=1, block=False)
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        handle.wait()
    assert handle.running
    assert list(handle.wait()) == ["rank 0"]
    with pytest.raises(KeyboardInterrupt):
        handle = launch(_count, 1000, nprocs=1, block=False)
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        handle.wait()
    handle.stop()
    assert not handle.running and handle.state == "stopped"


@pytest.mark.parametrize("rank", [2, -1, "a", True])
def test_an_unknown_rank_has_no_output(rank):
    handle = launch(_count, 1, nprocs=2, block=False)
    with pytest.raises((TypeError, ValueError), match="rank must be"):
        handle.output(rank)
    with pytest.raises(ValueError, match="timeout must be a number of seconds >= 0"):
        handle.wait("x")  # type: ignore[arg-type]
    handle.wait()
