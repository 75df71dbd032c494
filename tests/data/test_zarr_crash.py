"""A writer that is killed in the middle: what readers and the next writer find."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import zarr
from store_cases import chain

from nvalchemi.data.datapipes.zarr_store import AtomicDataZarrReader, AtomicDataZarrWriter

HERE = Path(__file__).parent
FIRST, SECOND = [chain(3, 1.0), chain(4, 2.0)], [chain(5, 3.0), chain(2, 4.0)]

# Every change of a file in a store goes through these two; the k-th kills the process that does it.
KILLED_AT = """
import os, signal, sys
sys.path.insert(0, {here!r})
from store_cases import chain
import zarr
from zarr.storage import LocalStore
from nvalchemi.data.datapipes.zarr_store import AtomicDataZarrWriter

left = [int(sys.argv[2])]
write = LocalStore.set

async def set(self, key, value):
    if left[0] == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    left[0] -= 1
    await write(self, key, value)

writer = AtomicDataZarrWriter(sys.argv[1], {{"core": {{"chunk_size": 4}}}})
LocalStore.set = set
if sys.argv[3] == "append":
    writer.append([chain(5, 3.0), chain(2, 4.0)])
elif sys.argv[3] == "write":
    writer.write([chain(3, 1.0), chain(4, 2.0)])
else:
    writer.defragment()
print(left[0])
"""


def run_until(path: Path, changes: int, what: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", KILLED_AT.format(here=str(HERE)), str(path), str(changes), what],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def stored(path: Path) -> list:
    reader = AtomicDataZarrReader(path)
    return reader.read_batch(range(len(reader))).to_data_list()


def new_store(path: Path) -> AtomicDataZarrWriter:
    writer = AtomicDataZarrWriter(path, {"core": {"chunk_size": 4}})
    writer.write(FIRST)
    return writer


@pytest.mark.parametrize("changes", [0, 1, 7, 14, 22, 27, 28])
def test_append_killed_after_any_change_leaves_the_old_store(tmp_path, changes):
    writer = new_store(tmp_path / "s.zarr")
    done = run_until(tmp_path / "s.zarr", changes, "append")
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert stored(tmp_path / "s.zarr") == FIRST
    writer.append(SECOND[1])
    assert stored(tmp_path / "s.zarr") == [*FIRST, SECOND[1]]
    AtomicDataZarrReader(tmp_path / "s.zarr").check_integrity()


def test_append_that_is_not_killed_is_seen_whole(tmp_path):
    new_store(tmp_path / "s.zarr")
    done = run_until(tmp_path / "s.zarr", 1000, "append")
    assert done.returncode == 0, done.stderr
    # 29 changes and no more: the cases above reach from the first to the last
    assert 1000 - int(done.stdout) == 29
    assert stored(tmp_path / "s.zarr") == FIRST + SECOND


def test_every_other_writer_discards_what_a_killed_append_left(tmp_path):
    path = tmp_path / "s.zarr"
    new_store(path)
    assert run_until(path, 20, "append").returncode == -signal.SIGKILL
    assert zarr.open_group(path, mode="r")["core/positions"].shape[0] == 14
    writer = AtomicDataZarrWriter(path)
    writer.add_custom("part", torch.tensor([[0], [1]]), "system")
    assert zarr.open_group(path, mode="r")["core/positions"].shape[0] == 7
    assert run_until(path, 3, "append").returncode == 1  # lacks the new field
    writer.delete([0])
    writer.defragment()
    assert stored(path)[0].energy.item() == 2.0


@pytest.mark.parametrize("changes", [0, 7, 28])
def test_write_killed_leaves_nothing_that_looks_like_a_store(tmp_path, changes):
    path = tmp_path / "s.zarr"
    assert run_until(path, changes, "write").returncode == -signal.SIGKILL
    assert not path.exists()
    AtomicDataZarrWriter(path).write(FIRST)
    assert [p.name for p in tmp_path.iterdir()] == ["s.zarr"]
    assert stored(path) == FIRST


def test_defragment_killed_leaves_the_old_store(tmp_path):
    path = tmp_path / "s.zarr"
    writer = new_store(path)
    writer.delete([0])
    assert run_until(path, 20, "defragment").returncode == -signal.SIGKILL
    assert stored(path) == FIRST[1:]
    writer.defragment()
    assert zarr.open_group(path, mode="r")["meta/samples_mask"].shape == (1,)
    assert [p.name for p in tmp_path.iterdir()] == ["s.zarr"]


APPENDING = """
import sys
sys.path.insert(0, {here!r})
from store_cases import chain
from nvalchemi.data.datapipes.zarr_store import AtomicDataZarrWriter
writer = AtomicDataZarrWriter(sys.argv[1])
print("ready", flush=True)
while True:
    writer.append([chain(5, 3.0), chain(2, 4.0)])
