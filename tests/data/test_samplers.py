"""Samplers: one global order dealt to ranks, composition as asked, exact resume, clear refusals."""

import warnings
from itertools import chain
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sampler_cases import Lengths, per_rank
from torch.utils.data import BatchSampler, DistributedSampler

from nvalchemi.data.datapipes.samplers import (
    DistributedSamplerProtocol,
    EpochSampler,
    MultiDatasetBatchSampler,
    MultiDatasetSampler,
)


class Manager:
    """The part of a DistributedManager that samplers look at."""

    def __init__(self, world_size: int, rank: int, initialised: bool = True) -> None:
        self.world_size, self.rank, self._initialised = world_size, rank, initialised

    def is_initialized(self) -> bool:
        return self._initialised


def composition(batch: list[int], *lengths: int) -> list[int]:
    edges = np.cumsum([0, *lengths])
    return np.histogram(batch, bins=[*edges[:-1], edges[-1]])[0].tolist()


BATCHES = MultiDatasetBatchSampler


# --- each sample once ---------------------------------------------------------------------------


@given(
    lengths=st.lists(st.integers(0, 60), min_size=1, max_size=5).filter(any),
    batch_size=st.integers(1, 9),
    world_size=st.integers(1, 6),
    shuffle=st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_default_has_every_sample_once_and_pads_with_the_first_batches(
    lengths: list[int], batch_size: int, world_size: int, shuffle: bool
):
    total = sum(lengths)
    options = {"batch_size": batch_size, "shuffle": shuffle, "seed": 5}
    ranks = per_rank(world_size, BATCHES, Lengths(*lengths), **options)
    assert len({len(batches) for batches in ranks}) == 1
    dealt = [batch for step in zip(*ranks) for batch in step]
    number = -(-total // batch_size)
    assert sorted(chain(*dealt[:number])) == list(range(total))
    padding = dealt[number:]
    assert len(padding) == -number % world_size
    assert padding == [dealt[i % number] for i in range(len(padding))]
    assert [len(b) for b in dealt[: number - 1]] == [batch_size] * (number - 1)


def test_a_small_data_set_is_spread_over_the_epoch_and_not_starved():
    """Rounding counts per batch would give [8, 0] here and never touch the small set."""
    sampler = BATCHES(Lengths(1000, 20), batch_size=8)
    flat = list(chain(*sampler))
    places = np.flatnonzero(np.array(flat) >= 1000)
    assert len(places) == 20 and sampler.draws_per_dataset == [1000, 20]
    assert np.diff(places).max() == np.diff(places).min() == 51


def test_drop_last_truncates_to_whole_steps():
    ranks = per_rank(3, BATCHES, Lengths(20, 13), batch_size=4, drop_last=True)
    assert [len(batches) for batches in ranks] == [2, 2, 2]
    seen = list(chain(*chain(*ranks)))
    assert len(seen) == len(set(seen)) == 24
    short_left_out = BATCHES(Lengths(20, 13), batch_size=4, drop_last=True)
    assert [len(batch) for batch in short_left_out] == [4] * 8
    assert short_left_out.num_batches == len(short_left_out) == 8


def test_more_ranks_than_batches_pads_cyclically():
    ranks = per_rank(4, BATCHES, Lengths(3), batch_size=4)
    assert ranks == [ranks[0]] * 4 and sorted(ranks[0][0]) == [0, 1, 2]


@pytest.mark.parametrize(
    "options",
    [{}, {"weights": [3, 1]}, {"replacement": True}, {"weights": [0.7, 0.3], "replacement": True}],
)
def test_the_samples_of_a_step_do_not_depend_on_the_number_of_ranks(options: dict[str, Any]):
    """One global batch of 24, dealt to 1, 2, 3, ... ranks."""
    reference: list[list[int]] | None = None
    for world_size in (1, 2, 3, 4, 6, 8, 12, 24):
        size = 24 // world_size
        ranks = per_rank(world_size, BATCHES, Lengths(300, 60), batch_size=size, seed=3, **options)
        steps = [sorted(chain(*step)) for step in zip(*ranks)]
        reference = reference or steps
        assert steps == reference


@pytest.mark.parametrize(
    ("cls", "data"), [(EpochSampler, range(120)), (MultiDatasetSampler, Lengths(60, 40, 20))]
)
def test_single_samples_in_a_batch_sampler_keep_the_steps_as_well(cls: Any, data: Any):
    reference: list[list[int]] | None = None
    for world_size in (1, 2, 3, 4, 6, 12):
        ranks = [
            list(BatchSampler(s, 12 // world_size, False))
            for s in (cls(data, num_replicas=world_size, rank=r, seed=1) for r in range(world_size))
        ]
        steps = [sorted(chain(*step)) for step in zip(*ranks)]
        reference = reference or steps
        assert steps == reference
    assert sorted(chain(*reference)) == list(range(120))


@pytest.mark.parametrize("world_size", [2, 4, 6])
@pytest.mark.parametrize("cls", [MultiDatasetSampler, EpochSampler])
def test_every_rank_sees_every_data_set_and_every_chunk(cls: Any, world_size: int):
    """Data sets that alternate must not each go to ranks of their own, nor chunks of a window."""
    number, options = 6000, {"locality": 2, "chunk_size": 30}
    data = Lengths(number // 2, number // 2) if cls is MultiDatasetSampler else range(number)
    ranks = per_rank(world_size, cls, data, seed=2, **options)
    own = number // world_size
    for indices in ranks:
        first = int((np.array(indices) < number // 2).sum())
        assert abs(first - own / 2) < 5 * (own / 4) ** 0.5
        odd_chunks = int((np.array(indices) // 30 % 2).sum())
        assert abs(odd_chunks - own / 2) < 5 * (own / 4) ** 0.5


def test_which_rank_begins_changes_nothing_about_a_step():
    samplers = [MultiDatasetSampler(Lengths(70, 70), num_replicas=4, rank=r) for r in range(4)]
    for sampler in samplers:
        sampler.set_epoch(3)
    steps = np.arange(len(samplers[0]))
    window = samplers[1].window(steps, range(4))[..., 0]
    order = samplers[0].order(np.arange(140)).reshape(-1, 4)
    assert (np.sort(window) == np.sort(order)).all()
    begins = [row.index(order[t, 0]) for t, row in enumerate(window.tolist())]
    assert set(begins) == {0, 1, 2, 3}
    assert all(
        row == np.roll(order[t], begins[t]).tolist() for t, row in enumerate(window.tolist())
    )
    assert [list(s) for s in samplers] == window.T.tolist()


@given(
    before=st.sampled_from([1, 2, 3, 4]),
    after=st.sampled_from([1, 2, 3, 4, 5]),
    step=st.integers(0, 30),
)
@settings(max_examples=40, deadline=None)
def test_single_samples_resume_on_any_number_of_ranks(before: int, after: int, step: int):
    def sampler(world_size: int, rank: int) -> MultiDatasetSampler:
        return MultiDatasetSampler(Lengths(80, 40), num_replicas=world_size, rank=rank, seed=6)

    seen, states, rest = [], [], []
    for rank in range(before):
        own = sampler(before, rank)
        running = iter(own)
        seen += [next(running) for _ in range(step)]
        states.append(own.state_dict())
    assert all(state == states[0] for state in states)
    for rank in range(after):
        own = sampler(after, rank)
        own.load_state_dict(states[0])
        rest += list(own)
    left = 120 - len(seen)
    assert len(rest) == -(-left // after) * after
    assert set(seen) | set(rest) == set(range(120)) and len(set(rest) - set(seen)) == left


def test_ranks_never_share_a_sample():
    ranks = per_rank(4, BATCHES, Lengths(50, 30), batch_size=5)
    sets = [set(chain(*batches)) for batches in ranks]
    assert sum(len(s) for s in sets) == len(set.union(*sets)) == 80


# --- composition --------------------------------------------------------------------------------


def test_integer_counts_hold_in_each_batch():
    sampler = BATCHES(Lengths(100, 10), batch_size=8, samples_per_dataset=[5, 3], num_batches=40)
    batches = list(sampler)
    assert all(composition(batch, 100, 10) == [5, 3] for batch in batches)
    assert sampler.samples_per_dataset == [5, 3]
    small = [i for batch in batches for i in batch if i >= 100]
    # passes: all ten of the small set come before any comes again
    assert all(sorted(small[k : k + 10]) == list(range(100, 110)) for k in range(0, 120, 10))
    assert small[:10] != small[10:20]


def test_floats_are_ratios_and_weights_are_shares():
    data = Lengths(9, 9)
    ratios = BATCHES(data, batch_size=8, samples_per_dataset=[1.0, 3.0])
    counts = BATCHES(data, batch_size=8, samples_per_dataset=np.array([2, 6]))
    assert ratios.samples_per_dataset == counts.samples_per_dataset == [2, 6]
    assert all(composition(batch, 9, 9) == [2, 6] for batch in chain(ratios, counts))
    assert BATCHES(data, batch_size=5, weights=[4, 1]).samples_per_dataset == [4, 1]


def test_balanced_alternates_where_a_batch_does_not_divide():
    sampler = BATCHES.balanced(Lengths(100, 10), batch_size=5, num_batches=20)
    counts = [composition(batch, 100, 10) for batch in sampler]
    assert sampler.samples_per_dataset == [2.5, 2.5]
    assert sum(c[0] for c in counts) == sum(c[1] for c in counts) == 50
    assert {tuple(c) for c in counts} == {(3, 2), (2, 3)}


def test_shares_hold_over_the_ranks_to_within_a_sample():
    weights = [0.9, 0.099, 0.001]
    ranks = per_rank(
        4, BATCHES, Lengths(10**6, 10**4, 10**3), batch_size=16, weights=weights, num_batches=2000
    )
    flat = np.array([batch for step in zip(*ranks) for batch in step]).ravel()
    sets = np.searchsorted([10**6, 10**6 + 10**4], flat, side="right")
    place = np.arange(1, len(flat) + 1)
    for j, weight in enumerate(weights):
        assert np.abs(np.cumsum(sets == j) - weight * place).max() < 1


@pytest.mark.parametrize(
    ("replacement", "expected"), [(True, [3, 2, 6]), (None, [3, 2, 6])]
)  # fmt: skip
def test_number_of_batches_by_policy(replacement: bool | None, expected: list[int]):
    policies = ["dataset_size", "min_size", "max_size"]
    found = [
        BATCHES(
            Lengths(6, 3), batch_size=3, samples_per_dataset=[1, 2],
            epoch_policy=policy, replacement=replacement,
        ).num_batches
        for policy in policies
    ]  # fmt: skip
    assert found == expected


def test_without_replacement_nothing_repeats_and_what_is_left_is_said():
    options: dict[str, Any] = {
        "batch_size": 4, "samples_per_dataset": [2, 2], "replacement": False,
    }  # fmt: skip
    with pytest.warns(UserWarning, match=r"uses 12 of 17 samples an epoch and leaves \[4, 1\]"):
        sampler = BATCHES(Lengths(10, 7), **options)
    assert sampler.num_batches == 3 and sampler.draws_per_dataset == [6, 6]
    flat = list(chain(*sampler))
    assert len(flat) == len(set(flat)) == 12
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert BATCHES(Lengths(10, 7), epoch_policy="min_size", **options).num_batches == 3
    with pytest.raises(ValueError, match="requires replacement=True"):
        BATCHES(Lengths(10, 7), epoch_policy="max_size", **options)
    with pytest.raises(ValueError, match="replacement=False supports at most 3 complete batches"):
        BATCHES(Lengths(10, 7), num_batches=4, **options)


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    data=st.data(),
    batch_size=st.integers(1, 6),
)
@settings(max_examples=100, deadline=None)
def test_replacement_false_never_repeats(lengths: list[int], data: st.DataObject, batch_size: int):
    size = len(lengths)
    weights = data.draw(st.lists(st.integers(1, 9), min_size=size, max_size=size))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            sampler = BATCHES(
                Lengths(*lengths), batch_size=batch_size, weights=weights, replacement=False
            )
        except ValueError as refusal:
            assert "replacement" in str(refusal) or "num_batches" in str(refusal)
            return
    flat = list(chain(*sampler))
    assert len(flat) == len(set(flat)) == sampler.num_batches * batch_size


def test_max_size_sees_every_sample_also_with_the_guides_arguments():
    unset = BATCHES.balanced(Lengths(40, 7), batch_size=8, epoch_policy="max_size")
    assert unset.num_batches == 10
    assert set(chain(*unset)) == set(range(47))
    guide = BATCHES(
        Lengths(40, 7), batch_size=8, epoch_policy="max_size", replacement=True, seed=1234
    )
    assert [len(batch) for batch in guide] == [8] * 6


def test_replacement_draws_independently():
    sampler = BATCHES(Lengths(500, 500), batch_size=10, replacement=True)
    flat = list(chain(*sampler))
    assert len(flat) == 1000
    assert 580 < len(set(flat)) < 690  # 1000 * (1 - 1/e) = 632
    sampler.set_epoch(1)
    assert list(chain(*sampler)) != flat


def test_without_shuffle_the_data_sets_are_read_in_order_and_cyclically():
    rank_1 = BATCHES(Lengths(6, 6), batch_size=4, num_replicas=2, rank=1, shuffle=False)
    assert list(rank_1) == [[2, 3, 8, 9], [0, 1, 6, 7]]
    cyclic = BATCHES.balanced(
        Lengths(2, 6), batch_size=4, epoch_policy="max_size", replacement=True, shuffle=False
    )
    assert list(cyclic) == [[0, 1, 2, 3], [0, 1, 4, 5], [0, 1, 6, 7]]
    ranks = per_rank(2, MultiDatasetSampler, Lengths(3, 3), shuffle=False, replacement=False)
    assert ranks == [[0, 2, 4], [1, 3, 5]]


# --- ranks --------------------------------------------------------------------------------------


def test_samplers_keep_the_protocol_and_so_does_torchs():
    data = Lengths(8, 8)
    for sampler in (
        BATCHES(data, batch_size=2),
        MultiDatasetSampler(data),
        EpochSampler(range(8)),
        DistributedSampler(range(8), num_replicas=2, rank=0),
    ):
        assert isinstance(sampler, DistributedSamplerProtocol)
    assert not isinstance(BatchSampler(range(8), 2, False), DistributedSamplerProtocol)


def test_an_initialised_manager_gives_the_rank_and_a_conflict_is_refused():
    data = Lengths(8, 8)
    sampler = BATCHES(data, batch_size=2, distributed_manager=Manager(4, 3))
    assert (sampler.num_replicas, sampler.rank) == (4, 3)
    same = BATCHES(data, batch_size=2, num_replicas=4, rank=3, distributed_manager=Manager(4, 3))
    assert (same.num_replicas, same.rank) == (4, 3)
    idle = MultiDatasetSampler(data, distributed_manager=Manager(4, 3, initialised=False))
    assert (idle.num_replicas, idle.rank) == (1, 0)
    with pytest.raises(ValueError, match="num_replicas=2 contradicts the distributed_manager"):
        BATCHES(data, batch_size=2, num_replicas=2, distributed_manager=Manager(4, 3))


# --- single samples -----------------------------------------------------------------------------


@given(n=st.integers(1, 3000), world_size=st.integers(1, 7), shuffle=st.booleans())
@settings(max_examples=60, deadline=None)
def test_epoch_sampler_pads_and_counts_as_torchs(n: int, world_size: int, shuffle: bool):
    ranks = per_rank(world_size, EpochSampler, range(n), shuffle=shuffle)
    theirs = DistributedSampler(range(n), num_replicas=world_size, rank=0, shuffle=False)
    own = EpochSampler(range(n), num_replicas=world_size, rank=0)
    assert {len(r) for r in ranks} == {len(theirs)}
    assert (own.num_samples, own.total_size) == (theirs.num_samples, theirs.total_size)
    dealt = [index for step in zip(*ranks) for index in step]
    assert sorted(dealt[:n]) == list(range(n))
    assert dealt[n:] == [dealt[i % n] for i in range(len(dealt) - n)]
    if not shuffle:
        assert ranks[0] == list(theirs)


def test_multi_dataset_sampler_has_each_sample_once_and_keeps_shares():
    flat = list(chain(*zip(*per_rank(2, MultiDatasetSampler, Lengths(30, 10)))))
    assert sorted(flat) == list(range(40))
    weighted = MultiDatasetSampler(Lengths(30, 10), weights=[1, 1], num_samples=60)
    assert weighted.draws_per_dataset == [30, 30]
    assert composition(list(weighted), 30, 10) == [30, 30]
    with pytest.raises(ValueError, match="data set 1 has 10 samples and its share is 20"):
        MultiDatasetSampler(Lengths(30, 10), weights=[1, 1], replacement=False)
