"""Which sampler a rank's loader gets: installed, kept, dealt out or refused, and put back."""

from functools import partial

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from nvalchemi.data import AtomicData, Batch
from nvalchemi.data.datapipes import (
    BalancedBatchSampler,
    BudgetBatchSampler,
    DataLoader,
    EpochSampler,
    InMemoryDataset,
    MultiDataset,
    MultiDatasetBatchSampler,
    MultiDatasetSampler,
)
from nvalchemi.training.hooks.loader_sharding import Place, shard_loader


def dataset(size: int) -> InMemoryDataset:
    atom = AtomicData(atomic_numbers=torch.tensor([6]), positions=torch.zeros(1, 3))
    return InMemoryDataset(Batch.from_data_list([atom] * size))


def multi(*sizes: int) -> MultiDataset:
    return MultiDataset(*(dataset(size) for size in sizes))


def place(rank: int = 0, world_size: int = 2, sampler_cls=DistributedSampler, **kwargs) -> Place:
    return Place(world_size, rank, sampler_cls, kwargs)


def indices(loader) -> list[list[int]]:
    if isinstance(loader, DataLoader):
        return list(loader.index_batches())
    return [list(batch) for batch in loader.batch_sampler]


def of_all_ranks(make_loader, world_size: int = 2, **kwargs) -> list[int]:
    """Samples of all ranks of one epoch."""
    seen = []
    for rank in range(world_size):
        loader, _ = shard_loader(make_loader(), place(rank, world_size, **kwargs))
        seen += [i for batch in indices(loader) for i in batch]
    return seen


# What is installed.


def test_single_dataset_gets_a_distributed_sampler_in_a_batch_sampler():
    loader = DataLoader(dataset(10), batch_size=3, shuffle=True, drop_last=True)
    prepared, _ = shard_loader(loader, place(rank=1))
    assert prepared is loader
    assert type(loader.batch_sampler) is BatchSampler
    inner = loader.batch_sampler.sampler
    assert type(inner) is DistributedSampler
    assert (inner.num_replicas, inner.rank, inner.seed) == (2, 1, 0)
    assert inner.shuffle is True and inner.drop_last is True
    assert loader.batch_sampler.drop_last is True and loader.sampler is None


def test_multidataset_gets_its_batch_sampler_with_every_sample_once():
    loader, _ = shard_loader(DataLoader(multi(8, 4), batch_size=3, shuffle=True), place())
    sampler = loader.batch_sampler
    assert type(sampler) is MultiDatasetBatchSampler
    assert (sampler.num_replicas, sampler.rank, sampler.batch_size) == (2, 0, 3)
    seen = of_all_ranks(lambda: DataLoader(multi(8, 4), batch_size=3, shuffle=True))
    assert sorted(seen) == list(range(12))


def test_options_go_over_the_defaults():
    loader, _ = shard_loader(
        DataLoader(dataset(10), batch_size=3, shuffle=True), place(shuffle=False, seed=0)
    )
    assert loader.batch_sampler.sampler.shuffle is False


def test_a_seed_without_shuffle_is_said_to_have_no_effect():
    # the guide's own example: the peer runs it in order, whatever the seed
    loader = DataLoader(multi(8, 4), batch_size=3)
    with pytest.warns(UserWarning, match="seed=1234 has no effect because shuffle is off"):
        shard_loader(loader, place(epoch_policy="max_size", replacement=True, seed=1234))


def test_shuffle_of_a_torch_loader_is_kept():
    data = TensorDataset(torch.arange(10))
    for shuffle in (True, False):
        loader = torch.utils.data.DataLoader(data, batch_size=3, shuffle=shuffle)
        prepared, _ = shard_loader(loader, place())
        assert prepared is not loader
        assert prepared.sampler.shuffle is shuffle
        assert (prepared.batch_size, prepared.drop_last) == (3, False)


def test_options_of_a_torch_loader_survive_the_rebuild():
    def collate(samples):
        return samples

    loader = torch.utils.data.DataLoader(
        TensorDataset(torch.arange(10)),
        batch_size=2,
        collate_fn=collate,
        num_workers=1,
        prefetch_factor=7,
        persistent_workers=True,
        drop_last=True,
    )
    prepared, _ = shard_loader(loader, place())
    assert prepared.collate_fn is collate
    assert (prepared.num_workers, prepared.prefetch_factor) == (1, 7)
    assert prepared.persistent_workers and prepared.drop_last


# A class or factory of the user's.


class Backwards(DistributedSampler):
    """A subclass, so that it can be told from the default."""


