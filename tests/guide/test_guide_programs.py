"""The programs of the user guide, each as plain Python, under torchrun and from a notebook cell.

The guide is the one on distributed training that this library follows, not a document of its own.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import nbformat
import pytest
import torch
from nbclient import NotebookClient

from nvalchemi.data import AtomicData
from nvalchemi.data.datapipes import AtomicDataZarrWriter

PROGRAMS = Path(__file__).parent / "programs"
SIZE_A, SIZE_B = 26, 7  # neither divides by batch_size 4 times two ranks
NAMES = (
    "basic_pattern",
    "single_dataset",
    "sampler_options",
    "custom_sampler",
    "foreign_names",
    "several_datasets",
)


def structures(number: int, seed: int) -> list[AtomicData]:
    generator = torch.Generator().manual_seed(seed)
    return [
        AtomicData(
            atomic_numbers=torch.randint(1, 9, (2 + i % 3,), generator=generator),
            positions=torch.randn(2 + i % 3, 3, generator=generator),
            energy=torch.randn(1, 1, generator=generator),
        )
        for i in range(number)
    ]


@pytest.fixture(scope="module")
def stores(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("stores")
    AtomicDataZarrWriter(folder / "dataset_a.zarr").write(structures(SIZE_A, 0))
    AtomicDataZarrWriter(folder / "dataset_b.zarr").write(structures(SIZE_B, 1))
    return folder


@pytest.fixture(scope="module")
def from_cells(stores: Path) -> dict[str, list[dict]]:
    """Reports of all programs, written in cells and launched on two ranks, by name."""
    cells = [(PROGRAMS / "recording.py").read_text()]
    cells.append("from nvalchemi.notebook import launch\nreports = {}")
    for name in NAMES:
        source = (PROGRAMS / f"{name}.py").read_text()
        cells.append(source.split('\nif __name__ == "__main__":')[0])
        cells.append(
            f"result = launch(program, {str(stores)!r}, Recorder(), nprocs=2)\n"
            f"reports[{name!r}] = list(result)"
        )
    cells.append(f"Path({str(stores)!r}, 'from_cells.json').write_text(json.dumps(reports))")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
    NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    return json.loads((stores / "from_cells.json").read_text())


def run(command: list[str], stores: Path, out: Path) -> list[dict]:
    out.mkdir()
    done = subprocess.run(
        [*command, str(stores), str(out)],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Traceback" not in done.stderr
    return [json.loads(path.read_text()) for path in sorted(out.glob("rank*.json"))]


def epochs_of(report: dict) -> dict[int, list[list[int]]]:
    by_epoch: dict[int, list[list[int]]] = {}
    for epoch, indices in report["batches"]:
        by_epoch.setdefault(epoch, []).append(indices)
    return by_epoch


def assert_promises(name: str, reports: list[dict], world_size: int) -> None:
    """What the guide promises of every program, and of this one."""
    assert [report["rank"] for report in reports] == list(range(world_size))
    assert all(report["world_size"] == world_size for report in reports)
    assert all(report["epochs"] == 2 for report in reports)
    assert not any(report["wrapped_after"] for report in reports)
    size = SIZE_A + SIZE_B if name == "several_datasets" else SIZE_A
    passes = [epochs_of(report) for report in reports]
    for epoch in (0, 1):
        lengths = [len(one[epoch]) for one in passes]
        assert len(set(lengths)) == 1, f"uneven ranks: {lengths}"
        counts = Counter(i for one in passes for batch in one[epoch] for i in batch)
        assert set(counts) == set(range(size))
        drawn = sum(counts.values())
        # no more repeats than padding needs
        assert drawn - size <= 4 * world_size
    for report in reports[1:]:
        assert report["parameters"] == reports[0]["parameters"]
    fixed = name in ("sampler_options", "foreign_names", "several_datasets")
    if world_size > 1:
        ordered = passes[0][0] == passes[0][1]
        assert ordered == fixed, "set_epoch must change a shuffled order and no other"
        assert passes[0][0] != passes[1][0]


def assert_sampler_is_back(reports: list[dict], name: str) -> None:
    plain = "SequentialSampler" if name == "several_datasets" else "RandomSampler"
    assert all(report["sampler_after"] == plain for report in reports)


@pytest.mark.parametrize("name", NAMES)
def test_program_runs_as_plain_python(name: str, stores: Path, tmp_path: Path):
    reports = run([sys.executable, str(PROGRAMS / f"{name}.py")], stores, tmp_path / "out")
    assert_promises(name, reports, world_size=1)
    assert_sampler_is_back(reports, name)


@pytest.mark.parametrize("name", NAMES)
def test_program_runs_under_torchrun(name: str, stores: Path, tmp_path: Path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*torchrun, "--nproc_per_node=2", str(PROGRAMS / f"{name}.py")]
    reports = run(command, stores, tmp_path / "out")
    assert_promises(name, reports, world_size=2)
    assert_sampler_is_back(reports, name)


@pytest.mark.parametrize("name", NAMES)
def test_program_runs_from_a_cell(name: str, from_cells: dict[str, list[dict]]):
    assert_promises(name, from_cells[name], world_size=2)
    assert_sampler_is_back(from_cells[name], name)


@pytest.mark.parametrize("arguments", [["--backend", "auto"], ["--backend", "gloo"]])
def test_ddp_example_runs_under_torchrun(arguments: list[str]):
    example = Path(__file__).parents[2] / "examples/intermediate/06_ddp_mlp_training.py"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*torchrun, "--nproc_per_node=2", str(example), *arguments, "--epochs", "2"],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "rank 0 of 2" in done.stdout and "rank 1 of 2" in done.stdout
    assert "Warning" not in done.stderr and "Traceback" not in done.stderr


def test_ddp_example_runs_as_plain_python():
    example = Path(__file__).parents[2] / "examples/intermediate/06_ddp_mlp_training.py"
    done = subprocess.run(
        [sys.executable, str(example), "--epochs", "2"],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "rank 0 of 1" in done.stdout and done.stderr == ""
