"""How one plan differs from another: step by step, and when one goes on where the other stopped."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from nvalchemi.data.datapipes.order import Indices
from nvalchemi.data.datapipes.weights import check_integer
from nvalchemi.sharding.coverage import BLOCK, blocks
from nvalchemi.sharding.overlap import dealt_once
from nvalchemi.sharding.sources import Method
from nvalchemi.sharding.view import sample_steps

if TYPE_CHECKING:
    from nvalchemi.sharding.plan import ShardPlan

COMPARED = 2**21  # draws of each plan that are compared; more steps than that are sampled


@dataclass(frozen=True)
class Resume:
    """An epoch that one plan begins and another one ends.

    Attributes
    ----------
    stop, start : int
        Steps that the first plan has done, and the step at which the other begins.
    seen : int
        Different samples that the first plan has shown.
    again : int
        Those of them that the other shows once more, without its padding.
    never : int
        Samples of the first plan's epoch that neither shows.
    method : {"by construction", "counted"}
    """

    stop: int
    start: int
    seen: int
    again: int
    never: int
    method: Method

    def __str__(self) -> str:
        return (
            f"after {self.stop} steps and on from step {self.start}: {self.seen} samples seen, "
            f"{self.again} of them again, {self.never} never"
        )


@dataclass(frozen=True)
class Diff:
    """Two plans side by side in an epoch.

    Attributes
    ----------
    epoch : int
    steps_compared : int
        Steps in which all ranks together were compared; 0 where the plans have other global
        batches.
    steps_equal : int
        Those in which all ranks together get the same samples.
    all_steps : bool
        Whether all steps of the longer plan were compared, not a part.
    first : (int, int) or None
        Step and rank of the first batch that differs, among those compared and for plans on
        equally many ranks.
    same : bool
        Whether nothing that was compared differs: batch by batch on equally many ranks, else the
        samples of each step.
    resume : Resume or None
    """

    epoch: int
    steps_compared: int
    steps_equal: int
    all_steps: bool
    first: tuple[int, int] | None
    same: bool
    resume: Resume | None

    def __str__(self) -> str:
        looked = f"{self.steps_compared} steps" + ("" if self.all_steps else " looked at")
        if not self.steps_compared:
            text = "the global batches differ in size, so steps can not be compared"
        elif self.same:
            text = f"the same samples in all {looked}"
        else:
            text = f"the same samples in {self.steps_equal} of {looked}"
        if self.first is not None:
            text += f"; batches differ from step {self.first[0]}, rank {self.first[1]} on"
        return text if self.resume is None else f"{text}\n{self.resume}"


def compare_plans(
    one: "ShardPlan", other: "ShardPlan", epoch: int, stop: int | None, start: int | None
) -> Diff:
    if len(one.samples) != len(other.samples):
        raise ValueError(
            "plans can be compared over the same samples only: one has "
            f"{len(one.samples)}, the other {len(other.samples)}"
        )
    if stop is None and start is not None:
        raise ValueError(f"start={start} needs stop, the steps that the first plan has done")
    resume = None if stop is None else measure_resume(one, other, epoch, stop, start)
    if one.global_batch != other.global_batch:
        return Diff(epoch, 0, 0, False, None, False, resume)
    longer = max(one.num_steps(epoch), other.num_steps(epoch))
    shorter = min(one.num_steps(epoch), other.num_steps(epoch))
    steps = sample_steps(one, shorter, COMPARED, one.world_size)
    a, b = (plan.source.window(steps, np.arange(plan.world_size), epoch) for plan in (one, other))
    equal = (sorted_rows(a) == sorted_rows(b)).all(axis=1)
    first = first_difference(a, b, steps) if one.world_size == other.world_size else None
    if first is None and one.world_size == other.world_size and shorter < longer:
        first = (shorter, 0)
    same = bool(equal.all()) and first is None and shorter == longer
    return Diff(epoch, len(steps), int(equal.sum()), len(steps) == longer, first, same, resume)


def sorted_rows(window: Indices) -> Indices:
    return np.sort(window.reshape(len(window), -1), axis=1)


def first_difference(a: Indices, b: Indices, steps: Indices) -> tuple[int, int] | None:
    if a.shape != b.shape:
        return int(steps[0]), 0
    where = np.argwhere((a != b).any(axis=2))
    return (int(steps[where[0, 0]]), int(where[0, 1])) if len(where) else None


def measure_resume(
    one: "ShardPlan", other: "ShardPlan", epoch: int, stop: int, start: int | None
) -> Resume:
    stop = check_step("stop", stop, one.num_steps(epoch))
    if start is None:
        start, rest = divmod(stop * one.global_batch, other.global_batch)
        if rest:
            raise ValueError(
                f"start must be given: {stop} steps of {one.global_batch} samples are no whole "
                f"number of steps of {other.global_batch}"
            )
        start = min(start, other.num_steps(epoch))
    start = check_step("start", start, other.num_steps(epoch))
    return resume_by_arithmetic(one, other, epoch, stop, start) or resume_counted(
        one, other, epoch, stop, start
    )


def check_step(name: str, step: int, most: int) -> int:
    step = check_integer(name, step, 0)
    if step > most:
        raise ValueError(f"{name} must be at most {most}, the steps of an epoch, got {step}")
    return step


def resume_by_arithmetic(
    one: "ShardPlan", other: "ShardPlan", epoch: int, stop: int, start: int
) -> Resume | None:
    """Both deal out the same order, each sample once: prefix and rest are numbers."""
    a, b = one.source.dealing(epoch), other.source.dealing(epoch)
    name = one.source.order_name(epoch)
    if a is None or b is None or name is None or name != other.source.order_name(epoch):
        return None
    if not (a.even and b.even):
        return None
    if not (dealt_once(a, one.samples.lengths) and dealt_once(b, other.samples.lengths)):
        return None
    whole = min(a.positions, a.emitted)
    done = min(stop * one.global_batch, whole)
    begin = min(start * other.global_batch, b.emitted)
    end = min(b.positions, b.emitted)
    never = max(0, min(begin, whole) - done) + max(0, whole - max(end, done))
    return Resume(stop, start, done, max(0, min(done, end) - begin), never, "by construction")


def resume_counted(
    one: "ShardPlan", other: "ShardPlan", epoch: int, stop: int, start: int
) -> Resume:
    before, after, whole = (np.zeros(len(one.samples), dtype=bool) for _ in range(3))
    mark(one, epoch, 0, stop, before)
    mark(other, epoch, start, other.num_steps(epoch), after)
    dealing = other.source.dealing(epoch)
    if dealing is not None and dealt_once(dealing, other.samples.lengths):
        # the beginning of the order, which comes again at the end only to make ranks equally long
        again = np.arange(min(dealing.padded, start * other.global_batch))
        after[other.source.order(again, epoch)] = False
    for block in blocks(one, epoch):
        whole[block] = True
    both = int((before & after).sum())
    never = int((whole & ~before & ~after).sum())
    return Resume(stop, start, int(before.sum()), both, never, "counted")


def mark(plan: "ShardPlan", epoch: int, start: int, stop: int, seen: "np.ndarray") -> None:
    """Mark the samples of some steps."""
    ranks = np.arange(plan.world_size)
    at_once = max(1, BLOCK // plan.global_batch)
    for first in range(start, stop, at_once):
        steps = np.arange(first, min(first + at_once, stop))
        window = plan.source.window(steps, ranks, epoch)
        seen[window[window >= 0]] = True
