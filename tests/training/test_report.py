"""RunFolder: what it writes is what happened, on one process, real ranks and killed ones."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from loop_cases import At, Failing, batches, loader, raise_failing, strategy

from nvalchemi.distributed import DistributedManager
from nvalchemi.notebook import RankError, launch
from nvalchemi.training import (
    DDPHook,
    EnergyMSELoss,
    ForceMSELoss,
    OptimizerConfig,
    RunFolder,
    TrainingStage,
    ValidationConfig,
)
from nvalchemi.training.hooks.run_files import LineFile, plain

Stage = TrainingStage


def no_constant(word: str) -> None:
    raise ValueError(f"{word} is no JSON")


def lines(path: Path) -> list[dict]:
    return [json.loads(line, parse_constant=no_constant) for line in path.read_text().splitlines()]


def steps_of(folder: Path) -> list[dict]:
    return [line for line in lines(folder / "metrics.jsonl") if "loss" in line and "lr" in line]


def status(folder: Path) -> dict:
    return json.loads((folder / "status.json").read_text())


class Losses:
    """Notes the loss and its parts after each step, at once."""

    frequency = 1
    stage = Stage.AFTER_BATCH

    def __init__(self):
        self.rows = []

    def __call__(self, ctx, stage):
        parts = ctx.losses["per_component_unweighted"].values()
        self.rows.append([float(ctx.loss), *map(float, parts)])


class Slow:
    """A loader that takes its time."""

    def __init__(self, data, seconds):
        self.data, self.seconds = data, seconds

    def __len__(self):
        return len(self.data)

    def __iter__(self):
        for batch in self.data:
            time.sleep(self.seconds)
            yield batch


def test_lines_are_means_of_the_losses_of_all_steps(tmp_path):
    seen = Losses()
    training = strategy(
        hooks=[RunFolder(tmp_path / "run"), seen],
        loss_fn=EnergyMSELoss() + EnergyMSELoss(per_atom=True),
        num_epochs=30,
    )
    training.run(loader(20, batch_size=4))
    rows, first = np.array(seen.rows), 0
    written = steps_of(tmp_path / "run")
    for line in written:
        assert line["step"] - first == line.get("steps", 1)
        expected = rows[first : line["step"]].mean(0)
        np.testing.assert_allclose([line["loss"], *line["parts"].values()], expected, rtol=1e-5)
        assert line["epoch"] == (line["step"] - 1) // 5
        first = line["step"]
    assert first == 150
    assert list(written[0]["parts"]) == ["EnergyMSELoss_0", "EnergyMSELoss_1"]
    assert written[0]["weights"] == {"EnergyMSELoss_0": 0.5, "EnergyMSELoss_1": 0.5}
    assert all("weights" not in line for line in written[1:])


def test_learning_rates_are_those_of_the_step(tmp_path):
    decaying = OptimizerConfig(
        optimizer_cls=torch.optim.SGD,
        optimizer_kwargs={"lr": 0.1},
        scheduler_cls=torch.optim.lr_scheduler.ExponentialLR,
        scheduler_kwargs={"gamma": 0.5},
    )
    pause = At(Stage.AFTER_BATCH, lambda ctx: time.sleep(0.021))  # a line for each step
    training = strategy(optimizer_configs=decaying, hooks=[pause, RunFolder(tmp_path)])
    training.run(batches(2, 2, 2))
    assert [line["lr"] for line in steps_of(tmp_path)] == [
        pytest.approx(0.1 * 0.5**step, rel=1e-5) for step in range(6)
    ]


def test_gradient_norm_is_of_the_whole_gradient_before_hooks_change_it(tmp_path):
    norms = []

    def clip(ctx):
        parameters = list(ctx.model.parameters())
        norms.append(float(torch.cat([p.grad.flatten() for p in parameters]).norm()))
        torch.nn.utils.clip_grad_norm_(parameters, 1e-3)

    strategy(hooks=[At(Stage.BEFORE_OPTIMIZER_STEP, clip), RunFolder(tmp_path)]).run(batches(3, 3))
    assert steps_of(tmp_path)[0]["grad_norm"] == pytest.approx(norms[0], rel=1e-5)


def test_validations_are_written_with_their_step(tmp_path):
    summaries = []
    training = strategy(
        hooks=[
            RunFolder(tmp_path),
            At(Stage.AFTER_VALIDATION, lambda ctx: summaries.append(ctx.validation)),
        ],
        validation_config=ValidationConfig(validation_data=batches(3, 4), every_n_epochs=1),
        num_epochs=3,
    )
    training.run(batches(2, 2))
    written = [line for line in lines(tmp_path / "metrics.jsonl") if "validation" in line]
    assert [line["step"] for line in written] == [2, 4, 6]
    for line, summary in zip(written, summaries, strict=True):
        assert line["loss"] == pytest.approx(summary["total_loss"], rel=1e-5)
        assert line["parts"].keys() == summary["per_component_unweighted"].keys()


def test_work_of_a_rank_is_that_of_its_batches(tmp_path):
    data = batches(2, 3, 4)
    strategy(hooks=[RunFolder(tmp_path)]).run(Slow(data, 0.03))
    mark, *work, end = lines(tmp_path / "rank0.jsonl")
    assert (mark["session"], mark["ranks"], end["end"]) == (0, 1, "done")
    assert sum(line["steps"] for line in work) == work[-1]["step"] == 6
    assert sum(line["structures"] for line in work) == 18
    assert sum(line["atoms"] for line in work) == 2 * sum(batch.num_nodes for batch in data)
    assert max(line["largest"] for line in work) == max(batch.num_nodes for batch in data)
    assert 6 * 0.03 <= sum(line["wait"] for line in work) <= sum(line["seconds"] for line in work)
    assert all(line["rss"] > 1 for line in work)


def test_config_says_what_is_trained(tmp_path):
    training = strategy(hooks=[RunFolder(tmp_path)])
    training.run(loader(10, batch_size=4, shuffle=True))
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["models"]["main"]["parameters"] == sum(
        p.numel() for p in training.models["main"].parameters()
    )
    assert config["models"]["main"]["dtype"] == "float64"
    assert config["optimizers"]["main"][0]["arguments"] == {"lr": 0.05}
    assert config["length"] == {
        "num_epochs": 2,
        "num_steps": None,
        "steps": 6,
        "steps_per_epoch": 3,
    }
    assert (config["data"]["samples"], config["data"]["batch_size"]) == (10, 4)
    assert config["ranks"]["world_size"] == 1
    assert config["versions"]["torch"] == torch.__version__


def test_status_ends_with_how_the_run_ended(tmp_path):
    folder = tmp_path / "done"
    strategy(hooks=[RunFolder(folder)]).run(batches(2, 2))
    done = status(folder)
    assert (done["state"], done["step"], done["steps"], done["epoch"]) == ("done", 4, 4, 2)
    assert (done["pid"], done["ranks"]) == (os.getpid(), 1)
    assert not list(folder.glob(".*"))  # nothing half written is left


@pytest.mark.parametrize(
    "error, state, said",
    [
        (Failing("one\ntwo"), "failed", "Failing: one"),
        (KeyboardInterrupt(), "stopped", "KeyboardInterrupt"),
    ],
)
def test_errors_are_told_by_their_first_line(tmp_path, error, state, said):
    def end(ctx):
        if ctx.step_count == 3:
            raise error

    with pytest.raises(type(error)):
        strategy(hooks=[At(Stage.AFTER_BATCH, end), RunFolder(tmp_path)]).run(batches(2, 2))
    assert (status(tmp_path)["state"], status(tmp_path)["error"]) == (state, said)
    assert status(tmp_path)["step"] == 3
    assert lines(tmp_path / "rank0.jsonl")[-1]["end"] == state
    assert steps_of(tmp_path)[-1]["step"] == 2  # what is known until then is written


def test_losses_that_are_not_finite_are_valid_json(tmp_path):
    def spoil(ctx):
        ctx.model.net[0].weight.data.fill_(float("nan"))

    strategy(hooks=[At(Stage.BEFORE_TRAINING, spoil), RunFolder(tmp_path)]).run(batches(2, 2))
    assert {line["loss"] for line in steps_of(tmp_path)} == {"NaN"}
    assert plain([float("inf"), -float("inf")]) == ["Infinity", "-Infinity"]


def test_a_folder_with_a_run_is_refused_before_anything_is_trained(tmp_path):
    strategy(hooks=[RunFolder(tmp_path)]).run(batches(2, 2))
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    losses = Losses()
    with pytest.raises(ValueError, match="holds a run already .done, step 4.*resume=True"):
        strategy(hooks=[RunFolder(tmp_path), losses]).run(batches(2, 2))
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert not losses.rows


def test_a_run_is_gone_on_with_as_a_further_session(tmp_path):
    strategy(hooks=[RunFolder(tmp_path)]).run(batches(2, 2))
    strategy(hooks=[RunFolder(tmp_path, resume=True)], step_count=4, num_epochs=3).run(
        batches(2, 2)
    )
    for name in ("metrics.jsonl", "rank0.jsonl"):
        marks = [line for line in lines(tmp_path / name) if "session" in line]
        assert [(mark["session"], mark["step"]) for mark in marks] == [(0, 0), (1, 4)], name
    assert steps_of(tmp_path)[-1]["step"] == 6
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["session"] == 1
    assert [earlier["length"]["steps"] for earlier in config["earlier_sessions"]] == [4]


def test_one_strategy_that_is_run_again_stays_one_session(tmp_path):
    training = strategy(hooks=[RunFolder(tmp_path)])
    training.run(batches(2, 2))
    training.num_epochs = 4
    training.run(batches(2, 2))
    assert sum("session" in line for line in lines(tmp_path / "metrics.jsonl")) == 1
    assert (status(tmp_path)["step"], status(tmp_path)["steps"]) == (8, 8)


def test_a_run_that_failed_in_its_first_step_is_not_in_the_way(tmp_path):
    with pytest.raises(Failing):
        strategy(hooks=[At(Stage.AFTER_LOSS, raise_failing), RunFolder(tmp_path)]).run(batches(2))
    strategy(hooks=[RunFolder(tmp_path)]).run(batches(2))
    assert status(tmp_path)["session"] == 1


def test_two_runs_at_once_are_refused_also_with_resume(tmp_path):
    def second(ctx):
        if ctx.step_count == 1:
            strategy(hooks=[RunFolder(tmp_path, resume=True)]).run(batches(2))

    with pytest.raises(ValueError, match=f"is being written to .*process {os.getpid()} on"):
        strategy(hooks=[RunFolder(tmp_path), At(Stage.AFTER_BATCH, second)]).run(batches(2, 2))


def test_what_never_begins_leaves_nothing(tmp_path):
    with pytest.warns(UserWarning, match="nothing to train"):
        strategy(hooks=[RunFolder(tmp_path / "a")], step_count=4).run(batches(2, 2))
    with pytest.raises(Failing):
        strategy(hooks=[RunFolder(tmp_path / "b"), At(Stage.SETUP, raise_failing)]).run(batches(2))
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_single_batches_are_one_session(tmp_path):
    training = strategy(hooks=[RunFolder(tmp_path)], num_steps=9)
    for batch in batches(1, 2, 3):
        training.train_batch(batch)
    with training:
        training.train_batch(batches(2)[0])
    assert [line["step"] for line in steps_of(tmp_path)] == [1, 2, 3, 4]
    assert sum("session" in line for line in lines(tmp_path / "rank0.jsonl")) == 1


def test_a_line_that_was_cut_off_hides_no_later_one(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"step":1}\n{"ste')
    file = LineFile(path)
    file.write([{"step": 2}, {"step": 3}])
    file.close()
    assert path.read_bytes() == b'{"step":1}\n{"ste\n{"step":2}\n{"step":3}\n'


def test_a_full_disk_is_said_once_and_does_not_end_the_run():
    file = LineFile(Path("/dev/full"))
    with pytest.warns(UserWarning, match="No space left") as said:
        file.write([{"step": 1}])
        file.write([{"step": 2}])
    file.close()
    assert len(said) == 1


# Ranks.


def train_on_ranks(folder: str, **options) -> list[int]:
    DistributedManager.initialize()
    manager = DistributedManager()
    seen = []
    note = At(Stage.AFTER_BATCH, lambda ctx: seen.append(ctx.batch.num_nodes))
    strategy(
        hooks=[DDPHook(), RunFolder(folder, **options), note],
        distributed_manager=manager,
        loss_fn=EnergyMSELoss(),
    ).run(loader(22, batch_size=4, shuffle=True))
    return seen


def test_each_rank_writes_its_own_work_and_rank_0_the_curves(tmp_path):
    atoms = launch(train_on_ranks, str(tmp_path / "run"), nprocs=2)
    for rank in range(2):
        mark, *work, end = lines(tmp_path / "run" / f"rank{rank}.jsonl")
        assert (mark["session"], mark["rank"], mark["ranks"]) == (0, rank, 2)
        assert sum(line["atoms"] for line in work) == sum(atoms[rank])
        assert (work[-1]["step"], end["end"]) == (6, "done")
    assert steps_of(tmp_path / "run")[-1]["step"] == 6
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (config["ranks"]["world_size"], config["ranks"]["backend"]) == (2, "gloo")
    assert config["data"]["global_batch_size"] == 8
    with pytest.raises(RankError, match="holds a run already"):
        launch(train_on_ranks, str(tmp_path / "run"), nprocs=2)
    launch(train_on_ranks, str(tmp_path / "run"), nprocs=2, resume=True)
    for rank in range(2):
        marks = [x for x in lines(tmp_path / "run" / f"rank{rank}.jsonl") if "session" in x]
        assert [mark["session"] for mark in marks] == [0, 1]


def refused_on_ranks(folder: str) -> str:
    try:
        train_on_ranks(folder)
    except ValueError as error:
        return str(error)
    return "not refused"


def test_all_ranks_are_refused_with_the_same_sentence(tmp_path):
    strategy(hooks=[RunFolder(tmp_path)]).run(batches(2, 2))
    said = launch(refused_on_ranks, str(tmp_path), nprocs=2)
    assert "holds a run already" in said[0]
    assert said[0] == said[1]


def fail_on_rank_1(folder: str) -> None:
    DistributedManager.initialize()
    manager = DistributedManager()

    def fail(ctx):
        if manager.rank == 1 and ctx.step_count == 2:
            raise Failing("rank 1 has had enough")

    strategy(
        hooks=[DDPHook(), RunFolder(folder), At(Stage.AFTER_BATCH, fail)],
        distributed_manager=manager,
    ).run(loader(40, batch_size=2))


def test_the_rank_that_failed_says_so_in_its_file(tmp_path):
    with pytest.raises(RankError):
        launch(fail_on_rank_1, str(tmp_path), nprocs=2)
    end = lines(tmp_path / "rank1.jsonl")[-1]
    assert (end["end"], end["error"]) == ("failed", "Failing: rank 1 has had enough")
    assert status(tmp_path)["state"] in ("running", "failed")  # rank 0 may have had no time


PROGRAM = """
import sys, time
sys.path.insert(0, {tests!r})
from loop_cases import At, loader, strategy
from nvalchemi.distributed import DistributedManager
from nvalchemi.training import DDPHook, RunFolder, TrainingStage

