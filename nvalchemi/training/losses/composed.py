"""A weighted sum of leaf losses, and the targets that it needs from a batch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple, TypedDict, cast

import torch
from torch import Tensor, nn

from nvalchemi.training.losses.base import (
    BaseLossFunction,
    DtypePolicy,
    LossAlgebra,
    align_dtypes,
    check_dtype_policy,
)
from nvalchemi.training.losses.reductions import LossTerms
from nvalchemi.training.losses.schedules import LossWeightSchedule

Weight = float | LossWeightSchedule


class ComposedLossOutput(TypedDict):
    """Result of a `ComposedLossFunction`; the dicts are keyed by component name.

    `per_component_terms` and `per_component_sample` (weighted, [B]) lack the components that have
    none. All but `total_loss` is detached.
    """

    total_loss: Tensor
    per_component_unweighted: dict[str, Tensor]
    per_component_weight: dict[str, float]
    per_component_raw_weight: dict[str, float]
    per_component_sample: dict[str, Tensor]
    per_component_terms: dict[str, LossTerms]


class _Part(NamedTuple):
    loss: BaseLossFunction
    weight: Weight
    factor: float


class ComposedLossFunction(LossAlgebra, nn.Module):
    """Weighted sum of leaf losses.

    Parameters
    ----------
    components : sequence of BaseLossFunction or ComposedLossFunction
        A composition is dissolved into its leaves, whose raw weights are multiplied by its weight.
    weights : sequence of float, LossWeightSchedule or None, optional
        One for each component; None means 1.0.
    normalize_weights : bool
        Divide the weights by their sum.
    dtype_policy : str, optional
        Used for all components in place of their own.

    Notes
    -----
    A component of weight 0 adds nothing to the total, even if it is NaN; its unweighted value is
    reported as it is.

    Raises
    ------
    ValueError
        For no components, a wrong number of weights, weights that are not finite or whose sum is
        not strictly positive (with `normalize_weights`), or components that normalise otherwise.
    TypeError
        For a component or a weight of another type, or a schedule on a composition.
    """

    def __init__(
        self,
        components: Sequence[BaseLossFunction | ComposedLossFunction],
        *,
        weights: Sequence[Weight | None] | None = None,
        normalize_weights: bool = True,
        dtype_policy: DtypePolicy | None = None,
    ) -> None:
        components = list(components)
        weights = [None] * len(components) if weights is None else list(weights)
        if len(weights) != len(components):
            raise ValueError(
                f"weights must have one entry for each component: {len(weights)} != "
                f"{len(components)}"
            )
        parts: list[_Part] = []
        for component, weight in zip(components, weights, strict=True):
            if isinstance(component, ComposedLossFunction):
                _check_same("normalize_weights", component.normalize_weights, normalize_weights)
                if component.dtype_policy is not None:
                    _check_same("dtype_policy", component.dtype_policy, dtype_policy)
            parts += _scaled(component, 1.0 if weight is None else weight)
        self._assemble(parts, normalize_weights, dtype_policy)
        if self._fixed_weights is not None:
            self._normalized(self._fixed_weights, step=0, epoch=None)

    def _assemble(
        self, parts: list[_Part], normalize_weights: bool, dtype_policy: DtypePolicy | None
    ) -> None:
        """Set all attributes. Unlike __init__ it allows 0 * loss: something may be added yet."""
        super().__init__()
        if not parts:
            raise ValueError("ComposedLossFunction needs at least one component, got none")
        if dtype_policy is not None:
            check_dtype_policy(dtype_policy)
        self.components = nn.ModuleList(part.loss for part in parts)
        self.weights = tuple(part.weight for part in parts)
        self.weight_factors = tuple(part.factor for part in parts)
        self.normalize_weights = normalize_weights
        self.dtype_policy = dtype_policy
        self.component_names = _component_names([part.loss for part in parts])
        fixed = [part.factor * part.weight for part in parts if isinstance(part.weight, float)]
        self._fixed_weights = fixed if len(fixed) == len(parts) else None

    def forward(
        self,
        predictions: Mapping[str, Tensor],
        targets: Mapping[str, Tensor],
        *,
        step: int = 0,
        epoch: int | None = None,
        joint_factors: Callable[[Tensor], Tensor] | None = None,
        **meta: Any,
    ) -> ComposedLossOutput:
        """The weighted sum and its components.

        Parameters
        ----------
        predictions, targets : mapping
            Tensors by the components' `prediction_key` and `target_key`.
        step, epoch : int
            Where the training is, for the schedules.
        joint_factors : callable, optional
            From the denominators [K] of the components that have terms to factors [K] of their
            values in the total. With those of `joint_batch_factors` the mean of the totals over
            ranks is the loss of the joint batch.
        **meta
            Facts about the batch, see `ReductionContext`.

        Raises
        ------
        KeyError
            If a prediction or a target is missing.
        ValueError
            As the components', or if the weights' sum is not strictly positive at this step.
        """
        raw = self._raw_weights(step, epoch)
        weights = self._normalized(raw, step=step, epoch=epoch)
        values: dict[str, Tensor] = {}
        samples: dict[str, Tensor] = {}
        terms: dict[str, LossTerms] = {}
        parts: dict[str, Tensor] = {}
        for name, component, weight in zip(
            self.component_names, self.components, weights, strict=True
        ):
            leaf = cast(BaseLossFunction, component)
            prediction, target = self._pair(leaf, predictions, targets)
            value = leaf(prediction, target, **meta)
            parts[name] = weight * value if weight != 0 else _nothing(value, prediction)
            values[name] = value.detach()
            if leaf.per_sample_loss is not None:
                samples[name] = weight * leaf.per_sample_loss
            # A class with its own forward may return anything: its terms would not fit the value.
            if leaf.last_terms is not None and type(leaf).forward is BaseLossFunction.forward:
                terms[name] = leaf.last_terms
        if joint_factors is not None and terms:
            factors = joint_factors(torch.stack([term.denominator for term in terms.values()]))
            for name, factor in zip(terms, factors, strict=True):
                parts[name] = parts[name] * factor.to(parts[name].dtype)
        first, *others = parts.values()
        return {
            "total_loss": sum(others, first),
            "per_component_unweighted": values,
            "per_component_weight": dict(zip(self.component_names, weights, strict=True)),
            "per_component_raw_weight": dict(zip(self.component_names, raw, strict=True)),
            "per_component_sample": samples,
            "per_component_terms": terms,
        }

    def current_weight(self, step: int = 0, epoch: int | None = None) -> dict[str, float]:
        """The weight of each component at this step, normalised if the composition is."""
        weights = self._normalized(self._raw_weights(step, epoch), step=step, epoch=epoch)
        return dict(zip(self.component_names, weights, strict=True))

    def requires_eval_grad(self) -> bool:
        """Whether validation needs autograd for the predictions of any component.

        Raises
        ------
        ValueError
            If no component says that it does and at least one does not say.
        """
        answers = {type(leaf).__name__: leaf.requires_eval_grad for leaf in self.components}
        if any(answers.values()):
            return True
        silent = sorted(name for name, answer in answers.items() if answer is None)
        if silent:
            raise ValueError(
                f"{silent} must say whether validation needs gradients of the prediction: set the "
                "class attribute requires_eval_grad to True (forces or stress from autograd) or "
                "False, or give the validation a grad_mode of 'enabled' or 'disabled'"
            )
        return False

    def _raw_weights(self, step: int, epoch: int | None) -> list[float]:
        if self._fixed_weights is not None:
            return self._fixed_weights
        return [
            factor * (weight if isinstance(weight, float) else weight(step, epoch))
            for factor, weight in zip(self.weight_factors, self.weights, strict=True)
        ]

    def _normalized(self, raw: list[float], *, step: int, epoch: int | None) -> list[float]:
        if not all(math.isfinite(weight) for weight in raw):
            raise ValueError(f"loss weights must be finite: {raw} at step {step}, epoch {epoch}")
        if not self.normalize_weights:
            return raw
        total = sum(raw)
        if not total > 0:
            raise ValueError(
                f"loss weights must have a strictly positive sum to be normalised: sum({raw}) = "
                f"{total} at step {step}, epoch {epoch}; set normalize_weights=False to use them "
                "as they are"
            )
        return [weight / total for weight in raw]

    def _pair(
        self,
        leaf: BaseLossFunction,
        predictions: Mapping[str, Tensor],
        targets: Mapping[str, Tensor],
    ) -> tuple[Tensor, Tensor]:
        name = type(leaf).__name__
        for kind, key, there in (
            ("prediction", leaf.prediction_key, predictions),
            ("target", leaf.target_key, targets),
        ):
            if key not in there:
                raise KeyError(
                    f"{name} needs the {kind} {key!r}, the {kind}s are {sorted(there)}; "
                    f"provide it, or set {kind}_key"
                )
        pair = predictions[leaf.prediction_key], targets[leaf.target_key]
        return (
            pair if self.dtype_policy is None else align_dtypes(*pair, self.dtype_policy, name=name)
        )

    def extra_repr(self) -> str:
        return (
            f"weights={self.weights}, factors={self.weight_factors}, "
            f"normalize_weights={self.normalize_weights}"
        )


def scale(loss: LossAlgebra, weight: Weight) -> ComposedLossFunction:
    """`weight * loss`."""
    normalize = loss.normalize_weights if isinstance(loss, ComposedLossFunction) else True
    policy = loss.dtype_policy if isinstance(loss, ComposedLossFunction) else None
    return _compose(_scaled(loss, weight), normalize, policy)


def add(left: LossAlgebra, right: LossAlgebra) -> ComposedLossFunction:
    """`left + right`; a leaf follows the composition that it is added to."""
    compositions = [loss for loss in (left, right) if isinstance(loss, ComposedLossFunction)]
    if len(compositions) == 2:
        first, second = compositions
        _check_same("normalize_weights", first.normalize_weights, second.normalize_weights)
        _check_same("dtype_policy", first.dtype_policy, second.dtype_policy)
    normalize = compositions[0].normalize_weights if compositions else True
    policy = compositions[0].dtype_policy if compositions else None
    return _compose(_scaled(left, 1.0) + _scaled(right, 1.0), normalize, policy)


def assemble_loss_targets(
    loss_fn: BaseLossFunction | ComposedLossFunction,
    predictions: Mapping[str, Tensor],
    batch: Any,
    *,
    workflow: Any = None,
    target_keys: Iterable[str] | None = None,
    batch_label: str = "Batch",
) -> dict[str, Tensor]:
    """The targets of a loss, read from the attributes of the batch.

    Parameters
    ----------
    loss_fn : BaseLossFunction or ComposedLossFunction
        Whose components' `target_key` are wanted.
    predictions, workflow
        Not used here; an assembler of the user's own may make targets from them.
    batch : Batch
        Where the targets are.
    target_keys : iterable of str, optional
        Read these instead.
    batch_label : str
        How to call the batch in the error.

    Raises
    ------
    AttributeError
        If the batch lacks a target, or holds None for it.
    """
    leaves = list(loss_fn.components if isinstance(loss_fn, ComposedLossFunction) else [loss_fn])
    needed_by = {str(leaf.target_key): type(leaf).__name__ for leaf in reversed(leaves)}
    keys = list(reversed(needed_by)) if target_keys is None else list(target_keys)
    targets: dict[str, Tensor] = {}
    for key in keys:
        value = getattr(batch, key, None)
        if value is None:
            raise AttributeError(
                f"{batch_label} is missing target attribute {key!r} required by "
                f"{needed_by.get(key, 'target_keys')}. "
                "Store this label with the data, or leave that loss out."
            )
        targets[key] = value
    return targets


def _compose(
    parts: list[_Part], normalize: bool, policy: DtypePolicy | None
) -> ComposedLossFunction:
    composed = ComposedLossFunction.__new__(ComposedLossFunction)
    composed._assemble(parts, normalize, policy)
    return composed


def _scaled(loss: object, weight: object) -> list[_Part]:
    """The leaves of `loss` with their raw weights times `weight`."""
    if not isinstance(loss, BaseLossFunction | ComposedLossFunction):
        raise TypeError(
            "a loss component must be a BaseLossFunction or a ComposedLossFunction: "
            f"{type(loss).__name__}; subclass BaseLossFunction and write compute_residual"
        )
    if isinstance(weight, Real) and not isinstance(weight, bool):
        weight = float(weight)
    elif not isinstance(weight, LossWeightSchedule):
        raise TypeError(
            f"a loss weight must be a number or a LossWeightSchedule: {weight!r}; "
            "a schedule has per_epoch, __call__(step, epoch) and to_spec()"
        )
    if isinstance(loss, BaseLossFunction):
        return [_Part(loss, weight, 1.0)]
    if not isinstance(weight, float):
        raise TypeError(
            f"a schedule can weight a leaf loss only: {type(weight).__name__} on a "
            "ComposedLossFunction; put it on each component"
        )
    leaves = zip(loss.components, loss.weights, loss.weight_factors, strict=True)
    return [
        _Part(cast(BaseLossFunction, leaf), own, factor * weight) for leaf, own, factor in leaves
    ]


def _nothing(value: Tensor, prediction: Tensor) -> Tensor:
    """Zero in place of ``0 * value``, which would be NaN where the value is, gradients too.

    It still hangs on the prediction: DDP waits for a gradient of every parameter.
    """
    finite = torch.nan_to_num(prediction, 0.0, 0.0, 0.0)
    return (0 * finite).sum().to(value.dtype)


def _component_names(leaves: Sequence[BaseLossFunction]) -> tuple[str, ...]:
    """Class names, those that occur more than once with _0, _1, ... behind."""
    names = [type(leaf).__name__ for leaf in leaves]
    totals, seen = Counter(names), Counter[str]()
    result = []
    for name in names:
        result.append(f"{name}_{seen[name]}" if totals[name] > 1 else name)
        seen[name] += 1
    return tuple(result)


def _check_same(name: str, left: object, right: object) -> None:
    if left != right:
        raise ValueError(
            f"compositions can be joined only if they have the same {name}: {left!r} != {right!r}; "
            f"build one ComposedLossFunction(leaves, weights=[...], {name}=...) instead"
        )
