"""Leaf losses against formulas written out by hand, and their behaviour at missing labels."""

import importlib
import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nvalchemi.training.losses import (
    BaseLossFunction,
    EnergyHuberLoss,
    EnergyMAELoss,
    EnergyMSELoss,
    ForceHuberLoss,
    ForceL2NormLoss,
    ForceMSELoss,
    LossTerms,
    StressHuberLoss,
    StressMSELoss,
    loss_component_to_spec,
)

NAN = float("nan")
SIZES = [1, 4, 2, 7]
ALL_LEAVES = [
    EnergyMSELoss,
    EnergyMAELoss,
    EnergyHuberLoss,
    ForceMSELoss,
    ForceHuberLoss,
    ForceL2NormLoss,
    StressMSELoss,
    StressHuberLoss,
]


def meta_of(sizes):
    counts = torch.tensor(sizes)
    return {
        "batch_idx": torch.repeat_interleave(counts).to(torch.int32),
        "num_graphs": len(sizes),
        "num_nodes_per_graph": counts,
    }


def structures(sizes, seed, missing=0.0):
    """Predictions and targets of each structure: lists of (energy, forces, stress) pairs."""
    generator = torch.Generator().manual_seed(seed)

    def pair(*shape):
        pred, target = torch.randn(2, *shape, generator=generator, dtype=torch.float64)
        target[torch.rand(shape, generator=generator) < missing] = NAN
        return pred, target

    return [{"energy": pair(1, 1), "forces": pair(n, 3), "stress": pair(1, 3, 3)} for n in sizes]


def joined(items, key):
    return tuple(torch.cat([item[key][side] for item in items]) for side in (0, 1))


def huber(difference, delta=0.01):
    size = abs(difference)
    return 0.5 * size**2 if size < delta else delta * (size - 0.5 * delta)


def rows(items, key):
    """Differences as nested Python floats, one list for each structure."""
    return [(item[key][0] - item[key][1]).reshape(-1).tolist() for item in items]


def mean(values):
    values = list(values)
    return sum(values) / len(values)


def expected(name, items, sizes):
    energy = [difference for (difference,) in rows(items, "energy")]
    forces, stress = rows(items, "forces"), rows(items, "stress")
    vectors = [[row[i : i + 3] for i in range(0, len(row), 3)] for row in forces]
    norms = [[math.hypot(*vector) for vector in row] for row in vectors]
    per_atom = [d / n for d, n in zip(energy, sizes, strict=True)]
    return {
        "energy_mse": mean(d**2 for d in energy),
        "energy_mse_atom": sum(n * d**2 for n, d in zip(sizes, per_atom, strict=True)) / sum(sizes),
        "energy_mae": sum(map(abs, energy)) / sum(sizes),
        "energy_mae_total": mean(map(abs, energy)),
        "energy_huber": mean(map(huber, per_atom)),
        "energy_huber_total": mean(map(huber, energy)),
        "force_mse": mean(mean(d**2 for d in row) for row in forces),
        "force_mse_global": mean(d**2 for row in forces for d in row),
        "force_huber": mean(huber(d) for row in forces for d in row),
        "force_huber_balanced": mean(mean(map(huber, row)) for row in forces),
        "force_l2": mean(map(mean, norms)),
        "force_l2_global": mean(n for row in norms for n in row),
        "stress_mse": mean(mean(d**2 for d in row) for row in stress),
        "stress_huber": mean(mean(map(huber, row)) for row in stress),
    }[name]


