"""Epochs told to samplers, going on in the middle of one, and one batch at a time."""

import pytest
import torch
from loop_cases import (
    ADAM,
    STEP,
    At,
    Context,
    Failing,
    Net,
    Recorder,
    batches,
    loader,
    raise_failing,
    strategy,
    structure,
    weights,
)
from torch.utils.data import BatchSampler, DistributedSampler

from nvalchemi.data import Batch
from nvalchemi.training import DDPHook, TrainingStage

S = TrainingStage


# Epochs and samplers.


class Tells:
    """Notes the epochs that it is told."""

    def __init__(self, data=()):
        self.data = data
        self.epochs = []

    def set_epoch(self, epoch):
        self.epochs.append(epoch)

    def __iter__(self):
        return iter(self.data)

    def __len__(self):
        return len(self.data)


def test_set_epoch_reaches_loader_and_all_samplers():
    # W36: also the loader itself
    data = Tells(batches(1, 1))
    data.sampler, data.batch_sampler = Tells(), Tells()
    data.batch_sampler.sampler = Tells()
    strategy(num_epochs=3).run(data)
    every = (data, data.sampler, data.batch_sampler, data.batch_sampler.sampler)
    assert [one.epochs for one in every] == [[0, 1, 2]] * 4


def test_set_epoch_is_told_once_to_each():
    data = Tells(batches(1))
    data.sampler = data.batch_sampler = data
    strategy(num_epochs=1, epoch_count=4, batch_count=4, step_count=0).run(data)
    assert data.epochs == [4]


@pytest.mark.parametrize("shuffle", [False, True])
def test_torch_sampler_draws_a_new_order_each_epoch(shuffle):
    plain = loader(6)
    sampler = DistributedSampler(plain.dataset, num_replicas=1, rank=0, shuffle=shuffle)
    seen = Recorder()
    data = loader(6, batch_sampler=BatchSampler(sampler, 1, False), batch_size=None)
    strategy(hooks=[seen], num_epochs=2).run(data)
    first, second = seen.indices[:6], seen.indices[6:]
    assert sorted(first) == sorted(second) == list(range(6))
    assert (first != second) is shuffle


# Going on in the middle of an epoch.


def plain_torch_loader(size):
    return torch.utils.data.DataLoader(list(range(size)), batch_size=1, collate_fn=one_batch)


def one_batch(numbers):
    batch = Batch.from_data_list([structure(number) for number in numbers])
    batch.metadata["index"] = torch.tensor(numbers)
    return batch


@pytest.mark.parametrize("make", [loader, plain_torch_loader])
@pytest.mark.parametrize("stop", range(1, 9))
def test_counters_of_a_stopped_training_go_on_exactly(make, stop):
    straight, model = Net(), Net()
    strategy(models=straight, num_steps=9).run(make(4))
    first, second = Recorder(), Recorder()
    begun = strategy(models=model, num_steps=stop, hooks=[first])
    begun.run(make(4))
    names = ("step_count", "batch_count", "epoch_count", "epoch_step_count", "global_step_count")
    counters = {name: getattr(begun, name) for name in names}
    rest = strategy(models=model, num_steps=9, hooks=[second], **counters)
    rest.run(make(4))
    assert first.indices + second.indices == [step % 4 for step in range(9)]
    assert torch.equal(weights(model), weights(straight))
    assert {name: getattr(rest, name) for name in names} == {
        "step_count": 9,
        "batch_count": 9,
        "epoch_count": 2,
        "epoch_step_count": 1,
        "global_step_count": 9,
    }


@pytest.mark.parametrize("make", [loader, plain_torch_loader])
@pytest.mark.parametrize(
    ("counters", "first"),
    [
        ({"step_count": 6}, 2),  # a count of steps alone
        ({"batch_count": 6}, 2),
        ({"step_count": 2}, 2),
        ({"step_count": 4}, 0),
        ({"step_count": 6, "epoch": 1}, 2),
        ({"step_count": 6, "epoch_count": 1, "epoch_step_count": 2}, 2),
        ({"step_count": 1, "batch_count": 6}, 2),  # steps that were left out count as batches
    ],
)
def test_counters_set_by_hand(make, counters, first):
    seen = Recorder()
    trained = strategy(num_steps=12, hooks=[seen], **counters)
    trained.run(make(4))
    steps = 12 - counters.get("step_count", 0)
    assert seen.indices == [(first + step) % 4 for step in range(steps)]
    done = counters.get("batch_count", counters.get("step_count", 0)) + steps
    assert (trained.epoch_count, trained.epoch_step_count) == divmod(done, 4)