def test_a_subclass_of_the_default_is_used():
    # W8: the peer installs the plain DistributedSampler
    loader, _ = shard_loader(
        DataLoader(dataset(10), batch_size=2), place(sampler_cls=Backwards, seed=3, shuffle=True)
    )
    assert type(loader.batch_sampler.sampler) is Backwards
    assert loader.batch_sampler.sampler.seed == 3


class OnlyRanks(Sampler):
    def __init__(self, data, num_replicas, rank):
        self.data, self.num_replicas, self.rank = data, num_replicas, rank

    def __iter__(self):
        return iter(range(self.rank, len(self.data), self.num_replicas))

    def __len__(self):
        return len(range(self.rank, len(self.data), self.num_replicas))


def test_a_class_with_some_of_the_defaults_gets_those():
    # W12: the peer forces all five on it and dies of a TypeError
    assert sorted(
        of_all_ranks(lambda: DataLoader(dataset(9), batch_size=2), sampler_cls=OnlyRanks)
    ) == list(range(9))


def test_a_class_with_foreign_names_gets_the_users_arguments_alone():
    given = {}

    class Foreign(OnlyRanks):
        def __init__(self, data, replicas, worker_rank, seed=None):
            given.update(replicas=replicas, worker_rank=worker_rank, seed=seed)
            super().__init__(data, replicas, worker_rank)

    shard_loader(
        DataLoader(dataset(9), batch_size=2),
        place(rank=1, sampler_cls=Foreign, replicas=2, worker_rank=1),
    )
    assert given == {"replicas": 2, "worker_rank": 1, "seed": None}


def test_a_factory_is_as_good_as_a_class():
    def factory(data, **options):
        return DistributedSampler(data, **options)

    loader, _ = shard_loader(DataLoader(dataset(9), batch_size=2), place(1, sampler_cls=factory))
    assert loader.batch_sampler.sampler.rank == 1


def test_a_class_that_makes_batches_is_installed_as_such():
    loader, _ = shard_loader(
        DataLoader(multi(8, 4), batch_size=3), place(sampler_cls=MultiDatasetBatchSampler)
    )
    assert type(loader.batch_sampler) is MultiDatasetBatchSampler
    assert loader.batch_sampler.batch_size == 3


@pytest.mark.parametrize("make", [lambda: dataset(12), lambda: multi(8, 4)])
def test_ranks_with_even_cost_are_installed_by_name(make):
    loader, _ = shard_loader(
        DataLoader(make(), batch_size=3, shuffle=True, drop_last=True),
        place(1, sampler_cls=BalancedBatchSampler, cost=(1.0, 2.0, 0.0), seed=4),
    )
    sampler = loader.batch_sampler
    assert type(sampler) is BalancedBatchSampler
    assert (sampler.num_replicas, sampler.rank, sampler.batch_size) == (2, 1, 3)
    assert (sampler.shuffle, sampler.seed, sampler.drop_last) == (True, 4, True)
    seen = of_all_ranks(lambda: DataLoader(make(), batch_size=3), sampler_cls=BalancedBatchSampler)
    assert sorted(seen) == list(range(12))


@pytest.mark.parametrize("wrap", [lambda cls: cls, lambda cls: partial(cls, max_atoms=3)])
def test_batches_up_to_a_budget_are_batches_although_they_have_no_batch_size(wrap):
    for make in (
        lambda: DataLoader(multi(8, 4), shuffle=True),
        lambda: torch.utils.data.DataLoader(dataset(12), shuffle=True),
    ):
        loader, _ = shard_loader(
            make(), place(1, sampler_cls=wrap(BudgetBatchSampler), max_atoms=3)
        )
        sampler = loader.batch_sampler
        assert type(sampler) is BudgetBatchSampler
        assert (sampler.num_replicas, sampler.rank, sampler.shuffle) == (2, 1, True)
        assert [len(batch) for batch in indices(loader)] == [3, 3]


def test_a_batch_size_beside_a_budget_is_said_to_have_no_effect():
    loader = DataLoader(dataset(12), batch_size=4)
    with pytest.warns(UserWarning, match="batch_size=4 of the loader has no effect"):
        shard_loader(loader, place(sampler_cls=BudgetBatchSampler, max_atoms=3))


def test_our_own_order_serves_a_single_dataset():
    seen = of_all_ranks(
        lambda: DataLoader(dataset(12), batch_size=3, shuffle=True), sampler_cls=EpochSampler
    )
    assert sorted(seen) == list(range(12))


