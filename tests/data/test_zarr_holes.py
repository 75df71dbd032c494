"""Files of a store that are gone, for a moment or for good: no label may become zero by that."""

import os
import threading
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import zarr
from store_cases import chain
from test_zarr_foreign import peer_store

from nvalchemi.data import Batch
from nvalchemi.data.datapipes.zarr_store import AtomicDataZarrReader, AtomicDataZarrWriter

NUM_ATOMS = 64


def atoms_store(path: Path, config=None, forces: float = 1.0) -> AtomicDataZarrWriter:
    """One atom a structure, one row of 8 a chunk: 8 files for each array."""
    one = torch.ones(NUM_ATOMS, dtype=torch.int64)
    batch = Batch.from_arrays(
        {
            "atomic_numbers": one * 6,
            "positions": torch.rand(NUM_ATOMS, 3),
            "forces": torch.full((NUM_ATOMS, 3), forces),
        },
        {},
        {"energy": torch.full((NUM_ATOMS, 1), forces), "pbc": torch.zeros(NUM_ATOMS, 3).bool()},
        one,
    )
    small = {"chunk_size": 8}
    writer = AtomicDataZarrWriter(path, config or {"core": small, "meta": small})
    writer.write(batch)
    return writer


def lose(path: Path, array: str, chunk: int) -> None:
    (file,) = (path / array / "c").glob(f"{chunk}*")
    for part in [file] if file.is_file() else list(file.iterdir()):
        part.unlink()


# A store that is away for a moment.


def test_what_was_read_while_the_store_was_away_is_not_kept(tmp_path):
    path, away = tmp_path / "s.zarr", tmp_path / "away"
    atoms_store(path)
    reader = AtomicDataZarrReader(path)
    reader.read_batch([0])
    os.rename(path, away)
    with pytest.raises(RuntimeError, match="rewritten or removed"):
        reader.read_batch([NUM_ATOMS - 1])
    os.rename(away, path)
    batch = reader.read_batch([NUM_ATOMS - 1])
    assert batch.forces.tolist() == [[1.0, 1.0, 1.0]] and batch.energy.item() == 1.0


def test_threads_never_see_fill_values_of_a_store_that_goes_and_comes(tmp_path):
    path, away = tmp_path / "s.zarr", tmp_path / "away"
    atoms_store(path)
    wrong, read, stop = [], [0], threading.Event()

    def reads(reader: AtomicDataZarrReader, seed: int) -> None:
        rng = np.random.default_rng(seed)
        while not stop.is_set():
            try:
                batch = reader.read_batch(rng.integers(0, NUM_ATOMS, 5))
            except (RuntimeError, ValueError, FileNotFoundError):
                continue
            read[0] += 1
            if not (batch.forces == 1).all() or not (batch.atomic_numbers == 6).all():
                wrong.append(batch)

    for round in range(20):
        reader = AtomicDataZarrReader(path)
        stop.clear()
        threads = [threading.Thread(target=reads, args=(reader, 3 * round + k)) for k in range(3)]
        for thread in threads:
            thread.start()
        for _ in range(20):
            os.rename(path, away)
            os.rename(away, path)
        stop.set()
        for thread in threads:
            thread.join()
        assert (reader.read_batch(range(NUM_ATOMS)).forces == 1).all()
    assert not wrong


# A file that is lost.


@pytest.mark.parametrize("array", ["forces", "energy", "positions", "atomic_numbers", "pbc"])
@pytest.mark.parametrize("cache_bytes", [2**28, 0])
def test_a_lost_file_is_refused_with_its_array_and_rows(tmp_path, array, cache_bytes):
    path = tmp_path / "s.zarr"
    atoms_store(path)
    lose(path, f"core/{array}", 3)
    reader = AtomicDataZarrReader(path, cache_bytes=cache_bytes)
    with pytest.raises(ValueError, match=rf"file of rows \d+\.\.\d+ of core/{array} .* is missing"):
        reader.read_batch([25, 40])
    with pytest.raises(ValueError, match=f"1 of 8 chunks of core/{array} are missing"):
        reader.check_integrity()


def test_a_lost_file_reads_as_what_no_label_is_in_any_other_tool(tmp_path):
    path = tmp_path / "s.zarr"
    atoms_store(path)
    for array in ("forces", "atomic_numbers"):
        lose(path, f"core/{array}", 3)
    root = zarr.open_group(path, mode="r")
    assert np.isnan(root["core/forces"][24:32]).all()
    assert (root["core/atomic_numbers"][24:32] < 0).all()


