"""Files of a record that were lost, damaged, mistaken, or are none."""

import shutil

import pytest
from test_record import feed, record_all

from nvalchemi.sharding import ShardPlan, ShardRecorder, load_record


def plan_of(world_size, epochs=2):
    return ShardPlan(48, world_size=world_size, batch_size=6, epochs=epochs)


@pytest.mark.parametrize("lost", [0, 1])
def test_a_run_after_a_file_was_lost_is_not_taken_for_an_earlier_one(tmp_path, lost):
    plan = plan_of(2)
    record_all(tmp_path, plan)
    (tmp_path / f"rank{lost:05d}.record").unlink()
    record = record_all(tmp_path, plan, epochs=[1])
    first, second = record.sessions
    assert len(first.ranks[lost]) == 0 and first.ranks[1 - lost].epochs.tolist() == [0] * 4
    assert [log.epochs.tolist() for log in second.ranks] == [[1] * 4] * 2
    comparison = plan.compare(record)
    assert not comparison.as_planned and f"rank {lost} has 0 batches" in str(comparison)


def test_ranks_that_join_and_leave_keep_the_numbers_of_the_sessions(tmp_path):
    for world_size, epoch in ((2, 0), (4, 1), (2, 2), (4, 3), (8, 4)):
        record = record_all(tmp_path, plan_of(world_size), epochs=[epoch])
    assert [session.world_size for session in record.sessions] == [2, 4, 2, 4, 8]
    for epoch, session in enumerate(record.sessions):
        assert all(set(log.epochs.tolist()) == {epoch} for log in session.ranks)


def test_a_rank_that_begins_first_counts_as_the_others(tmp_path):
    """Ranks 2 and 3 are new, and may write before rank 0 does."""
    record_all(tmp_path, plan_of(2))
    for rank in (3, 0, 2, 1):
        recorder = ShardRecorder(tmp_path)
        feed(recorder, plan_of(4), [1], rank)
        recorder.close()
    record = load_record(tmp_path)
    assert [session.world_size for session in record.sessions] == [2, 4]


def test_a_copy_of_another_rank_is_refused(tmp_path):
    plan = plan_of(2)
    record_all(tmp_path, plan)
    shutil.copy(tmp_path / "rank00000.record", tmp_path / "rank00001.record")
    with pytest.raises(ValueError, match="it is a record of rank 0"):
        load_record(tmp_path)
    with pytest.raises(ValueError, match="it is a record of rank 0"):
        feed(ShardRecorder(tmp_path), plan, rank=1)


@pytest.mark.parametrize("place", [64, 72, 80, 90, 120, 200])
def test_what_follows_a_damaged_block_is_kept(tmp_path, place):
    plan = ShardPlan(64, world_size=1, batch_size=4, epochs=2)
    recorder = ShardRecorder(tmp_path, flush_every=4)
    feed(recorder, plan)
    recorder.close()
    path = tmp_path / "rank00000.record"
    data = bytearray(path.read_bytes())
    data[place] ^= 1  # in the first block with batches, in its header or behind
    path.write_bytes(data)
    recorder = ShardRecorder(tmp_path)
    feed(recorder, plan, [1])
    recorder.close()
    assert path.read_bytes().startswith(bytes(data))
    with pytest.warns(UserWarning, match=r"\d+ bytes of .* are damaged and left out"):
        record = load_record(tmp_path)
    steps = [session.ranks[0].steps.tolist() for session in record.sessions]
    assert steps == [list(range(4, 16)), list(range(16))]


@pytest.mark.parametrize("content", [b"garbage" * 40, b"x", b""])
def test_files_that_are_no_records(tmp_path, content):
    (tmp_path / "rank00000.record").write_bytes(content)
    with pytest.raises(ValueError, match="must be a record" if content else "no whole block"):
        load_record(tmp_path)


def test_indices_below_zero_are_refused(tmp_path):
    with pytest.raises(ValueError, match="must be >= 0 to be recorded.* got -1"):
        feed(ShardRecorder(tmp_path), plan_of(1), steps=[0], samples=lambda step, epoch: [-1, 3])
