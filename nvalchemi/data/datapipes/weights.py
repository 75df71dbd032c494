"""Weights of data sets: checked, made from sizes by a temperature, and turned into exact shares."""

import math
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from numbers import Integral, Real
from typing import Any

import numpy as np

from nvalchemi.data.datapipes.order import MAX_SIZE


def check_integer(name: str, value: Any, low: int | None = None) -> int:
    """`value` as int; TypeError if it is none, ValueError if it is below `low`."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if low is not None and value < low:
        raise ValueError(f"{name} must be >= {low}, got {value}")
    return int(value)


def check_flag(name: str, value: Any) -> bool:
    """`value` as bool; TypeError if it is none: "False" from a file or an argument is true."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} must be True or False, got {value!r}")
    return bool(value)


def check_state(state: Any) -> None:
    """TypeError unless `state` is a dict, as `state_dict()` returns it."""
    if not isinstance(state, Mapping):
        raise TypeError(
            f"a state must be the dict that state_dict() returned, got {state!r:.100}; for a pass "
            "from the beginning load none"
        )


def check_weights(weights: Sequence[float], lengths: list[int], name: str) -> list[Any]:
    """One finite weight >= 0 for each data set, not all zero, zero for an empty data set."""
    if not isinstance(weights, Iterable) or isinstance(weights, str):
        raise TypeError(
            f"{name} must be a sequence with a number for each of {len(lengths)} data sets, got "
            f"{weights!r}"
        )
    weights = [entry.item() if hasattr(entry, "item") else entry for entry in weights]
    if len(weights) != len(lengths):
        what = "dataset weights" if name == "weights" else f"entries of {name}"
        raise ValueError(f"Expected {len(lengths)} {what}, got {len(weights)}: {weights}")
    for j, (weight, length) in enumerate(zip(weights, lengths)):
        if isinstance(weight, bool) or not isinstance(weight, Real):
            raise TypeError(f"{name}[{j}] must be a number, got {weight!r}")
        if not math.isfinite(weight) or weight < 0:
            raise ValueError(f"{name}[{j}] must be finite and >= 0, got {weight}")
        if weight > 0 and length == 0:
            raise ValueError(f"{name}[{j}] must be 0, data set {j} is empty, got {weight}")
    if not any(weights):
        raise ValueError(f"{name} must have a positive entry, got {weights}")
    return weights


def temperature_weights(lengths: Sequence[int], temperature: float) -> list[float]:
    """Weights in proportion to size^(1 / temperature); 1 keeps the sizes, infinity makes all equal.

    Raises
    ------
    TypeError, ValueError
        If `temperature` is no number above 0, or so small that no float holds the weights.
    """
    if isinstance(temperature, bool) or not isinstance(temperature, Real):
        raise TypeError(f"temperature must be a number, got {temperature!r}")
    if not temperature > 0:
        raise ValueError(f"temperature must be > 0, got {temperature}")
    try:
        return [float(n) ** (1 / float(temperature)) if n else 0.0 for n in lengths]
    except OverflowError:
        raise ValueError(
            f"temperature must be large enough for size ** (1 / temperature) to be a float, got "
            f"{temperature} and a data set of {max(lengths)} samples"
        ) from None


def exact_shares(weights: Sequence[float]) -> list[int]:
    """Integers in the ratio of `weights`, with a sum of at most 2^40.

    Weights that are fractions with a denominator up to a million as closely as a float can say
    (0.1, 1 / 3) are taken as those fractions; others are rounded to multiples of 2^-40 of the sum,
    at least one for a positive weight.
    """
    first = nearby_fraction(next(weight for weight in weights if weight))
    ratios: list[Fraction] = []
    least = 1  # share of the first, in the smallest integers
    for weight in weights:
        ratios.append(nearby_fraction(weight) / first)
        least = math.lcm(least, ratios[-1].denominator)
        if least > MAX_SIZE:
            return rounded_shares(weights)
    shares = [ratio.numerator * (least // ratio.denominator) for ratio in ratios]
    return shares if sum(shares) <= MAX_SIZE else rounded_shares(weights)


def rounded_shares(weights: Sequence[float]) -> list[int]:
    """Shares to within 2^-40 of the sum, in integers so that all machines agree."""
    ratios = [(w if isinstance(w, int) else float(w)).as_integer_ratio() for w in weights]
    scale = max(below for _, below in ratios)  # powers of two
    whole = [above * (scale // below) for above, below in ratios]
    total, room = sum(whole), MAX_SIZE - len(whole)  # every share may be raised to 1
    return [max(1, part * room // total) if part else 0 for part in whole]


def nearby_fraction(weight: float) -> Fraction:
    simple = Fraction(weight).limit_denominator(10**6)
    return simple if float(simple) == float(weight) else Fraction(weight)
