import os
import pickle
import shutil
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from store_cases import chain, structure

from nvalchemi.data.atomic_data import AtomicData
from nvalchemi.data.batch import Batch
from nvalchemi.data.datapipes.zarr_store import (
    AtomicDataZarrReader,
    AtomicDataZarrWriter,
    ZarrArrayConfig,
    ZarrWriteConfig,
)

sizes = st.lists(st.tuples(st.integers(1, 6), st.integers(0, 9)), min_size=1, max_size=6)


def stored(reader: AtomicDataZarrReader) -> list[AtomicData]:
    return reader.read_batch(range(len(reader))).to_data_list() if len(reader) else []


@settings(max_examples=25, deadline=None)
@given(sizes, sizes, st.data())
def test_structures_survive_write_append_delete_and_defragment(first, second, data):
    structures = [structure(n, e, seed) for seed, (n, e) in enumerate(first + second)]
    folder = Path(tempfile.mkdtemp())
    try:
        path = folder / "s.zarr"
        writer = AtomicDataZarrWriter(path, {"core": {"chunk_size": 4}, "meta": {"chunk_size": 3}})
        writer.write(structures[: len(first)])
        writer.append(Batch.from_data_list(structures[len(first) :]))
        assert stored(AtomicDataZarrReader(path)) == structures
        gone = data.draw(st.sets(st.integers(0, len(structures) - 2)))
        writer.delete(sorted(gone))
        kept = [s for i, s in enumerate(structures) if i not in gone]
        reader = AtomicDataZarrReader(path, cache_bytes=100)
        assert stored(reader) == kept
        writer.defragment()
        writer.append(structures[0])
        reader.refresh()
        assert stored(reader) == [*kept, structures[0]]
        order = data.draw(st.lists(st.integers(-len(reader), len(reader) - 1), min_size=1))
        wanted = [stored(reader)[i] for i in order]
        assert reader.read_batch(order).to_data_list() == wanted
        assert AtomicDataZarrReader(path).read_batch(order) == Batch.from_data_list(wanted)
        reader.check_integrity()
    finally:
        shutil.rmtree(folder)


def test_append_and_defragment_number_neighbours_from_the_start_of_the_store(tmp_path):
    # the peer appends the numbers of the appended batch as they are: its sample 2 reads -7..-3
    writer = AtomicDataZarrWriter(tmp_path / "s.zarr")
    structures = [chain(n, float(n)) for n in (3, 4, 5, 2)]
    writer.write(structures[:2])
    writer.append(structures[2:])
    numbers = zarr.open_group(tmp_path / "s.zarr", mode="r")["core/neighbor_list"][:]
    first_atoms = np.repeat([0, 3, 7, 12], [2, 3, 4, 1])
    local = np.concatenate([s.neighbor_list.numpy() for s in structures])
    np.testing.assert_array_equal(numbers, local + first_atoms[:, None])
    assert stored(AtomicDataZarrReader(tmp_path / "s.zarr")) == structures
    writer.delete([0])
    writer.defragment()
    assert stored(AtomicDataZarrReader(tmp_path / "s.zarr")) == structures[1:]
    numbers = zarr.open_group(tmp_path / "s.zarr", mode="r")["core/neighbor_list"][:]
    assert numbers.min() == 0 and numbers.max() == 10


def test_append_refuses_structures_without_a_stored_label_and_changes_nothing(tmp_path):
    # the peer accepts them, and every later structure then reads the label of its neighbour
    path = tmp_path / "s.zarr"
    writer = AtomicDataZarrWriter(path)
    labelled = [structure(n, seed=n) for n in (2, 3, 4, 1)]
    writer.write(labelled)
    before = {p: p.read_bytes() for p in path.rglob("*") if p.is_file()}
    unlabelled = structure(2, labels=False)
    with pytest.raises(ValueError, match=r"structure 0 lacks 'energy', which the store keeps"):
        writer.append(unlabelled)
    with pytest.raises(ValueError, match=r"structure 1 lacks 'energy'.*store of their own"):
        writer.append([labelled[0], unlabelled])
    with pytest.raises(ValueError, match=r"structure 0 carries 'charge', which the store does not"):
        writer.append(labelled[0].replace(charge=torch.zeros(1, 1)))
    with pytest.raises(ValueError, match=r"positions is float64, the store keeps float32"):
        writer.append(labelled[0].to(dtype=torch.float64))
    assert {p: p.read_bytes() for p in path.rglob("*") if p.is_file()} == before
    writer.append(labelled[1])
    assert stored(AtomicDataZarrReader(path)) == [*labelled, labelled[1]]


