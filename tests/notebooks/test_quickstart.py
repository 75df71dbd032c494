"""make demo as a newcomer runs it: real structures in, two ranks, forces worth having out."""

import json
import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def demo(tmp_path_factory) -> tuple[Path, str]:
    out = tmp_path_factory.mktemp("quickstart")
    environment = {k: v for k, v in os.environ.items() if k != "NVALCHEMI_FAST"}
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples/run_quickstart.py"), "--out", str(out)],
        capture_output=True,
        text=True,
        timeout=600,
        env=environment,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return out, done.stdout


def test_validation_errors_are_far_below_the_trivial_predictors(demo):
    validation = json.loads((demo[0] / "summary.json").read_text())["validation"]
    assert set(validation) == {"alloys", "molecules"}
    for name, errors in validation.items():
        assert errors["forces"] <= errors["zero forces"] / 5, name
        assert errors["energy"] < errors["element averages"] / 2, name


def test_each_rank_trained_on_its_half_of_everything(demo):
    summary = json.loads((demo[0] / "summary.json").read_text())
    first, second = summary["trained_on"]
    assert first == second
    structures = sum(count for count, _ in summary["imported"].values())
    assert first["structures"] + second["structures"] == structures * 36
    assert summary["last_loss"] < summary["first_loss"] / 10


def test_notebook_and_page_are_left_and_the_summary_says_where(demo):
    out, printed = demo
    executed = nbformat.read(out / "00_quickstart.ipynb", as_version=4)
    pictures = [
        output
        for cell in executed.cells
        for output in cell.get("outputs", [])
        if "image/png" in output.get("data", {})
    ]
    assert len(pictures) == 4
    assert "<html" in (out / "00_quickstart.html").read_text()[:500]
    for word in ("imported", "rank 0", "rank 1", "loss", "validation", "00_quickstart.html"):
        assert word in printed
