"""Sums and means over atoms and structures, and the check of shapes."""

import pytest
import torch

from nvalchemi.training.losses import (
    EnergyMSELoss,
    assert_same_shape,
    frobenius_mse,
    graph_balanced_mean,
    masked_mean,
    per_graph_mean,
    per_graph_sum,
)


def test_assert_same_shape():
    assert_same_shape(torch.zeros(2), torch.zeros(2).double(), name="x")
    with pytest.raises(ValueError, match=r"x: prediction 'p' and target 't' .*\(2,\) != \(3,\)"):
        assert_same_shape(
            torch.zeros(2), torch.zeros(3), name="x", prediction_key="p", target_key="t"
        )
    with pytest.raises(ValueError, match=r"same dtype: torch.float32 != torch.float64"):
        assert_same_shape(torch.zeros(2), torch.zeros(2).double(), name="x", strict=True)


def test_reductions():
    values = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    idx = torch.tensor([0, 2, 2], dtype=torch.int32)
    assert per_graph_sum(values, idx).tolist() == [[1, 2], [0, 0], [8, 10]]
    assert per_graph_sum(values, idx, 4).shape == (4, 2)
    assert per_graph_mean(values, idx).tolist() == [[1, 2], [0, 0], [4, 5]]
    assert per_graph_mean(values[:, 0], idx).tolist() == [1, 0, 4]
    assert per_graph_sum(values[:0], idx[:0]).shape == (0, 2)
    assert graph_balanced_mean(values, idx).item() == (1.5 + 4.5) / 2
    valid = torch.tensor([[True], [False], [True]])
    assert graph_balanced_mean(values, idx, valid=valid).item() == (1.5 + 5.5) / 2
    assert masked_mean(values, valid).item() == (1 + 2 + 5 + 6) / 4
    assert masked_mean(values).item() == 3.5
    assert masked_mean(values, torch.zeros(3, 1, dtype=torch.bool)).item() == 0.0
    stress = torch.arange(18.0).reshape(2, 3, 3)
    right = pytest.approx(stress.square().mean().item())
    assert frobenius_mse(stress, torch.zeros(2, 3, 3)).item() == right


def test_terms_hold_the_graph_until_detached():
    pred = torch.ones(2, 1, requires_grad=True)
    terms = EnergyMSELoss().terms(pred, torch.zeros(2, 1))
    assert terms.numerator.requires_grad and not terms.denominator.requires_grad
    assert not terms.detach().numerator.requires_grad
