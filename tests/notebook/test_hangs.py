"""Ranks that hang: reported with their stacks, or ended when nobody can help them any more."""

import os
import re
import signal
import threading
import time

import pytest
import torch

from nvalchemi.notebook import RankError, launch


def _wait_for_who_has_returned() -> None:
    import torch.distributed as dist

    if os.environ["RANK"] == "0":
        return
    dist.init_process_group("gloo")  # waits for rank 0 at the store, for ever


def test_a_rank_that_waits_for_one_that_has_returned_is_ended_with_its_stack():
    began = time.monotonic()
    with pytest.raises(RankError) as caught:
        launch(_wait_for_who_has_returned, nprocs=2, timeout=100)
    text = str(caught.value)
    assert text.startswith("rank 1: waits in ")
    assert re.search(r"for rank 0, which returned \d+ s ago: a collective needs every rank", text)
    assert 'dist.init_process_group("gloo")' in text  # where it waits
    assert caught.value.__notes__ == ["rank 0: had returned"]
    assert time.monotonic() - began < 90


def _outlast_the_others() -> str:
    if os.environ["RANK"] == "1":
        time.sleep(8)  # idle, but in no collective
    return os.environ["RANK"]


def test_a_rank_that_is_only_slower_is_left_alone():
    assert list(launch(_outlast_the_others, nprocs=2)) == ["0", "1"]


def _stand() -> str:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        time.sleep(5)
    dist.barrier()
    return "went on"


def test_a_stall_shows_where_every_rank_stands_and_ends_nothing(capfd):
    assert list(launch(_stand, nprocs=2, stall=1.5)) == ["went on", "went on"]
    said = capfd.readouterr().err
    assert said.count("no rank has printed or moved for") == 1
    first, second = said.split("rank 0 stands at")[1].split("rank 1 stands at")
    assert "time.sleep(5)" in first and "dist.barrier()" in second


def _move() -> None:
    until = time.monotonic() + 4
    while time.monotonic() < until:
        for _ in range(1000):
            pass
        sum(range(1000))


def test_a_rank_that_moves_does_not_stall(capfd):
    launch(_move, nprocs=1, stall=1)
    assert "no rank has printed" not in capfd.readouterr().err


def _die_when_made() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


class _Killer:
    """Kills the process that unpickles it."""

    def __reduce__(self):
        return _die_when_made, ()


def test_a_rank_that_dies_while_it_loads_is_told_from_one_that_dies_in_the_function():
    with pytest.raises(RankError, match="rank 0: killed by SIGSEGV while the function was being"):
        launch(lambda killer: None, _Killer(), nprocs=1)
    with pytest.raises(RankError) as caught:
        launch(_die_when_made, nprocs=1)
    assert str(caught.value).startswith("rank 0: killed by SIGSEGV\n") or (
        str(caught.value) == "rank 0: killed by SIGSEGV"
    )


def _report_late_peer() -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    dist.barrier()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def test_the_others_of_a_killed_rank_have_their_story_in_the_notes():
    with pytest.raises(
        RankError, match=r"^rank 1: killed by SIGKILL \(out of memory\?\)"
    ) as caught:
        launch(_report_late_peer, nprocs=2, timeout=60)
    assert len(caught.value.__notes__) == 1
    assert caught.value.__notes__[0].startswith("rank 0: ")


def _hold_the_gil() -> None:
    sum(range(6 * 10**8))  # a loop in C that does not let other threads run


def test_a_rank_that_holds_the_gil_shows_where_it_stands_too(capfd):
    launch(_hold_the_gil, nprocs=1, stall=1)
    assert "sum(range(6 * 10**8))" in capfd.readouterr().err


def _compute_backward_alone() -> str:
    if os.environ["RANK"] == "0":
        return "nothing to do"

    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):  # type: ignore[no-untyped-def]
            return x.clone()

        @staticmethod
        def backward(ctx, grad):  # type: ignore[no-untyped-def]
            time.sleep(9)  # idle below a backward pass, and no process group that could be met
            return grad

    x = torch.ones(1, requires_grad=True)
    Slow.apply(x).backward()
    return "done"


def test_a_backward_pass_without_a_process_group_waits_for_nobody():
    assert list(launch(_compute_backward_alone, nprocs=2)) == ["nothing to do", "done"]


def _talk_in_pairs() -> str:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    dist.barrier()
    time.sleep(0.5)
    if rank == 0:
        return "left"
    if rank == 1:
        threading.Timer(9, lambda: dist.send(torch.ones(1), dst=2)).start()
        got = torch.zeros(1)
        dist.recv(got, src=2)
        return "answered"
    got = torch.zeros(1)
    dist.recv(got, src=1)
    dist.send(got, dst=1)
    return "asked"


def test_ranks_that_send_to_each_other_do_not_wait_for_a_third():
    assert list(launch(_talk_in_pairs, nprocs=3)) == ["left", "answered", "asked"]


def _stop_itself() -> str:
    os.kill(os.getpid(), signal.SIGSTOP)
    return "went on"


def test_a_rank_that_a_signal_has_stopped_is_told_of():
    handle = launch(_stop_itself, nprocs=1, block=False)
    told = []
    handle._output.say = lambda text, stream="stdout": told.append(text)
    deadline = time.monotonic() + 60
    while not told and time.monotonic() < deadline:
        time.sleep(0.1)
    pid = int(told[0].split("kill -CONT ")[1])
    assert told[0].startswith(f"rank 0 (process {pid}) was stopped by a signal")
    os.kill(pid, signal.SIGCONT)
    assert list(handle.wait()) == ["went on"]


def test_a_timeout_tells_where_the_ranks_stood():
    with pytest.raises(TimeoutError) as caught:
        launch(_sleep_long, nprocs=1, timeout=6)
    assert "rank 0 stood at\n" in str(caught.value) and "time.sleep(999)" in str(caught.value)


def _sleep_long() -> None:
    time.sleep(999)
