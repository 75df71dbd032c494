"""TrainingMonitor: shows what the files say, of any run, and stops ranks by its button."""

import gc
import json
import os
import re
import subprocess
import sys
import time
import weakref
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from test_plot_run import write_run

from nvalchemi.data import AtomicData, Batch
from nvalchemi.data.datapipes import DataLoader, InMemoryDataset
from nvalchemi.distributed import DistributedManager
from nvalchemi.distributed.workers import Stopped
from nvalchemi.models import MLPPotential
from nvalchemi.notebook import TrainingMonitor, launch
from nvalchemi.notebook.monitor_words import MOST_RANKS
from nvalchemi.notebook.run import Run
from nvalchemi.training import (
    DDPHook,
    EnergyMSELoss,
    ForceMSELoss,
    OptimizerConfig,
    RunFolder,
    TrainingStage,
    TrainingStrategy,
    ValidationConfig,
    default_training_fn,
)

REPOSITORY = Path(__file__).resolve().parents[2]


class Pause:
    """Makes steps slow."""

    frequency, stage = 1, TrainingStage.BEFORE_FORWARD

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __call__(self, ctx, stage) -> None:
        time.sleep(self.seconds)


def make_batch(structures: int, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return Batch.from_data_list(
        [
            AtomicData(
                atomic_numbers=torch.full((3,), 6),
                positions=torch.randn(3, 3, generator=generator),
                energy=torch.randn(1, 1, generator=generator),
                forces=torch.randn(3, 3, generator=generator),
            )
            for _ in range(structures)
        ]
    )


def train(folder: str, steps: int, pause: float = 0.0) -> None:
    DistributedManager.initialize()
    manager = DistributedManager()
    print(f"rank {manager.rank} trains")
    torch.manual_seed(0)
    TrainingStrategy(
        models=MLPPotential(hidden_features=8),
        optimizer_configs=OptimizerConfig(optimizer_cls=torch.optim.SGD),
        num_epochs=steps // 4,
        training_fn=default_training_fn,
        loss_fn=EnergyMSELoss() + ForceMSELoss(),
        validation_config=ValidationConfig(validation_data=[make_batch(4, 1)], every_n_epochs=1),
        hooks=[DDPHook(), RunFolder(folder), Pause(pause)],
        distributed_manager=manager,
    ).run(DataLoader(InMemoryDataset(make_batch(16)), batch_size=2))


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def sentences(monitor: TrainingMonitor) -> str:
    return "\n".join(map(str, monitor.standings))


# Real trainings.


def test_a_training_in_the_background_is_followed_to_its_end(tmp_path):
    folder = tmp_path / "run"
    handle = launch(train, str(folder), 12, 0.15, nprocs=2, block=False, output="quiet")
    monitor = TrainingMonitor(folder, handle=handle)
    assert not monitor.has_ended and "is not there yet" in sentences(monitor)
    while len(monitor.runs[0].steps) < 4:
        monitor.update()
        time.sleep(0.05)
    assert not monitor.has_ended and "launch of 2 ranks: running" in sentences(monitor)
    assert "running, at step" in sentences(monitor) and "of 12" in sentences(monitor)
    assert not monitor._button.disabled and 'alt="How does' in monitor._pane.widget.value
    monitor.wait(60)
    assert monitor.has_ended and handle.state == "done"
    # what it shows is what the files say
    rows = [row for row in lines(folder / "metrics.jsonl") if "lr" in row]
    drawn = monitor._pane.arrays.runs[0]
    np.testing.assert_array_equal(drawn.losses["loss"].y, [row["loss"] for row in rows])
    np.testing.assert_array_equal(
        drawn.losses["ForceMSELoss"].y, [row["parts"]["ForceMSELoss"] for row in rows]
    )
    validated = [row for row in lines(folder / "metrics.jsonl") if "validation" in row]
    np.testing.assert_array_equal(drawn.validations["loss"].y, [row["loss"] for row in validated])
    work = [row for row in lines(folder / "rank1.jsonl") if "seconds" in row]
    np.testing.assert_allclose(
        drawn.throughput.curves["rank 1"].y, [w["structures"] / w["seconds"] for w in work]
    )
    assert drawn.memory.curves["rank 1"].y[-1] == work[-1]["rss"]
    text = repr(monitor)
    assert "✔ done at step 12 of 12" in text and f"loss {rows[-1]['loss']:.4g}" in text
    assert "rank 1 trains" in text  # the last line of a rank
    assert monitor._button.disabled and "have ended" in monitor._reason.value


def test_the_button_stops_the_ranks(tmp_path):
    folder = tmp_path / "run"
    handle = launch(train, str(folder), 4000, 0.05, nprocs=2, block=False, output="quiet")
    monitor = TrainingMonitor(folder, handle=handle)
    while not monitor.runs[0].sessions or len(monitor.runs[0].ranks) < 2:
        monitor.update()
        time.sleep(0.05)
    pids = [lines(folder / f"rank{rank}.jsonl")[0]["pid"] for rank in range(2)]
    assert all(map(psutil.pid_exists, pids))
    monitor._button.click()
    assert monitor._button.disabled and monitor._button.description == "Stopping"
    monitor.wait(60)
    assert handle.state == "stopped" and not any(map(psutil.pid_exists, pids))
    assert "■ launch of 2 ranks: stopped" in repr(monitor)
    assert monitor.runs[0].state.name == "stopped"
    with pytest.raises(Stopped):
        handle.wait()


def test_a_run_of_torchrun_is_shown_like_any_other(tmp_path):
    folder = tmp_path / "run"
    program = tmp_path / "program.py"
    program.write_text(
        f"import os, sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from test_monitor import train\n"
        f"train({str(folder)!r}, 12, 0.1)\n"
        "sys.stdout.flush()\nos._exit(0)\n"
    )
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    process = subprocess.Popen(
        [sys.executable, *command, str(program)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
    )
    monitor = TrainingMonitor(folder)
    assert monitor._button.disabled and "no handle" in monitor._reason.value
    states = set()
    try:
        monitor_ended = False
        while not monitor_ended and process.poll() in (None, 0):
            monitor_ended = monitor._look()
            states.add(monitor.runs[0].state.name)
            time.sleep(0.05)
    finally:
        said = process.communicate(timeout=60)[0].decode()
    assert states >= {"waiting", "running", "done"}, said
    assert "12 of 12" in repr(monitor) and "rank 1" in repr(monitor)
    with pytest.raises(ValueError, match="can stop no ranks: no handle"):
        monitor.stop()


# Files that are written here.


def test_a_finished_run_is_final_at_once_and_needs_no_kernel(tmp_path):
    folder = write_run(tmp_path / "run", [3.0, 2.0, 1.0], validation=[(2, 5.0)])
    monitor = TrainingMonitor(folder)
    bundle = monitor._repr_mimebundle_()
    assert set(bundle) == {"text/html", "text/plain"}
    page = bundle["text/html"]
    assert "data:image/png;base64" in page and "✔" in page and "done at step 3 of 3" in page
    assert re.search('<th scope="row"[^>]*>rank 1</th>', page)
    assert bundle["text/plain"].startswith("TrainingMonitor\n✔ done at step 3 of 3, took 1 min")
    monitor.wait(1)  # returns at once


def test_runs_over_each_other_are_named(tmp_path):
    first = write_run(tmp_path / "first", [3.0, 2.0, 1.0])
    second = write_run(tmp_path / "second", [3.0, 2.5, np.nan], state="failed", error="x")
    monitor = TrainingMonitor(first, compare=[second])
    drawn = monitor._pane.arrays.runs
    assert [run.name for run in drawn] == ["first", "second"]
    np.testing.assert_array_equal(drawn[1].losses["loss"].y, [3.0, 2.5])
    assert "✔ first: done at step 3" in repr(monitor) and "✖ second: failed" in repr(monitor)
    assert [f.sentence for f in monitor.findings] == [
        "second: The loss is not finite in 1 of 3 lines, first at step 3."
    ]
    assert monitor.has_ended


def test_a_compared_run_that_goes_on_is_followed(tmp_path):
    first = write_run(tmp_path / "first", [3.0])
    second = write_run(tmp_path / "second", [3.0], state="running", updated=time.time())
    monitor = TrainingMonitor(first, compare=[second])
    assert not monitor.has_ended
    with pytest.raises(TimeoutError, match="goes on after 0.01 s"):
        monitor.wait(0.01)
    status = json.loads((second / "status.json").read_text()) | {"state": "done"}
    (second / "status.json").write_text(json.dumps(status))
    monitor.wait(10)
    assert monitor.has_ended


def test_files_that_are_cut_off_or_of_others_are_told(tmp_path):
    folder = write_run(tmp_path / "run", [3.0, 2.0, 1.0])
    metrics = folder / "metrics.jsonl"
    metrics.write_text(metrics.read_text()[:-9])
    monitor = TrainingMonitor(folder)
    np.testing.assert_array_equal(monitor._pane.arrays.runs[0].losses["loss"].y, [3.0, 2.0])
    metrics.write_text(metrics.read_text() + "\nnot JSON\n")
    monitor.update()
    assert "⚠ lines not understood: 2" in repr(monitor)
    (folder / "status.json").write_text('{"state": "running", "step": "a", "updated": []}')
    monitor.update()
    assert "hold what RunFolder does not write (ValueError: " in repr(monitor)
    (folder / "status.json").write_text('{"sta')  # cut off: the last one that was whole holds
    monitor.update()
    assert monitor._top.value and "Traceback" not in repr(monitor)


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ("missing", "missing is not there yet; RunFolder(folder) among the hooks"),
        ("foldr", "foldr is not there yet; RunFolder(folder) among the hooks"),
        ("folder/iner", "iner is not there yet; beside it there are the runs inner; RunFolder"),
        ("folder", "folder has no run yet; there are runs in its folders inner"),
        ("others", "others has no run yet, but a.txt; RunFolder"),
        ("others/a.txt", "is a file: give the folder"),
        (3, "TrainingMonitor shows a run folder: its path"),
    ],
)
def test_what_is_no_run_folder_is_told_in_a_sentence(tmp_path, what, sentence):
    (tmp_path / "folder").mkdir()
    write_run(tmp_path / "folder" / "inner", [1.0])
    (tmp_path / "others").mkdir()
    (tmp_path / "others" / "a.txt").touch()
    monitor = TrainingMonitor(tmp_path / what if isinstance(what, str) else what)
    assert sentence in repr(monitor)
    assert sentence in monitor._repr_mimebundle_()["text/html"]
    assert monitor._pane.picture == b""


