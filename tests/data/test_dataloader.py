import pickle
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pipe_cases import ListReader, OwnDataset, numbered, numbers
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from nvalchemi.data import Batch
from nvalchemi.data.datapipes import (
    AtomicDataZarrReader,
    AtomicDataZarrWriter,
    DataLoader,
    Dataset,
    InMemoryDataset,
    MultiDataset,
)

STRUCTURES = numbered(50)
HELD = InMemoryDataset(Batch.from_data_list(STRUCTURES))


def listed(count: int = 50, **kwargs) -> Dataset:
    return Dataset(ListReader(STRUCTURES[:count], **kwargs), device="cpu")


def flat(batches) -> list[int]:
    return [i for numbers_of_batch in numbers(list(batches)) for i in numbers_of_batch]


# The order.


@settings(max_examples=50, deadline=None)
@given(
    size=st.integers(0, 50),
    batch_size=st.integers(1, 60),
    drop_last=st.booleans(),
    seed=st.none() | st.integers(0, 99),
    prefetch_factor=st.integers(0, 16),
)
def test_batches_are_the_samplers_in_its_order(size, batch_size, drop_last, seed, prefetch_factor):
    order = list(range(size))
    if seed is not None:
        order = torch.randperm(size, generator=torch.Generator().manual_seed(seed)).tolist()
    loader = DataLoader(
        HELD,
        batch_size=batch_size,
        sampler=order,
        drop_last=drop_last,
        prefetch_factor=prefetch_factor,
    )
    expected = list(BatchSampler(order, batch_size, drop_last))
    for _ in range(2):
        batches = list(loader)
        assert numbers(batches) == expected and len(loader) == len(expected)
        assert [b.metadata["index"].tolist() for b in batches] == expected
    assert list(loader.index_batches()) == expected


@pytest.mark.parametrize("prefetch_factor", range(17))
def test_every_prefetch_factor_gives_the_same_batches(prefetch_factor):
    plain = DataLoader(listed(), batch_size=3, prefetch_factor=0)
    ahead = DataLoader(listed(), batch_size=3, prefetch_factor=prefetch_factor)
    assert list(ahead) == list(plain) and len(ahead) == 17
    assert ahead.effective_read_window == 3 * max(prefetch_factor, 1)
    ahead.dataset.close()


def test_shuffling_draws_from_the_generator_or_the_global_one():
    def orders(**kwargs):
        loader = DataLoader(HELD, batch_size=8, shuffle=True, **kwargs)
        return [flat(loader) for _ in range(2)]

    seeded = [orders(generator=torch.Generator().manual_seed(5)) for _ in range(2)]
    assert seeded[0] == seeded[1] and seeded[0][0] != seeded[0][1]
    assert all(sorted(order) == list(range(50)) for order in seeded[0])
    unseeded = []
    for _ in range(2):
        torch.manual_seed(11)
        unseeded.append(orders())
    assert unseeded[0] == unseeded[1]


def test_windows_are_read_at_once_and_only_two_ahead():
    class Noting:
        def __init__(self) -> None:
            self.drawn = 0

        def __iter__(self):
            for i in range(50):
                self.drawn += 1
                yield i

        def __len__(self) -> int:
            return 50

    sampler = Noting()
    loader = DataLoader(listed(), batch_size=2, sampler=sampler, prefetch_factor=3)
    batches = iter(loader)
    assert sampler.drawn == 0, "nothing is drawn before the first batch is asked for"
    next(batches)
    assert sampler.drawn == 18, "the window in hand and two ahead"
    assert numbers(list(batches)) == [[i, i + 1] for i in range(2, 50, 2)]
    reads = loader.dataset.reader.reads
    assert sorted(map(tuple, reads))[0] == (0, 1, 2, 3, 4, 5) and len(reads) == 9
    loader.dataset.close()


