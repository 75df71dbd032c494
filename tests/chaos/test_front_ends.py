"""Where launch() is called from: nbconvert, nbmake, papermill, IPython, scripts without a guard."""

import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from conftest import REPOSITORY

GOOD = "assert list(launch(lambda: os.environ['RANK'], nprocs=2)) == ['0', '1']"
BAD = """
def fail():
    if os.environ["RANK"] == "1":
        raise KeyError("energy")
launch(fail, nprocs=2)
"""
IMPORTS = "import os\nfrom nvalchemi.notebook import launch"
RUNNERS = {
    "nbconvert": ["nbconvert", "--to", "notebook", "--execute", "--output", "done.ipynb"],
    "nbmake": ["pytest", "--nbmake", "-p", "no:cacheprovider"],
    "papermill": ["papermill", "--kernel", "python3"],
}


def _start(arguments: list[str], folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_failing_rank_fails_the_run(runner, tmp_path):
    if runner == "papermill":
        pytest.importorskip("papermill")
    cells = [nbformat.v4.new_code_cell(code) for code in (IMPORTS, BAD)]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "run.ipynb")
    output = ["done.ipynb"] if runner == "papermill" else []
    run = _start(["-m", *RUNNERS[runner], "run.ipynb", *output], tmp_path)
    said = run.communicate(timeout=200)[0]
    assert run.returncode != 0, said
    assert "rank 1: KeyError: 'energy'" in said


SCRIPT = """
import os
import torch
from nvalchemi.notebook import launch

print("the top level runs", flush=True)

class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        return index * index

def total():
    loader = torch.utils.data.DataLoader(Squares(), num_workers=1)
    return int(sum(int(batch) for batch in loader)) + int(os.environ["RANK"])

print(list(launch(total, nprocs=2, timeout=60)), flush=True)
"""


@pytest.mark.parametrize("method", ["", "torch.multiprocessing.set_start_method('spawn')"])
def test_a_script_without_a_guard_runs_once(method, tmp_path):
    (tmp_path / "script.py").write_text(
        SCRIPT.replace("import torch\n", f"import torch\n{method}\n")
    )
    run = _start(["script.py"], tmp_path)
    said = run.communicate(timeout=200)[0]
    # DataLoader workers that the user wants spawned run the script's top level, by themselves
    times = said.count("the top level runs")
    assert times == 1 if not method else times <= 3, said
    if run.returncode:
        assert method and "__main__" in said, said  # told what to do
    else:
        assert said.endswith("[14, 15]\n"), said


def test_ipython_runs_cells(tmp_path):
    commands = [f"{IMPORTS.replace(chr(10), '; ')}; {GOOD}; print('good')", BAD.strip()]
    (tmp_path / "cells.ipy").write_text("\n".join([*commands[0].split("; "), commands[1]]))
    run = _start(["-m", "IPython", "--no-banner", "--colors=NoColor", "cells.ipy"], tmp_path)
    said = run.communicate(timeout=200)[0]
    assert "good\n" in said and "rank 1: KeyError: 'energy'" in said, said
    assert run.returncode != 0
