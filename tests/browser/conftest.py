"""JupyterLab and a headless browser for the tests of this folder."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import chromium
import pytest
from lab_server import Lab
from notebook_page import NotebookPage

if TYPE_CHECKING:
    from playwright.sync_api import Browser

# no connection but the server's is made or tried
_FLAGS = ["--disable-gpu", "--disable-quic", "--disable-sync"]
_SIZE = {"width": 1000, "height": 900}
_IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"


@pytest.fixture(scope="session")
def has_browser() -> None:
    problem = chromium.missing()
    if problem is not None:
        pytest.fail(problem) if chromium.REQUIRED else pytest.skip(problem)


@pytest.fixture(scope="session")
def lab(has_browser: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    server = Lab(tmp_path_factory.mktemp("lab"))
    yield server
    server.close()


@pytest.fixture(scope="module")  # Playwright keeps an event loop, which no other test may find
def browser(has_browser: None) -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium.find(), args=_FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def open_notebook(lab: Lab, browser: Browser) -> Iterator[Callable[..., NotebookPage]]:
    """Opens a notebook of some cells."""
    pages = []

    def open_it(*cells: str) -> NotebookPage:
        pages.append(browser.new_page(viewport=_SIZE))
        return NotebookPage(pages[-1], lab, list(cells))

    yield open_it
    for page in pages:
        page.close()
    lab.end_kernels()


@pytest.fixture
def picture() -> Callable[[NotebookPage, int, str], None]:
    """Takes a cell for the documentation in both themes, if NVALCHEMI_SCREENSHOTS is set."""

    def take(notebook: NotebookPage, cell: int, name: str) -> None:
        if not os.environ.get("NVALCHEMI_SCREENSHOTS"):
            return
        _IMAGES.mkdir(exist_ok=True)
        height = notebook.cell(cell).evaluate("element => element.scrollHeight")
        notebook.page.set_viewport_size({**_SIZE, "height": height + 300})
        for theme in notebook.themes():
            notebook.cell(cell).screenshot(path=_IMAGES / f"{name}-{theme}.png")
        notebook.page.set_viewport_size(_SIZE)

    return take
