"""Labelled controls that the keyboard reaches."""

from collections.abc import Iterable, Sequence
from typing import Any

import ipywidgets

WHOLE = {"description_width": "initial"}  # labels are shown whole
NARROW, WIDE = "15em", "26em"
MOST = 2**20  # ranks or samples of a batch that a field takes


def number(label: str, value: int, low: int = 0, high: int = MOST) -> ipywidgets.BoundedIntText:
    return ipywidgets.BoundedIntText(
        value=value,
        min=low,
        max=max(high, value),
        description=label,
        style=WHOLE,
        layout=box(NARROW),
    )


def whole_number(label: str, value: int) -> ipywidgets.IntText:
    return ipywidgets.IntText(value=value, description=label, style=WHOLE, layout=box(NARROW))


def slider(label: str, value: int, high: int) -> ipywidgets.IntSlider:
    return ipywidgets.IntSlider(
        value=value, min=0, max=max(high, value), description=label, style=WHOLE, layout=box(WIDE)
    )


def interval(label: str, high: int) -> ipywidgets.IntRangeSlider:
    """From and to, both within; the numbers beside it can be typed."""
    return ipywidgets.IntRangeSlider(
        value=(0, high), min=0, max=high, description=label, style=WHOLE, layout=box(WIDE)
    )


def check(label: str, value: bool) -> ipywidgets.Checkbox:
    return ipywidgets.Checkbox(value=value, description=label, indent=False, layout=box(NARROW))


def choice(label: str, options: Iterable[Any], value: Any = None) -> ipywidgets.Dropdown:
    return ipywidgets.Dropdown(
        options=list(options), value=value, description=label, style=WHOLE, layout=box(WIDE)
    )


def row(parts: Sequence[ipywidgets.Widget]) -> ipywidgets.Box:
    """Side by side, on as many lines as the page needs."""
    return ipywidgets.Box(
        list(parts), layout=ipywidgets.Layout(flex_flow="row wrap", grid_gap="0.3em")
    )


def box(width: str) -> ipywidgets.Layout:
    return ipywidgets.Layout(width=width)


def set_upper(control: ipywidgets.Widget, high: int) -> None:
    """Another upper limit; an interval that was whole stays whole, others stay inside."""
    if control.max == high:
        return
    if isinstance(control.value, tuple):
        low, end = control.value
        whole = (low, end) == (control.min, control.max)
        wish = (0, high) if whole else (min(low, high), min(end, high))
    else:
        wish = min(control.value, high)
    if high > control.max:
        control.max = high
        control.value = wish
    else:
        control.value = wish
        control.max = high


def chosen(control: ipywidgets.IntRangeSlider) -> slice | None:
    """What an interval chooses; None if it is all."""
    low, high = control.value
    return None if (low, high) == (control.min, control.max) else slice(low, high + 1)
