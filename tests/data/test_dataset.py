import multiprocessing
import pickle
import traceback

import numpy as np
import pytest
import torch
from pipe_cases import ListReader, OwnDataset, numbered, numbers, wait_for

from nvalchemi.data import AtomicData, Batch
from nvalchemi.data.datapipes import (
    AtomicDataZarrReader,
    AtomicDataZarrWriter,
    BatchDatasetProtocol,
    Dataset,
)

STRUCTURES = numbered(10)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    path = tmp_path_factory.mktemp("store") / "numbered.zarr"
    AtomicDataZarrWriter(path).write(STRUCTURES)
    return path


@pytest.fixture(params=["store", "read_many only"])
def dataset(request, store):
    reader = AtomicDataZarrReader(store) if request.param == "store" else ListReader(STRUCTURES)
    with Dataset(reader, device="cpu") as dataset:
        yield dataset


def test_samples_and_batches_from_either_kind_of_reader(dataset):
    assert isinstance(dataset, BatchDatasetProtocol) and len(dataset) == 10
    assert [data for data, _ in dataset] == STRUCTURES
    assert dataset[-1][0] == STRUCTURES[-1]
    assert [data for data, _ in dataset.read_many([3, 1, -1])] == [STRUCTURES[i] for i in (3, 1, 9)]
    first, second = dataset.load_batches([[3, -1, 3], [0]])
    assert first == Batch.from_data_list([STRUCTURES[i] for i in (3, 9, 3)])
    assert second == Batch.from_data_list([STRUCTURES[0]]) == dataset.get_batch([0])
    assert first.metadata["index"].tolist() == [3, 9, 3]
    assert dataset.get_metadata(3) == dataset.get_metadata(-7) == (4, 3)
    assert set(dataset.field_names) == set(STRUCTURES[0].to_dict())
    assert repr(dataset.reader) in repr(dataset)


def test_metadata_of_samples_is_the_readers(store):
    assert Dataset(ListReader(STRUCTURES), device="cpu")[4][1] == {"name": "s4"}
    metadata = Dataset(AtomicDataZarrReader(store), device="cpu")[4][1]
    assert metadata["index"] == 4 and metadata["source_file"] == str(store)


def test_one_read_for_all_batches_of_a_window():
    reader = ListReader(STRUCTURES)
    Dataset(reader, device="cpu").load_batches([[1, 2], [3], [4, 5, 6]])
    assert reader.reads == [[1, 2, 3, 4, 5, 6]]


@pytest.mark.parametrize("index", [2, -8, np.int64(2), np.uint8(2), torch.tensor(2)])
def test_integers_of_any_kind(dataset, index):
    assert dataset[index][0] == STRUCTURES[2]
    assert numbers(dataset.load_batches([[index, 0]])) == [[2, 0]]
    for indices in (np.array([2, 0]), torch.tensor([2, 0]), (2, 0), range(2, -1, -2)):
        assert numbers(dataset.load_batches([indices])) == [[2, 0]]


@pytest.mark.parametrize("index", [10, -11, 10**30])
def test_indices_outside(dataset, index):
    for use in (lambda: dataset[index], lambda: dataset.load_batches([[0, index]]),
                lambda: dataset.get_metadata(index), lambda: dataset.prefetch(index)):  # fmt: skip
        with pytest.raises(IndexError, match=f"index must lie in -10..9: got {index}"):
            use()


@pytest.mark.parametrize("index", [1.7, True, "1", None, slice(0, 2), [1]])
def test_indices_that_are_none(dataset, index):
    with pytest.raises(TypeError, match="an index must be an integer: got"):
        dataset[index]
    with pytest.raises(TypeError, match="must be an integer"):
        dataset.load_batches([[0, index]])


def test_batches_that_are_none(dataset):
    for lists in ([], [[]], [[1], []]):
        with pytest.raises(ValueError, match="every batch needs at least one sample"):
            dataset.load_batches(lists)
    for lists in ([1, 2], ["01"], [np.array(1)], [np.array([[1, 2]])]):
        with pytest.raises(TypeError, match="a batch must be a list of sample indices"):
            dataset.load_batches(lists)
    with pytest.raises(TypeError, match="must be an integer: got True"):
        dataset.load_batches([np.array([True, False])])


