"""What a caller asks of a mixture, checked: lengths, weights, counts per batch, epoch length."""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, TypeAlias

from nvalchemi.data.datapipes.mixture import Allocation, FixedBatches, spread
from nvalchemi.data.datapipes.order import MAX_SIZE
from nvalchemi.data.datapipes.weights import (
    check_integer,
    check_weights,
    exact_shares,
    temperature_weights,
)

EPOCH_POLICIES = ("dataset_size", "min_size", "max_size")


@dataclass(frozen=True)
class Composition:
    """How positions are shared out among the data sets.

    Attributes
    ----------
    shares : list of int
        Relative shares, exact.
    allocation : Allocation
        The rule that spreads them over positions.
    asked : bool
        Whether the caller chose it; if not, the shares are the lengths.
    """

    shares: list[int]
    allocation: Allocation
    asked: bool

    def per_batch(self, batch_size: int) -> list[int] | list[float]:
        """Samples of each data set in a batch: integers where every batch has the same number."""
        whole = sum(self.shares)
        if all(batch_size * share % whole == 0 for share in self.shares):
            return [batch_size * share // whole for share in self.shares]
        return [batch_size * share / whole for share in self.shares]


Weights: TypeAlias = Sequence[float] | Mapping[int, Sequence[float]]
Stages: TypeAlias = dict[int, Composition]  # by first epoch, ascending, from 0


def check_policy(epoch_policy: Any) -> None:
    if epoch_policy not in EPOCH_POLICIES:
        raise ValueError(
            f"epoch_policy must be one of {', '.join(map(repr, EPOCH_POLICIES))}, "
            f"got {epoch_policy!r}"
        )


def dataset_lengths(dataset: Any) -> list[int]:
    """Lengths of the data sets in `dataset`, from `.lengths` or from the lengths of `.datasets`."""
    if hasattr(dataset, "lengths"):
        lengths = [check_integer("a data set's length", n, 0) for n in dataset.lengths]
    elif hasattr(dataset, "datasets"):
        lengths = [len(child) for child in dataset.datasets]
    else:
        raise TypeError(
            "dataset must be a MultiDataset (or have .datasets or .lengths), got "
            f"{type(dataset).__name__}; for a single data set use EpochSampler"
        )
    if not 1 <= sum(lengths) <= MAX_SIZE:
        raise ValueError(f"dataset must hold 1 to 2^40 samples, got lengths {lengths}")
    return lengths


def choose_compositions(
    lengths: list[int],
    weights: Weights | None,
    temperature: float | None,
    samples_per_dataset: Sequence[float] | None,
    batch_size: int,
) -> Stages:
    """What holds from which epoch on; a single stage from epoch 0 unless `weights` is a mapping."""
    given = {
        "weights": weights, "temperature": temperature, "samples_per_dataset": samples_per_dataset
    }  # fmt: skip
    asked = [name for name, value in given.items() if value is not None]
    if len(asked) > 1:
        raise ValueError(
            f"{' and '.join(asked)} are mutually exclusive: each says the shares of the data sets, "
            f"got {', '.join(f'{name}={given[name]}' for name in asked)}"
        )
    if isinstance(weights, Mapping):
        return staged_compositions(weights, lengths)
    if weights is not None:
        return {0: weighted_composition(weights, lengths)}
    if temperature is not None:
        tempered = temperature_weights(lengths, temperature)
        return {0: weighted_composition(tempered, lengths, "temperature weights")}
    if samples_per_dataset is not None:
        return {0: counted_composition(samples_per_dataset, lengths, batch_size)}
    return {0: Composition(lengths, spread(lengths), asked=False)}


def staged_compositions(
    weights: Mapping[int, Sequence[float]], lengths: list[int]
) -> dict[int, Composition]:
    first_epochs = [check_integer("the first epoch of a stage", epoch, 0) for epoch in weights]
    if not first_epochs or first_epochs[0] != 0 or first_epochs != sorted(set(first_epochs)):
        raise ValueError(
            "staged weights must be {first epoch: weights} with ascending epochs from 0, got the "
            f"epochs {first_epochs}"
        )
    return {
        first: weighted_composition(own, lengths, f"weights[{first}]")
        for first, own in zip(first_epochs, weights.values())
    }


def stage_at(stages: Stages, epoch: int) -> Composition:
    """The composition of an epoch."""
    return stages[max(first for first in stages if first <= epoch)]


def weighted_composition(
    weights: Sequence[float], lengths: list[int], name: str = "weights"
) -> Composition:
    """Shares in proportion to `weights`."""
    shares = exact_shares(check_weights(weights, lengths, name))
    return Composition(shares, spread(shares), asked=True)


def counted_composition(
    samples_per_dataset: Sequence[float], lengths: list[int], batch_size: int
) -> Composition:
    """Integers: counts that hold in each batch. Any float: ratios, as weights."""
    if not isinstance(samples_per_dataset, Iterable) or isinstance(samples_per_dataset, str):
        raise TypeError(
            "samples_per_dataset must be a sequence with a number for each data set, got "
            f"{samples_per_dataset!r}"
        )
    entries = list(samples_per_dataset)
    if any(isinstance(entry, bool) for entry in entries):
        raise TypeError(
            f"Integer samples_per_dataset entries must be integral counts, got {entries}"
        )
    if not all(isinstance(entry, Integral) for entry in entries):
        return weighted_composition(entries, lengths, "samples_per_dataset")
    counts = [int(entry) for entry in check_weights(entries, lengths, "samples_per_dataset")]
    if sum(counts) != batch_size:
        raise ValueError(
            f"samples_per_dataset must sum to batch_size: {sum(counts)} != {batch_size}"
        )
    return Composition(counts, FixedBatches(counts), asked=True)


def staged_positions(
    stages: Stages,
    lengths: list[int],
    batch_size: int,
    num_replicas: int,
    num_batches: int | None,
    epoch_policy: str,
    replacement: bool | None,
) -> int:
    """`epoch_positions`, which must be the same in all stages: a sampler has one length.

    Every stage must also reach each data set that it has a weight for.
    """
    positions = {
        first: epoch_positions(
            composition,
            lengths,
            batch_size,
            num_replicas,
            num_batches,
            epoch_policy,
            replacement,
        )
        for first, composition in stages.items()
    }
    if len(set(positions.values())) > 1:
        batches = {first: -(-number // batch_size) for first, number in positions.items()}
        raise ValueError(
            f"all stages must have epochs of one length: with epoch_policy={epoch_policy!r} those "
            f"from epochs {list(batches)} on have {list(batches.values())} batches; give "
            f"num_batches (at most {min(batches.values())} where nothing may repeat)"
        )
    for composition in stages.values():
        if composition.asked:
            check_reached(composition, positions[0], batch_size)
    return positions[0]


def epoch_positions(
    composition: Composition,
    lengths: list[int],
    batch_size: int,
    num_replicas: int,
    num_batches: int | None,
    epoch_policy: str,
    replacement: bool | None,
) -> int:
    """Number of positions of an epoch, before anything is padded or dropped for the ranks.

    All samples once, `num_batches` batches of a rank, or as many whole steps of all ranks as the
    policy needs: with a fixed global batch the same on any number of ranks.

    Raises
    ------
    ValueError
        If replacement=False cannot fill it without a repetition.
    """
    total = sum(lengths)
    once = not composition.asked and replacement is not True
    if num_batches is not None:
        if replacement is False:
            most = (
                -(-total // batch_size)
                if once
                else batches_without_repeat(composition, lengths, batch_size)
            )
            check_supported(num_batches, most)
            return min(num_batches * batch_size, total)
        return num_batches * batch_size
    if once:
        return total
    step = batch_size * num_replicas
    if replacement is False:
        return unrepeated_steps(composition, lengths, step, epoch_policy) * step
    if epoch_policy == "dataset_size":
        return -(-total // step) * step
    # steps after which a data set has been seen whole, in exact integers
    whole = sum(composition.shares)
    needed = [
        -(-length * whole // (step * share))
        for length, share in zip(lengths, composition.shares)
        if share
    ]
    return (min(needed) if epoch_policy == "min_size" else max(needed)) * step


def check_supported(num_batches: int, most: int) -> None:
    if num_batches > most:
        raise ValueError(
            f"replacement=False supports at most {most} complete batches, got "
            f"num_batches={num_batches}; leave replacement unset to pass over data sets again"
        )


def unrepeated_steps(
    composition: Composition, lengths: list[int], step: int, epoch_policy: str
) -> int:
    """Steps of `step` samples of all ranks that an epoch with replacement=False has."""
    if epoch_policy == "max_size":
        whole = sum(composition.shares)
        able = [n * whole // (step * s) for n, s in zip(lengths, composition.shares) if s]
        if max(able) > min(able):
            raise ValueError(
                "epoch_policy='max_size' requires replacement=True (or leave replacement unset): "
                f"data set lengths {lengths} last for {able} batches of {step} samples"
            )
    most = batches_without_repeat(composition, lengths, step)
    if most < 1:
        raise ValueError(
            "replacement=False needs one batch of all ranks without a repetition, and lengths "
            f"{lengths} with {composition.per_batch(step)} samples of {step} have none; leave "
            "replacement unset, give num_batches, or lower batch_size"
        )
    return most


def batches_without_repeat(composition: Composition, lengths: list[int], batch_size: int) -> int:
    """Largest number of whole batches in which no data set is drawn more often than it is long."""
    low, high = 0, sum(lengths) // batch_size
    while low < high:
        middle = (low + high + 1) // 2
        drawn = composition.allocation.counts(middle * batch_size)
        if all(k <= length for k, length in zip(drawn, lengths)):
            low = middle
        else:
            high = middle - 1
    return low


def check_reached(
    composition: Composition, positions: int, batch_size: int, name: str = "num_batches"
) -> None:
    """Refuse an epoch in which a data set that the caller asked for gets nothing."""
    drawn = composition.allocation.counts(positions)
    for j, (share, number) in enumerate(zip(composition.shares, drawn)):
        if share and not number:
            low, high = positions, 2 * sum(composition.shares)
            while low < high:
                middle = (low + high) // 2
                if composition.allocation.counts(middle)[j]:
                    high = middle
                else:
                    low = middle + 1
            raise ValueError(
                f"data set {j} has a positive weight and gets no sample in an epoch of {positions} "
                f"samples; the smallest epoch that reaches it has {name}={-(-low // batch_size)}"
            )


def check_no_repeat(lengths: list[int], draws: list[int]) -> None:
    for j, (length, number) in enumerate(zip(lengths, draws)):
        if number > length:
            raise ValueError(
                f"replacement=False gives each sample at most once: data set {j} has {length} "
                f"samples and its share is {number}; lower num_samples or leave replacement unset"
            )


def warn_of_left_over(lengths: list[int], draws: list[int], composition: Composition) -> None:
    wanted = [n if share else 0 for n, share in zip(lengths, composition.shares)]
    if sum(draws) < sum(wanted):
        left = [n - k for n, k in zip(wanted, draws)]
        warnings.warn(
            f"replacement=False uses {sum(draws)} of {sum(wanted)} samples an epoch and leaves "
            f"{left} of the data sets; epoch_policy='max_size' with replacement unset sees all",
            UserWarning,
            stacklevel=4,  # the line that makes the sampler
        )
