"""Run: what a folder says, read on while it is written, and told right when a run is gone."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from nvalchemi.data import AtomicData, Batch
from nvalchemi.notebook.run import Run
from nvalchemi.notebook.run_state import duration
from nvalchemi.notebook.tail import Columns, Tail
from nvalchemi.training import (
    EnergyMSELoss,
    OptimizerConfig,
    RunFolder,
    TrainingStage,
    TrainingStrategy,
    ValidationConfig,
    default_training_fn,
)
from nvalchemi.training.hooks.run_files import process_start


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(3, 1)

    def forward(self, batch):
        atomic = self.net(batch.positions)
        zero = atomic.new_zeros(batch.num_graphs, 1)
        return {"energy": zero.index_add(0, batch.batch_idx, atomic)}


def batch(seed: int, structures: int = 3) -> Batch:
    torch.manual_seed(seed)
    return Batch.from_data_list(
        [
            AtomicData(
                atomic_numbers=torch.ones(2, dtype=torch.long),
                positions=torch.randn(2, 3),
                energy=torch.randn(1, 1),
            )
            for _ in range(structures)
        ]
    )


def train(folder: Path, hooks=(), resume=False, **options) -> None:
    TrainingStrategy(
        models=Net(),
        optimizer_configs=OptimizerConfig(optimizer_cls=torch.optim.SGD),
        training_fn=default_training_fn,
        loss_fn=EnergyMSELoss(),
        hooks=[RunFolder(folder, resume=resume), *hooks],
        **{"num_epochs": 3, **options},
    ).run([batch(0), batch(1)])


def write(path: Path, *lines: dict) -> None:
    with open(path, "a") as file:
        file.writelines(f"{json.dumps(line)}\n" for line in lines)


def session(number: int = 0, step: int = 0, ranks: int = 1, time: float = 0.0) -> dict:
    return {"session": number, "step": step, "ranks": ranks, "time": time}


def set_status(folder: Path, **values) -> None:
    begun = {"state": "running", "step": 5, "steps": 10, "session": 0, "started": time.time()}
    place = {"updated": time.time(), "host": socket.gethostname(), "pid": os.getpid()}
    (folder / "status.json").write_text(json.dumps(begun | place | values))


# Files.


@given(st.lists(st.one_of(st.just("x{"), st.integers(), st.dictionaries(st.text(), st.integers()))))
def test_a_file_that_grows_by_any_pieces_is_read_once(tmp_path_factory, values):
    path = tmp_path_factory.mktemp("tail") / "lines"
    text = "".join(f"{v if v == 'x{' else json.dumps(v)}\n" for v in values).encode()
    tail, read = Tail(path), []
    for i in range(0, len(text), 5):
        with open(path, "ab") as file:
            file.write(text[i : i + 5])
        read += tail.read()[0]
    assert read == [value for value in values if isinstance(value, dict)]
    assert tail.foreign == len(values) - len(read)


def test_a_cut_last_line_waits_for_its_end(tmp_path):
    path = tmp_path / "lines"
    tail = Tail(path)
    assert tail.read() == ([], False)
    path.write_bytes(b'{"a":1}\n{"a":')
    assert tail.read()[0] == [{"a": 1}]
    with open(path, "ab") as file:
        file.write(b"2}\n")
    assert tail.read()[0] == [{"a": 2}]
    assert tail.foreign == 0


def test_a_file_that_was_replaced_is_read_anew(tmp_path):
    path = tmp_path / "lines"
    path.write_bytes(b'{"a":1}\n')
    tail = Tail(path)
    tail.read()
    path.unlink()
    path.write_bytes(b'{"a":2}\n{"a":3}\n')
    assert tail.read() == ([{"a": 2}, {"a": 3}], True)


def test_columns_that_come_later_are_missing_before():
    columns = Columns()
    columns.add([{"a": 1}] * 70)
    columns.add([{"a": "NaN", "b": 2.0}, {"a": "Infinity", "b": None}])
    assert len(columns) == 72
    np.testing.assert_array_equal(columns["b"], [np.nan] * 70 + [2.0, np.nan])
    np.testing.assert_array_equal(columns["a"][-3:], [1, np.nan, np.inf])
    columns.keep(columns["b"] == 2.0)
    columns.add([{"a": 5}])
    np.testing.assert_array_equal(columns["a"], [np.nan, 5])
    np.testing.assert_array_equal(columns["b"], [2.0, np.nan])
    assert np.isnan(columns["c"]).all()


# A real run.


def test_curves_of_a_run_are_those_of_its_steps(tmp_path):
    seen, folder = [], tmp_path / "run"

    class Note:
        frequency, stage = 1, TrainingStage.AFTER_BATCH

        def __call__(self, ctx, stage):
            seen.append(float(ctx.loss))
            time.sleep(0.021)  # so that each step has its line

    data = ValidationConfig(validation_data=[batch(2)], every_n_epochs=1)
    # the run is looked at on the way
    run = Run(folder)
    assert run.state.name == "waiting"
    train(folder, [Note()], validation_config=data)
    assert run.refresh() and not run.refresh()
    np.testing.assert_array_equal(run.steps, range(1, 7))
    np.testing.assert_array_equal(run.epochs, [0, 0, 1, 1, 2, 2])
    np.testing.assert_allclose(run.losses["loss"], seen, rtol=1e-5)
    np.testing.assert_allclose(run.losses["EnergyMSELoss"], seen, rtol=1e-5)
    np.testing.assert_allclose(run.learning_rates, np.full((6, 1), 1e-3))
    np.testing.assert_array_equal(run.validation_steps, [2, 4, 6])
    assert (np.diff(run.times) > 0).all()
    assert (run.state.name, run.state.sentence) == ("done", "done at step 6 of 6")
    assert (run.progress, run.time_left, run.world_size) == (1.0, None, 1)
    assert run.config["models"]["main"]["parameters"] == 4
    work = run.ranks[0]
    np.testing.assert_allclose(work.atoms_per_batch, 6)
    np.testing.assert_allclose(work.atoms_per_second, 2 * work.structures_per_second)
    assert ((work.waiting >= 0) & (work.waiting <= 1)).all()
    steps, norms = run.gradient_norm
    assert steps[0] == 1 and (norms > 0).all()


def test_reading_on_is_the_same_as_reading_at_the_end(tmp_path):
    run = Run(tmp_path)

    class Look:
        frequency, stage = 1, TrainingStage.AFTER_BATCH

        def __call__(self, ctx, stage):
            run.refresh()
            assert run.state.name in ("waiting", "running")

    train(tmp_path, [Look()], num_epochs=200)
    run.refresh()
    whole = Run(tmp_path)
    for name, values in whole.losses.items():
        np.testing.assert_array_equal(run.losses[name], values)
    np.testing.assert_array_equal(run.ranks[0].times, whole.ranks[0].times)
    assert whole.steps[-1] == 400


def test_steps_that_a_restart_makes_again_count_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, session(), *({"step": s, "loss": 1.0, "lr": 0.1} for s in range(1, 8)))
    write(path, {"validation": "v", "step": 6, "loss": 9.0})
    write(path, session(1, step=5), *({"step": s, "loss": 2.0, "lr": 0.1} for s in range(6, 9)))
    run = Run(tmp_path)
    np.testing.assert_array_equal(run.steps, range(1, 9))
    np.testing.assert_array_equal(run.losses["loss"], [1] * 5 + [2] * 3)
    assert len(run.validation_steps) == 0
    assert [(s.number, s.step) for s in run.sessions] == [(0, 0), (1, 5)]


def test_foreign_lines_are_counted_and_change_nothing(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, session(), {"step": 1, "loss": 1.0, "lr": 0.1})
    path.write_text(path.read_text() + 'no JSON\n[1]\n{"session": "mine"}\n{"loss": 3}\n')
    write(path, {"step": 2, "loss": "NaN", "lr": [0.1, 0.2], "parts": 3})
    run = Run(tmp_path)
    assert run.foreign_lines == 2
    np.testing.assert_array_equal(run.losses["loss"], [1.0, np.nan])
    np.testing.assert_array_equal(run.learning_rates, [[0.1, np.nan], [0.1, 0.2]])


def test_a_file_is_no_run(tmp_path):
    (tmp_path / "a").touch()
    with pytest.raises(ValueError, match="a run is a folder"):
        Run(tmp_path / "a")


# Ranks.


def test_lag_is_at_the_last_step_that_all_have_done(tmp_path):
    write(tmp_path / "metrics.jsonl", session(ranks=2))
    for rank, delay in ((0, 0.0), (1, 2.0)):
        rows = [
            {"step": s, "steps": 10, "seconds": 1.0, "time": s / 10 + delay} for s in (10, 20, 30)
        ]
        write(tmp_path / f"rank{rank}.jsonl", session(ranks=2), *rows[: 3 - rank])
    lag = Run(tmp_path).lag()
    assert lag.step == 20
    np.testing.assert_allclose(lag.seconds, [0.0, 2.0])
    # at 3.0 s rank 0 had done 30 steps and rank 1 its first 10
    np.testing.assert_allclose(lag.steps, [0.0, 20.0])


def test_lag_is_of_the_latest_session_and_needs_all_its_ranks(tmp_path):
    write(tmp_path / "metrics.jsonl", session(ranks=2), session(1, ranks=2))
    row = {"step": 4, "steps": 4, "seconds": 1.0, "time": 1.0}
    write(tmp_path / "rank0.jsonl", session(ranks=2), row, session(1, ranks=2), row)
    write(tmp_path / "rank1.jsonl", session(ranks=2), row, session(1, ranks=2))
    run = Run(tmp_path)
    assert run.lag() is None
    write(tmp_path / "rank1.jsonl", row | {"time": 4.0})
    run.refresh()
    np.testing.assert_allclose(run.lag().seconds, [0.0, 3.0])


# States.


def test_a_running_process_is_told_from_one_that_is_gone(tmp_path):
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    place = {"pid": child.pid, "pid_start": process_start(child.pid)}
    set_status(tmp_path, **place)
    run = Run(tmp_path)
    assert (run.state.name, run.state.sentence) == ("running", "running, at step 5 of 10")
    set_status(tmp_path, **place, updated=time.time() - 40)
    run.refresh()
    assert run.state.name == "running"
    assert f"nothing has been written for 40 s: process {child.pid} lives" in run.state.sentence
    child.communicate(b"\n")
    run.refresh()
    assert run.state.name == "lost" and run.state.has_ended
    assert run.state.sentence == (
        f"running at step 5 of 10, but nothing has been written for 40 s: process {child.pid} is "
        "gone"
    )


def test_a_later_process_of_the_same_number_is_not_the_run(tmp_path):
    set_status(tmp_path, pid_start=process_start(os.getpid()) - 1)
    assert Run(tmp_path).state.name == "lost"


def test_a_process_on_another_machine_is_not_looked_for(tmp_path):
    set_status(tmp_path, host="elsewhere", pid=1, updated=time.time() - 100)
    state = Run(tmp_path).state
    assert state.name == "running"
    assert "process 1 on elsewhere lives can not be seen from here" in state.sentence


def test_the_rank_that_failed_is_named_also_if_rank_0_had_no_time_to(tmp_path):
    set_status(tmp_path)
    write(tmp_path / "metrics.jsonl", session(ranks=2))
    write(tmp_path / "rank0.jsonl", session(ranks=2), {"end": "failed", "error": "gloo: lost"})
    write(tmp_path / "rank1.jsonl", session(ranks=2), {"end": "failed", "error": "ValueError: x"})
    run = Run(tmp_path)
    assert run.state.sentence == "failed at step 5 of 10: rank 1: ValueError: x"
    # what failed in an earlier session is history
    set_status(tmp_path, session=1)
    run.refresh()
    assert run.state.name == "running"


def test_a_rank_that_was_killed_is_named_by_its_silence(tmp_path):
    lost = {"end": "failed", "error": "RuntimeError: [pair.cc:553] Connection closed by peer"}
    set_status(tmp_path, ranks=2)
    write(tmp_path / "metrics.jsonl", session(ranks=2))
    write(tmp_path / "rank0.jsonl", session(ranks=2), lost)
    write(tmp_path / "rank1.jsonl", session(ranks=2))
    run = Run(tmp_path)
    assert run.state.name == "failed"
    assert run.state.sentence == (
        "failed at step 5 of 10: rank 1 is gone without a word, as after being killed; rank 0 lost "
        "the connection"
    )
    write(tmp_path / "rank1.jsonl", {"end": "failed", "error": "ValueError: x"})
    run.refresh()
    assert run.state.sentence == "failed at step 5 of 10: rank 1: ValueError: x"


def test_time_left_follows_the_speed_of_late(tmp_path):
    now = time.time()
    rows = [
        {"step": s, "loss": 1.0, "lr": 0.1, "time": now - 100 + min(s, 50) + 10 * max(s - 50, 0)}
        for s in range(1, 56)
    ]
    write(tmp_path / "metrics.jsonl", session(time=now - 100), *rows)
    set_status(tmp_path, step=55, steps=60, started=now - 100, updated=now)
    run = Run(tmp_path)
    assert run.progress == pytest.approx(55 / 60)
    assert run.time_left == pytest.approx(5 * 10, abs=5)


def test_durations_in_words():
    assert [duration(s) for s in (0.4, 59, 61, 3600 * 5 + 60, 3600 * 50)] == [
        "0 s",
        "59 s",
        "1 min 1 s",
        "5 h 1 min",
        "2 d 2 h",
    ]
