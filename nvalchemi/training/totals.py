"""Sums of losses over batches and ranks, in double precision, divided once at the end."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self


@dataclass
class LossTotals:
    """Numerator and denominator of each component.

    A component that has no terms (a user's own loss that overrides forward) counts by structures.
    """

    num_batches: int = 0
    components: dict[str, list[float]] = field(default_factory=dict)
    samples: dict[str, list[float]] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)
    raw_weights: dict[str, float] = field(default_factory=dict)

    def add(self, losses: Mapping[str, Any], batch: Any) -> None:
        """Add the result of the loss function for a batch."""
        self.num_batches += 1
        self.weights.update(losses["per_component_weight"])
        self.raw_weights.update(losses["per_component_raw_weight"])
        terms = losses.get("per_component_terms", {})
        size = float(getattr(batch, "num_graphs", 1))
        for name, value in losses["per_component_unweighted"].items():
            if name in terms:
                part = (float(terms[name].numerator), float(terms[name].denominator))
            else:
                part = (float(value) * size, size)
            _accumulate(self.components, name, part)
        for name, values in losses["per_component_sample"].items():
            labelled = values[~values.isnan()].double()
            _accumulate(self.samples, name, (float(labelled.sum()), float(len(labelled))))

    @classmethod
    def merged(cls, parts: Iterable[Self]) -> Self:
        """Sum over ranks."""
        whole = cls()
        for part in parts:
            whole.num_batches += part.num_batches
            whole.weights.update(part.weights)
            whole.raw_weights.update(part.raw_weights)
            for mine, theirs in (
                (whole.components, part.components),
                (whole.samples, part.samples),
            ):
                for name, sums in theirs.items():
                    _accumulate(mine, name, (sums[0], sums[1]))
        return whole

    def summary(self) -> dict[str, Any]:
        """Quotients; a component whose denominator is zero had no label and is NaN."""
        unweighted = {name: _quotient(sums) for name, sums in self.components.items()}
        # as in training, a component of weight 0 adds nothing, even if it is NaN
        counted = [n for n in unweighted if self.weights[n] != 0]
        return {
            "total_loss": sum(self.weights[name] * unweighted[name] for name in counted),
            "per_component_unweighted": unweighted,
            "per_component_weight": dict(self.weights),
            "per_component_raw_weight": dict(self.raw_weights),
            "per_component_sample": {n: _quotient(sums) for n, sums in self.samples.items()},
            "per_component_sample_count": {n: int(sums[1]) for n, sums in self.samples.items()},
            "num_batches": self.num_batches,
        }


def _accumulate(sums: dict[str, list[float]], name: str, part: tuple[float, float]) -> None:
    there = sums.setdefault(name, [0.0, 0.0])
    there[0] += part[0]
    there[1] += part[1]


def _quotient(sums: list[float]) -> float:
    return sums[0] / sums[1] if sums[1] else float("nan")