CASES = {
    "energy_mse": EnergyMSELoss(),
    "energy_mse_atom": EnergyMSELoss(per_atom=True),
    "energy_mae": EnergyMAELoss(),
    "energy_mae_total": EnergyMAELoss(per_atom=False),
    "energy_huber": EnergyHuberLoss(),
    "energy_huber_total": EnergyHuberLoss(per_atom=False),
    "force_mse": ForceMSELoss(),
    "force_mse_global": ForceMSELoss(normalize_by_atom_count=False),
    "force_huber": ForceHuberLoss(),
    "force_huber_balanced": ForceHuberLoss(normalize_by_atom_count=True),
    "force_l2": ForceL2NormLoss(),
    "force_l2_global": ForceL2NormLoss(normalize_by_atom_count=False),
    "stress_mse": StressMSELoss(),
    "stress_huber": StressHuberLoss(),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("ignore_nonfinite", [False, True])
def test_value_is_the_formula(name, ignore_nonfinite):
    items = structures(SIZES, seed=1)
    loss = CASES[name]
    kwargs = {k: v for k, v in loss_component_to_spec(loss).items() if k != "cls_path"}
    loss = type(loss)(**kwargs | {"ignore_nonfinite": ignore_nonfinite})
    value = loss(*joined(items, loss.target_key), **meta_of(SIZES))
    assert value.item() == pytest.approx(expected(name, items, SIZES), rel=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_value_of_a_structure_alone(name):
    """per_sample_loss is what each structure would give by itself."""
    items = structures(SIZES, seed=2)
    loss = CASES[name]
    loss(*joined(items, loss.target_key), **meta_of(SIZES))
    alone = [expected(name, [item], [n]) for item, n in zip(items, SIZES, strict=True)]
    assert loss.per_sample_loss.tolist() == pytest.approx(alone, rel=1e-12)
    assert not loss.per_sample_loss.requires_grad


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=9),
    cuts=st.sets(st.integers(1, 8)),
    seed=st.integers(0, 10_000),
    missing=st.sampled_from([0.0, 0.3, 1.0]),
    name=st.sampled_from(sorted(CASES)),
)
def test_terms_summed_over_any_batches_give_the_big_batch(sizes, cuts, seed, missing, name):
    """A mean of batch means is wrong for unequal batches; sums of numerators and denominators hold.

    The same holds over ranks, whose atoms or labels need not be equal in number.
    """
    kwargs = {k: v for k, v in loss_component_to_spec(CASES[name]).items() if k != "cls_path"}
    loss = type(CASES[name])(**kwargs | {"ignore_nonfinite": True})
    items = structures(sizes, seed, missing)
    whole = loss.terms(*joined(items, loss.target_key), **meta_of(sizes))

    edges = [0, *sorted(cut for cut in cuts if cut < len(sizes)), len(sizes)]
    total = LossTerms(torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64))
    for start, stop in pairwise(edges):
        batch = joined(items[start:stop], loss.target_key)
        total = total + loss.terms(*batch, **meta_of(sizes[start:stop]))
    assert total.denominator.item() == whole.denominator.item()
    torch.testing.assert_close(total.value, whole.value, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("cls", ALL_LEAVES)
@pytest.mark.parametrize("missing", [0.4, 1.0])
def test_missing_labels_leave_gradients_finite(cls, missing):
    loss = cls(ignore_nonfinite=True)
    items = structures(SIZES, seed=3, missing=missing)
    pred, target = joined(items, loss.target_key)
    pred.requires_grad_()
    value = loss(pred, target, **meta_of(SIZES))
    value.backward()
    assert torch.isfinite(value) and torch.isfinite(pred.grad).all()
    assert (pred.grad[~torch.isfinite(target)] == 0).all()
    if missing == 1.0:
        assert value.item() == 0.0
        assert torch.isnan(loss.per_sample_loss).all()


@pytest.mark.parametrize("cls", ALL_LEAVES)
def test_missing_labels_that_are_not_ignored_show(cls):
    loss = cls(ignore_nonfinite=False)
    pred, target = joined(structures(SIZES, seed=3), loss.target_key)
    target[0] = NAN
    assert torch.isnan(loss(pred, target, **meta_of(SIZES)))


@pytest.mark.parametrize("cls", ALL_LEAVES)
def test_prediction_that_is_not_finite_is_never_ignored(cls):
    loss = cls(ignore_nonfinite=True)
    pred, target = joined(structures(SIZES, seed=3), loss.target_key)
    pred[0] = NAN
    assert torch.isnan(loss(pred, target, **meta_of(SIZES)))


def test_structure_without_labels_does_not_dilute():
    loss = ForceMSELoss(ignore_nonfinite=True)
    pred, target = joined(structures([3, 2], seed=4), "forces")
    alone = loss(pred[:3], target[:3], **meta_of([3]))
    target[3:] = NAN
    assert loss(pred, target, **meta_of([3, 2])).item() == pytest.approx(alone.item())
    assert torch.isnan(loss.per_sample_loss).tolist() == [False, True]


def test_partly_labelled_force_counts_by_component_in_mse_and_not_at_all_in_l2():
    pred, target = torch.zeros(2, 3), torch.tensor([[3.0, NAN, 0.0], [0.0, 3.0, 4.0]])
    mse = ForceMSELoss(ignore_nonfinite=True, normalize_by_atom_count=False)
    assert mse(pred, target).item() == pytest.approx((9 + 0 + 9 + 16) / 5)
    norm = ForceL2NormLoss(normalize_by_atom_count=False)
    assert norm(pred, target).item() == pytest.approx(5.0)


@pytest.mark.parametrize("cls", [ForceMSELoss, ForceHuberLoss, ForceL2NormLoss])
@pytest.mark.parametrize("balanced", [True, False])
@pytest.mark.parametrize("by_mask", [True, False])
def test_padded_forces_equal_dense_ones(cls, balanced, by_mask):
    loss = cls(normalize_by_atom_count=balanced)
    pred, target = joined(structures(SIZES, seed=5), "forces")
    dense = loss(pred, target, **meta_of(SIZES))
    samples = loss.per_sample_loss
    counts = torch.tensor(SIZES)
    node_mask = torch.arange(max(SIZES)) < counts.unsqueeze(1)
    padded = torch.full((2, *node_mask.shape, 3), NAN, dtype=torch.float64)
    padded[0, node_mask], padded[1, node_mask] = pred, target
    meta = {"node_mask": node_mask} if by_mask else {"num_nodes_per_graph": counts}
    torch.testing.assert_close(loss(*padded, **meta), dense, rtol=1e-13, atol=0)
    torch.testing.assert_close(loss.per_sample_loss, samples, rtol=1e-13, atol=0)


def test_ways_to_say_which_atom_belongs_where_agree():
    pred, target = joined(structures(SIZES, seed=6), "forces")
    meta, loss = meta_of(SIZES), ForceMSELoss()
    full = loss(pred, target, **meta)
    for keys in (["batch_idx"], ["batch_idx", "num_graphs"], ["num_nodes_per_graph"]):
        assert loss(pred, target, **{key: meta[key] for key in keys}).item() == full.item()
    shuffle = torch.randperm(len(pred))
    moved = loss(pred[shuffle], target[shuffle], batch_idx=meta["batch_idx"][shuffle], num_graphs=4)
    assert moved.item() == pytest.approx(full.item(), rel=1e-13)
    energy = joined(structures(SIZES, seed=6), "energy")
    by_idx = EnergyMAELoss()(*energy, batch_idx=meta["batch_idx"])
    assert by_idx.item() == EnergyMAELoss()(*energy, **meta).item()


def test_global_force_mean_needs_no_meta():
    pred, target = joined(structures(SIZES, seed=7), "forces")
    loss = ForceMSELoss(normalize_by_atom_count=False)
    assert loss(pred, target).item() == pytest.approx((pred - target).square().mean().item())
    assert loss.per_sample_loss is None


def test_half_precision_is_reduced_in_float32():
    """bfloat16 has 8 bits: it cannot count to 1000 atoms."""
    pred = torch.ones(1001, 3, dtype=torch.bfloat16, requires_grad=True)
    loss = ForceMSELoss(normalize_by_atom_count=False)
    value = loss(pred, torch.zeros(1001, 3, dtype=torch.bfloat16))
    assert value.dtype == torch.float32 and value.item() == 1.0
    value.backward()
    assert pred.grad.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("cls", "answer"),
    [(cls, not cls.__name__.startswith("Energy")) for cls in ALL_LEAVES],
)
def test_every_leaf_says_whether_validation_needs_gradients(cls, answer):
    """None here would make validation fail after the training had run."""
    assert cls.requires_eval_grad is answer