"""


def test_readers_of_a_store_that_grows_see_whole_appends(tmp_path):
    path = tmp_path / "s.zarr"
    writer = new_store(path)
    child = subprocess.Popen(
        [sys.executable, "-c", APPENDING.format(here=str(HERE)), str(path)],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
        seen = []
        deadline = time.monotonic() + 60
        while len(set(seen)) < 4 and time.monotonic() < deadline:
            reader = AtomicDataZarrReader(path)
            seen.append(len(reader))
            assert len(reader) % 2 == 0
            assert reader.read_batch([-1, 0]).energy.ravel().tolist()[1] == 1.0
    finally:
        child.kill()
        child.wait()
    assert seen == sorted(seen) and len(set(seen)) >= 4
    found = stored(path)
    assert found == (FIRST + SECOND * len(found))[: len(found)] and len(found) % 2 == 0
    writer.append(FIRST)
    assert stored(path) == [*found, *FIRST]


def test_a_second_writer_is_refused(tmp_path):
    fcntl = pytest.importorskip("fcntl")
    writer = new_store(tmp_path / "s.zarr")
    handle = os.open(tmp_path / "s.zarr", os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    with pytest.raises(RuntimeError, match="another writer is at work"):
        writer.append(SECOND)
    os.close(handle)
    writer.append(SECOND)
    assert stored(tmp_path / "s.zarr") == FIRST + SECOND


@pytest.mark.parametrize(
    ("array", "rows", "said"),
    [
        ("core/energy", 1, r"core/energy has 1 rows where the pointers of 2 structures need 2"),
        ("core/positions", 9, r"core/positions has 9 rows where .* need 7"),
        ("meta/edges_ptr", 2, r"meta/edges_ptr has 2 entries where 2 structures .* need 3"),
        ("meta/samples_mask", 5, r"meta/atoms_ptr has 3 entries where 5 structures .* need 6"),
    ],
)
def test_a_torn_store_is_refused_with_the_array_and_both_lengths(tmp_path, array, rows, said):
    new_store(tmp_path / "s.zarr")
    torn = zarr.open_group(tmp_path / "s.zarr", mode="r+")[array]
    torn.resize((rows, *torn.shape[1:]))
    for use in (AtomicDataZarrReader, lambda p: AtomicDataZarrWriter(p).append(SECOND)):
        with pytest.raises(ValueError, match=said):
            use(tmp_path / "s.zarr")


def test_absent_parts_are_named(tmp_path):
    path = tmp_path / "s.zarr"
    with pytest.raises(FileNotFoundError, match="no store at"):
        AtomicDataZarrReader(path)
    zarr.open_group(path, mode="w")
    with pytest.raises(ValueError, match="no group 'meta'"):
        AtomicDataZarrReader(path)
    root = zarr.open_group(path, mode="w")
    root.create_group("meta"), root.create_group("core")
    with pytest.raises(ValueError, match="no array meta/samples_mask"):
        AtomicDataZarrReader(path)
    new_store(tmp_path / "t.zarr")
    del zarr.open_group(tmp_path / "t.zarr", mode="r+")["core/energy"]
    with pytest.raises(ValueError, match="no array core/energy"):
        AtomicDataZarrReader(tmp_path / "t.zarr")


def test_check_integrity_finds_lost_chunks_and_wrong_neighbours(tmp_path):
    path = tmp_path / "s.zarr"
    new_store(path)
    reader = AtomicDataZarrReader(path)
    reader.check_integrity()
    lost = path / "core" / "forces" / "c" / "1" / "0"
    content = lost.read_bytes()
    lost.unlink()
    with pytest.raises(ValueError, match="1 of 2 chunks of core/forces are missing"):
        reader.check_integrity()
    lost.write_bytes(content)
    numbers = zarr.open_group(path, mode="r+")["core/neighbor_list"]
    numbers[:] = np.asarray(numbers[:]) + 1
    reader.refresh()
    with pytest.raises(ValueError, match=r"structure 0 points to atoms 1..3 of its 3"):
        reader.check_integrity()
