"""A notebook in JupyterLab, as its user sees and handles it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from lab_server import Lab

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

_PATIENCE = 60_000  # ms; no test waits that long unless it fails or the machine is very busy


class NotebookPage:
    """A page with a notebook made of some cells, and a kernel that is ready.

    Parameters
    ----------
    page
        An empty page of the browser.
    lab
        The server.
    cells
        The code of each cell.
    """

    def __init__(self, page: Page, lab: Lab, cells: list[str]) -> None:
        self.page = page
        page.set_default_timeout(_PATIENCE)
        page.goto(lab.open("case.ipynb", cells))
        # a page that is asked to run a cell before that asks which kernel is wanted
        page.get_by_text("Python 3 (ipykernel) | Idle").wait_for()

    def themes(self) -> Iterator[str]:
        """Show the page in the light theme, then in the dark one."""
        for theme, is_light in (("light", "true"), ("dark", "false")):
            self.page.emulate_media(color_scheme=theme)
            body = self.page.locator(f"body[data-jp-theme-light='{is_light}']")
            body.wait_for(state="attached")
            self.page.locator("#jupyterlab-splash").wait_for(state="detached")
            yield theme

    def run(self, cell: int) -> Locator:
        """Run a cell by Control+Enter in it, and return all that it shows below its code."""
        place = self.cell(cell)
        place.get_by_role("textbox").first.click()
        self.page.keyboard.press("Control+Enter")
        return place.locator(".jp-OutputArea")

    def interrupt(self) -> None:
        """Press the toolbar's button that interrupts the kernel."""
        self.page.locator("[data-jp-item-name='interrupt'] >> [title*='Interrupt']").click()

    def cell(self, cell: int) -> Locator:
        """Return a code cell with its output."""
        return self.page.locator(".jp-Notebook .jp-CodeCell").nth(cell)

    def wait_for(self, place: Locator, text: str | re.Pattern[str]) -> str:
        """Wait until ``text`` is seen at a place, and return all that is read there."""
        from playwright.sync_api import expect

        expect(place).to_contain_text(text, timeout=_PATIENCE)
        return place.inner_text()

    def wait_for_attribute(self, place: Locator, name: str, value: str) -> None:
        """Wait until an attribute has a value."""
        from playwright.sync_api import expect

        expect(place).to_have_attribute(name, value, timeout=_PATIENCE)

    def wait_until_run(self, cell: int) -> None:
        """Wait until a cell's prompt has its number."""
        self.wait_for(self.cell(cell).locator(".jp-InputPrompt"), re.compile(r"\[\d+\]:"))


def contrast(place: Locator) -> float:
    """Return the contrast of a text to what is behind it, by WCAG 2.2: 4.5 can be read well."""
    text, behind = place.evaluate(_COLOURS)
    lighter, darker = sorted(map(_luminance, (text, behind)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


# a canvas knows each of the many ways in which a style sheet may name a colour
_COLOURS = """element => {
    const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
    const numbers = colour => {
        canvas.clearRect(0, 0, 1, 1);
        canvas.fillStyle = colour;
        canvas.fillRect(0, 0, 1, 1);
        return Array.from(canvas.getImageData(0, 0, 1, 1).data);
    };
    const text = numbers(getComputedStyle(element).color);
    let behind = [255, 255, 255, 0];
    for (; element && behind[3] === 0; element = element.parentElement)
        behind = numbers(getComputedStyle(element).backgroundColor);
    return [text, behind];
}"""


def _luminance(colour: list[float]) -> float:
    linear = [
        c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4
        for c in (channel / 255 for channel in colour[:3])
    ]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear))
