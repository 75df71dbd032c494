"""Plans with other settings are those that would have been made with them."""

import numpy as np
import pytest
from sharding_cases import Strided
from torch.utils.data import DataLoader, DistributedSampler, SubsetRandomSampler

from nvalchemi.data.datapipes import (
    BalancedBatchSampler,
    BudgetBatchSampler,
    EpochSampler,
    MultiDatasetBatchSampler,
)
from nvalchemi.sharding import ShardPlan
from nvalchemi.sharding.replan import replan, settings_of

LENGTHS = [40, 17]
SIZES = np.arange(57) % 9 + 1


@pytest.mark.parametrize(
    ("sampler", "kwargs", "changes"),
    [
        (None, {}, {"world_size": 3, "seed": 5, "shuffle": False}),
        (EpochSampler, {}, {"world_size": 4, "batch_size": 2, "drop_last": True}),
        (Strided, {}, {"seed": 3, "world_size": 3, "drop_last": True}),
        (BalancedBatchSampler, {"cost": "atoms"}, {"seed": 3, "batch_size": 5}),
        (MultiDatasetBatchSampler, {"seed": 2}, {"seed": 3, "world_size": 3}),
        (
            MultiDatasetBatchSampler,
            {"weights": [1, 1]},
            {"epoch_policy": "max_size", "world_size": 3},
        ),
        (BudgetBatchSampler, {"max_atoms": 20}, {"seed": 4, "world_size": 3}),
    ],
)
def test_a_plan_with_other_settings_is_the_one_made_with_them(sampler, kwargs, changes) -> None:
    first = {} if sampler is BudgetBatchSampler else {"batch_size": 4}
    lengths = sum(LENGTHS) if sampler in (EpochSampler, Strided) else LENGTHS
    options = {"sampler": sampler, "sizes": SIZES, "epochs": 2}
    plan = ShardPlan(lengths, world_size=2, sampler_kwargs=kwargs, **first, **options)
    again = replan(replan(plan, **changes), world_size=3)
    direct = {**first, **changes} | {"world_size": 3}
    policy = {k: direct.pop(k) for k in ("epoch_policy",) if k in direct}
    moved = {k: direct.pop(k) for k in list(direct) if k in kwargs}
    expected = ShardPlan(lengths, sampler_kwargs={**kwargs, **policy, **moved}, **direct, **options)
    assert again.hash == expected.hash
    assert np.array_equal(again.window(None), expected.window(None))
    assert again.epochs == 2 and again.samples is plan.samples
    assert settings_of(again)["world_size"].value == 3
    for name, value in changes.items():
        assert settings_of(again)[name].value == (3 if name == "world_size" else value)


def test_loaders_are_planned_again_as_DDPHook_would_deal_them_out() -> None:
    loader = DataLoader(range(50), batch_size=4, shuffle=True)
    plan = ShardPlan.from_loader(loader, world_size=2)
    again = replan(plan, world_size=3, batch_size=2, seed=7)
    sampler = DistributedSampler(range(50), 3, 1, seed=7)
    sampler.set_epoch(1)
    assert again.window(None, 1, 1)[..., 0, :].ravel()[: len(sampler)].tolist() == list(sampler)
    one = replan(plan, world_size=1)
    assert settings_of(one)["seed"].fixed == "on one rank DDPHook leaves the loader as it is"
    assert replan(one, world_size=2).hash == plan.hash


def test_what_can_not_be_changed_says_why() -> None:
    built = ShardPlan(57, sampler=EpochSampler(range(57), num_replicas=2), world_size=2)
    assert {bool(setting.fixed) for setting in settings_of(built).values()} == {True}
    with pytest.raises(ValueError, match="world_size can not be changed: the sampler was built"):
        replan(built, world_size=3)
    plan = ShardPlan(57, sampler=EpochSampler, world_size=2, batch_size=4, shuffle=False)
    fixed = {name: setting.fixed for name, setting in settings_of(plan).items()}
    assert fixed["seed"] == "shuffle is off, so no order is drawn"
    assert fixed["epoch_policy"] == "EpochSampler has no argument epoch_policy"
    assert not fixed["shuffle"] and not fixed["world_size"] and not fixed["drop_last"]
    even = settings_of(ShardPlan([30, 20], world_size=2, batch_size=4))["epoch_policy"]
    assert even.value == "dataset_size" and "every sample comes once" in even.fixed
    subset = DataLoader(range(50), batch_size=4, sampler=SubsetRandomSampler(range(40)))
    own = settings_of(ShardPlan.from_loader(subset, world_size=2))
    assert own["shuffle"].fixed == "the loader's own SubsetRandomSampler is dealt out as it is"
    assert not own["seed"].fixed
    with pytest.raises(ValueError, match="world_size must be >= 1, got 0"):
        replan(plan, world_size=0)
    with pytest.raises(ValueError, match="settings of a plan are"):
        replan(plan, weights=[1])