def test_an_argument_that_the_class_lacks_is_an_error_before_it_is_built():
    with pytest.raises(ValueError, match="OnlyRanks can not be built.*sampler_kwargs"):
        shard_loader(DataLoader(dataset(9), batch_size=2), place(sampler_cls=OnlyRanks, replicas=2))


def test_a_class_that_forgets_the_ranks_is_found_out():
    class Forgetful(OnlyRanks):
        def __init__(self, data, num_replicas, rank):
            super().__init__(data, 1, 0)

        def set_epoch(self, epoch): ...

    with pytest.raises(ValueError, match="built for rank 0 of 1, but this is rank 1 of 2"):
        shard_loader(DataLoader(dataset(9), batch_size=2), place(1, sampler_cls=Forgetful))


@pytest.mark.parametrize(
    "sampler_cls", [SequentialSampler, RandomSampler, lambda data: SequentialSampler(data)]
)
def test_a_class_that_knows_no_ranks_is_refused(sampler_cls):
    for shuffle in (False, True):
        loader = DataLoader(dataset(9), batch_size=2, shuffle=shuffle)
        with pytest.raises(ValueError, match="told nothing of the ranks, so all 2 would see"):
            shard_loader(loader, place(sampler_cls=sampler_cls))


# What is kept, and what is refused.


def test_a_sampler_for_these_ranks_is_kept():
    data = dataset(10)
    for sampler in (
        DistributedSampler(data, num_replicas=2, rank=1),
        EpochSampler(data, num_replicas=2, rank=1),
    ):
        loader = DataLoader(data, batch_size=2, sampler=sampler)
        prepared, _ = shard_loader(loader, place(rank=1))
        assert prepared is loader and loader.sampler is sampler


def test_a_batch_sampler_for_these_ranks_is_kept():
    data = multi(8, 4)
    sampler = MultiDatasetBatchSampler(data, batch_size=3, num_replicas=2, rank=1)
    loader = DataLoader(data, batch_sampler=sampler)
    assert shard_loader(loader, place(rank=1))[0].batch_sampler is sampler
    nested = BatchSampler(DistributedSampler(data, num_replicas=2, rank=1), 3, False)
    loader = DataLoader(data, batch_sampler=nested)
    assert shard_loader(loader, place(rank=1))[0].batch_sampler is nested


@pytest.mark.parametrize("replicas", [1, 2, 8])
def test_a_sampler_for_other_ranks_is_an_error_that_says_both_numbers(replicas: int):
    # W6: the peer keeps it, and with one replica all ranks train on the same batches
    data = multi(80, 40)
    made = [
        DataLoader(
            data,
            batch_sampler=MultiDatasetBatchSampler(
                data, batch_size=4, num_replicas=replicas, rank=0
            ),
        ),
        DataLoader(
            data,
            batch_size=4,
            sampler=MultiDatasetSampler(data, num_replicas=replicas, rank=0),
        ),
        DataLoader(
            data,
            batch_size=4,
            sampler=DistributedSampler(data, num_replicas=replicas, rank=0),
        ),
    ]
    for loader in made:
        with pytest.raises(
            ValueError, match=f"built for rank 0 of {replicas}, but this is rank 0 of 4"
        ):
            shard_loader(loader, place(rank=0, world_size=4))


def test_the_right_ranks_in_the_wrong_place_are_refused_too():
    data = dataset(10)
    loader = DataLoader(data, sampler=DistributedSampler(data, num_replicas=2, rank=0))
    with pytest.raises(ValueError, match="rank 0 of 2, but this is rank 1 of 2"):
        shard_loader(loader, place(rank=1))


def test_a_subset_stays_a_subset():
    # W7: the peer trains on all 20 samples, the held-out ones too
    held_in = [0, 3, 5, 7, 11, 13]
    for make in (
        lambda: DataLoader(dataset(20), batch_size=2, sampler=SubsetRandomSampler(held_in)),
        lambda: DataLoader(dataset(20), batch_size=2, sampler=held_in),
        lambda: torch.utils.data.DataLoader(
            TensorDataset(torch.arange(20)), batch_size=2, sampler=SubsetRandomSampler(held_in)
        ),
    ):
        assert sorted(of_all_ranks(make)) == held_in


def test_weights_stay_weights_and_ranks_draw_one_order():
    weights = [0.0] * 10 + [1.0] * 10
    sampler = WeightedRandomSampler(weights, num_samples=40)

    def make():
        return DataLoader(dataset(20), batch_size=5, sampler=sampler)

    seen = of_all_ranks(make)
    assert len(seen) == 40 and min(seen) >= 10
    # the generators of ranks differ, the order must not
    torch.manual_seed(1)
    first, _ = shard_loader(make(), place(0))
    torch.manual_seed(2)
    again, _ = shard_loader(make(), place(0))
    assert indices(first) == indices(again)


