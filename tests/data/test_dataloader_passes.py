"""Passes over a loader: several at a time, left early, failing, closed meanwhile."""

import gc
import threading
import traceback

import pytest
from pipe_cases import ListReader, numbered, numbers, wait_for
from torch.utils.data import BatchSampler, SequentialSampler

from nvalchemi.data import Batch
from nvalchemi.data.datapipes import DataLoader, Dataset, InMemoryDataset, MultiDataset

STRUCTURES = numbered(50)
HELD = InMemoryDataset(Batch.from_data_list(STRUCTURES))


def listed(count: int = 50, **kwargs) -> Dataset:
    return Dataset(ListReader(STRUCTURES[:count], **kwargs), device="cpu")


# Several passes at a time.


@pytest.mark.parametrize("prefetch_factor", [0, 1, 4])
@pytest.mark.parametrize("make", [listed, lambda: HELD, lambda: MultiDataset(listed(), HELD)])
def test_two_iterators_over_one_loader_do_not_mix(prefetch_factor, make):
    loader = DataLoader(make(), batch_size=4, prefetch_factor=prefetch_factor)
    expected = list(BatchSampler(SequentialSampler(loader.dataset), 4, False))
    pairs = list(zip(loader, loader))
    assert [b.metadata["index"].tolist() for b, _ in pairs] == expected
    assert [b.metadata["index"].tolist() for _, b in pairs] == expected


@pytest.mark.parametrize("prefetch_factor", [1, 4])
def test_a_nested_loop_over_the_same_data_set(prefetch_factor):
    dataset = listed()
    outer = DataLoader(dataset, batch_size=10, prefetch_factor=prefetch_factor)
    inner = DataLoader(dataset, batch_size=7, sampler=range(49, -1, -1), prefetch_factor=2)
    backwards = list(BatchSampler(range(49, -1, -1), 7, False))
    seen = []
    for batch in outer:
        seen += numbers([batch])
        assert numbers(list(inner)) == backwards
        next(iter(inner))
    assert seen == list(BatchSampler(range(50), 10, False))
    dataset.close()


def test_a_pass_leaves_what_the_user_reads_ahead_alone():
    dataset = listed()
    dataset.prefetch_fused_batches([[5, 6]])
    dataset.prefetch(7)
    loader = DataLoader(dataset, batch_size=10)
    assert numbers(list(loader)) == list(BatchSampler(range(50), 10, False))
    next(iter(loader))
    assert dataset.prefetch_count == 2
    assert numbers(list(dataset.get_fused_batches())) == [[5, 6]]
    batches = iter(loader)
    next(batches)
    dataset.cancel_prefetch()
    assert len(list(batches)) == 4
    dataset.close()


def test_passes_in_several_threads(new_threads):
    loader = DataLoader(listed(), batch_size=3, prefetch_factor=2)
    results: list[list[list[int]]] = []
    threads = [
        threading.Thread(target=lambda: results.append(numbers(list(loader)))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [list(BatchSampler(range(50), 3, False))] * 4
    loader.dataset.close()
    assert not new_threads()


# Leaving early, failing, closing.


def test_breaking_out_leaves_nothing_running(new_threads):
    # W40: the peer's background reads go on after a break
    dataset = listed()
    reader = dataset.reader
    for _ in DataLoader(dataset, batch_size=2, prefetch_factor=2):
        break
    assert reader.running == 0 and dataset.prefetch_count == 0
    count = len(reader.reads)
    dataset.close()
    assert len(reader.reads) == count and not new_threads()


def test_an_iterator_that_is_dropped_ends_its_reads():
    dataset = listed()
    batches = iter(DataLoader(dataset, batch_size=2, prefetch_factor=2))
    next(batches)
    del batches
    gc.collect()
    assert dataset.reader.running == 0
    dataset.close()


@pytest.mark.parametrize("prefetch_factor", [0, 1, 3])
def test_errors_in_the_background_reach_the_foreground(prefetch_factor):
    dataset = listed(fails_at=33)
    loader = DataLoader(dataset, batch_size=5, prefetch_factor=prefetch_factor)
    seen = []
    with pytest.raises(OSError, match="disk gone at 33") as caught:
        for batch in loader:
            seen += numbers([batch])
    good = 6 if prefetch_factor < 2 else 6 // prefetch_factor * prefetch_factor
    assert seen == list(BatchSampler(range(50), 5, False))[:good], "whole windows before it come"
    text = "".join(traceback.format_exception(caught.value))
    assert "_break" in text and "load_batches" in text
    assert dataset.reader.running == 0
    dataset.reader.fails_at = None
    assert len(list(loader)) == 10, "the loader can be used again"
    dataset.close()


def test_a_sampler_that_fails_is_heard():
    def broken():
        yield 0
        raise RuntimeError("no more")

    class Broken:
        def __iter__(self):
            return broken()

    loader = DataLoader(listed(), sampler=Broken())
    with pytest.raises(RuntimeError, match="no more"):
        list(loader)
    assert loader.dataset.reader.running == 0
    loader.dataset.close()


def test_closing_in_the_middle_of_a_pass_is_said_and_does_not_hang(new_threads):
    dataset = Dataset(ListReader(STRUCTURES), device="cpu", num_workers=1)
    loader = DataLoader(dataset, batch_size=5, prefetch_factor=1)
    batches = iter(loader)
    next(batches)
    dataset.close()
    with pytest.raises(RuntimeError, match="the data set was closed while it was read ahead"):
        list(batches)
    assert not new_threads()


def test_threads_end_when_the_data_set_is_closed(new_threads):
    dataset = listed()
    list(DataLoader(dataset, batch_size=5))
    assert new_threads()
    dataset.close()
    assert not new_threads() and dataset.reader.closed


def test_closing_waits_for_a_read_that_has_begun(new_threads):
    dataset = Dataset(ListReader(STRUCTURES), device="cpu", num_workers=1)
    reader = dataset.reader
    reader.gate.clear()
    dataset.prefetch_fused_batches([[0]])
    wait_for(lambda: reader.running)
    closing = threading.Thread(target=dataset.close)
    closing.start()
    reader.gate.set()
    closing.join()
    assert reader.running == 0 and reader.closed and not new_threads()
