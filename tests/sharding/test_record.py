"""ShardRecorder: what ranks consumed, on disk whatever happens, and beside the plan."""

import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sharding_cases import found

from nvalchemi.data import AtomicData, Batch
from nvalchemi.data.datapipes import DataLoader, InMemoryDataset, MultiDataset
from nvalchemi.distributed import DistributedManager
from nvalchemi.models import MLPPotential
from nvalchemi.notebook import launch
from nvalchemi.sharding import ShardPlan, ShardRecorder, load_record
from nvalchemi.training import (
    DDPHook,
    EnergyMSELoss,
    OptimizerConfig,
    TrainingStage,
    TrainingStrategy,
    default_training_fn,
)


def structures(number):
    return InMemoryDataset(
        Batch.from_data_list(
            [
                AtomicData(
                    atomic_numbers=torch.full((2,), 6),
                    positions=torch.full((2, 3), float(i)),
                    energy=torch.full((1, 1), float(i)),
                )
                for i in range(number)
            ]
        )
    )


def feed(recorder, plan, epochs=(0,), rank=0, steps=None, samples=None):
    """Let a recorder see what a rank of a plan would see."""
    for epoch in epochs:
        for step in range(plan.num_steps(epoch)) if steps is None else steps:
            indices = plan.batch(rank, step, epoch) if samples is None else samples(step, epoch)
            recorder(context(plan, rank, epoch, step, indices), TrainingStage.AFTER_BATCH)


def context(plan, rank, epoch, step, indices):
    return SimpleNamespace(
        batch=SimpleNamespace(metadata={"index": torch.as_tensor(indices)}),
        global_rank=rank,
        workflow=SimpleNamespace(
            distributed_manager=SimpleNamespace(world_size=plan.world_size, rank=rank)
        ),
        epoch=epoch,
        epoch_step_count=step + 1,
    )


def record_all(folder, plan, epochs=(0,), **options):
    for rank in range(plan.world_size):
        recorder = ShardRecorder(folder)
        feed(recorder, plan, epochs, rank, **options)
        recorder.close()
    return load_record(folder)


def train(folder, data, kwargs, epochs=2):
    DistributedManager.initialize()
    recorder = ShardRecorder(folder, flush_every=3)
    strategy = TrainingStrategy(
        models=MLPPotential(hidden_features=4, outputs=("energy",)),
        optimizer_configs=OptimizerConfig(optimizer_cls=torch.optim.SGD),
        training_fn=default_training_fn,
        loss_fn=EnergyMSELoss(),
        hooks=[DDPHook(sampler_kwargs=kwargs), recorder],
        num_epochs=epochs,
        distributed_manager=DistributedManager(),
    )
    strategy.run(DataLoader(data, batch_size=4, shuffle=True))
    return strategy.step_count