def test_an_empty_data_set():
    dataset = Dataset(ListReader([]), device="cpu")
    assert len(dataset) == 0 and list(dataset) == [] and dataset.field_names == []
    for use in (lambda: dataset[0], lambda: dataset.load_batches([[0]])):
        with pytest.raises(IndexError, match="the data set is empty: there is no sample 0"):
            use()


# Arguments.


def test_arguments_are_checked():
    with pytest.raises(TypeError, match="must implement Reader interface .* list lacks read_many"):
        Dataset([])
    with pytest.raises(TypeError, match="device must be a string"):
        Dataset(ListReader([]), device=0)
    with pytest.raises(ValueError, match="device 'gpu' is none that torch knows"):
        Dataset(ListReader([]), device="gpu")
    for transforms in (lambda d, m: (d, m), "abc", {1}):
        with pytest.raises(TypeError, match="transforms must be a sequence"):
            Dataset(ListReader([]), transforms=transforms)
    with pytest.raises(TypeError, match=r"transforms\[0\] must be callable: got 1"):
        Dataset(ListReader([]), transforms=[1])
    for workers, error in ((0, ValueError), (1.5, TypeError), (True, TypeError)):
        with pytest.raises(error, match="num_workers must be"):
            Dataset(ListReader([]), num_workers=workers)


@pytest.mark.parametrize("device", [None, "auto"])
def test_the_device_is_a_gpu_where_there_is_one(device):
    expected = "cuda" if torch.cuda.is_available() else "cpu"
    assert Dataset(ListReader([]), device=device).device.type == expected


def test_batches_go_to_the_device():
    dataset = Dataset(ListReader(STRUCTURES), device="meta", skip_validation=True)
    assert dataset.load_batches([[0]])[0].device.type == dataset[0][0].device.type == "meta"


# Values and transforms.


def answer(data: AtomicData, metadata: dict) -> tuple[AtomicData, dict]:
    return data.replace(energy=torch.full((1, 1), 42.0)), {**metadata, "seen": True}


@pytest.mark.parametrize("skip", [True, False])
def test_transforms_apply_to_batches_whether_or_not_validation_is_skipped(dataset, skip):
    # W4: the peer's batches silently lack the transforms when validation is skipped
    dataset = Dataset(dataset.reader, device="cpu", skip_validation=skip, transforms=[answer])
    assert dataset[0][0].energy.item() == 42 and dataset[0][1]["seen"]
    batches = dataset.load_batches([[0, 1], [2]])
    assert [b.energy.flatten().tolist() for b in batches] == [[42.0, 42.0], [42.0]]
    assert [b.metadata["index"].tolist() for b in batches] == [[0, 1], [2]]


def test_transforms_see_the_metadata_of_the_reader_in_batches_too(dataset):
    seen: list[dict] = []

    def note(data, metadata):
        seen.append(metadata)
        return data, metadata

    noting = Dataset(dataset.reader, device="cpu", transforms=[note])
    alone = noting[3][1]
    noting.load_batches([[3]])
    assert seen == [alone, alone] and alone


def test_transforms_may_change_the_atoms():
    def first_atom(data, metadata):
        return AtomicData(
            atomic_numbers=data.atomic_numbers[:1], positions=data.positions[:1]
        ), metadata

    dataset = Dataset(ListReader(STRUCTURES), device="cpu", transforms=[first_atom])
    (batch,) = dataset.load_batches([[3, 2]])
    assert batch.num_nodes_list == [1, 1] and "energy" not in batch


def test_an_error_in_a_transform_says_which():
    def bad(data, metadata):
        raise KeyError("x")

    dataset = Dataset(ListReader(STRUCTURES), device="cpu", transforms=[answer, bad])
    for use in (lambda: dataset[0], lambda: dataset.load_batches([[0]])):
        with pytest.raises(RuntimeError, match=r"transform\[1\] \(bad\) failed") as caught:
            use()
        assert isinstance(caught.value.__cause__, KeyError)


