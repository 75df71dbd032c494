"""Mistakes that newcomers made, each met by a sentence where it is made."""

import warnings

import pytest
import torch
from torch.utils.data import DistributedSampler

from nvalchemi.data import AtomicData, Batch
from nvalchemi.data.datapipes import DataLoader, InMemoryDataset, MultiDataset
from nvalchemi.models import MLPPotential
from nvalchemi.notebook import launch
from nvalchemi.training import (
    DDPHook,
    EnergyMSELoss,
    OptimizerConfig,
    TrainingStage,
    TrainingStrategy,
    ValidationConfig,
    default_training_fn,
)
from nvalchemi.training.hooks.ddp import warn_of_batch_norm


def dataset() -> InMemoryDataset:
    structures = [
        AtomicData(
            atomic_numbers=torch.tensor([6, 1]),
            positions=torch.randn(2, 3),
            energy=torch.randn(1, 1),
        )
        for _ in range(6)
    ]
    return InMemoryDataset(Batch.from_data_list(structures))


def strategy(**options) -> TrainingStrategy:
    given = {
        "models": MLPPotential(outputs=("energy",)),
        "optimizer_configs": OptimizerConfig(optimizer_cls=torch.optim.SGD),
        "training_fn": default_training_fn,
        "loss_fn": EnergyMSELoss(),
        "num_epochs": 1,
        **options,
    }
    return TrainingStrategy(**given)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: strategy(epochs=3), "no argument 'epochs'; did you mean 'epoch"),
        (lambda: DDPHook(sampler_kwarg={}), "'sampler_kwarg'; did you mean 'sampler_kwargs'"),
        (
            lambda: ValidationConfig(validation_data=[], every_n_epoch=1),
            "'every_n_epoch'; did you mean 'every_n_epochs'",
        ),
        (
            lambda: OptimizerConfig(optimizer_cls=torch.optim.SGD, lr=0.1),
            "no argument 'lr'.*optimizer_kwargs",
        ),
        (lambda: ValidationConfig(validation_data="a.zarr"), "a loader or a list.*got str"),
        (lambda: strategy(devices=["cuda:77"]), "cuda:77, but torch finds"),
    ],
)
def test_wrong_arguments_are_refused_at_construction(make, sentence: str):
    with pytest.raises(ValueError, match=sentence):
        make()


def test_a_hook_class_is_not_a_hook():
    class MyHook:
        stage = TrainingStage.SETUP

    with pytest.raises(TypeError, match=r"pass MyHook\(\)"):
        strategy(hooks=[MyHook])


@pytest.mark.parametrize(
    ("loader", "sentence"),
    [
        (dataset(), "wrap the InMemoryDataset in DataLoader"),
        (dataset().batch, "put the one Batch in a list"),
        (3, "got int"),
    ],
)
def test_what_is_no_loader_is_refused_before_the_training(loader, sentence: str):
    training = strategy()
    with pytest.raises(TypeError, match=sentence):
        training.run(loader)
    assert training.step_count == 0


def test_a_training_function_that_returns_a_tensor_is_told_what_to_return():
    training = strategy(training_fn=lambda model, batch: model(batch)["energy"])
    with pytest.raises(TypeError, match="must return a dict of predictions.*got Tensor"):
        training.run(DataLoader(dataset(), batch_size=2))


def test_a_sampler_for_several_ranks_is_refused_on_one():
    data = dataset()
    sampler = DistributedSampler(data, num_replicas=3, rank=0)
    training = strategy(hooks=[DDPHook()])
    with pytest.raises(ValueError, match="rank 0 of 3, but this is rank 0 of 1"):
        training.run(DataLoader(data, batch_size=2, sampler=sampler))


def test_a_mixture_that_one_rank_does_not_get_is_said():
    data = MultiDataset(dataset(), dataset())
    training = strategy(hooks=[DDPHook(sampler_kwargs={"weights": [1, 9], "seed": 3})])
    with pytest.warns(UserWarning, match=r"\['weights'\] have no effect on one rank"):
        training.run(DataLoader(data, batch_size=2))


def test_raising_the_number_of_epochs_goes_on_with_the_same_optimizer():
    training = strategy(optimizer_configs=OptimizerConfig(optimizer_cls=torch.optim.Adam))
    loader = DataLoader(dataset(), batch_size=2)
    training.run(loader)
    (optimizer,) = training.optimizers
    training.num_epochs = 2
    training.run(loader)
    assert training.optimizers == [optimizer]
    assert {float(state["step"]) for state in optimizer.state.values()} == {6.0}


def test_running_statistics_of_one_rank_are_said():
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.BatchNorm1d(1))
    with pytest.warns(UserWarning, match="main.1 keeps running statistics of this rank's batches"):
        warn_of_batch_norm("main", model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_batch_norm("main", torch.nn.SyncBatchNorm.convert_sync_batchnorm(model))


def train_without_hook() -> list[str]:
    from nvalchemi.distributed import DistributedManager

    DistributedManager.initialize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        strategy(distributed_manager=DistributedManager()).run(DataLoader(dataset(), batch_size=2))
    return [str(w.message) for w in caught if "trains alone" in str(w.message)]


def test_forgetting_the_hook_on_several_ranks_is_said_once():
    first, second = launch(train_without_hook, nprocs=2, timeout=120)
    assert "2 ranks, but no model is wrapped" in first[0] and "DDPHook()" in first[0]
    assert second == []


def test_a_strategy_prints_in_a_line():
    text = repr(strategy(hooks=[DDPHook()]))
    assert "main: MLPPotential" in text and "num_epochs=1" in text and "DDPHook" in text
    assert len(text) < 200 and str(strategy()).startswith("TrainingStrategy(")
