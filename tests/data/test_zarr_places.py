"""Where a store is: relative paths, and several writers that want the same place."""

import os
import pickle
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from store_cases import chain
from zarr.storage import LocalStore

from nvalchemi.data.datapipes.zarr_layout import exclusive
from nvalchemi.data.datapipes.zarr_replace import replaced_by_rename
from nvalchemi.data.datapipes.zarr_store import AtomicDataZarrReader, AtomicDataZarrWriter

HERE = Path(__file__).parent


@pytest.mark.parametrize("kind", [str, Path, LocalStore])
def test_a_relative_path_is_meant_from_where_it_was_given(tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    writer = AtomicDataZarrWriter(kind("s.zarr"))
    writer.write([chain(3, 1.0)])
    reader = AtomicDataZarrReader(kind("s.zarr"))
    sent = pickle.dumps(reader)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    for one in (reader, pickle.loads(sent)):
        assert one.read_batch([0]).energy.item() == 1.0
        one.check_integrity()
    writer.append(chain(2, 2.0))
    reader.refresh()
    assert len(reader) == 2 and str(tmp_path / "s.zarr") in repr(reader)
    assert os.listdir() == []


WRITING = """
import sys, time
sys.path.insert(0, {here!r})
from store_cases import chain
from nvalchemi.data.datapipes.zarr_store import AtomicDataZarrWriter
print("ready", flush=True)
sys.stdin.readline()
for k in range(30):
    try:
        AtomicDataZarrWriter(f"{{sys.argv[1]}}/{{k}}.zarr").write([chain(2, float(sys.argv[2]))])
        print("won")
    except (RuntimeError, FileExistsError) as error:
        print(type(error).__name__, error)
"""


def test_of_several_writers_of_one_store_one_makes_it_and_the_others_say_why_not(tmp_path):
    children = [
        subprocess.Popen(
            [sys.executable, "-c", WRITING.format(here=str(HERE)), str(tmp_path), str(k)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for k in range(3)
    ]
    for child in children:
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
    for child in children:
        assert child.stdin is not None
        child.stdin.write("\n")
        child.stdin.flush()
    answers = [child.communicate(timeout=120)[0].splitlines() for child in children]
    assert [child.returncode for child in children] == [0, 0, 0]
    for k, told in enumerate(zip(*answers, strict=True)):
        assert Counter(told)["won"] == 1, told
        reader = AtomicDataZarrReader(tmp_path / f"{k}.zarr")
        assert reader.read_batch([0]).energy.item() == told.index("won")
        for sentence in set(told) - {"won"}:
            assert (
                "another writer is making" in sentence
                or "exists already" in sentence
                or "has appeared while" in sentence
            )


def test_a_writer_that_comes_while_another_builds_is_told(tmp_path):
    pytest.importorskip("fcntl")
    with replaced_by_rename(tmp_path / "s.zarr", replaces=False):
        with pytest.raises(RuntimeError, match=r"another writer is making .*s.zarr .*: wait"):
            AtomicDataZarrWriter(tmp_path / "s.zarr").write([chain(2)])
    with pytest.raises(FileExistsError, match="has appeared while it was being written"):
        with replaced_by_rename(tmp_path / "t.zarr", replaces=False) as beside:
            (beside / "new").touch()
            (tmp_path / "t.zarr").mkdir()
            (tmp_path / "t.zarr" / "old").touch()
    # a writer that looked before another had finished, and builds after it
    AtomicDataZarrWriter(tmp_path / "u.zarr").write([chain(2, 1.0)])
    with pytest.raises(FileExistsError, match="has appeared while it was being written"):
        with replaced_by_rename(tmp_path / "u.zarr", replaces=False) as beside:
            (beside / "new").touch()
    assert AtomicDataZarrReader(tmp_path / "u.zarr").read_batch([0]).energy.item() == 1.0


def test_a_lock_on_a_folder_that_was_replaced_meanwhile_is_no_lock(tmp_path, monkeypatch):
    fcntl = pytest.importorskip("fcntl")
    place = tmp_path / "s"
    place.mkdir()
    lock = fcntl.flock

    def replaced(handle: int, how: int) -> None:
        place.rename(tmp_path / "old")
        place.mkdir()
        lock(handle, how)

    monkeypatch.setattr(fcntl, "flock", replaced)
    with pytest.raises(RuntimeError, match="another writer is at work"), exclusive(place):
        raise AssertionError("locked a folder that is not there any more")