def test_a_transform_that_returns_the_structure_alone_is_refused():
    # a structure of two fields would otherwise be unpacked into them
    dataset = Dataset(ListReader(STRUCTURES), device="cpu", transforms=[lambda d, m: d])
    with pytest.raises(TypeError, match=r"must return \(data, metadata\): got AtomicData"):
        dataset[0]


class Raw(ListReader):
    def __init__(self, raws: list[dict]) -> None:
        super().__init__(raws)

    def read_many(self, indices):
        return [(dict(self.structures[i]), {}) for i in indices]


def test_values_are_checked_unless_it_is_skipped():
    raw = {"atomic_numbers": torch.tensor([0]), "positions": torch.zeros(1, 3)}
    edge = {
        "atomic_numbers": torch.tensor([1]),
        "positions": torch.zeros(1, 3),
        "neighbor_list": torch.tensor([[0, 1]]),
    }
    for wrong, sentence in ((raw, "1..118: got 0"), (edge, "indices in|atoms of another")):
        dataset = Dataset(Raw([wrong, wrong]), device="cpu")
        for use in (lambda d: d[0], lambda d: d.load_batches([[0, 1]])):
            with pytest.raises(ValueError, match=sentence):
                use(dataset)
    skipping = Dataset(Raw([raw]), device="cpu", skip_validation=True)
    assert skipping.get_batch([0]).atomic_numbers.tolist() == [0]


def test_a_label_on_some_samples_only_is_refused():
    # W5: never dropped, never zero
    unlabelled = [data.replace(energy=None) for data in numbered(2)]
    dataset = Dataset(ListReader([*numbered(2), *unlabelled]), device="cpu")
    assert "energy" not in dataset[2][0] and dataset[0][0].energy is not None
    for pair in ([0, 2], [2, 0]):
        with pytest.raises(ValueError, match="energy is on 1 of 2"):
            dataset.load_batches([pair])


def test_a_store_appended_with_unlabelled_structures_never_shifts_labels(tmp_path):
    # W3: the peer gives structures the labels of others after such an append
    AtomicDataZarrWriter(tmp_path / "s").write(numbered(3))
    writer = AtomicDataZarrWriter(tmp_path / "s")
    with pytest.raises(ValueError, match="energy|forces"):
        writer.append([numbered(1)[0].replace(energy=None, forces=None)])
    writer.append(numbered(2, start=3))
    with Dataset(AtomicDataZarrReader(tmp_path / "s"), device="cpu") as dataset:
        assert numbers(dataset.load_batches([range(5)])) == [[0, 1, 2, 3, 4]]


def test_a_reader_that_returns_too_few_is_named():
    class Short(ListReader):
        def read_many(self, indices):
            return super().read_many(indices)[1:]

    dataset = Dataset(Short(STRUCTURES), device="cpu")
    for use in (lambda: dataset[0], lambda: dataset.load_batches([[0, 1]])):
        with pytest.raises(RuntimeError, match="Short.read_many must return one sample per index"):
            use()


def test_levels_of_custom_fields_come_from_the_reader():
    class Tagged(ListReader):
        field_levels = {"tag": "atom", "elsewhere": "edge"}

    data = numbered(4)[3]
    data.add_node_property("tag", torch.arange(4))
    dataset = Dataset(Tagged([data]), device="cpu")
    assert "tag" in dataset[0][0].node_properties
    assert dataset.get_batch([0, 0]).tag.tolist() == [0, 1, 2, 3] * 2


# Reading ahead.


def test_single_samples_read_ahead(new_threads):
    reader = ListReader(STRUCTURES)
    with Dataset(reader, device="cpu") as dataset:
        dataset.prefetch(-1)
        dataset.prefetch_many([np.int64(2), 3])
        dataset.prefetch_batch([3, 4])
        assert dataset.prefetch_count == 4
        assert dataset[9][0] == STRUCTURES[9] and dataset[-8][0] == STRUCTURES[2]
        assert dataset.prefetch_count == 2
        dataset.cancel_prefetch(-7)
        assert dataset.prefetch_count == 1
        dataset.cancel_prefetch()
        assert dataset.prefetch_count == 0 and reader.running == 0
        assert [9] in reader.reads and [2] in reader.reads
    assert reader.closed and not new_threads()


