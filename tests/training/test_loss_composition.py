"""Weighted sums of losses: weights, names, errors, targets, and exact sums over batches."""

import copy
import pickle
from types import SimpleNamespace

import pytest
import torch

from nvalchemi.training.losses import (
    BaseLossFunction,
    ComposedLossFunction,
    ConstantWeight,
    EnergyMSELoss,
    ForceMSELoss,
    LinearWeight,
    LossTerms,
    StressMSELoss,
    assemble_loss_targets,
)
from nvalchemi.training.totals import LossTotals

META = {
    "batch_idx": torch.tensor([0, 0, 0, 1], dtype=torch.int32),
    "num_graphs": 2,
    "num_nodes_per_graph": torch.tensor([3, 1]),
}


def tensors(seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"energy": (2, 1), "forces": (4, 3), "stress": (2, 3, 3)}
    targets = {k: torch.randn(s, generator=generator) for k, s in shapes.items()}
    predictions = {
        f"predicted_{k}": torch.randn(s, generator=generator).requires_grad_()
        for k, s in shapes.items()
    }
    return predictions, targets


def raw(loss, **kwargs):
    return list(loss(*tensors(), **META, **kwargs)["per_component_raw_weight"].values())


def test_total_is_the_weighted_sum():
    loss = ComposedLossFunction([EnergyMSELoss(), ForceMSELoss()], weights=[1.0, 3.0])
    predictions, targets = tensors()
    out = loss(predictions, targets, **META)
    energy = EnergyMSELoss()(predictions["predicted_energy"], targets["energy"])
    forces = ForceMSELoss()(predictions["predicted_forces"], targets["forces"], **META)
    torch.testing.assert_close(out["total_loss"], 0.25 * energy + 0.75 * forces)
    assert out["per_component_weight"] == {"EnergyMSELoss": 0.25, "ForceMSELoss": 0.75}
    assert out["per_component_raw_weight"] == {"EnergyMSELoss": 1.0, "ForceMSELoss": 3.0}
    assert out["per_component_unweighted"]["ForceMSELoss"].item() == forces.item()
    samples = out["per_component_sample"]["ForceMSELoss"]
    assert samples.shape == (2,)
    assert samples.mean().item() == pytest.approx(0.75 * forces.item())
    out["total_loss"].backward()
    assert predictions["predicted_energy"].grad is not None
    assert predictions["predicted_stress"].grad is None
    detached = [*out["per_component_unweighted"].values(), *out["per_component_sample"].values()]
    assert not any(value.requires_grad for value in detached)


def test_without_normalisation_weights_are_used_as_they_are():
    loss = ComposedLossFunction(
        [EnergyMSELoss(), ForceMSELoss()], weights=[2.0, None], normalize_weights=False
    )
    assert loss.current_weight() == {"EnergyMSELoss": 2.0, "ForceMSELoss": 1.0}


def test_operators():
    energy, forces, stress = EnergyMSELoss(), ForceMSELoss(), StressMSELoss()
    assert raw(0.1 * energy + forces * 2 + stress) == [0.1, 2.0, 1.0]
    assert raw(sum([energy, 3 * forces, stress])) == [1.0, 3.0, 1.0]
    assert raw(5 * (energy + 2 * forces) + stress) == [5.0, 10.0, 1.0]
    assert (5 * (energy + 2 * forces)).weight_factors == (5.0, 5.0)
    ramp = LinearWeight(start=0.0, end=1.0, num_steps=10)
    assert raw(2 * (ramp * energy) + forces, step=5) == [1.0, 1.0]
    assert raw(0.0 * energy + 0.0 * forces + stress) == [0.0, 0.0, 1.0]
    assert sum([energy]) is energy
    with pytest.raises(TypeError):
        energy + 1.0


def test_operators_do_not_change_their_operands():
    inner = EnergyMSELoss() + ForceMSELoss()
    assert raw(4 * inner + StressMSELoss()) == [4.0, 4.0, 1.0]
    assert raw(inner) == [1.0, 1.0]


def test_nested_compositions_are_flattened_with_raw_weights():
    inner = ComposedLossFunction([EnergyMSELoss(), ForceMSELoss()], weights=[1.0, 3.0])
    outer = ComposedLossFunction([inner, StressMSELoss()], weights=[2.0, 1.0])
    assert outer.component_names == ("EnergyMSELoss", "ForceMSELoss", "StressMSELoss")
    assert raw(outer) == [2.0, 6.0, 1.0]


def test_duplicate_names_are_numbered():
    loss = EnergyMSELoss() + ForceMSELoss() + EnergyMSELoss(per_atom=True)
    assert loss.component_names == ("EnergyMSELoss_0", "ForceMSELoss", "EnergyMSELoss_1")