def test_arguments_that_do_not_fit_are_told(tmp_path):
    folder = write_run(tmp_path / "run", [1.0])
    said = repr(TrainingMonitor(folder, handle="x"))
    assert "handle must be what launch(..., block=False) has returned: got str" in said
    assert "compare must be a list" in repr(TrainingMonitor(folder, compare=str(folder)))


def wait_a_little() -> str:
    print("here")
    return "done"


def test_a_handle_alone_shows_states_and_says_how_to_get_curves():
    handle = launch(wait_a_little, nprocs=2, block=False, output="quiet")
    monitor = TrainingMonitor(handle)
    monitor.wait(60)
    text = repr(monitor)
    assert "✔ launch of 2 ranks: done" in text and "rank 1  here" in text
    assert "TrainingMonitor(folder, handle=handle)" in text
    assert "TrainingMonitor(folder, handle=handle)" in monitor._repr_mimebundle_()["text/html"]
    assert "give the run folder first" in repr(TrainingMonitor(handle, compare=["a"]))


def killed(folder: str, state: str, wait: float) -> None:
    """What a rank leaves that was killed: a status that says that it runs."""
    if os.environ["RANK"] == "0":
        write_run(Path(folder), [3.0, 2.0], state="running", pid=1, pid_start=-1.0)
        for name in ("metrics.jsonl", "rank0.jsonl", "rank1.jsonl"):
            path = Path(folder) / name
            path.write_text(path.read_text().replace('"time": 0.0', f'"time": {time.time()}'))
        Path(folder, "written").touch()
    while not Path(folder, "written").exists():
        time.sleep(0.01)
    if state == "failed":
        raise OSError("no more")
    time.sleep(wait)