@pytest.mark.parametrize(
    "sampler",
    [
        [4, 2, -1],
        (4, 2, 49),
        np.array([4, 2, 49]),
        torch.tensor([4, 2, 49]),
        [np.int32(4), np.uint8(2), torch.tensor(49)],
        [torch.tensor(4), torch.tensor(2), torch.tensor(-1)],
    ],
    ids=["list", "tuple", "array", "tensor", "mixed", "tensors"],
)
@pytest.mark.parametrize("prefetch_factor", [0, 2])
def test_indices_of_any_kind(sampler, prefetch_factor):
    loader = DataLoader(HELD, batch_size=2, sampler=sampler, prefetch_factor=prefetch_factor)
    assert numbers(list(loader)) == [[4, 2], [49]]
    assert all(type(i) is int for batch in loader.index_batches() for i in batch)


@pytest.mark.parametrize(
    "batches",
    [
        [[4, 2], [49]],
        [np.array([4, 2]), np.array([49])],
        [torch.tensor([4, 2]), (49,)],
        [range(4, 0, -2), [np.int64(-1)]],
    ],
    ids=["lists", "arrays", "mixed", "ranges"],
)
def test_a_batch_sampler_says_the_batches(batches):
    loader = DataLoader(HELD, batch_sampler=batches)
    assert numbers(list(loader)) == [[4, 2], [49]] and len(loader) == 2
    assert loader.sampler is None and loader.batch_sampler is batches


def test_torchs_samplers():
    subset = DataLoader(HELD, batch_size=2, sampler=SubsetRandomSampler([7, 8, 9]))
    assert sorted(flat(subset)) == [7, 8, 9]
    weights = torch.zeros(50)
    weights[3] = 1
    weighted = DataLoader(HELD, batch_size=2, sampler=WeightedRandomSampler(weights, 4))
    assert numbers(list(weighted)) == [[3, 3], [3, 3]]
    shards = [DistributedSampler(HELD, num_replicas=2, rank=r, seed=3) for r in range(2)]
    loaders = [DataLoader(HELD, batch_size=5, sampler=shard) for shard in shards]
    seen = []
    for epoch in range(2):
        for loader in loaders:
            loader.set_epoch(epoch)
        seen.append([flat(loader) for loader in loaders])
        assert sorted([i for part in seen[-1] for i in part]) == list(range(50))
    assert seen[0] != seen[1]


# Where a pass begins.


@pytest.mark.parametrize("prefetch_factor", [0, 2])
def test_a_pass_may_begin_in_the_middle_of_the_epoch(prefetch_factor):
    loader = DataLoader(listed(20), batch_size=4, prefetch_factor=prefetch_factor)
    loader.set_epoch_step(3)
    assert len(loader) == 5
    batches = iter(loader)
    assert numbers(list(batches)) == [[12, 13, 14, 15], [16, 17, 18, 19]]
    read = {i for part in loader.dataset.reader.reads for i in part}
    assert read == set(range(12, 20)), "what is skipped is not read"
    assert len(list(loader)) == 5, "only the next pass is shortened"
    loader.set_epoch_step(np.int64(5))
    assert list(loader) == []
    for wrong, error in ((-1, ValueError), (1.0, TypeError), (True, TypeError)):
        with pytest.raises(error, match="step must be"):
            loader.set_epoch_step(wrong)
    loader.dataset.close()


def test_the_skip_belongs_to_the_next_iterator_made():
    loader = DataLoader(HELD, batch_size=10)
    loader.set_epoch_step(4)
    short, full = iter(loader), iter(loader)
    assert len(list(full)) == 5 and len(list(short)) == 1


def test_set_epoch_reaches_the_first_that_asks():
    class Told:
        def __init__(self, sampler=None) -> None:
            self.told: list[int] = []
            if sampler is not None:
                self.sampler = sampler

        def set_epoch(self, epoch: int) -> None:
            self.told.append(epoch)

        def __iter__(self):
            return iter([[0]])

        def __len__(self) -> int:
            return 1

    outer, inner, sampler = Told(Told()), Told(), Told()
    DataLoader(HELD, batch_sampler=outer).set_epoch(3)
    assert outer.told == [3] and outer.sampler.told == []
    DataLoader(HELD, batch_sampler=BatchSampler(inner, 2, False)).set_epoch(4)
    DataLoader(HELD, sampler=sampler).set_epoch(5)
    assert (inner.told, sampler.told) == ([4], [5])
    DataLoader(HELD, shuffle=True).set_epoch(6)