def test_batches_of_a_resumed_epoch_are_not_read_again():
    read = []
    data = loader(4, prefetch_factor=0)
    load = data.dataset.load_batches
    data.dataset.load_batches = lambda lists: read.extend(lists) or load(lists)
    strategy(num_steps=4, step_count=2).run(data)
    assert read == [[2], [3]]


def test_counters_that_contradict_the_loader():
    for counters in (
        {"epoch_count": 2, "step_count": 3},
        {"epoch_count": 1, "epoch_step_count": 2, "step_count": 7},
        {"epoch_count": 2},
        {"epoch_step_count": 6, "step_count": 6},
    ):
        with pytest.raises(ValueError, match="restart counters are inconsistent"):
            strategy(num_steps=50, **counters).run(loader(4))


def test_an_epoch_that_was_done_but_not_closed_is_closed():
    seen = Recorder()
    trained = strategy(num_steps=5, hooks=[seen], step_count=4, epoch_step_count=4)
    trained.run(loader(4))
    assert seen.stages[2:5] == [S.BEFORE_EPOCH, S.AFTER_EPOCH, S.BEFORE_EPOCH]
    assert seen.indices == [0]
    assert (trained.epoch_count, trained.epoch_step_count) == (1, 1)


# One batch at a time.


@pytest.mark.parametrize("inside", [True, False])
def test_train_batch_does_the_steps_of_run(inside):
    # outside of `with` the optimizers must keep their state between calls
    run, single, data = Net(), Net(), batches(2, 1, 3)
    strategy(models=run, optimizer_configs=ADAM, num_epochs=2).run(data)
    trained = strategy(models=single, optimizer_configs=ADAM, num_epochs=2)
    if inside:
        with trained:
            results = [trained.train_batch(batch) for batch in data * 2]
    else:
        results = [trained.train_batch(batch) for batch in data * 2]
    assert torch.equal(weights(single), weights(run))
    assert (trained.step_count, trained.batch_count) == (6, 6)
    assert all(not one["total_loss"].requires_grad for one in results)
    assert results[-1]["total_loss"] < results[0]["total_loss"]


def test_train_batch_sets_up_once_inside_with():
    seen, log = Recorder(), []
    trained = strategy(hooks=[seen, Context("a", log)])
    with trained:
        for batch in batches(1, 1, 1):
            trained.train_batch(batch)
    assert seen.stages == [S.SETUP, *STEP, *STEP, *STEP]
    assert log == ["+a", "-a"]
    seen.stages.clear()
    trained.train_batch(batches(1)[0])
    assert seen.stages == [S.SETUP, *STEP]


def test_train_batch_builds_new_optimizers_for_other_parameters():
    model = Net()
    trained = strategy(models=model, optimizer_configs=ADAM)
    trained.train_batch(batches(1)[0])
    trained.models["main"] = other = Net()
    trained.train_batch(batches(1)[0])
    assert not torch.equal(weights(other), weights(Net()))


def test_train_batch_after_a_failed_set_up_sets_up_again():
    armed, model = [True], Net()

    def fail_once(ctx):
        if armed:
            armed.clear()
            raise Failing

    trained = strategy(models=model, hooks=[At(S.SETUP, fail_once)])
    with trained:
        with pytest.raises(Failing):
            trained.train_batch(batches(1)[0])
        trained.train_batch(batches(1)[0])
    assert not torch.equal(weights(model), weights(Net()))


def test_train_batch_puts_modes_back_after_an_error():
    model = Net().eval()
    trained = strategy(models=model, hooks=[At(S.AFTER_LOSS, raise_failing)])
    with pytest.raises(Failing):
        trained.train_batch(batches(1)[0])
    assert not any(module.training for module in model.modules())


def test_ddp_hook_does_nothing_in_one_process():
    model, plain = Net(), Net()
    data = loader(4, shuffle=False)
    sampler = data.sampler
    trained = strategy(models=model, hooks=[DDPHook()])
    trained.run(data)
    strategy(models=plain).run(loader(4))
    assert torch.equal(weights(model), weights(plain))
    assert trained.models["main"] is model and data.sampler is sampler
