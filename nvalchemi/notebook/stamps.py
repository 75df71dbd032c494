"""Text that is rasterised once: most of a picture's time goes into letters that stay the same."""

from functools import lru_cache
from typing import Any

import numpy as np
from matplotlib.backend_bases import RendererBase
from matplotlib.backends.backend_agg import FigureCanvasAgg, RendererAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from numpy.typing import NDArray

from nvalchemi.notebook.style import styled

KEPT = 1024  # texts, some 20 kB each
MARGIN = 2  # pixels around one


class StampedText(Text):
    """Text in one line, which Agg renderers get as an image of whole pixels.

    Other renderers (SVG) get letters.
    """

    def draw(self, renderer: RendererBase) -> None:
        words = self.get_text()
        if not isinstance(renderer, RendererAgg) or not self.get_visible() or not words.strip():
            super().draw(renderer)
            return
        colour, weight = self.get_color(), self.get_fontweight()
        image, below = stamp(words, self.get_fontsize(), weight, colour, renderer.dpi)
        x, y = self.get_transform().transform(self.get_unitless_position())
        gc = renderer.new_gc()
        renderer.draw_image(gc, round(x) - MARGIN, round(y) - below, image)
        gc.restore()


@lru_cache(maxsize=KEPT)
def stamp(
    words: str, size: float, weight: Any, colour: Any, dpi: float
) -> tuple[NDArray[np.uint8], int]:
    """The words as an RGBA image, bottom row first, and how many rows are below the baseline."""
    with styled():
        figure = Figure(figsize=(1, 1), dpi=dpi, facecolor="none")
        canvas = FigureCanvasAgg(figure)
        text = figure.text(0, 0, words, fontsize=size, fontweight=weight, color=colour)
        box = text.get_window_extent(canvas.get_renderer())
        below = int(np.ceil(max(0.0, -box.y0))) + MARGIN
        width = int(np.ceil(box.x1)) + 2 * MARGIN
        height = int(np.ceil(box.y1)) + below + MARGIN
        figure.set_size_inches(width / dpi, height / dpi)
        text.set_position((MARGIN / width, below / height))
        canvas.draw()
        pixels = np.array(canvas.buffer_rgba())[::-1]
    return np.ascontiguousarray(pixels), below