@pytest.mark.parametrize("state", ["stopped", "failed", "done"])
def test_how_the_launch_ended_wins_over_a_status_that_says_running(tmp_path, state):
    folder = tmp_path / "run"
    wait = 60.0 if state == "stopped" else 0.0
    handle = launch(killed, str(folder), state, wait, nprocs=2, block=False, output="quiet")
    monitor = TrainingMonitor(folder, handle=handle)
    if state == "stopped":
        while not (folder / "written").exists():
            time.sleep(0.05)
        handle.stop()
    monitor.wait(60)
    assert handle.state == state
    assert f"{state} at step 2 of 2, as its launch tells" in repr(monitor)
    assert "lost" not in [standing.state for standing in monitor.standings]
    assert "is gone" not in repr(monitor) and monitor._pane.arrays.runs[0].state == state
    assert TrainingMonitor(folder).runs[0].state.is_lost  # nobody else can know


def test_a_run_from_before_the_launch_is_not_its_work(tmp_path):
    folder = write_run(tmp_path / "run", [1.0], state="running", pid_start=-1.0)
    handle = launch(wait_a_little, nprocs=2, block=False, output="quiet")
    monitor = TrainingMonitor(folder, handle=handle)
    monitor.wait(60)
    assert monitor.runs[0].state.is_lost