def test_schedules_follow_step_and_epoch():
    loss = ComposedLossFunction(
        [EnergyMSELoss(), ForceMSELoss()],
        weights=[
            LinearWeight(start=1.0, end=3.0, num_steps=10),
            LinearWeight(start=1.0, end=2.0, num_steps=1, per_epoch=True),
        ],
    )
    assert list(loss.current_weight(10, 1).values()) == [0.6, 0.4]
    out = loss(*tensors(), step=0, epoch=0, **META)
    assert list(out["per_component_weight"].values()) == [0.5, 0.5]
    with pytest.raises(ValueError, match="needs the epoch"):
        loss(*tensors(), step=0, **META)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: ComposedLossFunction([]), ValueError, "at least one component"),
        (
            lambda: ComposedLossFunction([EnergyMSELoss()], weights=[1.0, 2.0]),
            ValueError,
            "weights must have one entry for each component: 2 != 1",
        ),
        (
            lambda: ComposedLossFunction([EnergyMSELoss(), ForceMSELoss()], weights=[1.0, -1.0]),
            ValueError,
            "strictly positive sum",
        ),
        (
            lambda: ComposedLossFunction([EnergyMSELoss()], weights=[float("inf")]),
            ValueError,
            "must be finite",
        ),
        (
            lambda: ComposedLossFunction([torch.nn.MSELoss()]),
            TypeError,
            "must be a BaseLossFunction.*MSELoss",
        ),
        (
            lambda: ComposedLossFunction([EnergyMSELoss()], weights=["1"]),
            TypeError,
            "number or a LossWeightSchedule: '1'",
        ),
        (lambda: True * EnergyMSELoss(), TypeError, "number or a LossWeightSchedule: True"),
        (
            lambda: ConstantWeight(value=1.0) * (EnergyMSELoss() + ForceMSELoss()),
            TypeError,
            "ConstantWeight on a ComposedLossFunction",
        ),
        (
            lambda: (
                ComposedLossFunction([EnergyMSELoss()], normalize_weights=False)
                + ComposedLossFunction([ForceMSELoss()])
            ),
            ValueError,
            "same normalize_weights: False != True",
        ),
        (
            lambda: ComposedLossFunction(
                [ComposedLossFunction([EnergyMSELoss()], normalize_weights=False)]
            ),
            ValueError,
            "same normalize_weights: False != True",
        ),
        (
            lambda: ComposedLossFunction([EnergyMSELoss()], dtype_policy="x"),
            ValueError,
            "dtype_policy must be one of",
        ),
    ],
)
def test_mistakes_are_told_at_construction(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_leaf_joins_a_composition_that_does_not_normalise():
    loss = ComposedLossFunction([EnergyMSELoss()], weights=[3.0], normalize_weights=False)
    assert (loss + ForceMSELoss()).current_weight() == {"EnergyMSELoss": 3.0, "ForceMSELoss": 1.0}
    assert (ForceMSELoss() + loss).normalize_weights is False


def test_weights_that_sum_to_zero_at_a_step_are_told_with_the_step():
    loss = LinearWeight(start=1.0, end=0.0, num_steps=5) * EnergyMSELoss()
    assert raw(loss, step=4) == pytest.approx([0.2])
    with pytest.raises(ValueError, match=r"strictly positive sum.* at step 5"):
        loss(*tensors(), step=5, **META)


def test_missing_prediction_or_target_is_named_with_what_is_there():
    loss = EnergyMSELoss() + ForceMSELoss()
    predictions, targets = tensors()
    with pytest.raises(KeyError, match=r"ForceMSELoss needs the target 'forces'.*\['energy'\]"):
        loss(predictions, {"energy": targets["energy"]}, **META)
    with pytest.raises(KeyError, match=r"EnergyMSELoss needs the prediction 'predicted_energy'"):
        loss({"energy": targets["energy"]}, targets, **META)


def test_dtype_policy_of_the_composition_holds_for_all_components():
    predictions, targets = tensors()
    targets = {key: value.double() for key, value in targets.items()}
    leaf = EnergyMSELoss(dtype_policy="target_to_prediction")
    with pytest.raises(ValueError, match="EnergyMSELoss: prediction and target must have the same"):
        ComposedLossFunction([leaf], dtype_policy="strict")(predictions, targets)
    loss = ComposedLossFunction([leaf, ForceMSELoss()], dtype_policy="prediction_to_target")
    assert loss(predictions, targets, **META)["total_loss"].dtype == torch.float64
    assert leaf.dtype_policy == "target_to_prediction"


class OwnForward(BaseLossFunction):
    def forward(self, pred, target, **meta):
        return 2 * (pred - target).abs().mean()


class DoubledForward(EnergyMSELoss):
    def forward(self, pred, target, **meta):
        return 2 * super().forward(pred, target, **meta)


@pytest.mark.parametrize(
    "own", [OwnForward(target_key="energy", prediction_key="predicted_energy"), DoubledForward()]
)
def test_a_loss_with_its_own_forward_has_no_terms(own):
    out = (own + ForceMSELoss())(*tensors(), **META)
    assert set(out["per_component_terms"]) == {"ForceMSELoss"}
    assert len(out["per_component_unweighted"]) == 2


def test_summed_terms_give_the_value_of_one_batch():
    """Batches of 9 and 1 structures: the mean of their two means is not the mean of the ten."""
    torch.manual_seed(0)
    pred, target = torch.randn(2, 10, 1, dtype=torch.float64)
    loss = ComposedLossFunction([EnergyMSELoss()])

    def evaluate(rows):
        return loss({"predicted_energy": pred[rows]}, {"energy": target[rows]})

    parts = [evaluate(slice(0, 9)), evaluate(slice(9, 10))]
    whole = evaluate(slice(0, 10))["total_loss"].item()
    terms = [part["per_component_terms"]["EnergyMSELoss"] for part in parts]
    assert all(isinstance(term, LossTerms) for term in terms)
    assert (terms[0] + terms[1]).value.item() == pytest.approx(whole, rel=1e-14)
    mean_of_means = 0.5 * sum(part["total_loss"].item() for part in parts)
    assert mean_of_means != pytest.approx(whole, rel=1e-3)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_component_of_weight_zero_adds_nothing_even_if_it_is_not_finite(bad):
    predictions, targets = tensors()
    targets["forces"][0, 0] = bad
    out = (EnergyMSELoss() + 0.0 * ForceMSELoss())(predictions, targets, **META)
    energy = EnergyMSELoss()(predictions["predicted_energy"], targets["energy"])
    assert out["total_loss"].item() == energy.item()
    assert not out["per_component_unweighted"]["ForceMSELoss"].isfinite()
    out["total_loss"].backward()
    assert predictions["predicted_energy"].grad.any()
    # DDP needs a gradient of the parameters behind this prediction too
    assert torch.equal(predictions["predicted_forces"].grad, torch.zeros(4, 3))
    totals = LossTotals()
    totals.add(out, SimpleNamespace(num_graphs=2))
    assert totals.summary()["total_loss"] == pytest.approx(energy.item())


def test_weights_of_zero_alone_give_zero_with_a_gradient():
    loss = ComposedLossFunction([ForceMSELoss()], weights=[0.0], normalize_weights=False)
    predictions, targets = tensors()
    predictions = {name: value.detach() for name, value in predictions.items()}
    predictions["predicted_forces"][1] = float("nan")
    predictions["predicted_forces"].requires_grad_()
    total = loss(predictions, targets, **META)["total_loss"]
    total.backward()
    assert total.item() == 0
    assert torch.equal(predictions["predicted_forces"].grad, torch.zeros(4, 3))


def test_requires_eval_grad():
    silent = OwnForward(target_key="energy", prediction_key="predicted_energy")
    assert (EnergyMSELoss() + EnergyMSELoss()).requires_eval_grad() is False
    assert (EnergyMSELoss() + ForceMSELoss()).requires_eval_grad() is True
    assert (silent + ForceMSELoss()).requires_eval_grad() is True
    with pytest.raises(ValueError, match=r"\['OwnForward'\].*requires_eval_grad"):
        (silent + EnergyMSELoss()).requires_eval_grad()


def test_targets_come_from_the_batch():
    batch = SimpleNamespace(energy=torch.ones(2, 1), forces=None, stress=torch.ones(2, 3, 3))
    loss = EnergyMSELoss() + StressMSELoss()
    targets = assemble_loss_targets(loss, {}, batch)
    assert list(targets) == ["energy", "stress"] and targets["energy"] is batch.energy
    assert list(assemble_loss_targets(EnergyMSELoss(), {}, batch)) == ["energy"]
    assert list(assemble_loss_targets(loss, {}, batch, target_keys=["stress"])) == ["stress"]
    message = "Batch is missing target attribute 'forces' required by ForceMSELoss."
    with pytest.raises(AttributeError, match=message):
        assemble_loss_targets(loss + ForceMSELoss(), {}, batch)
    with pytest.raises(AttributeError, match="Validation batch is missing target attribute 'x'"):
        assemble_loss_targets(loss, {}, batch, target_keys=["x"], batch_label="Validation batch")


def test_composition_can_be_copied_and_pickled():
    loss = 2 * EnergyMSELoss() + LinearWeight(start=1.0, end=2.0, num_steps=3) * ForceMSELoss()
    loss(*tensors(), **META)
    for twin in (copy.deepcopy(loss), pickle.loads(pickle.dumps(loss))):
        assert twin.current_weight(3) == loss.current_weight(3)
        assert twin(*tensors(), **META)["total_loss"] == loss(*tensors(), **META)["total_loss"]
    assert not list(loss.state_dict())