@pytest.mark.parametrize("cls", ALL_LEAVES)
def test_dtypes_must_match_unless_a_policy_says_otherwise(cls):
    pred, target = joined(structures(SIZES, seed=8), cls().target_key)
    pred = pred.float()
    with pytest.raises(ValueError, match=r"float32 != torch\.float64.*dtype_policy='target_to_pr"):
        cls()(pred, target, **meta_of(SIZES))
    down = cls(dtype_policy="target_to_prediction")(pred, target, **meta_of(SIZES))
    up = cls(dtype_policy="prediction_to_target")(pred, target, **meta_of(SIZES))
    assert (down.dtype, up.dtype) == (torch.float32, torch.float64)
    assert down.item() == pytest.approx(up.item(), rel=1e-5)
    with pytest.raises(ValueError, match="floating point"):
        cls()(pred, target.nan_to_num().int(), **meta_of(SIZES))


@pytest.mark.parametrize("cls", ALL_LEAVES)
def test_shapes_must_match(cls):
    pred, target = joined(structures(SIZES, seed=8), cls().target_key)
    with pytest.raises(ValueError, match=r"must have the same shape: .* != .*do not broadcast"):
        cls()(pred, target[:1], **meta_of(SIZES))


@pytest.mark.parametrize(
    ("loss", "shape", "meta", "message"),
    [
        (EnergyMSELoss(), (2, 3), {}, r"\[B\] or \[B, 1\].*\(2, 3\)"),
        (EnergyMAELoss(), (2, 1), {}, "num_nodes_per_graph= or batch_idx="),
        (EnergyMAELoss(), (2, 1), {"num_nodes_per_graph": torch.tensor([1])}, "1 != 2"),
        (ForceMSELoss(), (5, 2), {}, r"\[V, 3\] or padded \[B, Vmax, 3\].*\(5, 2\)"),
        (ForceMSELoss(), (5, 3), {}, "pass batch_idx="),
        (ForceMSELoss(), (5, 3), {"num_nodes_per_graph": torch.tensor([2, 2])}, "4 != 5"),
        (ForceMSELoss(), (5, 3), {"batch_idx": torch.zeros(4, dtype=torch.int)}, r"\(4,\)"),
        (ForceMSELoss(), (2, 5, 3), {}, "num_nodes_per_graph= or node_mask="),
        (ForceMSELoss(), (2, 5, 3), {"node_mask": torch.ones(2, 5)}, "must be bool"),
        (
            ForceMSELoss(),
            (2, 5, 3),
            {"num_nodes_per_graph": torch.tensor([5])},
            "one entry for each structure",
        ),
        (StressMSELoss(), (3, 3), {}, r"\[B, 3, 3\].*\(3, 3\)"),
        (StressMSELoss(), (2, 6), {}, r"\[B, 3, 3\].*\(2, 6\)"),
    ],
)
def test_wrong_shapes_and_missing_meta_are_told(loss, shape, meta, message):
    with pytest.raises(ValueError, match=message):
        loss(torch.zeros(shape), torch.zeros(shape), **meta)