def fail_early() -> None:
    raise OSError("no such data\nand more")


def test_a_launch_that_failed_before_the_folder_is_told(tmp_path):
    handle = launch(fail_early, nprocs=2, block=False, output="quiet")
    monitor = TrainingMonitor(tmp_path / "run_c", handle=handle)
    monitor.wait(60)
    own = str(monitor.standings[1])
    assert own.startswith("✖ the launch has failed before a run was written to ")
    assert "run_c: rank " in own and "no such data" in own and "and more" not in own
    assert "waiting" not in repr(monitor)
    handle = launch(wait_a_little, nprocs=2, block=False, output="quiet")
    monitor = TrainingMonitor(tmp_path / "run_c", handle=handle)
    monitor.wait(60)
    assert "the launch is done, and " in repr(monitor) and "RunFolder(folder)" in repr(monitor)


def test_of_many_ranks_those_furthest_behind_are_listed(tmp_path):
    monitor = TrainingMonitor(write_run(tmp_path / "run", [3.0, 2.0, 1.0], ranks=40))
    rows = monitor._table()
    assert len(rows.rows) == MOST_RANKS and rows.left_out == 40 - MOST_RANKS
    assert [row[0] for row in rows.rows][-1] == "rank 39"
    assert "and 24 ranks that are less far behind" in repr(monitor)


def test_a_monitor_that_nobody_has_is_gone(tmp_path):
    monitor = TrainingMonitor(write_run(tmp_path / "run", [1.0], state="running"))
    gone = weakref.ref(monitor)
    del monitor
    gc.collect()
    assert gone() is None


# What looks wrong.


def findings(folder: Path) -> dict[str, str]:
    return {f.data["check"]: f.sentence for f in TrainingMonitor(folder).findings}


def edit_ranks(folder: Path, rank: int, **values) -> None:
    path = folder / f"rank{rank}.jsonl"
    rows = [row | (values if "seconds" in row else {}) for row in lines(path)]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def test_a_training_that_goes_well_has_no_findings(tmp_path):
    falling = np.exp(-np.arange(200) / 50) + 0.1
    folder = write_run(
        tmp_path / "run", falling, validation=[(s, 1 / s) for s in range(20, 200, 20)]
    )
    assert findings(folder) == {}


def test_a_loss_that_rises_is_found(tmp_path):
    folder = write_run(tmp_path / "run", [*np.linspace(2, 1, 100), *np.linspace(1, 9, 100)])
    (sentence,) = findings(folder).values()
    assert sentence.startswith("The loss has risen to ") and "around step 1" in sentence


def test_a_validation_that_rises_while_the_loss_falls_is_found(tmp_path):
    worse = [(s, abs(s - 60) + 20) for s in range(20, 200, 20)]
    folder = write_run(tmp_path / "run", np.linspace(2, 1, 200), validation=worse)
    assert "best, 20, at step 60" in findings(folder)["rising validation"]


def test_a_rank_that_waits_or_has_more_atoms_is_found(tmp_path):
    folder = write_run(tmp_path / "run", [1.0] * 10, ranks=3)
    edit_ranks(folder, 1, wait=0.3)
    edit_ranks(folder, 2, atoms=80)
    said = findings(folder)
    assert said["waiting for data"] == (
        "Rank 1 waits for data 60% of the time and the others wait for it."
    )
    assert said["uneven load"].startswith("Rank 2 has 80 atoms a batch of late, 1.5 times")


def test_numbers_are_those_of_run(tmp_path):
    folder = write_run(tmp_path / "run", [3.0, 2.0, 1.0])
    run = Run(folder)
    row = TrainingMonitor(run)._table().rows[1]
    assert row[1:4] == ("3", f"{run.lag().seconds[1]:.2f}", "8")