# Options.


def test_the_guides_options_are_harmless_without_a_gpu():
    # the peer dies of pin_memory=True on a CPU
    for dataset in (listed(), HELD, MultiDataset(listed(), OwnDataset(STRUCTURES))):
        loader = DataLoader(dataset, batch_size=64, prefetch_factor=16, pin_memory=True)
        batches = list(loader)
        assert sum(b.num_graphs for b in batches) == len(dataset)
        assert batches[0].positions.is_pinned() == torch.cuda.is_available()
        assert loader.pin_memory and loader.use_streams == torch.cuda.is_available()


def test_batch_transforms_run_in_the_foreground_in_order():
    here = []

    def double(batch):
        here.append(threading.current_thread())
        return batch.with_fields("system", {"energy": batch.energy * 2})

    def plus_one(batch: Batch) -> Batch:
        return batch.with_fields("system", {"energy": batch.energy + 1})

    loader = DataLoader(HELD, batch_size=2, batch_transforms=[double, plus_one])
    assert numbers(list(loader)) == [[2 * i + 1, 2 * i + 3] for i in range(0, 50, 2)]
    assert set(here) == {threading.current_thread()}
    assert HELD[3][0].energy.item() == 3, "the data set is as it was"
    with pytest.raises(TypeError, match=r"batch_transforms\[0\] must return a batch: got None"):
        next(iter(DataLoader(HELD, batch_transforms=[lambda batch: None])))
    for wrong in (double, "ab"):
        with pytest.raises(TypeError, match="batch_transforms must be a sequence"):
            DataLoader(HELD, batch_transforms=wrong)


def test_a_data_set_of_the_users_own_without_reading_ahead(new_threads):
    own = OwnDataset(STRUCTURES[:5])
    loader = DataLoader(own, batch_size=2, prefetch_factor=16, shuffle=False)
    assert numbers(list(loader)) == [[0, 1], [2, 3], [4]]
    assert not new_threads()


@pytest.mark.parametrize(
    ("kwargs", "error", "sentence"),
    [
        ({"batch_size": 0}, ValueError, "batch_size must be at least 1: got 0"),
        ({"batch_size": -3}, ValueError, "batch_size must be at least 1: got -3"),
        ({"batch_size": 2.0}, TypeError, "batch_size must be an integer: got 2.0"),
        ({"batch_size": True}, TypeError, "batch_size must be an integer: got True"),
        ({"prefetch_factor": -1}, ValueError, "prefetch_factor must be at least 0: got -1"),
        ({"prefetch_factor": None}, TypeError, "prefetch_factor must be an integer: got None"),
        ({"sampler": [0], "shuffle": True}, ValueError, "exclude each other"),
        ({"batch_sampler": [[0]], "batch_size": 2}, ValueError, "batch_size can not be given"),
        ({"batch_sampler": [[0]], "sampler": [0]}, ValueError, "sampler can not be given beside"),
        ({"batch_sampler": [[0]], "shuffle": True}, ValueError, "shuffle can not be given"),
        ({"batch_sampler": [[0]], "drop_last": True}, ValueError, "drop_last can not be given"),
        ({"sampler": 5}, TypeError, "sampler must be iterable: got int"),
        ({"sampler": (i for i in range(3))}, TypeError, "used up by the first; pass list"),
        ({"sampler": iter([1, 2])}, TypeError, "used up by the first"),
        ({"batch_sampler": map(list, [[1]])}, TypeError, "used up by the first"),
    ],
)
def test_wrong_options_are_refused_when_it_is_made(kwargs, error, sentence):
    with pytest.raises(error, match=sentence):
        DataLoader(HELD, **kwargs)


