"""Committed notebooks carry their outputs and nothing of the machine that made them."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted(
    p for p in ROOT.glob("notebooks/**/*.ipynb") if ".ipynb_checkpoints" not in p.parts
)
TIMING = {"execution", "ExecuteTime", "papermill"}
REMEDY = "run `make clean-notebooks`"
# /two/components at least, not part of a word, a URL, a tag or a relative path.
ABSOLUTE_PATH = re.compile(r"(?<![\w./:~<+\-=\])}])/(?:[\w.+\-]+/)+[\w.+\-]*|\b[A-Z]:\\\\?\w+\\")
EMBEDDED = re.compile(r"base64,[A-Za-z0-9+/=\s]+")


def text(value: Any) -> str:
    """Notebook text, which is stored as one string or a list of lines."""
    return "".join(value) if isinstance(value, list) else str(value)


def texts(cell: dict[str, Any]) -> list[str]:
    """All text of a cell that a reader can see: its source and its textual outputs."""
    found = [text(cell["source"])]
    for output in cell.get("outputs", []):
        found.append(text(output.get("text", "")))
        data = output.get("data", {})
        found += [text(v) for kind, v in data.items() if kind.startswith("text/")]
    return [EMBEDDED.sub("", t) for t in found]


def problems(notebook: dict[str, Any]) -> list[str]:
    """What may not be committed, one sentence each."""
    found = []
    for key in sorted({"widgets", *TIMING} & set(notebook["metadata"])):
        found.append(f"metadata.{key} is present: {REMEDY}")
    for number, cell in enumerate(notebook["cells"]):
        for key in sorted(TIMING & set(cell["metadata"])):
            found.append(f"cell {number} has timing in metadata.{key}: {REMEDY}")
        if any(o["output_type"] == "error" for o in cell.get("outputs", [])):
            found.append(f"cell {number} ended in an error")
        for path in [m for t in texts(cell) for m in ABSOLUTE_PATH.findall(t)]:
            found.append(f"cell {number} shows the absolute path {path}")
    return found


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.name)
def test_committed_notebook_is_clean(path: Path) -> None:
    assert problems(json.loads(path.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.name)
def test_committed_notebook_carries_its_outputs(path: Path) -> None:
    cells = [
        cell
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]
        if cell["cell_type"] == "code"
    ]
    assert all(cell["execution_count"] for cell in cells), "execute the whole notebook"
    pictures = [o for cell in cells for o in cell["outputs"] if "image/png" in o.get("data", {})]
    assert pictures, "readers come through GitHub: they see only what was committed"


def make_notebook(source: str = "", outputs: list[Any] | None = None, **metadata: Any) -> dict:
    cell = {"cell_type": "code", "source": [source], "outputs": outputs or [], "metadata": {}}
    return {"metadata": metadata, "cells": [cell]}


@pytest.mark.parametrize(
    "source",
    [
        "open('/home/somebody/data.xyz')",
        "path = /tmp/x1234/run",
        "C:\\Users\\somebody",
        "File /opt/lib/python3.11/site-packages/x.py:12",
    ],
)
def test_the_check_itself_sees_absolute_paths(source: str) -> None:
    shown = {"output_type": "stream", "name": "stdout", "text": [source + "\n"]}
    assert problems(make_notebook(source))
    assert problems(make_notebook(outputs=[shown]))


@pytest.mark.parametrize(
    "source",
    [
        "see https://example.org/a/b/c and runs/quickstart/log.jsonl",
        "eV/Angstrom/atom, train/val/test, ../data/x.zarr, ./a/b, a / b / c",
        "<b>forces</b><br/><img src='data:image/png;base64,iVBO/abc/def+/x=='/>",
    ],
)
def test_the_check_itself_leaves_other_slashes_alone(source: str) -> None:
    assert problems(make_notebook(source)) == []


def test_the_check_itself_sees_widgets_timing_and_errors() -> None:
    assert problems(make_notebook(widgets={}))
    assert problems(make_notebook(papermill={}))
    assert problems(make_notebook(outputs=[{"output_type": "error", "ename": "ValueError"}]))
    timed = make_notebook()
    timed["cells"][0]["metadata"]["execution"] = {"iopub.execute_input": "then"}
    assert problems(timed)