@pytest.mark.parametrize("array", ["atoms_ptr", "edges_ptr", "samples_mask"])
def test_a_lost_pointer_or_mask_is_named_at_opening(tmp_path, array):
    atoms_store(tmp_path / "s.zarr")
    lose(tmp_path / "s.zarr", f"meta/{array}", 2)
    with pytest.raises(ValueError, match=f"file of rows 16..23 of meta/{array} .* is missing"):
        AtomicDataZarrReader(tmp_path / "s.zarr")


def test_a_lost_shard_is_refused(tmp_path):
    path = tmp_path / "s.zarr"
    atoms_store(path, {"core": {"chunk_size": 4, "shard_size": 16}})
    assert (AtomicDataZarrReader(path).read_batch(range(NUM_ATOMS)).forces == 1).all()
    lose(path, "core/forces", 1)
    with pytest.raises(ValueError, match=r"of core/forces .* is missing"):
        AtomicDataZarrReader(path).read_batch([20])
    with pytest.raises(ValueError, match="1 of 4 chunks of core/forces"):
        AtomicDataZarrReader(path).check_integrity()


def test_a_lost_file_in_memory_is_refused(tmp_path):
    memory: dict = {}
    atoms_store(memory)
    del memory["core/forces/c/3/0"]
    with pytest.raises(ValueError, match="core/forces"):
        AtomicDataZarrReader(memory).read_batch([25])


def test_labels_that_are_zero_are_read_and_appended_as_such(tmp_path):
    writer = atoms_store(tmp_path / "s.zarr", forces=0.0)
    reader = AtomicDataZarrReader(tmp_path / "s.zarr")
    writer.append(reader.read_batch(range(NUM_ATOMS)))
    writer.delete(range(16))  # whole files of the mask
    reader.refresh()
    assert len(reader) == 2 * NUM_ATOMS - 16
    assert (reader.read_batch(range(len(reader))).forces == 0).all()
    reader.check_integrity()
    writer.defragment()
    AtomicDataZarrReader(tmp_path / "s.zarr").check_integrity()


def test_zeros_that_were_to_be_left_out_stay_zeros_whoever_appends(tmp_path):
    path = tmp_path / "s.zarr"
    atoms_store(path, {"core": {"chunk_size": 8, "write_empty_chunks": False}}, forces=0.0)
    assert not (path / "core" / "forces" / "c").exists()
    reader = AtomicDataZarrReader(path)
    AtomicDataZarrWriter(path).append(reader.read_batch(range(NUM_ATOMS)))
    assert not (path / "core" / "forces" / "c").exists()
    reader.refresh()
    assert (reader.read_batch(range(2 * NUM_ATOMS)).forces == 0).all()
    reader.check_integrity()
    other = tmp_path / "t.zarr"
    atoms_store(other, forces=0.0)
    sparse = {"core": {"write_empty_chunks": False}}
    AtomicDataZarrWriter(other, sparse).append(reader.read_batch(range(NUM_ATOMS)))
    AtomicDataZarrReader(other).check_integrity()


def test_zeros_of_another_tool_are_zeros_but_not_in_silence_for_labels(tmp_path):
    root = peer_store(tmp_path / "p.zarr")
    assert not (tmp_path / "p.zarr/core/velocities/c").exists()
    reader = AtomicDataZarrReader(tmp_path / "p.zarr")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert (reader.read_batch([0]).velocities == 0).all()
    root["core/energy"][:] = 0
    assert not list((tmp_path / "p.zarr/core/energy").glob("c/*/*"))
    reader.refresh()
    with pytest.warns(UserWarning, match=r"no file of rows 0..2 of core/energy: the tool"):
        assert reader.read_batch([0]).energy.item() == 0
    lose(tmp_path / "p.zarr", "core/atomic_numbers", 0)
    with pytest.raises(ValueError, match="core/atomic_numbers .* is missing"):
        AtomicDataZarrReader(tmp_path / "p.zarr").read_batch([0])


# Rows that an unfinished append has made room for.


def test_a_store_whose_append_was_killed_is_whole(tmp_path):
    path = tmp_path / "s.zarr"
    writer = AtomicDataZarrWriter(path, {"core": {"chunk_size": 4}})
    writer.write([chain(3, 1.0), chain(4, 2.0)])
    root = zarr.open_group(path, mode="r+")
    root.attrs["pending_append"] = {"samples": 2, "target": 4}
    for name in ("positions", "forces"):
        root[f"core/{name}"].resize((3000, 3))
    reader = AtomicDataZarrReader(path)
    reader.check_integrity()
    assert reader.read_batch([0, 1]).energy.ravel().tolist() == [1.0, 2.0]
    writer.append(chain(2, 3.0))
    AtomicDataZarrReader(path).check_integrity()
