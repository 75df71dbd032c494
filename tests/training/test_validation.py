"""Validation: the exact result whatever the batching, modes, gradients, callbacks and errors."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loop_cases import SGD, At, Net, batches, loader, strategy, structure
from validation_cases import DATA, Custom, cut, validating

from nvalchemi.data import AtomicData, Batch
from nvalchemi.training import (
    EnergyMAELoss,
    EnergyMSELoss,
    ForceMSELoss,
    TrainingStage,
    ValidationConfig,
    ValidationLoop,
)

S = TrainingStage


def assert_same(left, right):
    """Summaries equal up to rounding, but for the number of batches."""
    assert left.keys() == right.keys()
    for key in left.keys() - {"num_batches"}:
        expected = right[key]
        if isinstance(expected, float | dict):
            expected = pytest.approx(expected, rel=1e-12, abs=1e-14)
        assert left[key] == expected, key


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=10))
def test_any_batching_gives_the_same_summary(sizes):
    # W18: a mean of batch means weights a structure by the size of its batch
    sizes = [size for i, size in enumerate(sizes) if sum(sizes[: i + 1]) < 10]
    sizes.append(10 - sum(sizes))
    whole = validating(cut(DATA, [10])).validate()
    parts = validating(cut(DATA, sizes)).validate()
    assert_same(parts, whole)
    assert (whole["num_batches"], parts["num_batches"]) == (1, len(sizes))


def test_batches_of_nine_and_one_by_hand():
    model = Net()
    with torch.no_grad():
        energies = [
            (float(model(batch)["energy"]), float(batch.energy)) for batch in cut(DATA, [1] * 10)
        ]
    expected = sum((guess - truth) ** 2 for guess, truth in energies) / 10
    for sizes in ([9, 1], [1, 9], [10]):
        summary = validating(cut(DATA, sizes), models=model, loss_fn=EnergyMSELoss()).validate()
        assert summary["total_loss"] == pytest.approx(expected, rel=1e-12)
        assert summary["per_component_unweighted"]["EnergyMSELoss"] == summary["total_loss"]
        assert summary["per_component_sample"]["EnergyMSELoss"] == pytest.approx(expected)
        assert summary["per_component_sample_count"] == {"EnergyMSELoss": 10}


def collate(numbers):
    return Batch.from_data_list([DATA[number] for number in numbers])


def test_list_and_loaders_give_the_same():
    expected = validating(cut(DATA, [10])).validate()
    assert_same(validating(cut(DATA, [4, 4, 2])).validate(), expected)
    ours = validating(loader(10, batch_size=4))
    assert_same(ours.validate(), expected)
    assert_same(ours.validate(), expected)  # it can be passed over again
    torchs = torch.utils.data.DataLoader(range(10), batch_size=3, collate_fn=collate)
    assert_same(validating(torchs).validate(), expected)
    shuffled = loader(10, batch_size=3, shuffle=True)
    assert_same(validating(shuffled).validate(), expected)


def test_summary():
    summary = validating(cut(DATA, [6, 4]), name="held out").validate()
    assert set(summary) == {
        "name",
        "total_loss",
        "per_component_unweighted",
        "per_component_weight",
        "per_component_raw_weight",
        "per_component_sample",
        "per_component_sample_count",
        "num_batches",
        "model_source",
        "ema_model_keys",
        "precision",
        "distributed_reduced",
    }
    assert (summary["name"], summary["num_batches"]) == ("held out", 2)
    assert (summary["model_source"], summary["ema_model_keys"]) == ("live", [])
    assert summary["distributed_reduced"] is False
    assert sum(summary["per_component_weight"].values()) == pytest.approx(1)
    assert summary["per_component_raw_weight"]["ForceMSELoss_0"] == 3
    parts = summary["per_component_unweighted"]
    weight = summary["per_component_weight"]
    total = sum(weight[name] * value for name, value in parts.items())
    assert summary["total_loss"] == pytest.approx(total)


# Labels that are not there.


def labelled(number, energy):
    data = structure(number)
    value = torch.tensor([[energy]], dtype=torch.float64)
    fields = {name: getattr(data, name) for name in ("atomic_numbers", "positions", "forces")}
    return AtomicData(**fields, energy=value)


@pytest.mark.parametrize("sizes", [[4], [1, 3], [2, 2], [1, 1, 1, 1]])
def test_missing_labels_do_not_count(sizes):
    data = [labelled(n, e) for n, e in enumerate((1.0, math.nan, 3.0, math.nan))]
    model, loss = Net(), EnergyMSELoss(ignore_nonfinite=True)
    known = [data[0], data[2]]
    expected = validating(cut(known, [2]), models=model, loss_fn=loss).validate()
    summary = validating(cut(data, sizes), models=model, loss_fn=loss).validate()
    assert summary["total_loss"] == pytest.approx(expected["total_loss"], rel=1e-12)
    assert summary["per_component_sample_count"] == {"EnergyMSELoss": 2}


def test_a_component_without_any_label_is_nan():
    data = [labelled(number, math.nan) for number in range(3)]
    loss = EnergyMSELoss(ignore_nonfinite=True) + ForceMSELoss()
    summary = validating(cut(data, [2, 1]), loss_fn=loss).validate()
    assert math.isnan(summary["per_component_unweighted"]["EnergyMSELoss"])
    assert math.isfinite(summary["per_component_unweighted"]["ForceMSELoss"])
    assert math.isnan(summary["total_loss"])
    assert summary["per_component_sample_count"]["EnergyMSELoss"] == 0


def test_a_model_that_diverged_is_not_taken_for_missing_labels():
    def diverged(model, batch):
        energy = model(batch)["energy"]
        energy[0] = math.inf
        return {"predicted_energy": energy}

    loss = EnergyMSELoss(ignore_nonfinite=True)
    summary = validating(
        cut(DATA, [5, 5]), models=Net(), loss_fn=loss, validation_fn=diverged
    ).validate()
    assert summary["total_loss"] == math.inf
    assert summary["per_component_sample"]["EnergyMSELoss"] == math.inf


def test_a_loss_with_its_own_forward_counts_by_structures():
    loss = Custom(target_key="energy", prediction_key="predicted_energy")
    model = Net()
    expected = validating(cut(DATA, [10]), models=model, loss_fn=EnergyMSELoss()).validate()
    summary = validating(cut(DATA, [9, 1]), models=model, loss_fn=loss).validate()
    assert summary["total_loss"] == pytest.approx(expected["total_loss"], rel=1e-12)


# Callbacks, hooks and functions.


def test_batch_callback():
    calls = []
    data = cut(DATA, [6, 4])
    trained = validating(
        data,
        batch_callback=lambda **told: calls.append(told),
        models=Net(),
        loss_fn=EnergyMSELoss(),
    )
    trained.step_count, trained.epoch_count = 7, 2
    trained.validate()
    assert [set(call) for call in calls] == [
        {"batch", "predictions", "loss", "batch_count", "step_count", "epoch"}
    ] * 2
    assert [call["batch"] for call in calls] == data
    assert [call["batch_count"] for call in calls] == [0, 1]
    assert [(call["step_count"], call["epoch"]) for call in calls] == [(7, 2), (7, 2)]
    assert calls[0]["predictions"]["predicted_energy"].shape == (6, 1)
    assert "total_loss" in calls[0]["loss"]


def test_hooks_see_validation_batches_and_the_summary_also_outside_of_a_run():
    seen = []
    data = cut(DATA, [6, 4])

    class Look:
        frequency, stage = 1, None

        def _runs_on_stage(self, stage):
            return True

        def __call__(self, ctx, stage):
            seen.append((stage, ctx.batch, ctx.validation))

    trained = validating(data, hooks=[Look()], models=Net(), loss_fn=EnergyMSELoss())
    summary = trained.validate()
    assert [row[0] for row in seen] == [S.BEFORE_FORWARD, S.AFTER_FORWARD] * 2 + [
        S.AFTER_VALIDATION
    ]
    assert [row[1] for row in seen[:4]] == [data[0], data[0], data[1], data[1]]
    assert seen[-1][2] is summary is trained.last_validation


def test_hooks_see_the_trained_batch_again_after_a_validation():
    seen = []
    train = batches(1, 1)
    hooks = [
        At(S.AFTER_VALIDATION, lambda ctx: seen.append(ctx.batch)),
        At(S.AFTER_TRAINING, lambda ctx: seen.append(ctx.batch)),
    ]
    config = ValidationConfig(validation_data=batches(3), every_n_epochs=1)
    strategy(num_epochs=1, hooks=hooks, validation_config=config).run(train)
    assert len(seen) == 2 and all(batch is train[1] for batch in seen)


def test_own_function_and_loss():
    def half(models, batch):
        return {"predicted_energy": 0.5 * batch.energy}

    config = ValidationConfig(
        validation_data=cut(DATA, [10]), validation_fn=half, loss_fn=EnergyMAELoss(per_atom=False)
    )
    trained = strategy(
        models={"a": Net(), "b": Net()},
        optimizer_configs={"a": SGD},
        training_fn=half,
        validation_config=config,
    )
    summary = trained.validate()
    expected = sum(abs(float(data.energy)) for data in DATA) / 20
    assert summary["per_component_unweighted"] == {"EnergyMAELoss": pytest.approx(expected)}


def test_loop_by_hand_with_another_config():
    trained = validating(cut(DATA, [10]), models=Net(), loss_fn=EnergyMSELoss())
    other = ValidationConfig(validation_data=cut(DATA, [5, 5]), name="other")
    loop = ValidationLoop.from_training_strategy(trained, other)
    with pytest.raises(RuntimeError, match="inside `with loop:` only"):
        loop.execute()
    with loop:
        summary = loop.execute()
    assert (summary["name"], summary["num_batches"]) == ("other", 2)
    with pytest.raises(RuntimeError, match="inside `with loop:` only"):
        loop.execute()
    assert trained.last_validation is None


# Mistakes.


def test_no_batches():
    for data in ([], loader(2, batch_size=3, drop_last=True)):
        with pytest.raises(ValueError, match=r"validation_data produced no batches\."):
            validating(data).validate()


def test_no_config():
    with pytest.raises(RuntimeError, match="validate.. needs a validation_config"):
        strategy().validate()


@pytest.mark.parametrize("name", ["use_ema", "use_mixed_precision"])
def test_what_no_hook_offers(name):
    with pytest.raises(RuntimeError, match=f"{name}='always', but no hook"):
        validating(cut(DATA, [10]), **{name: "always"}).validate()
    assert validating(cut(DATA, [10]), **{name: "never"}).validate()["model_source"] == "live"


def test_missing_target_names_the_validation_batch():
    data = [AtomicData(**{n: getattr(structure(1), n) for n in ("atomic_numbers", "positions")})]
    with pytest.raises(
        AttributeError, match="Validation batch is missing target attribute 'energy'"
    ):
        validating(cut(data, [1]), models=Net(), loss_fn=EnergyMSELoss()).validate()


def test_error_in_a_callback_is_raised_as_it_is():
    def fail(**told):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        validating(cut(DATA, [5, 5]), batch_callback=fail).validate()
