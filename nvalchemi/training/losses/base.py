"""The steps that every leaf loss goes through, and the checks of its two tensors."""

from __future__ import annotations

import inspect
import json
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast, get_args

import torch
from torch import Tensor, nn

from nvalchemi.training.losses.reductions import LossTerms, ReductionContext, element_terms

if TYPE_CHECKING:
    from nvalchemi.training.losses.composed import ComposedLossFunction
    from nvalchemi.training.losses.schedules import LossWeightSchedule

DtypePolicy = Literal["strict", "prediction_to_target", "target_to_prediction"]


class LossAlgebra:
    """`0.1 * energy + schedule * forces` and `sum([...])`, for leaves and compositions."""

    def __mul__(self, weight: float | LossWeightSchedule) -> ComposedLossFunction:
        from nvalchemi.training.losses.composed import scale  # composed is built on this module

        return scale(self, weight)

    __rmul__ = __mul__

    def __add__(self, other: object) -> ComposedLossFunction:
        from nvalchemi.training.losses.composed import add

        return add(self, other) if isinstance(other, LossAlgebra) else NotImplemented

    def __radd__(self, other: object) -> Any:
        return self if other == 0 else NotImplemented  # sum() starts from 0


class BaseLossFunction(LossAlgebra, nn.Module):
    """One loss between one prediction and one target.

    `terms` runs the steps `align_dtypes`, `validate`, `normalize`, `mask`, `compute_residual` and
    `reduce`; the loss is their numerator over their denominator. A subclass has to write
    `compute_residual` only, and is then a mean over all valid elements whose terms can be summed
    over batches. A subclass that overrides `forward` has no terms.

    Parameters
    ----------
    target_key, prediction_key : str
        Where to find the two tensors.
    ignore_nonfinite : bool
        Leave out the components whose target is NaN or infinite (a label that is not there). A
        prediction that is not finite is never left out. If False, such a target makes the loss NaN.
    dtype_policy : {"strict", "prediction_to_target", "target_to_prediction"}
        What to do if the dtypes differ: raise, or cast one of the two.

    Attributes
    ----------
    requires_eval_grad : bool or None
        Whether the prediction needs autograd in validation too (forces and stress do); None if
        the class does not say.
    per_sample_loss : Tensor or None
        After a call: the value of each structure alone, [B], detached, NaN without a label.

    Raises
    ------
    ValueError
        For an unknown `dtype_policy`.
    """

    requires_eval_grad: ClassVar[bool | None] = None

    def __init__(
        self,
        *,
        target_key: str,
        prediction_key: str,
        ignore_nonfinite: bool = False,
        dtype_policy: DtypePolicy = "strict",
    ) -> None:
        super().__init__()
        check_dtype_policy(dtype_policy)
        self.target_key = target_key
        self.prediction_key = prediction_key
        self.ignore_nonfinite = ignore_nonfinite
        self.dtype_policy: DtypePolicy = dtype_policy
        self.per_sample_loss: Tensor | None = None
        self.last_terms: LossTerms | None = None

    def forward(self, pred: Tensor, target: Tensor, **meta: Any) -> Tensor:
        """The loss, a scalar; `meta` as in `ReductionContext`, what is not needed is ignored."""
        terms = self.terms(pred, target, **meta)
        self.per_sample_loss = terms.per_sample
        self.last_terms = terms.detach()
        return terms.value

    def terms(self, pred: Tensor, target: Tensor, **meta: Any) -> LossTerms:
        """Numerator and denominator of the loss of this batch.

        Raises
        ------
        ValueError
            If dtypes or shapes do not match, or `meta` lacks what the loss needs.
        """
        context = cast(ReductionContext, meta)
        pred, target = self.align_dtypes(pred, target)
        self.validate(pred, target)
        pred, target = self.normalize(pred, target, context)
        valid = self.mask(pred, target, context)
        if valid is not None:
            # Before the residual, so that no NaN reaches a gradient as 0 * NaN.
            pred, target = torch.where(valid, pred, 0), torch.where(valid, target, 0)
        residual = self.compute_residual(pred, target)
        if valid is not None:
            while valid.ndim > residual.ndim:  # a norm of a vector needs all its components
                valid = valid.all(-1)
        return self.reduce(residual, valid, context)

    def align_dtypes(self, pred: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Both in one dtype by `dtype_policy`, and half precision as float32: counts are exact."""
        pred, target = align_dtypes(pred, target, self.dtype_policy, name=type(self).__name__)
        wide = torch.promote_types(pred.dtype, torch.float32)
        return pred.to(wide), target.to(wide)

    def validate(self, pred: Tensor, target: Tensor) -> None:
        """Raise ValueError if the loss is not defined for these two tensors."""
        assert_same_shape(
            pred,
            target,
            name=type(self).__name__,
            prediction_key=self.prediction_key,
            target_key=self.target_key,
        )

    def normalize(
        self, pred: Tensor, target: Tensor, context: ReductionContext
    ) -> tuple[Tensor, Tensor]:
        """Bring both into the unit in which they are compared, for example eV per atom."""
        return pred, target

    def mask(self, pred: Tensor, target: Tensor, context: ReductionContext) -> Tensor | None:
        """True where a component counts, broadcastable to the target; None where all count."""
        return torch.isfinite(target) if self.ignore_nonfinite else None

    def compute_residual(self, pred: Tensor, target: Tensor) -> Tensor:
        """Error of each component, or of each row if trailing axes are reduced; to be written.

        Where `mask` is False both arguments are 0 and the result is not used.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must define compute_residual(pred, target) or forward"
        )

    def reduce(
        self, residual: Tensor, valid: Tensor | None, context: ReductionContext
    ) -> LossTerms:
        """From the errors to the terms: here the mean over all valid elements."""
        return element_terms(residual, valid)

    def extra_repr(self) -> str:
        return ", ".join(f"{key}={value!r}" for key, value in _constructor_values(self).items())