def test_write_refuses_structures_that_differ(tmp_path):
    writer = AtomicDataZarrWriter(tmp_path / "s.zarr")
    with pytest.raises(ValueError, match=r"structure 1 lacks 'energy', which structure 0 carries"):
        writer.write([structure(2), structure(3, labels=False)])
    with pytest.raises(ValueError, match=r"structure 1 carries 'energy', which structure 0 lacks"):
        writer.write([structure(2, labels=False), structure(3)])
    with pytest.raises(ValueError, match=r"structure 1 is torch.float64, of earlier ones"):
        writer.write([structure(2), structure(3).to(dtype=torch.float64)])
    with pytest.raises(ValueError, match="at least one structure"):
        writer.write([])
    with pytest.raises(TypeError, match="structure 1 must be AtomicData: got int"):
        writer.write([structure(2), 3])
    with pytest.raises(ValueError, match="bfloat16"):
        writer.write(structure(2).to(dtype=torch.bfloat16))
    assert list(tmp_path.iterdir()) == []
    writer.write(structure(2))
    with pytest.raises(FileExistsError, match=r"append\(\)"):
        writer.write(structure(2))
    with pytest.raises(FileNotFoundError):
        AtomicDataZarrWriter(tmp_path / "other.zarr").append(structure(2))


def test_structures_that_are_not_periodic_join_periodic_ones(tmp_path):
    writer = AtomicDataZarrWriter(tmp_path / "s.zarr")
    writer.write(structure(3))
    writer.append(structure(2).replace(cell=None, pbc=None))
    with pytest.raises(ValueError, match="lacks 'cell'"):
        writer.append(structure(2).replace(cell=None))
    last = AtomicDataZarrReader(tmp_path / "s.zarr").read_batch([1])
    assert not last.pbc.any() and not last.cell.any()


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.float32, torch.float64], ids=lambda d: str(d)[6:]
)
def test_dtypes_are_kept(tmp_path, dtype):
    data = structure(3, 4).to(dtype=dtype)
    data = data.replace(atomic_numbers=data.atomic_numbers.int())
    data.neighbor_list = data.neighbor_list.int()
    AtomicDataZarrWriter(tmp_path / "s.zarr").write([data, data])
    assert stored(AtomicDataZarrReader(tmp_path / "s.zarr")) == [data, data]


def test_custom_fields_of_every_level(tmp_path):
    path = tmp_path / "s.zarr"

    def with_custom(n: int) -> AtomicData:
        data = structure(n, 3, seed=n)
        data.add_node_property("weight", torch.rand(n))
        data.add_edge_property("bond_order", torch.rand(3, 2))
        data.add_system_property("temperature", torch.rand(1, 1))
        return data

    structures = [with_custom(n) for n in (2, 3)]
    writer = AtomicDataZarrWriter(path)
    writer.write(structures[0])
    writer.append(structures[1])
    reader = AtomicDataZarrReader(path)
    assert stored(reader) == structures
    assert reader.field_levels["weight"] == "atom"
    assert reader.field_levels["bond_order"] == "edge"
    writer.add_custom("part", torch.tensor([[0], [1]]), level="system")
    with pytest.raises(ValueError, match="already"):
        writer.add_custom("part", torch.tensor([[0], [1]]), level="system")
    with pytest.raises(ValueError, match="expected 5, got 2"):
        writer.add_custom("mass", torch.ones(2), level="atom")
    with pytest.raises(ValueError, match="level must be"):
        writer.add_custom("mass", torch.ones(2), level="bond")
    for name in ("device", "num_nodes", "num_graphs", "info", "_p"):
        with pytest.raises(ValueError, match=f"{name!r} can not name a field"):
            writer.add_custom(name, torch.zeros(2, 1), level="system")
    assert "part" not in reader.field_names
    reader.refresh()
    assert reader.read_batch([1, 0]).fields("system")["part"].tolist() == [[1], [0]]
    writer.delete(0)
    writer.defragment()
    reader.refresh()
    assert reader.read_batch([0]).fields("system")["part"].tolist() == [[1]]


def test_info_is_reported_as_not_stored(tmp_path):
    data = structure(2)
    data.info = {"note": torch.ones(1)}
    with pytest.warns(UserWarning, match="info is not stored: note"):
        AtomicDataZarrWriter(tmp_path / "s.zarr").write(data)


