"""ShardPlan: its questions, at any size, and its arguments."""

import sys

import numpy as np
import pytest
import torch
from sharding_cases import Lengths, Padded, SeedPerRank, emitted

from nvalchemi.data import AtomicData, Batch
from nvalchemi.data.datapipes import DataLoader, InMemoryDataset, MultiDataset
from nvalchemi.data.datapipes.samplers import EpochSampler, MultiDatasetBatchSampler
from nvalchemi.sharding import ShardPlan
from nvalchemi.training import DDPHook, OptimizerConfig, TrainingStrategy
from nvalchemi.training.losses import EnergyMSELoss

HUGE = [7 * 10**7, 2 * 10**7, 10**7]


def structures(number: int) -> InMemoryDataset:
    return InMemoryDataset(
        Batch.from_data_list(
            [
                AtomicData(
                    atomic_numbers=torch.full((1 + i % 3,), 6),
                    positions=torch.zeros(1 + i % 3, 3),
                    energy=torch.zeros(1, 1),
                )
                for i in range(number)
            ]
        )
    )


def test_windows_and_batches_agree():
    plan = ShardPlan([20, 9], world_size=3, batch_size=4)
    whole = plan.window(slice(None))
    assert whole.shape == (3, 3, 4) and whole.dtype == np.int64
    assert np.array_equal(
        plan.window([2, 0], [1], epoch=1), plan.window(None, None, 1)[[2, 0]][:, [1]]
    )
    assert plan.window(1).shape == (1, 3, 4)
    assert (whole == -1).sum() == 3  # the last of 29 samples stands alone in its batch
    assert plan.batch(1, 2).size == 1
    assert plan.steps_per_rank().tolist() == [3, 3, 3] and plan.num_steps() == 3


def test_a_huge_plan_answers_from_its_arithmetic():
    sizes = np.tile(np.array([10, 20, 30, 400], dtype=np.uint16), 25 * 10**6)
    plan = ShardPlan(HUGE, world_size=1024, batch_size=64, epochs=10, sizes=sizes)
    assert plan.batch(1023, 1525, 9).shape == (64,)
    coverage = plan.coverage()
    assert coverage.method == "by construction"
    assert (coverage.seen, coverage.never, coverage.padded) == (10**8, 0, 10 * 7936)
    overlap = plan.overlap()
    assert overlap.matrix.shape == (1024, 1024) and overlap.method == "by construction"
    assert (overlap.matrix.sum(axis=1) - np.diagonal(overlap.matrix)).sum() == 2 * 7936
    composition = plan.composition()
    assert composition.method == "by construction" and not composition.all_steps
    assert composition.counts.sum() == 10**8 + 7936
    assert (np.abs(composition.per_batch - composition.expected) <= composition.spread).all()
    load = plan.load()
    assert not load.all_steps and 0 < load.error < 0.02
    assert load.bound == 64 * 400
    assert [finding.severity for finding in plan.check()].count("error") == 0
    half = ShardPlan(HUGE, world_size=512, batch_size=128)
    resumed = plan.diff(half, stop=700).resume
    assert resumed.method == "by construction"
    assert (resumed.seen, resumed.again, resumed.never) == (700 * 65536, 0, 0)


def test_expected_coverage_is_near_the_counted_one():
    kwargs = {"weights": [1, 1], "replacement": True}
    plan = ShardPlan(
        [3 * 10**6, 10**6], world_size=8, batch_size=64, epochs=2, sampler_kwargs=kwargs
    )
    expected, exact = plan.coverage(), plan.coverage(exact=True)
    assert expected.method == "expected" and exact.method == "counted"
    assert 0 < expected.error < 2000
    assert abs(expected.seen - exact.seen) < 5 * expected.error
    part = ShardPlan(
        [3 * 10**6, 10**6],
        world_size=8,
        batch_size=64,
        epochs=3,
        sampler_kwargs={"weights": [1, 1]},
    )
    expected, exact = part.coverage(), part.coverage(exact=True)
    assert expected.method == "expected" and expected.seen_of[1] == 10**6
    assert abs(expected.seen - exact.seen) < 5 * expected.error


