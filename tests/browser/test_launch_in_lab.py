"""A launch as the user of JupyterLab sees it: its lines, its table with a Stop button, its stop."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

import psutil
import pytest
from notebook_page import NotebookPage, contrast

COUNT = """\
from nvalchemi.notebook import launch

def count():
    for step in range(200):
        print("step", step)

results = launch(count, nprocs=2)"""
WAIT = """\
from nvalchemi.notebook import launch

def wait():
    import os, time
    print("waiting in process", os.getpid(), flush=True)
    time.sleep(600)

"""
BLOCKING = WAIT + "launch(wait, nprocs=2)"
BACKGROUND = WAIT + "handle = launch(wait, nprocs=2, block=False, output='quiet')"


@pytest.fixture(scope="module")
def notebook(open_notebook: Callable[..., NotebookPage]) -> NotebookPage:
    return open_notebook(COUNT, BLOCKING, BACKGROUND, "f'the kernel is free: {6 * 7}'")


def processes(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"process (\d+)", text)]


def assert_ended(pids: list[int]) -> None:
    deadline = time.monotonic() + 20  # the operating system may take its time; no test of speed
    while any(map(psutil.pid_exists, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [pid for pid in pids if psutil.pid_exists(pid)]


def test_lines_of_ranks_are_coloured_and_in_order(notebook: NotebookPage) -> None:
    output = notebook.run(0)
    notebook.wait_until_run(0)

    for rank in (0, 1):
        lines = notebook.wait_for(output, f"[rank {rank}] step 199").splitlines()
        mine = [line for line in lines if line.startswith(f"[rank {rank}]")]
        assert mine == [f"[rank {rank}] step {step}" for step in range(200)]
    marks = [output.locator("span", has_text=f"[rank {rank}]").first for rank in (0, 1)]
    colour = "element => getComputedStyle(element).color"
    for theme in notebook.themes():
        assert marks[0].evaluate(colour) != marks[1].evaluate(colour), theme
        assert all(contrast(mark) > 3 for mark in marks), theme


def test_the_interrupt_button_ends_a_launch(notebook: NotebookPage) -> None:
    output = notebook.run(1)
    for rank in (0, 1):
        notebook.wait_for(output, f"[rank {rank}] waiting")
    pids = processes(output.inner_text())
    assert len(pids) == 2 and all(map(psutil.pid_exists, pids))

    notebook.interrupt()

    notebook.wait_for(output, "KeyboardInterrupt")
    assert_ended(pids)
    notebook.wait_until_run(1)


def test_the_stop_button_ends_the_ranks(
    notebook: NotebookPage, picture: Callable[[NotebookPage, int, str], None]
) -> None:
    table = notebook.run(2)
    notebook.wait_for(table, re.compile(r"rank 0\s*waiting.*rank 1\s*waiting", re.S))
    notebook.wait_for(notebook.run(3), "the kernel is free: 42")
    pids = processes(table.inner_text())
    assert len(pids) == 2 and all(map(psutil.pid_exists, pids))
    assert "running" in table.inner_text()
    for theme in notebook.themes():
        assert contrast(table.locator("td").first) > 4.5, theme
    picture(notebook, 2, "launch-running")

    table.get_by_role("button", name="Stop the ranks").click()

    text = notebook.wait_for(table, "stopped")
    assert_ended(pids)
    assert "■" in text and "running" not in text and processes(text) == pids
    assert table.get_by_role("button").count() == 0
