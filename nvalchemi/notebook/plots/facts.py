"""What a picture says in words and numbers: its question, its truth, its key numbers."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from nvalchemi.sharding.check import NOTED_PADDING, NOTED_UNSEEN
from nvalchemi.sharding.coverage import COUNT_LIMIT, Coverage
from nvalchemi.sharding.sources import Dealing

if TYPE_CHECKING:
    from nvalchemi.sharding.plan import ShardPlan

SIGN = "⚠"
NOT_COUNTED = "not counted"


@dataclass(frozen=True)
class Number:
    """A key number of a picture.

    Attributes
    ----------
    name, value : str
    wrong : bool
        Whether it should be otherwise: drawn in red with a sign.
    """

    name: str
    value: str
    wrong: bool = False

    def __str__(self) -> str:
        return f"{SIGN + ' ' if self.wrong else ''}{self.name}: {self.value}"


@dataclass(frozen=True)
class Facts:
    """The words and numbers of a picture.

    Attributes
    ----------
    view, question, look_for : str
        Which view it is, what it answers, and what in it would be a fault.
    exact : bool
    truth : str
        "exact: ...", or "sample of 2 %: ..." with how far it may be off.
    numbers : tuple of Number
    plan : str
        Samples, ranks, batch, seed, epoch and hash of the plan.
    """

    view: str
    question: str
    look_for: str
    exact: bool
    truth: str
    numbers: tuple[Number, ...]
    plan: str

    @property
    def wrong(self) -> tuple[Number, ...]:
        return tuple(number for number in self.numbers if number.wrong)

    @property
    def alt(self) -> str:
        """The picture in words."""
        numbers = "; ".join(map(str, self.numbers))
        return f"{self.question} ({self.truth}) {numbers}. {self.plan}."

    def __str__(self) -> str:
        return "\n".join([self.question, self.truth, *map(str, self.numbers), self.plan])


def plan_line(plan: "ShardPlan", epoch: int | str) -> str:
    """The line under each picture; plans with equal hashes have equal orders."""
    sampler = getattr(plan.source, "sampler", None)
    seed = getattr(sampler, "seed", plan._seed or None)
    parts = [
        f"{len(plan.samples):,} samples",
        f"{plan.world_size:,} ranks x {plan.batch_size}",
        plan.source.name,
        *([] if seed is None else [f"seed {seed}"]),
        f"epoch {epoch}",
        f"plan {plan.hash}",
    ]
    return ", ".join(parts)


def percent(part: float) -> str:
    """A share with two digits that count."""
    if not part:
        return "0 %"
    if part < 0.0001:
        return f"{100 * part:.1g} %"
    return f"{100 * part:.{2 if part < 0.01 else 1 if part < 0.995 else 0}f} %"


def compact(value: float) -> str:
    """A count in few letters, whole numbers whole."""
    if float(value).is_integer() and abs(value) < 1e6:
        return f"{int(value):,}"
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g} {letter}"
    return f"{value:.3g}"


def audit(plan: "ShardPlan", epoch: int) -> tuple[Number, ...]:
    """Steps, padding, drops, repeats, never seen and idle ranks of an epoch."""
    steps = plan.steps_per_rank(epoch) if whole_ranks(plan) else None
    return (*step_numbers(steps), *coverage_numbers(plan, quick_coverage(plan, [epoch]), 1))


def step_numbers(steps: "np.ndarray | None") -> tuple[Number, ...]:
    if steps is None:
        return (Number("steps", NOT_COUNTED),)
    low, high = int(steps.min()), int(steps.max())
    idle = int((steps == 0).sum())
    uneven = Number("steps", f"{low:,} to {high:,}" if low < high else f"{high:,}", low < high)
    return (uneven, Number("idle ranks", f"{idle:,}", idle > 0))


def whole_ranks(plan: "ShardPlan") -> bool:
    """Whether all ranks can be asked at once: those of an iterated sampler take long one by one."""
    if plan.source.cheap or plan.source.dealing() is not None:
        return True
    return plan.world_size * len(plan.samples) <= COUNT_LIMIT * 4


def quick_coverage(plan: "ShardPlan", epochs: list[int]) -> Coverage | None:
    """Coverage where it takes no longer than a picture may."""
    known = plan.source.dealing() is not None
    if not known and (not whole_ranks(plan) or plan.estimated_draws * len(epochs) > COUNT_LIMIT):
        return None
    return plan.coverage(epochs)


def coverage_numbers(
    plan: "ShardPlan", coverage: Coverage | None, epochs: int
) -> tuple[Number, ...]:
    """Padded, repeated, dropped and never seen: red where the check of a plan would warn."""
    if coverage is None:
        return (Number("padded, repeated, never seen", NOT_COUNTED),)
    about = "" if coverage.method != "expected" else "about "
    unshuffled = plan.source.shuffled is False
    padding = coverage.padded > NOTED_PADDING * coverage.drawn
    unseen = coverage.never > NOTED_UNSEEN * coverage.samples
    again = coverage.repeated > 0 and epochs == 1 and not asked_again(plan, coverage.epochs[0])
    return (
        Number("padded", f"{coverage.padded:,}", coverage.padded > 0 and (padding or unshuffled)),
        Number("repeated", f"{about}{coverage.repeated:,}", again),
        Number("dropped", f"{coverage.dropped:,}", coverage.dropped > 0 and unshuffled),
        Number(
            "never seen",
            f"{about}{coverage.never:,}",
            coverage.never > 0 and (unseen or unshuffled),
        ),
    )


def asked_again(plan: "ShardPlan", epoch: int) -> bool:
    """Whether the caller's weights ask for some samples more than once in an epoch."""
    dealing: Dealing | None = plan.source.dealing(epoch)
    if dealing is None:
        return False
    return dealing.independent or bool((dealing.draws > np.array(plan.samples.lengths)).any())