def test_sampled_load_is_near_the_whole():
    sizes = np.random.default_rng(1).gamma(1.5, 24, 200_000).astype(int) + 1
    plan = ShardPlan([200_000], world_size=64, batch_size=16, sizes=sizes)
    whole = plan.load(steps=slice(None))
    part = plan.load(steps=np.random.default_rng(2).choice(196, 40, replace=False))
    assert whole.all_steps and whole.error == 0 and not part.all_steps
    assert abs(part.efficiency - whole.efficiency) < 5 * part.error
    by_hand = sizes[plan.window([5], [3])].sum()
    assert whole.cost[5, 3] == by_hand
    assert whole.bound == np.sort(sizes)[-16:].sum()
    assert whole.imbalance == pytest.approx(whole.cost.max(1).sum() / whole.cost.mean(1).sum())


@pytest.mark.parametrize("dtype", [np.int64, np.float64])
def test_costs_may_be_any_numbers(dtype):
    costs = np.random.default_rng(0).integers(0, 50, 100).astype(dtype) * 10**6
    plan = ShardPlan(100, world_size=2, batch_size=7, costs=costs)
    load = plan.load()
    assert load.unit == "cost" and load.bound == np.sort(costs)[-7:].sum()


@pytest.mark.parametrize("k", [1, 2, 7, 99, 100, 500])
def test_the_sum_of_the_largest_sizes(k):
    sizes = np.random.default_rng(3).integers(0, 9, 100)
    plan = ShardPlan(100, world_size=1, batch_size=k, sizes=sizes)
    assert plan.samples.ranked_costs[1](k) == np.sort(sizes)[-k:].sum()
    assert plan.samples.ranked_costs[0] == sizes.mean()


def test_hash_of_a_plan():
    def plan(**options):
        return ShardPlan(
            **{"dataset_or_lengths": [60, 20], "world_size": 2, "batch_size": 5, **options}
        )

    assert plan().hash == plan().hash and len(plan().hash) == 16
    others = [
        plan(dataset_or_lengths=[20, 60]),
        plan(world_size=4),
        plan(batch_size=10),
        plan(seed=1),
        plan(epochs=2),
        plan(shuffle=False),
        plan(drop_last=True, batch_size=7),
        plan(batch_size=7),
        plan(sampler_kwargs={"weights": [1, 1]}),
        plan(dataset_or_lengths=80),
        plan(dataset_or_lengths=80, seed=3),
        plan(sampler=Padded),
        plan(sampler=Padded, seed=4),
        plan(sampler=SeedPerRank),
    ]
    assert len({plan().hash, *(other.hash for other in others)}) == 15
    assert plan(sampler=Padded).hash == plan(sampler=Padded).hash


def test_diff_of_plans():
    one = ShardPlan([60, 20], world_size=2, batch_size=5)
    assert one.diff(ShardPlan([60, 20], world_size=2, batch_size=5)).same
    wider = one.diff(ShardPlan([60, 20], world_size=1, batch_size=10))
    assert wider.same and wider.first is None and wider.steps_equal == 8
    seeded = one.diff(ShardPlan([60, 20], world_size=2, batch_size=5, seed=1), stop=4)
    assert not seeded.same and seeded.first == (0, 0)
    first = {i for batches in emitted(one) for batch in batches[:4] for i in batch}
    rest = {
        i
        for batches in emitted(ShardPlan([60, 20], world_size=2, batch_size=5, seed=1))
        for batch in batches[4:]
        for i in batch
    }
    resume = seeded.resume
    assert resume.method == "counted" and resume.seen == 40
    assert (resume.again, resume.never) == (len(first & rest), 80 - len(first | rest))
    assert f"{resume.again} of them again" in str(seeded)


