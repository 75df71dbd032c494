"""A launch as the user of JupyterLab sees it: its lines, its table with a Stop button, its stop."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

import psutil
from notebook_page import NotebookPage, contrast

LINGER = """\
from nvalchemi.notebook import launch

def linger():
    import os, time
    print("waiting in process", os.getpid(), flush=True)
    time.sleep(600)

"""


def processes(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"process (\d+)", text)]


def assert_ended(pids: list[int]) -> None:
    deadline = time.monotonic() + 20  # the operating system may take its time; no test of speed
    while any(map(psutil.pid_exists, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [pid for pid in pids if psutil.pid_exists(pid)]


def test_the_stop_button_ends_the_ranks(
    open_notebook: Callable[..., NotebookPage], picture: Callable[[NotebookPage, str], None]
) -> None:
    notebook = open_notebook(
        LINGER + "handle = launch(linger, nprocs=2, block=False, output='quiet')",
        "f'the kernel is free: {6 * 7}'",
    )
    notebook.run_all()
    table = notebook.output(0)
    notebook.wait_for(table, re.compile(r"rank 0\s*waiting.*rank 1\s*waiting", re.S))
    notebook.wait_for(notebook.output(1), "the kernel is free: 42")
    pids = processes(table.inner_text())
    assert len(pids) == 2 and all(map(psutil.pid_exists, pids))
    assert "running" in table.inner_text()
    assert all(contrast(table.locator("td").first) > 4.5 for _ in notebook.themes())
    picture(notebook, "launch-running")

    table.get_by_role("button", name="Stop the ranks").click()

    text = notebook.wait_for(table, "stopped")
    assert_ended(pids)
    assert "■" in text and "running" not in text and processes(text) == pids
    assert table.get_by_role("button").count() == 0


def test_lines_of_ranks_are_coloured_and_in_order(
    open_notebook: Callable[..., NotebookPage],
) -> None:
    notebook = open_notebook(
        "from nvalchemi.notebook import launch\n\n"
        "def count():\n"
        "    for step in range(200):\n"
        "        print('step', step)\n"
        "results = launch(count, nprocs=2)",
    )
    notebook.run_all()
    notebook.wait_until_run(0)

    lines = notebook.wait_for(notebook.output(0), "step 199").splitlines()
    for rank in (0, 1):
        mine = [line for line in lines if line.startswith(f"[rank {rank}]")]
        assert mine == [f"[rank {rank}] step {step}" for step in range(200)]
    marks = [notebook.output(0).locator("span", has_text=f"[rank {r}]").first for r in (0, 1)]
    colour = "element => getComputedStyle(element).color"
    for theme in notebook.themes():
        assert marks[0].evaluate(colour) != marks[1].evaluate(colour), theme
        assert all(contrast(mark) > 3 for mark in marks), theme


def test_the_interrupt_button_ends_a_launch(
    open_notebook: Callable[..., NotebookPage],
) -> None:
    notebook = open_notebook(LINGER + "launch(linger, nprocs=2)")
    notebook.run_all()
    for rank in (0, 1):
        notebook.wait_for(notebook.output(0), f"[rank {rank}] waiting")
    pids = processes(notebook.output(0).inner_text())
    assert len(pids) == 2

    notebook.interrupt()

    notebook.wait_for(notebook.output(0), "KeyboardInterrupt")
    assert_ended(pids)
    notebook.wait_until_run(0)