DistributedManager.initialize()
manager = DistributedManager()
pause = At(TrainingStage.AFTER_BATCH, lambda ctx: time.sleep(float(sys.argv[2])))
training = strategy(
    hooks=[DDPHook(), RunFolder(sys.argv[1]), pause],
    distributed_manager=manager,
    num_epochs=int(sys.argv[3]),
)
training.run(loader(16, batch_size=2))
"""


def write_program(tmp_path: Path) -> Path:
    program = tmp_path / "train.py"
    program.write_text(PROGRAM.format(tests=str(Path(__file__).parent)))
    return program


def test_a_run_under_torchrun_writes_the_same_files(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    arguments = [str(write_program(tmp_path)), str(tmp_path / "run"), "0", "2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([*command, *arguments], check=True, env=environment, capture_output=True)
    names = sorted(path.name for path in (tmp_path / "run").iterdir())
    assert names == ["config.json", "metrics.jsonl", "rank0.jsonl", "rank1.jsonl", "status.json"]
    assert (status(tmp_path / "run")["state"], status(tmp_path / "run")["step"]) == ("done", 8)


def test_a_killed_run_leaves_what_it_has_written_and_can_be_gone_on_with(tmp_path):
    folder = tmp_path / "run"
    arguments = [str(write_program(tmp_path)), str(folder), "0.01", "1000"]
    process = subprocess.Popen([sys.executable, *arguments])
    end = time.monotonic() + 120
    while not (folder / "status.json").exists() or status(folder)["step"] < 20:
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    left = status(folder)
    assert (left["state"], left["pid"]) == ("running", process.pid)
    assert steps_of(folder)
    strategy(hooks=[RunFolder(folder, resume=True)]).run(batches(2))  # the lock went with it
    assert status(folder)["session"] == 1


def test_forces_are_a_part_of_their_own(tmp_path):
    from validation_cases import DATA, cut, potential

    strategy(
        models=potential(),
        loss_fn=EnergyMSELoss() + 2 * ForceMSELoss(),
        hooks=[RunFolder(tmp_path)],
    ).run(cut(DATA, [4, 4]))
    first = steps_of(tmp_path)[0]
    assert list(first["parts"]) == ["EnergyMSELoss", "ForceMSELoss"]
    energy, forces = first["parts"].values()
    assert first["loss"] == pytest.approx((energy + 2 * forces) / 3, rel=1e-4)