def check_dtype_policy(policy: str | None) -> None:
    """ValueError unless the policy is one of the three."""
    if policy not in get_args(DtypePolicy):
        raise ValueError(f"dtype_policy must be one of {list(get_args(DtypePolicy))}: {policy!r}")


def check_delta(delta: float) -> float:
    """The Huber threshold, which must be positive (ValueError)."""
    if not delta > 0:
        raise ValueError(f"delta, where the Huber loss turns linear, must be positive: {delta!r}")
    return float(delta)


def align_dtypes(
    pred: Tensor, target: Tensor, policy: DtypePolicy, *, name: str
) -> tuple[Tensor, Tensor]:
    """Prediction and target in one floating dtype, or ValueError."""
    if not (pred.is_floating_point() and target.is_floating_point()):
        raise ValueError(
            f"{name} needs floating point tensors: "
            f"prediction is {pred.dtype}, target is {target.dtype}"
        )
    if pred.dtype == target.dtype:
        return pred, target
    if policy == "prediction_to_target":
        return pred.to(target.dtype), target
    if policy == "target_to_prediction":
        return pred, target.to(pred.dtype)
    raise ValueError(
        f"{name}: prediction and target must have the same dtype: {pred.dtype} != {target.dtype}; "
        "cast one of them, or set dtype_policy='target_to_prediction' or 'prediction_to_target'"
    )


def assert_same_shape(
    pred: Tensor,
    target: Tensor,
    *,
    name: str,
    prediction_key: str | None = None,
    target_key: str | None = None,
    strict: bool = False,
) -> None:
    """ValueError unless prediction and target have the same shape, and if `strict`, dtype.

    Without it a pair like [B, 1] and [B] would broadcast to [B, B] in silence.
    """
    left = f"prediction {prediction_key!r}" if prediction_key else "prediction"
    right = f"target {target_key!r}" if target_key else "target"
    if pred.shape != target.shape:
        raise ValueError(
            f"{name}: {left} and {right} must have the same shape: "
            f"{tuple(pred.shape)} != {tuple(target.shape)}; reshape one of them, "
            "losses do not broadcast"
        )
    if strict and pred.dtype != target.dtype:
        raise ValueError(
            f"{name}: {left} and {right} must have the same dtype: {pred.dtype} != {target.dtype}"
        )


def loss_component_to_spec(loss: BaseLossFunction) -> dict[str, Any]:
    """The class path and the constructor arguments of a leaf, as JSON-ready values.

    The arguments are read from attributes of the same names.

    Raises
    ------
    ValueError
        If an argument has no such attribute, or cannot be written as JSON.
    """
    cls = type(loss)
    values = _constructor_values(loss)
    names = [
        name
        for name, parameter in inspect.signature(cls).parameters.items()
        if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    ]
    missing = [name for name in names if name not in values]
    if missing:
        raise ValueError(
            f"{cls.__name__} cannot be written as a spec: its constructor takes {missing}, which "
            "it does not keep; store each argument in an attribute of the same name"
        )
    try:
        json.dumps(values)
    except TypeError as error:
        raise ValueError(
            f"{cls.__name__} cannot be written as a spec: {error}; "
            f"its arguments are {values!r}, allowed are numbers, strings, lists and dicts of them"
        ) from error
    return {"cls_path": f"{cls.__module__}.{cls.__qualname__}", **values}


def _constructor_values(loss: nn.Module) -> dict[str, Any]:
    names = inspect.signature(type(loss)).parameters
    return {name: getattr(loss, name) for name in names if hasattr(loss, name)}