def test_constructor_mistakes():
    with pytest.raises(ValueError, match=r"dtype_policy must be one of .*'loose'"):
        EnergyMSELoss(dtype_policy="loose")
    with pytest.raises(ValueError, match=r"delta.* must be positive: 0"):
        ForceHuberLoss(delta=0)
    with pytest.raises(TypeError):
        EnergyMSELoss("energy")


class LogCosh(BaseLossFunction):
    """What a user writes: one method."""

    def compute_residual(self, pred, target):
        return torch.log(torch.cosh(pred - target) + 1.0)


def test_own_loss_with_compute_residual_only_has_terms():
    loss = LogCosh(target_key="dipole", prediction_key="predicted_dipole", ignore_nonfinite=True)
    pred, target = torch.randn(2, 4, 3, dtype=torch.float64)
    target[1, 1] = NAN
    terms = loss.terms(pred, target)
    assert terms.denominator.item() == 11
    right = torch.log(torch.cosh(pred - target) + 1.0).nansum() / 11
    assert loss(pred, target).item() == pytest.approx(right.item())


def test_own_loss_of_whole_rows_counts_complete_rows():
    class Norm(BaseLossFunction):
        def compute_residual(self, pred, target):
            return (pred - target).norm(dim=-1)

    loss = Norm(target_key="dipole", prediction_key="p", ignore_nonfinite=True)
    target = torch.tensor([[3.0, 4.0], [NAN, 100.0]])
    assert loss.terms(torch.zeros(2, 2), target).denominator.item() == 1
    assert loss(torch.zeros(2, 2), target).item() == 5.0


def test_base_without_residual_says_what_to_write():
    loss = BaseLossFunction(target_key="a", prediction_key="b")
    with pytest.raises(NotImplementedError, match="compute_residual"):
        loss(torch.zeros(1), torch.zeros(1))


@pytest.mark.parametrize("name", CASES)
def test_spec_rebuilds_the_leaf(name):
    spec = loss_component_to_spec(CASES[name])
    module, _, cls = spec.pop("cls_path").rpartition(".")
    rebuilt = getattr(importlib.import_module(module), cls)(**spec)
    assert loss_component_to_spec(rebuilt) == loss_component_to_spec(CASES[name])
    assert repr(rebuilt) == repr(CASES[name])


def test_spec_refuses_what_it_cannot_write():
    class Forgetful(LogCosh):
        def __init__(self, width):
            super().__init__(target_key="a", prediction_key="b")

    class Holder(LogCosh):
        def __init__(self, scale):
            super().__init__(target_key="a", prediction_key="b")
            self.scale = scale

    with pytest.raises(ValueError, match=r"Forgetful .*\['width'\]"):
        loss_component_to_spec(Forgetful(1.0))
    with pytest.raises(ValueError, match="Holder cannot be written"):
        loss_component_to_spec(Holder(torch.ones(1)))
