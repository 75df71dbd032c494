"""The live view of a background launch: in real kernels with real widgets, and without any."""

import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

REPOSITORY = Path(__file__).resolve().parents[2]
VIEW = "application/vnd.jupyter.widget-view+json"

# what LaunchStatus needs of a launch, with a thread like that of the real one
LAUNCH = """
import threading, time
from nvalchemi.notebook.status import LaunchStatus

class Launch:
    nprocs = 2
    def __init__(self, work):
        self.error, self.state, self.count, self.seconds = None, "running", 0, 61.5
        self._stopped = threading.Event()
        self.status = LaunchStatus(self)
        self.thread = threading.Thread(target=self._run, args=(work,))
        self.thread.start()
    def _run(self, work):
        try:
            while self.count < 3 or work == "for ever":
                self.count += 1
                self.status.update()
                if self._stopped.wait(0.05):
                    self.state = "stopped"
                    return
            if work == "fail":
                raise RuntimeError("rank 1: KeyError: <energy>\\n\\nOn rank 1: ...")
            self.state = "done"
        except Exception as error:
            self.state, self.error = "failed", error
        finally:
            self.status.finish()
            self.status.finish()
    def last_lines(self):
        return [f"step {self.count} <b>", "\\x1b[32m45%\\x1b[0m|" + "#" * 1000]
    def stop(self):
        self._stopped.set()
        self.thread.join()
"""


@pytest.fixture(autouse=True)
def _importable(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))


def _client(*cells: str) -> NotebookClient:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
    return NotebookClient(notebook, timeout=100)


def _models(client: NotebookClient, name: str) -> dict[str, dict]:
    return {i: state for i, state in client.widget_state.items() if state["_model_name"] == name}


def test_a_notebook_has_the_end_of_the_launch_also_without_widgets():
    client = _client(f"{LAUNCH}\nlaunch = Launch('fail')", "launch.thread.join()", "launch.status")
    client.execute()
    (shown,) = client.nb.cells[0].outputs
    assert shown.output_type == "display_data" and VIEW in shown.data
    assert shown.data["text/plain"].splitlines() == [
        "launch: failed, 1 min 1 s: rank 1: KeyError: <energy>",
        "  rank 0: step 3 <b>",
        f"  rank 1: 45%|{'#' * 193}...",
    ]
    static = shown.data["text/html"]
    assert "✖" in static and "rank 1: KeyError: &lt;energy&gt;</b>" in static
    assert '<th scope="row"' in static and "step 3 &lt;b&gt;" in static
    assert client.nb.cells[2].outputs[0].data["text/html"] == static
    assert [model["value"] for model in _models(client, "HTMLModel").values()] == [static]
    (box,) = _models(client, "VBoxModel").values()
    assert len(box["children"]) == 1  # nothing is left to stop
    assert shown.data[VIEW]["model_id"] in _models(client, "VBoxModel")


def test_the_stop_button_stops_and_the_kernel_is_free_meanwhile():
    client = _client(f"{LAUNCH}\nlaunch = Launch('for ever')", "launch.status", "launch.status")
    with client.setup_kernel():
        client.execute_cell(client.nb.cells[0], 0)
        client.execute_cell(client.nb.cells[1], 1)
        ((model, button),) = _models(client, "ButtonModel").items()
        assert button["description"] == "Stop the ranks" and button["tooltip"]
        click = {"comm_id": model, "data": {"method": "custom", "content": {"event": "click"}}}
        client.kc.shell_channel.send(client.kc.session.msg("comm_msg", click))
        client.execute_cell(client.nb.cells[2], 2)
    before, after = (cell.outputs[0].data for cell in client.nb.cells[1:])
    assert "▶" in before["text/html"] and "launch: running, " in before["text/plain"]
    assert "■" in after["text/html"] and "launch: stopped, " in after["text/plain"]


@pytest.mark.parametrize(
    ("work", "end"),
    [
        ("done", "done, 1 min 1 s"),
        ("fail", "failed, 1 min 1 s: rank 1: KeyError: <energy>"),
        ("for ever", "stopped, 1 min 1 s"),
    ],
)
def test_without_jupyter_there_is_a_line_at_each_end(work, end):
    code = f"{LAUNCH}\nlaunch = Launch({work!r})\ntime.sleep(0.2)\nlaunch.stop()\n"
    code += "import sys; print('ipywidgets' in sys.modules)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "launch: 2 ranks started in the background",
        f"launch: {end}",
        "False",
    ]
    assert not re.search("Traceback", done.stderr)