def test_delete_counts_stored_structures_and_touches_only_masks(tmp_path):
    path = tmp_path / "s.zarr"
    structures = [chain(n, float(n)) for n in (3, 4, 5, 2)]
    writer = AtomicDataZarrWriter(path)
    writer.write(structures)
    before = {p: p.read_bytes() for p in path.rglob("*") if p.is_file()}
    writer.delete([0, -1])
    changed = {p for p, content in before.items() if p.read_bytes() != content}
    assert {p.relative_to(path).parts[:2] for p in changed} == {
        ("meta", f"{name}_mask") for name in ("samples", "atoms", "edges")
    }
    reader = AtomicDataZarrReader(path)
    assert [int(reader[i][1]["physical_index"]) for i in range(2)] == [1, 2]
    with pytest.warns(UserWarning, match=r"already deleted: \[0\]"):
        writer.delete([0, 1])
    reader.refresh()
    assert stored(reader) == [structures[2]]
    with pytest.raises(IndexError, match="index 4 is out of range for a store of 4 structures"):
        writer.delete([4])
    writer.delete(2)
    assert len(AtomicDataZarrReader(path)) == 0
    with pytest.raises(ValueError, match="would leave no structure"):
        writer.defragment()


def test_chunks_do_not_follow_the_first_write(tmp_path):
    writer = AtomicDataZarrWriter(tmp_path / "s.zarr")
    writer.write(structure(3, 4))
    for _ in range(3):
        writer.append(structure(5, 2))
    root = zarr.open_group(tmp_path / "s.zarr", mode="r")
    assert root["core/positions"].chunks == (16384, 3)
    assert root["core/neighbor_list"].chunks == (16384, 2)
    assert root["core/energy"].chunks == (65536, 1)
    chunk_files = [p for p in (tmp_path / "s.zarr" / "core").rglob("*") if p.name.isdigit()]
    assert len([p for p in chunk_files if p.is_file()]) == len(list(root["core"].arrays()))


def test_config_reaches_the_arrays(tmp_path):
    config = ZarrWriteConfig(
        core=ZarrArrayConfig(chunk_size=8, shard_size=16),
        field_overrides={"energy": ZarrArrayConfig(chunk_size=5, compressors=())},
    )
    writer = AtomicDataZarrWriter(tmp_path / "s.zarr", config)
    structures = [structure(n, n, seed=n) for n in range(1, 30)]
    writer.write(structures)
    writer.append(structures)
    root = zarr.open_group(tmp_path / "s.zarr", mode="r")
    assert root["core/positions"].chunks == (8, 3) and root["core/positions"].shards == (16, 3)
    assert root["core/energy"].chunks == (5, 1) and not root["core/energy"].compressors
    assert stored(AtomicDataZarrReader(tmp_path / "s.zarr")) == structures + structures
    with pytest.raises(ValueError, match="multiple of chunk_size: 20 is none of 8"):
        ZarrArrayConfig(chunk_size=8, shard_size=20)
    with pytest.raises(ValueError):
        AtomicDataZarrWriter(tmp_path / "t.zarr", {"core": {"chunks": 3}})


def test_stores_in_memory(tmp_path):
    memory: dict = {}
    writer = AtomicDataZarrWriter(memory)
    structures = [chain(n, float(n)) for n in (3, 4, 5)]
    writer.write(structures[:2])
    writer.append(structures[2])
    writer.delete([1])
    writer.defragment()
    assert stored(AtomicDataZarrReader(memory)) == [structures[0], structures[2]]
    with pytest.raises(FileExistsError):
        writer.write(structures)


def test_reader_answers(tmp_path):
    path = tmp_path / "s.zarr"
    structures = [structure(n, 2 * n, seed=n) for n in (2, 5, 3)]
    AtomicDataZarrWriter(path).write(structures)
    with AtomicDataZarrReader(path) as reader:
        assert len(reader) == 3
        assert reader.num_nodes_per_sample.tolist() == [2, 5, 3]
        assert reader.num_edges_per_sample.tolist() == [4, 10, 6]
        assert reader.get_metadata(-1) == (3, 6)
        raw, metadata = reader.read(-2)
        assert AtomicData(**raw) == structures[1]
        assert metadata == {"index": 1, "source_file": str(path), "physical_index": "1"}
        both = reader.read_many([2, 2])
        assert [AtomicData(**raw) for raw, _ in both] == [structures[2]] * 2
        assert [AtomicData(**raw) for raw, _ in reader] == structures
        assert reader.read_many([]) == []
        assert reader.schema()["positions"] == ("atom", np.dtype("float32"), (3,))
        assert reader.field_levels["energy"] == "system"
        batch = reader.read_batch(torch.tensor([2, 0, 2]))
        assert batch.metadata["index"].tolist() == [2, 0, 2]
        assert batch == Batch.from_data_list([structures[i] for i in (2, 0, 2)])
        with pytest.raises(IndexError, match=r"index 3 is out of range .* with 3 structures"):
            reader.read_batch([0, 3])
        with pytest.raises(TypeError, match="integers"):
            reader.read_batch([0.5])
        with pytest.raises(ValueError, match="at least one index"):
            reader.read_batch([])
    for use in (lambda: reader.read(0), lambda: len(reader), reader.refresh):
        with pytest.raises(RuntimeError, match="closed"):
            use()