def test_a_subset_is_drawn_anew_each_epoch():
    loader, _ = shard_loader(
        DataLoader(dataset(40), batch_size=4, sampler=SubsetRandomSampler(range(30))), place()
    )
    first = indices(loader)
    loader.set_epoch(1)
    assert indices(loader) != first


class Unknown(Sampler):
    def __init__(self, data):
        self.data = data

    def __iter__(self):
        return iter(torch.randperm(len(self.data)).tolist())

    def __len__(self):
        return len(self.data)


def test_an_order_that_ranks_could_not_share_is_refused_with_the_remedy():
    for loader in (
        DataLoader(dataset(9), batch_size=2, sampler=Unknown(range(9))),
        torch.utils.data.DataLoader(
            TensorDataset(torch.arange(9)), batch_size=2, sampler=Unknown(range(9))
        ),
        DataLoader(multi(8, 4), batch_size=2, sampler=SubsetRandomSampler([0, 1, 2])),
    ):
        with pytest.raises(ValueError, match="cannot shard the sampler.*num_replicas, rank and"):
            shard_loader(loader, place())


def test_batches_of_the_users_own_are_refused_with_the_remedy():
    data = dataset(9)
    batches = BatchSampler(SequentialSampler(data), 2, False)
    with pytest.raises(ValueError, match="batch_sampler"):
        shard_loader(DataLoader(data, batch_sampler=batches), place())
    loader = torch.utils.data.DataLoader(TensorDataset(torch.arange(9)), batch_sampler=batches)
    with pytest.raises(ValueError, match="batch_sampler"):
        shard_loader(loader, place())


def test_an_explicit_class_may_replace_an_order():
    loader = DataLoader(dataset(9), batch_size=2, sampler=Unknown(range(9)))
    prepared, _ = shard_loader(loader, place(sampler_cls=OnlyRanks))
    assert type(prepared.batch_sampler.sampler) is OnlyRanks


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(8))


def test_a_stream_without_ranks_is_refused_with_the_remedy():
    # W11: the peer dies of "object of type 'Stream' has no len()"
    with pytest.raises(ValueError, match="IterableDataset.*all 2 ranks.*num_replicas and rank"):
        shard_loader(torch.utils.data.DataLoader(Stream(), batch_size=2), place())


def test_a_stream_that_split_itself_is_kept():
    stream = Stream()
    stream.num_replicas, stream.rank = 2, 1
    loader = torch.utils.data.DataLoader(stream, batch_size=2)
    assert shard_loader(loader, place(rank=1))[0] is loader
    with pytest.raises(ValueError, match="rank 1 of 2, but this is rank 0 of 2"):
        shard_loader(loader, place(rank=0))


def test_a_list_of_batches_is_used_as_it_is_with_a_warning():
    batches = [torch.zeros(1)]
    with pytest.warns(UserWarning, match="has no sampler"):
        prepared, _ = shard_loader(batches, place())
    assert prepared is batches


def test_a_loader_without_its_data_set_is_an_error():
    class Odd:
        sampler = None

    with pytest.raises(ValueError, match="no dataset"):
        shard_loader(Odd(), place())


def test_a_plain_loader_with_replacement_is_dealt_out():
    data = dataset(10)
    sampler = RandomSampler(data, replacement=True, num_samples=30)
    seen = of_all_ranks(lambda: DataLoader(data, batch_size=5, sampler=sampler))
    assert len(seen) == 30


# Undoing.


@pytest.mark.parametrize("make", [lambda: dataset(10), lambda: multi(8, 4)])
def test_the_loader_is_put_back(make):
    # W16: at the peer it stays one rank's share, and later uses see half of the data
    loader = DataLoader(make(), batch_size=3)
    before = indices(loader)
    sampler = loader.sampler
    _, undo = shard_loader(loader, place())
    assert indices(loader) != before
    undo()
    assert loader.sampler is sampler and loader.batch_sampler is None
    assert indices(loader) == before


def test_pinning_and_deep_prefetch_are_harmless_without_a_gpu():
    loader = DataLoader(multi(8, 4), batch_size=2, prefetch_factor=16, pin_memory=True)
    prepared, _ = shard_loader(loader, place())
    assert sum(batch.num_graphs for batch in prepared) == 6
