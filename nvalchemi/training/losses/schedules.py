"""Weights of a loss component that change over the training."""

from __future__ import annotations

import math
from abc import abstractmethod
from bisect import bisect_right
from typing import Any, Protocol, runtime_checkable

from pydantic import BaseModel, ConfigDict, FiniteFloat, PositiveInt, model_validator


@runtime_checkable
class LossWeightSchedule(Protocol):
    """What `ComposedLossFunction` accepts in place of a number.

    `per_epoch` says whether the weight follows the epoch rather than the optimizer step.
    """

    @property
    def per_epoch(self) -> bool: ...

    def __call__(self, step: int, epoch: int | None) -> float: ...

    def to_spec(self) -> dict[str, Any]: ...


class _Schedule(BaseModel):
    """A function of the position in the training: of the epoch if `per_epoch`, else of the step."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    per_epoch: bool = False

    def __call__(self, step: int, epoch: int | None = None) -> float:
        """The weight at this optimizer step and epoch.

        Raises
        ------
        ValueError
            If `per_epoch` is set and no epoch is given.
        """
        if not self.per_epoch:
            return self._weight(step)
        if epoch is None:
            raise ValueError(
                f"{type(self).__name__}(per_epoch=True) needs the epoch: pass epoch= with the call"
            )
        return self._weight(epoch)

    @abstractmethod
    def _weight(self, position: int) -> float: ...

    def to_spec(self) -> dict[str, Any]:
        """Class path and fields, JSON-ready."""
        cls = type(self)
        return {"cls_path": f"{cls.__module__}.{cls.__qualname__}", **self.model_dump(mode="json")}


class ConstantWeight(_Schedule):
    """The same weight throughout."""

    value: FiniteFloat

    def _weight(self, position: int) -> float:
        return self.value


class _Ramp(_Schedule):
    start: FiniteFloat
    end: FiniteFloat
    num_steps: PositiveInt

    def _progress(self, position: int) -> float:
        return min(max(position, 0), self.num_steps) / self.num_steps


class LinearWeight(_Ramp):
    """From `start` at 0 along a line to `end` at `num_steps` (epochs if `per_epoch`) and after."""

    def _weight(self, position: int) -> float:
        progress = self._progress(position)
        return (1 - progress) * self.start + progress * self.end


class CosineWeight(_Ramp):
    """From `start` at 0 along half a cosine to `end` at `num_steps` and after."""

    def _weight(self, position: int) -> float:
        rest = 0.5 * (1 + math.cos(math.pi * self._progress(position)))
        return self.end + (self.start - self.end) * rest


class PiecewiseWeight(_Schedule):
    """`values[k]` from `boundaries[k - 1]` on, up to but not including `boundaries[k]`."""

    boundaries: tuple[int, ...]
    values: tuple[FiniteFloat, ...]

    @model_validator(mode="after")
    def _check(self) -> PiecewiseWeight:
        if len(self.values) != len(self.boundaries) + 1:
            raise ValueError(
                "values must have one entry more than boundaries: "
                f"{len(self.values)} != {len(self.boundaries)} + 1"
            )
        if any(b <= a for a, b in zip((0, *self.boundaries), self.boundaries, strict=False)):
            raise ValueError(f"boundaries must be positive and increase: {self.boundaries}")
        return self

    def _weight(self, position: int) -> float:
        return self.values[bisect_right(self.boundaries, position)]