def test_only_chosen_fields_are_read(tmp_path):
    path = tmp_path / "s.zarr"
    AtomicDataZarrWriter(path).write(structure(3, 4))
    reader = AtomicDataZarrReader(path, fields=["energy"])
    assert set(reader.field_names) == {"atomic_numbers", "positions", "energy"}
    assert set(reader.read(0)[0]) == {"atomic_numbers", "positions", "energy"}
    with pytest.raises(ValueError, match="no field 'stress': it keeps"):
        AtomicDataZarrReader(path, fields=["stress"])
    with pytest.raises(TypeError, match="sequence of names"):
        AtomicDataZarrReader(path, fields="energy")


def test_index_and_pinning_are_optional(tmp_path):
    path = tmp_path / "s.zarr"
    AtomicDataZarrWriter(path).write(structure(3))
    reader = AtomicDataZarrReader(path, pin_memory=True, include_index_in_metadata=False)
    raw, metadata = reader[0]
    assert "index" not in metadata
    assert raw["positions"].is_pinned() == torch.cuda.is_available()


def test_an_open_reader_keeps_its_view_until_it_is_refreshed(tmp_path):
    path = tmp_path / "s.zarr"
    structures = [structure(n, n, seed=n) for n in range(1, 9)]
    writer = AtomicDataZarrWriter(path)
    writer.write(structures[:5])
    first, second = AtomicDataZarrReader(path), AtomicDataZarrReader(path)
    assert stored(first) == structures[:5]
    writer.append(structures[5:])
    writer.delete([0])
    sent = pickle.loads(pickle.dumps(first))
    for reader in (first, second, sent):
        assert stored(reader) == structures[:5]
    first.refresh()
    assert stored(first) == structures[1:]
    writer.defragment()
    for reader in (first, second, pickle.loads(pickle.dumps(first))):
        with pytest.raises(RuntimeError, match=r"rewritten .* refresh"):
            reader.read_batch([0])
        reader.refresh()
        assert stored(reader) == structures[1:]
    shutil.rmtree(path)
    with pytest.raises(RuntimeError, match="removed"):
        first.read_batch([0])


def test_many_threads_read_what_one_reads(tmp_path):
    path = tmp_path / "s.zarr"
    structures = [structure(n % 7 + 1, n % 5, seed=n) for n in range(200)]
    AtomicDataZarrWriter(path, {"core": {"chunk_size": 16}}).write(structures)
    reader = AtomicDataZarrReader(path, cache_bytes=4096)
    wrong: list[object] = []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(15):
            order = rng.integers(0, 200, 20)
            if seed == 0:
                reader.refresh()
            if reader.read_batch(order).to_data_list() != [structures[i] for i in order]:
                wrong.append(order)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


class Indexed(torch.utils.data.Dataset):
    """What torch's DataLoader sends to its worker processes."""

    def __init__(self, reader: AtomicDataZarrReader) -> None:
        self.reader = reader

    def __len__(self) -> int:
        return len(self.reader)

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return os.getpid(), self.reader.read(index)[0]["positions"].sum()


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_worker_processes_open_the_store_again(tmp_path, context):
    path = tmp_path / "s.zarr"
    structures = [structure(n, seed=n) for n in range(1, 7)]
    AtomicDataZarrWriter(path).write(structures)
    reader = AtomicDataZarrReader(path)
    reader.read_batch([0])
    loader = torch.utils.data.DataLoader(
        Indexed(reader), batch_size=None, num_workers=1, multiprocessing_context=context, timeout=60
    )
    found = list(loader)
    assert {pid for pid, _ in found}.isdisjoint({os.getpid()})
    torch.testing.assert_close(
        torch.stack([total for _, total in found]),
        torch.stack([s.positions.sum() for s in structures]),
    )
