"""The cutoff of a neighbour list is remembered: by batches, stores and data sets."""

import functools
import subprocess
import sys

import numpy as np
import pytest
import torch
import zarr
from ase.build import bulk, molecule
from store_cases import chain

from nvalchemi.data import AtomicData, Batch, DataLoader, Dataset, InMemoryDataset, MultiDataset
from nvalchemi.data.convert import import_atoms
from nvalchemi.data.datapipes import AtomicDataZarrReader, AtomicDataZarrWriter
from nvalchemi.data.demo_sets import alloys
from nvalchemi.data.neighbors import add_neighbor_list, edge_vectors

KEY = "neighbor_cutoff"


def batch_of(count: int, cutoff: float | None = 3.0) -> Batch:
    """Crystals and molecules with neighbour lists; without a cutoff nobody remembers it."""
    atoms = [bulk("Cu", cubic=True), molecule("H2O")] * count
    batch = Batch.from_data_list([AtomicData.from_atoms(a) for a in atoms[:count]])
    new = add_neighbor_list(batch, 3.0 if cutoff is None else cutoff)
    return Batch.from_data_list(new.to_data_list()) if cutoff is None else new


def reaches(batch: Batch) -> list[float] | None:
    values = batch.metadata.get(KEY)
    assert values is None or (values.dtype == torch.float64 and values.device.type == "cpu")
    return None if values is None else values.tolist()


def stored(path) -> Batch:
    reader = AtomicDataZarrReader(path)
    return reader.read_batch(range(len(reader)))


def test_a_list_follows_selection_join_and_split_with_its_cutoff():
    near, far = batch_of(2), batch_of(2, 4)
    assert reaches(near) == [3.0, 3.0]
    both = Batch.concat([near, far])
    assert reaches(both) == [3.0, 3.0, 4.0, 4.0]
    assert reaches(both[[3, 0]]) == [4.0, 3.0]
    assert [reaches(part) for part in both.split([1, 3])] == [[3.0], [3.0, 4.0, 4.0]]
    assert reaches(both.clone().to(dtype=torch.float64)) == [3.0, 3.0, 4.0, 4.0]
    assert reaches(Batch.concat([near, batch_of(1, None)])) is None
    assert reaches(add_neighbor_list(near, 2.0)) == [2.0, 2.0] and reaches(near) == [3.0, 3.0]


def test_a_list_that_replaces_another_has_no_known_cutoff():
    batch = batch_of(2)
    edges = batch.fields("edge")
    assert reaches(batch.with_edges(batch.num_edges_per_graph, edges)) is None
    assert reaches(batch.with_fields("edge", {"neighbor_list": batch.neighbor_list})) is None
    assert reaches(batch.with_fields("atom", {"forces": batch.positions})) == [3.0, 3.0]
    assert reaches(batch) == [3.0, 3.0]
    batch.neighbor_list = batch.neighbor_list.flip(1)
    assert reaches(batch) is None


def test_a_store_keeps_the_cutoff_through_append_delete_and_defragment(tmp_path):
    writer = AtomicDataZarrWriter(tmp_path / "s.zarr")
    writer.write(batch_of(3))
    writer.append(batch_of(2))
    writer.delete([1])
    writer.defragment()
    writer.append(batch_of(1))
    assert zarr.open_group(tmp_path / "s.zarr", mode="r").attrs[KEY] == 3.0
    batch = stored(tmp_path / "s.zarr")
    assert batch.num_graphs == 5 and reaches(batch) == [3.0] * 5
    reader = AtomicDataZarrReader(tmp_path / "s.zarr")
    assert reaches(reader.read_batch([4, 0])) == [3.0, 3.0] and reader[2][1][KEY] == 3.0
    few = AtomicDataZarrReader(tmp_path / "s.zarr", fields=["cell", "pbc"])
    assert reaches(few.read_batch([0])) is None and KEY not in few[0][1]


def test_a_store_of_unknown_cutoff_takes_any_list_and_goes_on_not_knowing(tmp_path):
    writer = AtomicDataZarrWriter(tmp_path / "s.zarr")
    writer.write(batch_of(2, None))
    for more in (batch_of(2, None), batch_of(2, 4.0)):
        writer.append(more)
    assert KEY not in zarr.open_group(tmp_path / "s.zarr", mode="r").attrs
    assert reaches(stored(tmp_path / "s.zarr")) is None