def test_other_data_sets_are_refused():
    for wrong in (STRUCTURES, ListReader(STRUCTURES), None):
        with pytest.raises(TypeError, match="dataset must have load_batches"):
            DataLoader(wrong)


@pytest.mark.parametrize("prefetch_factor", [0, 2])
@pytest.mark.parametrize(
    ("kwargs", "error", "sentence"),
    [
        ({"sampler": [0, 50]}, IndexError, "index must lie in -50..49: got 50"),
        ({"sampler": [0, 10**30]}, IndexError, "index must lie in"),
        ({"sampler": [0.5]}, TypeError, "an index must be an integer: got 0.5"),
        ({"sampler": [True, False]}, TypeError, "an index must be an integer: got True"),
        ({"sampler": torch.tensor([0.0])}, TypeError, "an index must be an integer"),
        ({"batch_sampler": [0, 1]}, TypeError, "a batch must be a list of sample indices: got 0"),
        ({"batch_sampler": [[]]}, ValueError, "every batch needs at least one sample"),
    ],
)
def test_samplers_that_yield_nonsense(kwargs, error, sentence, prefetch_factor):
    with pytest.raises(error, match=sentence):
        list(DataLoader(HELD, prefetch_factor=prefetch_factor, **kwargs))


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("prefetch_factor", [0, 3])
def test_empty_and_small_data_sets(shuffle, prefetch_factor):
    kwargs = {"shuffle": shuffle, "prefetch_factor": prefetch_factor}
    empty = DataLoader(listed(0), batch_size=4, **kwargs)
    assert list(empty) == [] and len(empty) == 0
    small = DataLoader(listed(3), batch_size=np.int64(64), **kwargs)
    assert [sorted(n) for n in numbers(list(small))] == [[0, 1, 2]] and len(small) == 1
    dropped = DataLoader(listed(3), batch_size=64, drop_last=True, **kwargs)
    assert list(dropped) == [] and len(dropped) == 0


def test_a_sampler_without_length_or_end():
    class Forever:
        def __iter__(self):
            while True:
                yield from range(50)

    loader = DataLoader(HELD, batch_size=4, sampler=Forever(), prefetch_factor=2)
    batches = iter(loader)
    assert [numbers([next(batches)])[0][0] for _ in range(14)][-1] == 2
    assert "an unknown number of batches" in repr(loader)
    with pytest.raises(TypeError, match="len"):
        len(loader)


def test_defaults_and_attributes():
    loader = DataLoader(HELD)
    assert (loader.batch_size, loader.prefetch_factor, loader.drop_last) == (1, 2, False)
    assert loader.dataset is HELD and loader.batch_sampler is None
    assert isinstance(loader.sampler, SequentialSampler) and loader.effective_read_window == 2
    whole = DataLoader(HELD, batch_sampler=BatchSampler(range(50), 8, False), prefetch_factor=4)
    assert whole.effective_read_window == 32 and "7 batches" in repr(whole)


def test_a_loader_travels(tmp_path, new_threads):
    AtomicDataZarrWriter(tmp_path / "s").write(STRUCTURES)
    dataset = Dataset(AtomicDataZarrReader(tmp_path / "s"), device="cpu")
    generator = torch.Generator().manual_seed(1)
    loader = DataLoader(dataset, batch_size=8, shuffle=True, generator=generator)
    batches = iter(loader)
    next(batches)
    again = pickle.loads(pickle.dumps(loader))
    batches.close()
    assert list(again) == list(loader)
    again.dataset.close()
    dataset.close()
    assert "an unknown number of batches" in repr(loader), "a closed reader can still be shown"
    assert not new_threads()


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"shuffle": "no"}, "shuffle must be True or False, got 'no'"),
        ({"drop_last": 1}, "drop_last must be True or False, got 1"),
        ({"shuffle": True, "generator": 3}, "generator must be a torch.Generator: got 3"),
    ],
)
def test_flags_and_generators_that_are_none_are_refused(wrong, sentence):
    with pytest.raises(TypeError, match=sentence):
        DataLoader(InMemoryDataset(Batch.from_data_list(numbered(3))), **wrong)