@pytest.mark.parametrize("sampler", [None, EpochSampler, Padded])
@pytest.mark.parametrize("ranks", [1, 2, 3, 6])
def test_resume_on_other_numbers_of_ranks(sampler, ranks):
    four = ShardPlan(50, sampler=sampler, world_size=4, batch_size=3)
    other = ShardPlan(50, sampler=sampler, world_size=ranks, batch_size=12 // ranks)
    resume = four.diff(other, stop=2).resume
    assert (resume.seen, resume.start) == (24, 2)
    assert resume.never == 0
    # padding is told apart only where the rule is known
    assert resume.again == (0 if sampler is not Padded else len(resumed_by_hand(four, other)))


def resumed_by_hand(one, other):
    before = {i for batches in emitted(one) for batch in batches[:2] for i in batch}
    return before & {i for batches in emitted(other) for batch in batches[2:] for i in batch}


def test_locality():
    plan = ShardPlan([640, 640], world_size=2, batch_size=16)
    price = plan.locality(32)
    assert 10 < price.distinct_chunks < 16
    in_order = ShardPlan(1280, sampler=EpochSampler, world_size=1, batch_size=16, shuffle=False)
    assert in_order.locality(32).distinct_chunks == 1


def test_data_sets_and_their_sizes():
    one, two = structures(12), structures(6)
    plan = ShardPlan(one, world_size=2, batch_size=3)
    assert plan.load().cost.sum() == one.batch.num_nodes
    several = ShardPlan(MultiDataset(one, two), world_size=2, batch_size=3)
    assert several.samples.lengths == [12, 6]
    assert several.source.name == "MultiDatasetBatchSampler"
    assert several.load().cost.sum() == 18 / 3 * (1 + 2 + 3)
    with pytest.raises(ValueError, match="load needs the size of each sample"):
        ShardPlan([12, 6], world_size=2, batch_size=3).load()


@pytest.mark.parametrize("shuffle", [True, False])
def test_from_a_loader_and_a_strategy(shuffle):
    loader = DataLoader(structures(20), batch_size=3, shuffle=shuffle)
    sampler = loader.sampler
    kwargs = {"seed": 4} if shuffle else {}
    plan = ShardPlan.from_loader(loader, world_size=2, sampler_kwargs=kwargs)
    assert loader.sampler is sampler and loader.batch_sampler is None
    same = ShardPlan(20, world_size=2, batch_size=3, shuffle=shuffle, seed=4 if shuffle else 0)
    assert emitted(plan, 1) == emitted(same, 1)
    strategy = TrainingStrategy(
        models=torch.nn.Linear(1, 1),
        optimizer_configs=OptimizerConfig(optimizer_cls=torch.optim.SGD),
        training_fn=lambda model, batch: {},
        loss_fn=EnergyMSELoss(),
        num_epochs=5,
        hooks=[DDPHook(sampler_cls=EpochSampler)],
    )
    plan = ShardPlan.from_strategy(strategy, loader, world_size=4)
    assert plan.epochs == 5 and plan.source.name == "EpochSampler"
    assert plan.load().cost.size == 4 * plan.num_steps()


def test_from_loaders_of_other_kinds():
    data = list(range(30))
    theirs = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True, drop_last=True)
    plan = ShardPlan.from_loader(theirs, world_size=2)
    same = ShardPlan(30, world_size=2, batch_size=4, drop_last=True)
    assert emitted(plan) == emitted(same)
    subset = torch.utils.data.SubsetRandomSampler(range(5, 13))
    plan = ShardPlan.from_loader(
        torch.utils.data.DataLoader(data, batch_size=2, sampler=subset), world_size=2
    )
    assert plan.coverage().seen == 8
    built = MultiDatasetBatchSampler(Lengths(20, 10), batch_size=5, num_replicas=3, rank=2)
    plan = ShardPlan.from_loader(
        torch.utils.data.DataLoader(data, batch_sampler=built), world_size=3
    )
    assert plan.source.cheap and plan.coverage().seen == 30
    with pytest.raises(ValueError, match="built for rank 2 of 3"):
        ShardPlan.from_loader(torch.utils.data.DataLoader(data, batch_sampler=built), world_size=2)
    alone = ShardPlan.from_loader(torch.utils.data.DataLoader(data, batch_size=4), world_size=1)
    assert emitted(alone)[0][0] == [0, 1, 2, 3]
    with pytest.raises(TypeError, match="loader must have a dataset and a sampler"):
        ShardPlan.from_loader([1, 2], world_size=2)