def test_windows_of_batches_read_ahead(dataset):
    assert not dataset.has_pending_fused_batches()
    dataset.prefetch_fused_batches([[0], [1, 2]])
    dataset.prefetch_fused_batches([[3]])
    assert dataset.prefetch_count == 2 and dataset.has_pending_fused_batches()
    with pytest.raises(RuntimeError, match="Fused batch prefetch queue is full"):
        dataset.prefetch_fused_batches([[4]])
    assert numbers(list(dataset.get_fused_batches())) == [[0], [1, 2]]
    assert numbers(list(dataset.get_fused_batches())) == [[3]]
    with pytest.raises(RuntimeError, match="no fused batches are pending"):
        dataset.get_fused_batches()


def test_errors_in_the_background_come_with_their_traceback():
    dataset = Dataset(ListReader(STRUCTURES, fails_at=3), device="cpu")
    dataset.prefetch_fused_batches([[2], [3]])
    dataset.prefetch(3)
    for use in (dataset.get_fused_batches, lambda: dataset[3]):
        with pytest.raises(OSError, match="disk gone at 3") as caught:
            use()
        assert "_break" in "".join(traceback.format_exception(caught.value))
    assert dataset[2][0] == STRUCTURES[2]
    dataset.close()


def test_nothing_runs_after_cancelling(new_threads):
    reader = ListReader(STRUCTURES)
    dataset = Dataset(reader, device="cpu", num_workers=1)
    reader.gate.clear()
    dataset.prefetch_fused_batches([[0]])
    dataset.prefetch_fused_batches([[1]])
    wait_for(lambda: reader.reads)
    reader.gate.set()
    dataset.cancel_prefetch()
    assert reader.running == 0 and not dataset.has_pending_fused_batches()
    dataset.close()
    dataset.close()
    assert not new_threads()


def test_a_data_set_travels_while_it_reads_ahead(store):
    dataset = Dataset(AtomicDataZarrReader(store), device="cpu")
    dataset.prefetch(0)
    again = pickle.loads(pickle.dumps(dataset))
    assert again.prefetch_count == 0 and again[0][0] == STRUCTURES[0]
    again.prefetch(1)
    assert again[1][0] == STRUCTURES[1]
    again.close()
    assert dataset.prefetch_count == 1, "the original is as it was"
    dataset.close()


def _read_in_fork(dataset, queue) -> None:
    dataset.prefetch(1)
    queue.put([dataset[0][0].energy.item(), dataset[1][0].energy.item(), dataset.prefetch_count])


def test_a_fork_does_not_wait_for_threads_that_stayed_behind(store):
    with Dataset(AtomicDataZarrReader(store), device="cpu") as dataset:
        dataset.prefetch_many([0, 1])
        context = multiprocessing.get_context("fork")
        queue = context.SimpleQueue()
        child = context.Process(target=_read_in_fork, args=(dataset, queue))
        child.start()
        child.join(timeout=60)
        child.kill()
        assert child.exitcode == 0 and queue.get() == [0.0, 1.0, 0]


def _collate(samples) -> Batch:
    return Batch.from_data_list([data for data, _ in samples])


def test_torchs_own_loader_with_worker_processes(store):
    dataset = Dataset(AtomicDataZarrReader(store), device="cpu")
    loader = torch.utils.data.DataLoader(
        dataset, batch_size=4, num_workers=2, collate_fn=_collate, multiprocessing_context="fork"
    )
    assert numbers(list(loader)) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_pin_memory_is_the_readers():
    reader = ListReader(STRUCTURES)
    dataset = Dataset(reader, device="cpu")
    assert dataset.pin_memory is False
    dataset.pin_memory = True
    assert reader.pin_memory is True and dataset.pin_memory is True
    assert numbers(dataset.load_batches([[1]])) == [[1]]


def test_own_data_sets_keep_the_protocol_and_lists_do_not():
    assert isinstance(OwnDataset(STRUCTURES), BatchDatasetProtocol)
    assert not isinstance(STRUCTURES, BatchDatasetProtocol)
