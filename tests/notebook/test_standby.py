"""Ranks that are spawned ahead: fresh for each launch, the same as new ones, and soon there."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from nvalchemi.distributed import standby
from nvalchemi.notebook import launch

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _none_waits():
    yield
    launch(_pid, nprocs=1, standby=0)
    assert standby._waiting == []


def _pid() -> int:
    return os.getpid()


def _waiting() -> set[int]:
    return {rank.pid for _, rank in standby._waiting}


def test_waiting_ranks_are_taken_replaced_and_never_used_twice():
    first = set(launch(_pid, nprocs=2, standby=2))
    ahead = _waiting()
    assert len(ahead) == 2 and not first & ahead
    second = set(launch(_pid, nprocs=2, standby=2))
    assert second == ahead
    assert not any(map(psutil.pid_exists, first | second))
    assert len(_waiting()) == 2 and not _waiting() & second


def test_one_that_waits_is_taken_only_if_it_is_what_a_new_one_would_be(monkeypatch, tmp_path):
    launch(_pid, nprocs=1, standby=1)
    ahead = _waiting()
    value = launch(lambda: os.environ["NEW"], nprocs=1, standby=1, env={"NEW": "1"})[0]
    assert value == "1" and not any(map(psutil.pid_exists, ahead))
    ahead = _waiting()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["mine"])
    place = launch(
        lambda: (os.getpid(), os.getcwd(), sys.path[0], sys.argv, os.environ["RANK"]),
        nprocs=1,
        standby=1,
        env={"NEW": "1"},
    )[0]
    assert place == (ahead.pop(), str(tmp_path), str(tmp_path), ["mine"], "0")


def test_one_that_was_killed_while_it_waited_is_replaced():
    launch(_pid, nprocs=1, standby=1)
    lost = _waiting().pop()
    os.kill(lost, signal.SIGKILL)
    time.sleep(0.5)
    assert launch(_pid, nprocs=1, standby=1)[0] != lost


def _meet() -> tuple[int, bool]:
    preloaded = "torch._dynamo" in sys.modules
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()
    dist.destroy_process_group()
    return os.getpid(), preloaded


def test_ranks_that_waited_meet_and_train():
    launch(_pid, nprocs=2, standby=2)
    time.sleep(1)
    ahead = _waiting()
    results = launch(_meet, nprocs=2, standby=2)
    assert {pid for pid, _ in results} == ahead
    assert all(preloaded for _, preloaded in results)
    results = launch(_meet, nprocs=3, standby=0)  # two that wait and a new one
    assert len({pid for pid, _ in results}) == 3


SCRIPT = """
import os, time
from nvalchemi.distributed import standby
from nvalchemi.notebook import launch
launch(os.getpid, nprocs=1, standby=1)
print([rank.pid for _, rank in standby._waiting][0], flush=True)
if {stays}:
    time.sleep(1000)
"""


@pytest.mark.parametrize("stays", [False, True])
def test_ranks_that_wait_go_with_the_process_that_spawned_them(stays):
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT.format(stays=stays)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    pid = int(process.stdout.read().split()[-1]) if not stays else 0
    if stays:
        line = ""
        while not line.strip().isdigit():
            line = process.stdout.readline()
        pid = int(line)
        assert psutil.pid_exists(pid)
        process.kill()
    assert process.wait(60) == (-signal.SIGKILL if stays else 0)
    deadline = time.monotonic() + 5
    while psutil.pid_exists(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not psutil.pid_exists(pid)
