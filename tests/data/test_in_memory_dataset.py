import pickle

import pytest
import torch
from pipe_cases import ListReader, numbered, numbers

from nvalchemi.data import Batch
from nvalchemi.data.datapipes import (
    AtomicDataZarrReader,
    AtomicDataZarrWriter,
    BatchDatasetProtocol,
    DataLoader,
    Dataset,
    InMemoryDataset,
)

STRUCTURES = numbered(10)


def held() -> InMemoryDataset:
    return InMemoryDataset(Batch.from_data_list(STRUCTURES))


@pytest.mark.parametrize("chunk_size", [1, 3, 10, 4096])
def test_reading_everything_once(chunk_size):
    reader = ListReader(STRUCTURES)
    dataset = InMemoryDataset(reader=reader, chunk_size=chunk_size)
    assert reader.closed and max(map(len, reader.reads)) <= chunk_size
    assert [i for part in reader.reads for i in part] == list(range(10))
    assert dataset.batch == held().batch
    assert dataset.get_batch([3, 1]) == Batch.from_data_list([STRUCTURES[3], STRUCTURES[1]])


def test_from_a_store(tmp_path):
    AtomicDataZarrWriter(tmp_path / "s").write(STRUCTURES)
    dataset = InMemoryDataset(reader=AtomicDataZarrReader(tmp_path / "s"))
    assert [data for data, _ in dataset] == STRUCTURES


def test_samples_and_batches():
    dataset = held()
    assert isinstance(dataset, BatchDatasetProtocol) and len(dataset) == 10
    assert dataset[-1] == (STRUCTURES[-1], {}) and [data for data, _ in dataset] == STRUCTURES
    first, second = dataset.load_batches([[3, -1], [0]])
    assert first == Batch.from_data_list([STRUCTURES[3], STRUCTURES[9]])
    assert second == Batch.from_data_list(STRUCTURES[:1])
    assert first.metadata["index"].tolist() == [3, 9]
    assert dataset.get_metadata(-7) == (4, 3)
    assert dataset.field_names == sorted(STRUCTURES[0].to_dict())
    for bad, error in ((10, IndexError), (1.5, TypeError), (True, TypeError)):
        with pytest.raises(error):
            dataset[bad]
        with pytest.raises(error):
            dataset.load_batches([[bad]])
    with pytest.raises(ValueError, match="every batch needs at least one sample"):
        dataset.load_batches([[]])


def test_what_is_given_out_can_be_changed_without_changing_what_is_held():
    dataset = held()
    dataset[0][0].positions.add_(1)
    dataset[0][0].energy.add_(1)
    for batch in dataset.load_batches([[0], [1]]):
        batch.positions.add_(1)
        batch.metadata["index"].add_(1)
    assert [data for data, _ in dataset] == STRUCTURES
    assert dataset.get_batch([0]).metadata["index"].tolist() == [0]


def test_exactly_one_source():
    batch = Batch.from_data_list(STRUCTURES)
    for kwargs in ({}, {"in_memory_batch": batch, "reader": ListReader(STRUCTURES)}):
        with pytest.raises(ValueError, match="exactly one of in_memory_batch and reader"):
            InMemoryDataset(**kwargs)
    with pytest.raises(TypeError, match="in_memory_batch must be a Batch: got list"):
        InMemoryDataset(STRUCTURES)
    with pytest.raises(ValueError, match="chunk_size must be at least 1: got 0"):
        InMemoryDataset(reader=ListReader(STRUCTURES), chunk_size=0)
    empty = ListReader([])
    with pytest.raises(ValueError, match="the reader is empty"):
        InMemoryDataset(reader=empty)
    assert empty.closed


def test_a_reader_that_fails_is_closed():
    reader = ListReader(STRUCTURES, fails_at=5)
    with pytest.raises(OSError, match="disk gone"):
        InMemoryDataset(reader=reader, chunk_size=2)
    assert reader.closed


def test_values_are_checked_unless_it_is_skipped():
    wrong = Batch.from_raw_dicts(
        [{"atomic_numbers": torch.tensor([0]), "positions": torch.zeros(1, 3)}]
    )
    with pytest.raises(ValueError, match="1..118: got 0"):
        InMemoryDataset(wrong)
    assert len(InMemoryDataset(wrong, skip_validation=True)) == 1


def test_transforms_run_once_when_it_is_built():
    calls = []

    def shift(batch: Batch) -> Batch:
        calls.append(batch.num_graphs)
        return batch.with_fields("system", {"energy": batch.energy + 100})

    dataset = InMemoryDataset(reader=ListReader(STRUCTURES), chunk_size=3, batch_transforms=[shift])
    assert numbers(dataset.load_batches([[0, 1], [2]])) == [[100, 101], [102]]
    assert calls == [10]
    with pytest.raises(TypeError, match=r"batch_transforms\[0\] must return a Batch: got NoneType"):
        InMemoryDataset(Batch.from_data_list(STRUCTURES), batch_transforms=[lambda b: None])
    with pytest.raises(TypeError, match="batch_transforms must be a sequence"):
        InMemoryDataset(Batch.from_data_list(STRUCTURES), batch_transforms=shift)


def test_the_device_is_that_of_the_structures_unless_one_is_given():
    batch = Batch.from_data_list(STRUCTURES)
    assert InMemoryDataset(batch).get_batch([0]).device.type == "cpu"
    there = InMemoryDataset(batch, device="meta")
    assert there.get_batch([0]).device.type == there[0][0].device.type == "meta"
    auto = "cuda" if torch.cuda.is_available() else "cpu"
    assert InMemoryDataset(batch, device="auto").get_batch([0]).device.type == auto


def test_reading_ahead_and_closing(new_threads):
    with held() as dataset:
        dataset.prefetch(2)
        dataset.prefetch_fused_batches([[0, 1], [2]])
        assert dataset[2][0] == STRUCTURES[2]
        assert numbers(list(dataset.get_fused_batches())) == [[0, 1], [2]]
        assert dataset.prefetch_count == 0
    assert not new_threads()


def test_it_travels_and_pinning_is_harmless():
    dataset = held()
    dataset.pin_memory = True
    assert dataset.pin_memory == torch.cuda.is_available()
    again = pickle.loads(pickle.dumps(dataset))
    assert [data for data, _ in again] == STRUCTURES


def test_a_loader_over_it_gives_what_one_over_the_reader_gives():
    loaders = [
        DataLoader(ds, batch_size=3, shuffle=True, generator=torch.Generator().manual_seed(3))
        for ds in (held(), Dataset(ListReader(STRUCTURES), device="cpu"))
    ]
    first, second = map(list, loaders)
    assert first == second
    assert [b.metadata["index"].tolist() for b in first] == numbers(first)
