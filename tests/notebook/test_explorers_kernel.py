"""Explorers in a real kernel: moved from the front end, refined while idle, kept by nbconvert."""

import re
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbconvert import HTMLExporter

from nvalchemi.sharding import ShardPlan

REPOSITORY = Path(__file__).resolve().parents[2]
VIEW = "application/vnd.jupyter.widget-view+json"
MAKE = """
from nvalchemi.notebook import ShardExplorer
from nvalchemi.sharding import ShardPlan
from nvalchemi.data.datapipes import EpochSampler
"""


@pytest.fixture(autouse=True)
def _importable(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))


def client_of(*cells: str, **options) -> NotebookClient:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
    return NotebookClient(notebook, timeout=120, **options)


def test_nbconvert_without_widget_state_shows_picture_and_table():
    client = client_of(
        f"{MAKE}\nexplorer = ShardExplorer(ShardPlan(21, world_size=4, batch_size=3))\nexplorer",
        "explorer.show('Who saw what').controls['world_size'].value = 3\nexplorer",
        "from nvalchemi.notebook import DatasetExplorer\nDatasetExplorer([])",
        store_widget_state=False,
    )
    client.execute()
    shown, changed, sentence = (cell.outputs[-1].data for cell in client.nb.cells)
    assert VIEW in shown and shown["text/plain"].startswith("ShardExplorer")
    assert "widgets" not in client.nb.metadata
    page, _ = HTMLExporter().from_notebook_node(client.nb)
    pictures = re.findall(r'<img alt="[^"]+"[^>]* src="data:image/png;base64', page)
    assert len(pictures) == 3
    assert page.count('aria-label="audit of the epoch"') == 2
    first, second = (
        ShardPlan(21, world_size=4, batch_size=3),
        ShardPlan(21, world_size=3, batch_size=3),
    )
    assert first.hash in shown["text/html"] and second.hash in changed["text/html"]
    assert "<td" in shown["text/html"] and "ranks alike" in shown["text/html"]
    assert "at least one structure" in sentence["text/html"]
    assert not any(output.output_type == "error" for c in client.nb.cells for output in c.outputs)


def value_of(client: NotebookClient, cell: str) -> str:
    client.nb.cells.append(nbformat.v4.new_code_cell(cell))
    client.execute_cell(client.nb.cells[-1], len(client.nb.cells) - 1)
    return client.nb.cells[-1].outputs[-1].data["text/plain"]


def test_a_slider_in_the_front_end_skips_values_and_refines_when_idle():
    count = """
drawn = []
before = ShardExplorer._redraw
def counted(self):
    drawn.append(self.controls["epoch"].value if hasattr(self, "controls") else None)
    before(self)
ShardExplorer._redraw = counted
explorer = ShardExplorer(ShardPlan(2**20, sampler=EpochSampler, world_size=16, batch_size=16))
explorer
"""
    client = client_of(MAKE + count)
    with client.setup_kernel():
        client.execute_cell(client.nb.cells[0], 0)
        first = client.nb.cells[0].outputs[0].data["text/plain"]
        sliders = {
            model: state
            for model, state in client.widget_state.items()
            if state.get("_model_name") == "IntSliderModel"
        }
        ((model, state),) = sliders.items()
        assert state["description"] == "epoch"
        for epoch in range(1, 9):  # as a mouse that is drawn along
            content = {"comm_id": model, "data": {"method": "update", "state": {"value": epoch}}}
            client.kc.shell_channel.send(client.kc.session.msg("comm_msg", content))
        assert value_of(client, "explorer.epoch") == "8"
        assert value_of(client, "explorer.panes[0].facts.plan").count("epoch 8")
        values = value_of(client, "drawn")
        assert int(value_of(client, "len(drawn)")) < 9, values
        for _ in range(200):
            if value_of(client, "explorer._idle.is_done") == "True":
                break
            time.sleep(0.1)
        truth = value_of(client, "explorer.panes[0].facts.truth, explorer.panes[0].facts.exact")
    assert "sample of" in first and "True" in truth and "every draw" in truth


def test_nothing_heavy_is_imported_before_an_explorer_is():
    code = (
        "import sys, nvalchemi.notebook as n; print('ShardExplorer' in n.__all__, "
        "sorted({'matplotlib', 'ipywidgets', 'ase'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True []"