def test_a_table():
    pandas = pytest.importorskip("pandas")
    plan = ShardPlan([7, 4], world_size=2, batch_size=3, sizes=np.arange(11))
    table = plan.to_dataframe(1)
    assert (
        isinstance(table, pandas.DataFrame)
        and len(table) == (plan.window(None, None, 1) >= 0).sum()
    )
    assert list(table.columns) == ["epoch", "step", "rank", "slot", "sample", "dataset", "atoms"]
    row = table.iloc[5]
    assert plan.window([row.step], [row["rank"]], 1)[0, 0, row.slot] == row["sample"]
    assert (table["dataset"] == (table["sample"] >= 7)).all() and (
        table.atoms == table["sample"]
    ).all()
    with pytest.raises(ValueError, match="at most 10000000 rows"):
        ShardPlan(HUGE, world_size=8, batch_size=64).to_dataframe()


def test_a_table_without_pandas(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="pip install pandas"):
        ShardPlan(8, world_size=2, batch_size=2).to_dataframe()


def test_start_up_and_summary():
    plan = ShardPlan(10**7, world_size=8, batch_size=64)
    assert plan.startup().bytes == 48 * 10**7 and "scaled" in plan.startup().method
    ours = ShardPlan(HUGE, world_size=1024, batch_size=64)
    assert ours.startup().bytes < 5 * 2**20
    assert ShardPlan(100, sampler=Padded, world_size=2, batch_size=5).startup().bytes > 0
    text = ShardPlan([60, 21], world_size=4, batch_size=4, sizes=np.arange(81)).summary()
    for part in (
        "hash",
        "81 of 81 samples seen",
        "data set 1",
        "efficiency",
        "first batch",
        "info",
    ):
        assert part in text
    assert repr(plan) == "ShardPlan(10000000 samples, DistributedSampler, 8 ranks x 64, epochs=1)"