@pytest.mark.parametrize(
    ("more", "got"),
    [
        (batch_of(2, 2.5), "2.5 Angstrom"),
        (batch_of(2, 4.0), "4 Angstrom"),
        (Batch.concat([batch_of(1), batch_of(1, 4.0)]), "3 Angstrom and 4 Angstrom"),
        (batch_of(2, None), "an unknown cutoff"),
        (batch_of(2, None).to_data_list(), "an unknown cutoff"),
    ],
)
def test_a_store_takes_no_lists_of_another_cutoff(tmp_path, more, got):
    writer = AtomicDataZarrWriter(tmp_path / "s.zarr")
    writer.write(batch_of(2))
    with pytest.raises(ValueError, match=rf"with cutoff 3 Angstrom.* {got}: append add_neighbor"):
        writer.append(more)
    assert stored(tmp_path / "s.zarr") == batch_of(2)


def test_a_store_is_not_begun_with_two_cutoffs(tmp_path):
    with pytest.raises(ValueError, match="lists of one cutoff: got 3 to 4 Angstrom"):
        AtomicDataZarrWriter(tmp_path / "s.zarr").write(Batch.concat([batch_of(1), batch_of(1, 4)]))
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def imported(tmp_path):
    import_atoms(alloys(6), tmp_path / "i.zarr", cutoff=3.5)
    return tmp_path / "i.zarr"


def test_the_cutoff_of_an_import_reaches_every_kind_of_batch(imported):
    dataset = Dataset(AtomicDataZarrReader(imported), device="cpu")
    assert reaches(dataset.get_batch([1, 0])) == [3.5, 3.5]
    held = InMemoryDataset(reader=AtomicDataZarrReader(imported), chunk_size=4)
    assert reaches(held.get_batch([5, 0])) == [3.5, 3.5]
    multi = MultiDataset(dataset, held)
    assert [reaches(b) for b in DataLoader(multi, batch_size=5)] == [[3.5] * 5] * 2 + [[3.5] * 2]


def test_data_sets_of_which_one_does_not_know_share_no_cutoff(imported):
    known = AtomicDataZarrReader(imported).read_batch(range(6))
    unknown = known.with_edges(known.num_edges_per_graph, known.fields("edge"))
    multi = MultiDataset(InMemoryDataset(known), InMemoryDataset(unknown))
    assert reaches(multi.get_batch([0, 7])) is None
    assert reaches(multi.get_batch([0, 1])) == [3.5, 3.5]


def moved(data, metadata):
    return data.replace(positions=data.positions + 1.0), metadata


def copied(data, metadata):
    return data.clone(), metadata


def reversed_list(data, metadata):
    return data.replace(neighbor_list=data.neighbor_list.flip(0)), metadata


def said(data, metadata):
    return reversed_list(data, metadata)[0], {**metadata, KEY: 3.0}


@pytest.mark.parametrize(
    ("transform", "cutoff"), [(moved, 3.5), (copied, 3.5), (reversed_list, None), (said, 3.0)]
)
def test_transforms_keep_the_cutoff_unless_they_change_the_list(imported, transform, cutoff):
    dataset = Dataset(AtomicDataZarrReader(imported), device="cpu", transforms=[transform])
    assert reaches(dataset.get_batch([0, 1])) == (None if cutoff is None else [cutoff] * 2)
    assert dataset[0][1].get(KEY) == cutoff


def test_batch_transforms_build_lists_on_the_fly(tmp_path):
    AtomicDataZarrWriter(tmp_path / "s.zarr").write([chain(3), chain(2)])
    loader = DataLoader(
        Dataset(AtomicDataZarrReader(tmp_path / "s.zarr"), device="cpu"),
        batch_size=2,
        batch_transforms=[functools.partial(add_neighbor_list, cutoff=np.float32(2.5))],
    )
    assert [reaches(batch) for batch in loader] == [[2.5, 2.5]]


def test_a_missing_list_is_answered_with_what_a_training_can_do():
    batch = Batch.from_data_list([AtomicData.from_atoms(molecule("H2O"))])
    with pytest.raises(ValueError, match="no neighbor_list: import the data with cutoff=") as found:
        edge_vectors(batch)
    assert "batch_transforms=[functools.partial(add_neighbor_list" in str(found.value)
    assert "nvalchemi.data.neighbors" in str(found.value)


def test_add_neighbor_list_is_a_name_of_the_data_package_loaded_on_first_use():
    code = (
        "import sys, nvalchemi.data as d; before = 'vesin' in sys.modules;"
        "from nvalchemi.data import add_neighbor_list as a; print(before, a.__module__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "nvalchemi.data.neighbors"]
