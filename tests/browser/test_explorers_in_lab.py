"""Explorers moved by keyboard in JupyterLab: what is seen is what Python computes."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
from notebook_page import NotebookPage, contrast

from nvalchemi.notebook.export import png
from nvalchemi.notebook.plots import VIEWS
from nvalchemi.notebook.plots.facts import audit
from nvalchemi.sharding import ShardPlan

if TYPE_CHECKING:
    from playwright.sync_api import Locator

Pictures = Callable[[NotebookPage, int, str], None]
SHARDS = """\
from nvalchemi.notebook import ShardExplorer
from nvalchemi.sharding import ShardPlan

ShardExplorer(ShardPlan(range(50), world_size=4, batch_size=4))"""
BATCHES = """\
from nvalchemi.notebook import BatchExplorer
from nvalchemi.sharding import ShardPlan

BatchExplorer(ShardPlan([900, 100], world_size=2, batch_size=10))"""
MISTAKE = """\
from nvalchemi.notebook import ShardExplorer

ShardExplorer([1, 2, 3])"""


@pytest.fixture(scope="module")
def notebook(open_notebook: Callable[..., NotebookPage]) -> NotebookPage:
    return open_notebook(SHARDS, BATCHES, MISTAKE)


def assert_shows(
    notebook: NotebookPage, output: Locator, view: str, plan: ShardPlan, *where: int
) -> None:
    """The picture that a script would get, byte by byte, and its numbers."""
    *_, arrays = VIEWS[view].refine(plan, *where)
    image = output.locator("img:visible").first
    notebook.wait_for_attribute(image, "alt", arrays.facts.alt)
    shown = base64.b64decode((image.get_attribute("src") or "").split(",")[1])
    assert shown == png(VIEWS[view].draw(arrays))
    rows = image.locator("xpath=following-sibling::table").locator("tr").all_inner_texts()
    assert [tuple(row.replace("⚠ ", "").split("\t")) for row in rows] == [
        (number.name, number.value) for number in arrays.facts.numbers
    ]


def strip(output: Locator) -> dict[str, str]:
    """The audit above the tabs, as it is read."""
    table = output.get_by_role("table", name="audit of the epoch")
    names, values = (row.split("\t") for row in table.locator("tr").all_inner_texts())
    return dict(zip(names, values))


def tab_to(notebook: NotebookPage, target: Locator) -> None:
    """Press Tab until a control has the focus."""
    for _ in range(20):
        notebook.page.keyboard.press("Tab")
        if target.evaluate("element => element === document.activeElement"):
            return
    raise AssertionError(f"Tab does not lead to {target}")


def test_epoch_and_world_size_by_keyboard(notebook: NotebookPage, picture: Pictures) -> None:
    output, press = notebook.run(0), notebook.page.keyboard.press
    plan = ShardPlan(range(50), world_size=4, batch_size=4)
    assert_shows(notebook, output, "assignment", plan, 0)
    assert strip(output)["padded"] == "⚠ 2"  # 50 samples on 4 ranks are 52 draws
    texts = output.get_by_role("columnheader").first, output.locator("td b[style]").first
    for theme in notebook.themes():
        assert all(contrast(text) > 4.5 for text in texts), theme
    picture(notebook, 0, "shard-explorer")

    output.get_by_label("world size").focus()
    tab_to(notebook, output.locator(".widget-slider", has_text="epoch").get_by_role("slider"))
    press("ArrowRight")
    assert_shows(notebook, output, "assignment", plan, 1)

    output.get_by_label("world size").focus()
    press("Control+a")
    notebook.page.keyboard.type("8")
    press("Tab")
    plan = ShardPlan(range(50), world_size=8, batch_size=4)
    assert_shows(notebook, output, "assignment", plan, 1)
    numbers = {number.name: f"{'⚠ ' * number.wrong}{number.value}" for number in audit(plan, 1)}
    assert strip(output) == {"ranks": "8", **numbers}
    assert strip(output)["padded"] == "⚠ 6"
    notebook.wait_for(output, f"epoch 1, plan {plan.hash}; findings: ⚠ 1 warning")


def test_a_batch_is_opened_by_keyboard(notebook: NotebookPage, picture: Pictures) -> None:
    output, press = notebook.run(1), notebook.page.keyboard.press
    plan = ShardPlan([900, 100], world_size=2, batch_size=10)
    assert_shows(notebook, output, "composition", plan, 0)
    picture(notebook, 1, "batch-explorer")

    output.get_by_role("tab", name="Composition").focus()
    for key in ("ArrowRight", "ArrowRight", "Enter"):
        press(key)
    assert_shows(notebook, output, "batch", plan, 0, 0, 0)


def test_a_mistake_is_shown_as_a_sentence(notebook: NotebookPage) -> None:
    output = notebook.run(2)
    notebook.wait_for(output.get_by_role("alert"), "an explorer shows a ShardPlan")
    assert "Traceback" not in output.inner_text()