@pytest.mark.parametrize(
    ("options", "error", "sentence"),
    [
        ({"dataset_or_lengths": -1}, ValueError, "length of the data set must be >= 1, got -1"),
        ({"dataset_or_lengths": 0}, ValueError, "must be >= 1, got 0"),
        ({"dataset_or_lengths": []}, ValueError, "at least one data set"),
        ({"dataset_or_lengths": [3, -1]}, ValueError, "must be >= 0, got -1"),
        ({"dataset_or_lengths": [0, 0]}, ValueError, "1 to 2\\^40 samples"),
        ({"dataset_or_lengths": 2**41}, ValueError, "1 to 2\\^40 samples"),
        ({"dataset_or_lengths": [1.5]}, TypeError, "must be an integer, got 1.5"),
        ({"dataset_or_lengths": "store.zarr"}, TypeError, "must be a data set, its length"),
        ({"dataset_or_lengths": None}, TypeError, "must be a data set, its length"),
        ({"dataset_or_lengths": True}, TypeError, "must be a data set, its length"),
        ({"dataset_or_lengths": iter([1])}, TypeError, "must be a data set, its length"),
        ({"world_size": 0}, ValueError, "world_size must be >= 1, got 0"),
        ({"world_size": 2.0}, TypeError, "world_size must be an integer"),
        ({"batch_size": None}, ValueError, "needs batch_size"),
        ({"batch_size": 0}, ValueError, "batch_size must be >= 1, got 0"),
        ({"epochs": 0}, ValueError, "epochs must be >= 1, got 0"),
        ({"shuffle": 1}, TypeError, "shuffle must be True or False, got 1"),
        ({"drop_last": None}, TypeError, "drop_last must be True or False, got None"),
        ({"seed": "a"}, TypeError, "seed must be an integer"),
        ({"sampler": 3}, TypeError, "sampler must be a class, a factory"),
        ({"sampler_kwargs": {"colour": 1}}, ValueError, "name its arguments in sampler_kwargs"),
        ({"sizes": np.ones(3)}, ValueError, "one number for each of the 20 samples"),
        ({"sizes": -np.ones(20)}, ValueError, "finite and >= 0, got values from -1.0"),
        ({"sizes": np.full(20, np.nan)}, ValueError, "finite and >= 0"),
        ({"costs": ["a"] * 20}, TypeError, "costs must be numbers"),
        ({"sizes": (np.ones(20),) * 3}, ValueError, "atoms or \\(atoms, edges\\), got 3"),
        ({"sampler": [Padded(range(20), 2, 0)]}, ValueError, "one for each rank: got 1 for 2"),
        (
            {"sampler": MultiDatasetBatchSampler(Lengths(20), batch_size=2, num_replicas=3)},
            ValueError,
            "built for the 2 ranks of the plan, got num_replicas=3",
        ),
        (
            {"sampler": MultiDatasetBatchSampler(Lengths(21), batch_size=2, num_replicas=2)},
            ValueError,
            "is for 21, the plan for 20",
        ),
        (
            {"sampler": Padded(range(20), 2, 0), "batch_size": 2},
            ValueError,
            "knows the samples of its own rank only",
        ),
        (
            {"sampler": Padded(range(20), 2, 0), "seed": 3},
            ValueError,
            "Padded is built already",
        ),
    ],
)
def test_arguments(options, error, sentence):
    options = {"dataset_or_lengths": 20, "world_size": 2, "batch_size": 2, **options}
    with pytest.raises(error, match=sentence):
        ShardPlan(**options)


def test_questions_out_of_range():
    plan = ShardPlan(20, world_size=2, batch_size=3)
    for ask, sentence in [
        (lambda: plan.batch(2, 0), r"ranks must be in \[0, 2\), got \[2\]"),
        (lambda: plan.batch(-1, 0), r"ranks must be in \[0, 2\)"),
        (lambda: plan.batch(0, 4), r"steps must be in \[0, 4\), got \[4\]"),
        (lambda: plan.window([0], None, -1), "epoch must be >= 0, got -1"),
        (lambda: plan.coverage(-1), "epochs must be >= 0"),
        (lambda: plan.diff(ShardPlan(21, world_size=2, batch_size=3)), "one has 20, the other 21"),
        (lambda: plan.diff(plan, stop=9), "stop must be at most 4"),
        (lambda: plan.diff(plan, start=1), "start=1 needs stop"),
        (
            lambda: plan.diff(ShardPlan(20, world_size=2, batch_size=4), stop=1),
            "start must be given: 1 steps of 6 samples are no whole number of steps of 8",
        ),
    ]:
        with pytest.raises(ValueError, match=sentence):
            ask()
    with pytest.raises(TypeError, match="steps must be integers"):
        plan.window([0.5])
    with pytest.raises(TypeError, match="other must be a ShardPlan"):
        plan.diff(3)


def test_a_sampler_that_gives_what_is_not_there_or_has_no_end():
    class Outside(Padded):
        def __iter__(self):
            return iter([0, 25])

    with pytest.raises(
        ValueError, match=r"Outside of rank 0 gives index 25; it must be in \[0, 20\)"
    ):
        ShardPlan(20, sampler=Outside, world_size=1, batch_size=2).batch(0, 0)

    class Endless(Padded):
        def __iter__(self):
            while True:
                yield 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nvalchemi.sharding.iterated.KEPT_INDICES", 1000)
        with pytest.raises(ValueError, match="at most 1000 samples to be planned by iterating"):
            ShardPlan(20, sampler=Endless, world_size=1, batch_size=2).batch(0, 0)
