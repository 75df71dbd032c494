"""TrainingMonitor in a real kernel: follows while idle, stops by a click, is kept by nbconvert."""

import os
import re
import time
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbconvert import HTMLExporter

from nvalchemi.notebook.run import Run

HERE = Path(__file__).resolve().parent
VIEW = "application/vnd.jupyter.widget-view+json"
START = """
from nvalchemi.notebook import TrainingMonitor, launch
from test_monitor import train
handle = launch(train, {folder!r}, {steps}, {pause}, nprocs=2, block=False, output="quiet")
"""


@pytest.fixture(autouse=True)
def _importable(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE.parents[1]), str(HERE)]))


def client_of(*cells: str) -> NotebookClient:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
    return NotebookClient(notebook, timeout=120, store_widget_state=False)


def value_of(client: NotebookClient, cell: str) -> str:
    client.nb.cells.append(nbformat.v4.new_code_cell(cell))
    client.execute_cell(client.nb.cells[-1], len(client.nb.cells) - 1)
    return client.nb.cells[-1].outputs[-1].data["text/plain"]


def test_what_is_left_of_a_run_needs_no_kernel(tmp_path):
    folder = str(tmp_path / "run")
    client = client_of(
        START.format(folder=folder, steps=12, pause=0.1),
        f"monitor = TrainingMonitor({folder!r}, handle=handle)\nmonitor",
        "monitor.wait()",
        f"TrainingMonitor({folder!r}, compare=[{folder!r}])",
    )
    client.execute()
    # the output of the second cell was replaced when the run had ended
    (left,) = [output.data for output in client.nb.cells[1].outputs]
    assert set(left) == {"text/html", "text/plain"}
    assert "✔ done at step 12 of 12" in left["text/plain"]
    page, _ = HTMLExporter().from_notebook_node(client.nb)
    assert len(re.findall(r'<img alt="How does[^"]+" [^>]*src="data:image/png;base64', page)) == 1
    assert len(re.findall(r'<img alt="How do these[^"]+" [^>]*src="data:image/png', page)) == 1
    assert page.count('<table aria-label="ranks">') == 2
    assert "done at step 12 of 12" in page


def test_it_follows_while_the_kernel_is_idle_and_a_click_stops_the_ranks(tmp_path):
    folder = str(tmp_path / "run")
    show = f"monitor = TrainingMonitor({folder!r}, handle=handle)\nmonitor"
    client = client_of(START.format(folder=folder, steps=40000, pause=0.05), show)
    with client.setup_kernel():
        for number, cell in enumerate(client.nb.cells):
            client.execute_cell(cell, number)
        assert VIEW in client.nb.cells[1].outputs[0].data
        run = Run(folder)
        end = time.monotonic() + 60
        while not len(run.steps) and time.monotonic() < end:
            time.sleep(0.2)
            run.refresh()
        time.sleep(2)
        # what was read and drawn was read without a cell that asked for it
        assert int(value_of(client, "len(monitor.runs[0].steps)")) > 0
        assert value_of(client, "'image/png' in monitor._pane.widget.value") == "True"
        model = value_of(client, "monitor._button.model_id").strip("'")
        content = {"method": "custom", "content": {"event": "click"}}
        message = client.kc.session.msg("comm_msg", {"comm_id": model, "data": content})
        client.kc.shell_channel.send(message)
        assert "stopped" in value_of(client, "handle._thread.join(30)\nhandle.state")
        for _ in range(50):
            if value_of(client, "monitor._is_final") == "True":
                break
            time.sleep(0.2)
        assert "launch of 2 ranks: stopped" in value_of(client, "repr(monitor)")
        # no timer is left, and the widget was replaced
        left = "monitor._timer, monitor._display_id"
        assert value_of(client, left) == "(None, None)"