@pytest.mark.parametrize("several", [False, True], ids=["one data set", "several"])
def test_two_real_ranks_do_what_was_planned(tmp_path, several):
    data = MultiDataset(structures(18), structures(9)) if several else structures(27)
    steps = launch(train, tmp_path, data, {"seed": 3}, nprocs=2, timeout=120)
    plan = ShardPlan(data, world_size=2, batch_size=4, seed=3, epochs=2)
    assert list(steps) == [2 * plan.num_steps()] * 2
    record = load_record(tmp_path)
    comparison = plan.compare(record)
    assert comparison.as_planned
    assert str(comparison) == f"as planned: {4 * plan.num_steps()} batches on 2 ranks"
    other = ShardPlan(data, world_size=2, batch_size=4, seed=4, epochs=2).compare(record)
    assert not other.as_planned and (other.parting.epoch, other.parting.step) == (0, 0)
    # a further run in the folder is a further session
    launch(train, tmp_path, data, {"seed": 4}, epochs=1, nprocs=2, timeout=120)
    sessions = load_record(tmp_path).sessions
    assert [len(session.ranks[1]) for session in sessions] == [steps[1], steps[1] // 2]
    assert plan.compare(load_record(tmp_path)).parting.session == 1
    # nor is it taken for an earlier one where a file was lost
    (tmp_path / "rank00001.record").unlink()
    launch(train, tmp_path, data, {"seed": 3}, epochs=1, nprocs=2, timeout=120)
    sessions = load_record(tmp_path).sessions
    assert [len(session.ranks[0]) for session in sessions] == [
        steps[0],
        steps[0] // 2,
        steps[0] // 2,
    ]
    assert [len(session.ranks[1]) for session in sessions] == [0, 0, steps[1] // 2]


def test_records_take_few_bytes(tmp_path):
    plan = ShardPlan(200, world_size=1, batch_size=10)
    record = record_all(tmp_path, plan)
    assert (tmp_path / "rank00000.record").stat().st_size == 2 * 64 + 20 * (24 + 10)
    log = record.sessions[0].ranks[0]
    assert log.steps.tolist() == list(range(20)) and log.epochs.tolist() == [0] * 20
    assert log.batch(7).tolist() == plan.batch(0, 7).tolist()
    assert "1 ranks, epochs [0], batches 20" in repr(record)


@pytest.mark.parametrize("size", [200, 60_000, 10**6, 10**11])
def test_any_index_is_kept(tmp_path, size):
    plan = ShardPlan([size, 1], world_size=2, batch_size=5)
    record_all(tmp_path, plan, steps=range(7))
    assert str(plan.compare(load_record(tmp_path))).startswith("as planned: 14 batches")


def test_a_killed_process_leaves_what_was_flushed(tmp_path):
    code = """
import os, signal, sys
from test_record import ShardPlan, ShardRecorder, feed
recorder = ShardRecorder(sys.argv[1], flush_every=4)
feed(recorder, ShardPlan(100, world_size=1, batch_size=5), steps=range(11))
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.path.dirname(__file__)},
        check=False,
    )
    assert done.returncode == -signal.SIGKILL
    plan = ShardPlan(100, world_size=1, batch_size=5)
    assert plan.compare(load_record(tmp_path)).batches == 8
    # the run goes on from its checkpoint, in the same folder
    recorder = ShardRecorder(tmp_path)
    feed(recorder, plan, steps=range(6, 20))
    recorder.close()
    record = load_record(tmp_path)
    assert [session.ranks[0].steps.tolist() for session in record.sessions] == [
        list(range(8)),
        list(range(6, 20)),
    ]
    comparison = plan.compare(record)
    assert comparison.batches == 22 and comparison.parting is None and not comparison.as_planned
    assert "2 steps again, the first in session 1 at epoch 0, step 6" in str(comparison)


def test_a_tail_that_was_cut_off_is_left_out_and_written_over(tmp_path):
    plan = ShardPlan(40, world_size=1, batch_size=4, epochs=2)
    recorder = ShardRecorder(tmp_path, flush_every=3)
    feed(recorder, plan)
    recorder.close()
    path = tmp_path / "rank00000.record"
    whole = path.read_bytes()
    lengths = []
    for end in range(len(whole) + 1):
        path.write_bytes(whole[:end])
        if end < 64:
            with pytest.raises(ValueError, match="no whole block yet"):
                load_record(tmp_path)
        else:
            lengths.append(len(load_record(tmp_path).sessions[0].ranks[0]))
    assert sorted(set(lengths)) == [0, 3, 6, 9, 10] and lengths == sorted(lengths)
    for damaged in (whole[:-5], whole[:-5] + b"\0" * 5):
        path.write_bytes(damaged)
        recorder = ShardRecorder(tmp_path)
        feed(recorder, plan, epochs=[1])
        recorder.close()
        assert [len(s.ranks[0]) for s in load_record(tmp_path).sessions] == [9, 10]
        assert plan.compare(load_record(tmp_path)).parting is None
        assert "1 step missing, the first after epoch 0, step 8" in str(
            plan.compare(load_record(tmp_path))
        )


def test_runs_on_other_numbers_of_ranks_are_other_sessions(tmp_path):
    two = ShardPlan(48, world_size=2, batch_size=6, epochs=2)
    four = ShardPlan(48, world_size=4, batch_size=3)
    record_all(tmp_path, two, steps=range(2))
    record_all(tmp_path, four, steps=range(2, 4))
    record_all(tmp_path, two, epochs=[1])
    record = load_record(tmp_path)
    assert [session.world_size for session in record.sessions] == [2, 4, 2]
    assert two.compare(record).batches == 4 + 8 and two.compare(record).as_planned
    assert str(two.compare(record)).endswith("on other numbers of ranks: sessions [1]")
    assert four.compare(record).batches == 8 and four.compare(record).as_planned
    with pytest.raises(ValueError, match=r"the plan has 3, the record \[2, 4\]"):
        ShardPlan(48, world_size=3, batch_size=4).compare(record)


def test_where_a_run_parted_and_why(tmp_path):
    plan = ShardPlan(48, world_size=2, batch_size=6, epochs=2)

    def forgets_set_epoch(step, epoch):
        return plan.batch(0, step, 0)

    recorder = ShardRecorder(tmp_path / "a")
    feed(recorder, plan, [0, 1], samples=forgets_set_epoch)
    recorder.close()
    text = str(plan.compare(load_record(tmp_path / "a")))
    assert "not as planned from epoch 1, step 0, rank 0 on" in text
    assert "that is what epoch 0 has there: set_epoch(1) was not called" in text
    assert "rank 1 has 0 batches in session 0 and others up to 8" in text

    for rank in range(2):
        recorder = ShardRecorder(tmp_path / "b")
        feed(recorder, plan, rank=rank, samples=lambda step, epoch: plan.batch(0, step, epoch))
        recorder.close()
    comparison = plan.compare(load_record(tmp_path / "b"))
    assert comparison.parting.rank == 1 and "that is the batch of rank 0" in str(comparison)
    assert comparison.parting.expected.tolist() == plan.batch(1, 0).tolist()
    assert comparison.parting.got.tolist() == plan.batch(0, 0).tolist()

    record = record_all(
        tmp_path / "c", plan, samples=lambda step, epoch: plan.batch(0, step, epoch)[::-1].copy()
    )
    assert "the same samples in another order" in str(plan.compare(record))
    record = record_all(tmp_path / "d", plan, steps=[3, 4], samples=lambda step, epoch: [1, 2])
    assert "got [1, 2]" in str(plan.compare(record))
    record = record_all(tmp_path / "e", plan, steps=[9], samples=lambda step, epoch: range(20))
    assert "the plan has 4 steps in an epoch" in str(plan.compare(record))
    assert "... 20 in all]" in str(plan.compare(record))


def test_a_record_can_be_checked_as_a_plan(tmp_path):
    plan = ShardPlan(48, world_size=2, batch_size=6, epochs=2)
    record = record_all(tmp_path, plan, [0, 1], samples=lambda step, epoch: plan.batch(0, step, 0))
    findings = found(ShardPlan.from_record(48, record))
    assert findings["identical ranks"].data["ranks"] == [0, 1]
    assert "equal epochs" in findings
    good = ShardPlan.from_record(48, record_all(tmp_path / "good", plan, [0, 1]))
    assert good.check() == [] and good.epochs == 2
    assert good.diff(plan, epoch=1).same
    assert np.array_equal(good.window([2], None, 1), plan.window([2], None, 1))
    with pytest.raises(ValueError, match="session must be one of 1"):
        ShardPlan.from_record(48, record, session=3)
    with pytest.raises(ValueError, match=r"must be in \[0, 20\)"):
        ShardPlan.from_record(20, record)


def test_mistakes(tmp_path):
    with pytest.raises(ValueError, match="flush_every must be >= 1, got 0"):
        ShardRecorder(tmp_path, flush_every=0)
    with pytest.raises(FileNotFoundError, match="no record in"):
        load_record(tmp_path)
    recorder = ShardRecorder(tmp_path)
    ctx = SimpleNamespace(batch=torch.zeros(3), global_rank=0, workflow=None)
    with pytest.raises(ValueError, match='needs batch.metadata\\["index"\\]'):
        recorder(ctx, TrainingStage.AFTER_BATCH)
    recorder.close()
    (tmp_path / "rank00000.record").write_text("something that somebody else wrote")
    plan = ShardPlan(8, world_size=1, batch_size=2)
    with pytest.raises(ValueError, match="must be a record of ShardRecorder"):
        feed(ShardRecorder(tmp_path), plan)
    assert (tmp_path / "rank00000.record").read_text().startswith("something")


def session_of(folder, plan, places, rank_places=None):
    """A session with batches of the plan at (epoch, step), the same on all ranks or by rank."""
    for rank in range(plan.world_size):
        recorder = ShardRecorder(folder)
        for epoch, step in (rank_places or {}).get(rank, places):
            feed(recorder, plan, [epoch], rank, [step])
        recorder.close()


@pytest.mark.parametrize(
    ("sessions", "expected"),
    [
        ([[0, 1, 2, 3, 4], [3, 4, 5, 6, 7]], "2 steps again, the first in session 1 at epoch 0"),
        ([[0, 1, 2], [5, 6, 7]], "2 steps missing, the first after epoch 0, step 2 in session 0"),
        ([[0, 1, 2, 4, 5, 6, 7]], "1 step missing, the first after epoch 0, step 2"),
        ([[0, 1, 2, 3, 0, 1, 2, 3, 4]], "4 steps again, the first in session 0 at epoch 0, step 0"),
        ([[0, 2, 1, 3]], "steps out of their order, the first in session 0 at epoch 0, step 1"),
        ([[5, 6, 7, 9, 10]], "1 step missing, the first after epoch 0, step 7"),
        ([[], []], "no batches are recorded"),
        ([[22, 23, 24]], "epoch 3 is recorded and the plan has 3"),
    ],
)
def test_steps_again_and_steps_missing_are_not_as_planned(tmp_path, sessions, expected):
    plan = ShardPlan(64, world_size=2, batch_size=4, epochs=3)
    for steps in sessions:
        for rank in range(2):  # a rank writes its session down with the first batch
            recorder = ShardRecorder(tmp_path)
            if not steps:
                recorder._open(2, rank)
            for step in steps:
                feed(recorder, plan, [step // 8], rank, [step % 8])
            recorder.close()
    comparison = plan.compare(load_record(tmp_path))
    assert comparison.parting is None and not comparison.as_planned
    assert expected in str(comparison) and "as planned: " in str(comparison)
    assert not str(comparison).startswith("as planned")


@pytest.mark.parametrize("stop", [1, 7, 8, 11])
def test_a_resume_that_goes_on_exactly_is_as_planned(tmp_path, stop):
    plan = ShardPlan(64, world_size=2, batch_size=4, epochs=2)
    places = [(step // 8, step % 8) for step in range(16)]
    session_of(tmp_path, plan, places[:stop])
    session_of(tmp_path, plan, places[stop:])
    assert str(plan.compare(load_record(tmp_path))) == "as planned: 32 batches on 2 ranks"


@pytest.mark.parametrize(
    ("first", "stop", "part"),
    [
        (0, 16, ""),
        (3, 16, "the record begins at epoch 0, step 3"),
        (0, 9, "the record ends with epoch 1, step 0, of a plan up to epoch 1, step 7"),
        (
            8,
            12,
            "the record begins at epoch 1, step 0 and ends with epoch 1, step 3, of a plan up to "
            "epoch 1, step 7",
        ),
    ],
)
def test_a_record_of_a_part_says_so(tmp_path, first, stop, part):
    plan = ShardPlan(64, world_size=2, batch_size=4, epochs=2)
    session_of(tmp_path, plan, [(step // 8, step % 8) for step in range(first, stop)])
    comparison = plan.compare(load_record(tmp_path))
    assert comparison.as_planned and comparison.part == part
    whole = f"as planned: {2 * (stop - first)} batches on 2 ranks"
    assert str(comparison) == (f"{whole}; {part}" if part else whole)


def test_a_rank_that_repeats_alone_is_named(tmp_path):
    plan = ShardPlan(64, world_size=2, batch_size=4)
    places = [(0, step) for step in range(4)]
    session_of(tmp_path, plan, places, {1: [(0, 0), (0, 1), (0, 1), (0, 3)]})
    text = str(plan.compare(load_record(tmp_path)))
    assert "1 step again, the first in session 0 at epoch 0, step 1 of rank 1" in text
    assert "1 step missing, the first after epoch 0, step 1 in session 0 of rank 1" in text
