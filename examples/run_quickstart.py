"""Execute notebooks/00_quickstart.ipynb from a clean kernel and say what happened.

    python examples/run_quickstart.py        (or: make demo)

Leaves the executed notebook and an HTML page in build/quickstart/, beside the stores and weights.
"""

import argparse
import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbconvert import HTMLExporter
from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOK = ROOT / "notebooks" / "00_quickstart.ipynb"
OUT = ROOT / "build" / "quickstart"


class Client(NotebookClient):
    """Show what the ranks print while they print it."""

    def process_message(
        self, msg: dict[str, Any], cell: NotebookNode, cell_index: int
    ) -> NotebookNode | None:
        content = msg["content"]
        if msg["msg_type"] == "stream" and "[rank " in content["text"]:
            print("  " + content["text"].rstrip("\n").replace("\n", "\n  "), flush=True)
        output: NotebookNode | None = super().process_message(msg, cell, cell_index)
        return output


def execute(out: Path) -> Path:
    """Run the notebook in its own folder; what it made so far is kept if a cell fails."""
    out.mkdir(parents=True, exist_ok=True)
    for made in ("*.zarr", "*.xyz", "00_quickstart.*", "summary.json", "weights.pt"):
        for path in out.glob(made):  # of an earlier run, and nothing else in that folder
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    os.environ["QUICKSTART_FOLDER"] = str(out)
    if not sys.stdout.isatty():
        os.environ.setdefault("NO_COLOR", "1")  # the marks of ranks are coloured otherwise
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = Client(
        notebook,
        timeout=600,
        kernel_name="python3",
        resources={"metadata": {"path": str(NOTEBOOK.parent)}},
        extra_arguments=["--log-level=ERROR"],  # not a word on TCP without encryption
    )
    try:
        client.execute()
    finally:
        nbformat.write(notebook, out / NOTEBOOK.name)
    page, _ = HTMLExporter().from_notebook_node(notebook)
    html = out / NOTEBOOK.with_suffix(".html").name
    html.write_text(page, encoding="utf-8")
    return html


def report(summary: dict, seconds: float, html: Path) -> str:
    """The summary of a run in a few lines."""
    lines = [""]
    for name, (structures, atoms) in summary["imported"].items():
        lines.append(f"imported    {name}: {structures} structures, {atoms} atoms")
    for rank, seen in enumerate(summary["trained_on"]):
        parts = f"{seen['alloys']} alloys + {seen['molecules']} molecules"
        lines.append(f"rank {rank}      trained on {seen['structures']} structures ({parts})")
    lines.append(
        f"loss        {summary['first_loss']:.3g} at first, {summary['last_loss']:.3g} after "
        f"{summary['steps']} steps"
    )
    for name, errors in summary["validation"].items():
        lines.append(
            f"validation  {name}: forces {1e3 * errors['forces']:.0f} meV/Å (zero forces: "
            f"{1e3 * errors['zero forces']:.0f}), energy {errors['energy']:.1f} meV/atom "
            f"(element averages: {errors['element averages']:.0f})"
        )
    for title, path in (("notebook", html.with_suffix(".ipynb")), ("page", html)):
        lines.append(f"{title:11} {os.path.relpath(path)}")
    lines.append(f"took        {seconds:.0f} s")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description="Execute the quickstart notebook.")
    parser.add_argument("--out", type=Path, default=OUT, help="folder for what it makes")
    out = parser.parse_args().out.resolve()
    print(f"executing {NOTEBOOK.relative_to(ROOT)} on 2 ranks; a minute or two", flush=True)
    start = time.monotonic()
    try:
        html = execute(out)
    except CellExecutionError as error:
        print(f"a cell failed; the notebook so far is in {os.path.relpath(out)}\n{error}")
        return 1
    summary = json.loads((out / "summary.json").read_text())
    print(report(summary, time.monotonic() - start, html))
    return 0


if __name__ == "__main__":
    sys.exit(main())
