"""Pictures as files and as notebook output: the same figure gives the same bytes."""

import base64
import html
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from nvalchemi.notebook.plots.facts import SIGN, Number
from nvalchemi.notebook.style import WRONG, styled

COMPRESSION = 1  # of PNG: twice the bytes of the best, a tenth of the time


def png(figure: Figure, *, dpi: float | None = None) -> bytes:
    """The figure as PNG.

    Equal figures give equal bytes on one version of matplotlib: no date or version is written, and
    the alt text is the description.
    """
    before = figure.dpi
    buffer = io.BytesIO()
    with styled():
        if dpi is not None:
            figure.set_dpi(dpi)
        try:
            canvas: Any = figure.canvas
            canvas.draw()
            # the canvas is opaque; without the fourth channel the file is a fifth smaller
            pixels = np.ascontiguousarray(np.asarray(canvas.buffer_rgba())[..., :3])
            resolution = (figure.dpi, figure.dpi)
        finally:
            figure.set_dpi(before)
    words = PngInfo()
    words.add_itxt("Description", alt_text(figure))
    Image.fromarray(pixels).save(
        buffer, "png", compress_level=COMPRESSION, pnginfo=words, dpi=resolution
    )
    return buffer.getvalue()


def svg(figure: Figure) -> bytes:
    """The figure as SVG, letters as paths, with the alt text as its description."""
    buffer = io.BytesIO()
    words = {"Date": None, "Creator": None, "Description": alt_text(figure)}
    with styled():
        figure.savefig(buffer, format="svg", metadata=words)
    return buffer.getvalue()


def save(figure: Figure, path: str | Path, *, dpi: float = 200) -> Path:
    """Write ``.png`` or ``.svg``, by the name.

    Raises
    ------
    ValueError
        For another ending.
    """
    path = Path(path)
    if path.suffix not in (".png", ".svg"):
        raise ValueError(f"a picture is written as .png or .svg, got {path.name!r}")
    path.write_bytes(svg(figure) if path.suffix == ".svg" else png(figure, dpi=dpi))
    return path


def alt_text(figure: Figure) -> str:
    """The picture in words, as its draw function left it."""
    return str(figure.get_label() or "a figure without a description")


def bundle(
    figure: Figure, numbers: Sequence[Number] = (), *, picture: bytes | None = None
) -> dict[str, str]:
    """``text/html`` with the picture and its key numbers as a table, and ``text/plain``.

    Parameters
    ----------
    figure : Figure
    numbers : sequence of Number
        ``arrays.facts.numbers``.
    picture : bytes, optional
        The PNG, if it has been made already.
    """
    data = base64.b64encode(png(figure) if picture is None else picture).decode()
    alt = alt_text(figure)
    image = (
        f'<img alt="{html.escape(alt, quote=True)}" style="max-width:100%" '
        f'src="data:image/png;base64,{data}">'
    )
    return {"text/html": image + numbers_table(numbers), "text/plain": alt}


def numbers_table(numbers: Sequence[Number]) -> str:
    """Key numbers as an HTML table; wrong ones red, with a sign."""
    if not numbers:
        return ""
    rows = "".join(
        f'<tr><th scope="row" style="text-align:left">{html.escape(number.name)}</th>'
        f"<td{wrong_style(number)}>{SIGN + ' ' if number.wrong else ''}"
        f"{html.escape(number.value)}</td></tr>"
        for number in numbers
    )
    return f"<table><tbody>{rows}</tbody></table>"


def wrong_style(number: Number) -> str:
    # on a dark page the red would not be legible without a light ground
    if not number.wrong:
        return ""
    return f' style="color:{WRONG};background:#FFFFFF;font-weight:bold"'
