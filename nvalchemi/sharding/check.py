"""Findings about a plan: what would go wrong, in one sentence, and one remedy."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from nvalchemi.sharding.check_epochs import check_epochs, later_epochs
from nvalchemi.sharding.check_ranks import check_identical, check_overlap, check_steps
from nvalchemi.sharding.composition import (
    SIGMAS,
    Composition,
    explained_gap,
    variance_ratio,
    wished_shares,
)
from nvalchemi.sharding.finding import SEVERITIES, Finding, amount, counted
from nvalchemi.sharding.iterated import IteratedSource
from nvalchemi.sharding.look import Look

if TYPE_CHECKING:
    from nvalchemi.sharding.plan import ShardPlan

FAR = 0.5  # of the share asked for, below which a data set is called starved
STARVED = "starved data set"
STRIPES = 4.0  # times the variance within batches that a random order has
NOTED_PADDING = 0.01  # part of an epoch that may be padding
NOTED_UNSEEN = 0.01  # part of the samples that may stay unseen


def check_plan(plan: "ShardPlan", max_imbalance: float, seed: int) -> list[Finding]:
    if not max_imbalance >= 1:
        raise ValueError(f"max_imbalance must be >= 1 (even ranks), got {max_imbalance}")
    look = Look(plan, max_imbalance, seed)
    findings = [finding for check in CHECKS for finding in check(look)]
    orders = {look.epochs[0]: look.orders}
    looks = [look]
    for epoch in later_epochs(look):
        later = Look(plan, max_imbalance, seed, epoch)
        orders[epoch] = later.orders
        known = {finding.data["check"] for finding in findings}
        for check in EPOCH_CHECKS if epoch < plan.epochs else ():
            findings += [in_epoch(f, epoch) for f in check(later) if f.data["check"] not in known]
        looks += [later] if epoch < plan.epochs else []
    findings = [unless_by_chance(finding, looks) for finding in findings]
    findings += check_epochs(look, orders)
    return sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))


def in_epoch(finding: Finding, epoch: int) -> Finding:
    sentence = f"In epoch {epoch}: {finding.sentence[0].lower()}{finding.sentence[1:]}"
    return replace(finding, sentence=sentence, data={**finding.data, "epoch": epoch})


def unless_by_chance(finding: Finding, looks: list[Look]) -> Finding:
    """A data set that gets nothing in an epoch: no error if chance may do that, and not always."""
    data = finding.data
    if data["check"] != STARVED or data["count"] or data["wish"] > SIGMAS**2:
        return finding
    j = data["dataset"]
    got = {
        look.epochs[0]: int(look.composition.counts[j])
        for look in looks
        if look.composition is not None
    }
    reached = [epoch for epoch, number in got.items() if number]
    if not reached:
        return finding
    empty = [epoch for epoch, number in got.items() if not number]
    return Finding(
        "warning",
        f"Data set {j} gets no sample in epoch {empty[0]} and {got[reached[0]]} in epoch "
        f"{reached[0]}: of so few (about {data['wish']:.2g} an epoch are asked for) the order "
        "leaves out all now and then.",
        "Use drop_last=False, or raise its weight.",
        data,
    )


def check_seed(look: Look) -> Iterator[Finding]:
    if look.seed and look.plan.source.shuffled is False:
        yield Finding(
            "warning",
            f"The seed {look.seed} has no effect because shuffle is off.",
            "Set shuffle=True, or leave the seed out.",
            {"check": "seed without effect", "seed": look.seed},
        )


def check_reproducible(look: Look) -> Iterator[Finding]:
    """Orders that are drawn from a global generator can not be planned."""
    source = look.plan.source
    if not isinstance(source, IteratedSource) or not look.complete:
        return
    again = source.iterate(int(look.ranks[0]), look.epochs[0], state=1)
    if not np.array_equal(again[0], source.log(int(look.ranks[0]), look.epochs[0])[0]):
        yield Finding(
            "warning",
            f"{source.name} draws from a global random generator: ranks and runs have orders that "
            "no plan can foresee.",
            "Draw from a generator of its own, seeded with (seed, epoch).",
            {"check": "not reproducible"},
        )


def check_shares(look: Look) -> Iterator[Finding]:
    """Data sets that get nothing, or much less than asked, and batches of one data set."""
    composition = look.composition
    if composition is None:
        return
    drawn, told = composition.counts.sum(), []
    for j, (asked, count) in enumerate(zip(composition.asked, composition.counts.tolist())):
        wish = asked * drawn
        data = {"check": STARVED, "dataset": j, "asked": asked, "count": count, "wish": wish}
        if asked and not count:
            told.append(j)
            yield Finding(
                "error",
                f"Data set {j} is asked for ({asked:.2%}) and gets no sample{look.counted_in}.",
                "Raise its weight, the batch size or the length of an epoch.",
                data,
            )
        elif asked and count < FAR * wish and wish - count > SIGMAS * np.sqrt(wish):
            told.append(j)
            yield Finding(
                "warning",
                f"Data set {j} gets {count / drawn:.2%} of the samples and {asked:.2%} were asked "
                f"for{look.counted_in}.",
                "See whether the sampler uses the weights at all.",
                data,
            )
    yield from check_wishes(look, composition, told)
    yield from check_stripes(look)
    yield from check_rank_shares(look)


def check_wishes(look: Look, composition: Composition, told: list[int]) -> Iterator[Finding]:
    """Shares that were asked for by name, and are missed by more than chance and rounding.

    Some data sets have been told to be starved; the others share what these should have.
    """
    if wished_shares(look.plan) is None:
        return
    asked, counts = composition.asked, composition.counts
    ratio = variance_ratio(composition.per_batch, composition.realised)
    whole = composition.method != "sampled"
    explained = explained_gap(look.plan, composition.epoch, asked, counts, whole, ratio)
    drawn = max(1, int(counts.sum()))
    more = counts - asked * drawn
    gap = np.abs(more)
    wrong = gap > explained - np.where(more > 0, more[told].sum(), 0.0)
    wrong[told] = False
    off = np.flatnonzero(wrong)
    if off.size:
        off = off[np.argsort(-gap[off], kind="stable")]
        got = composition.realised
        each = [f"{got[j]:.2%} of data set {j} ({asked[j]:.2%} asked for)" for j in off[:3]]
        others = f" and of {counted(off.size - 3, 'other')}" if off.size > 3 else ""
        yield Finding(
            "warning",
            f"Other shares than asked for: {', '.join(each)}{others}{look.counted_in}; chance and "
            f"rounding explain {explained[off[0]] / drawn:.2%}.",
            "See whether the sampler uses the weights at all; MultiDatasetBatchSampler keeps them.",
            {
                "check": "shares",
                "datasets": off.tolist(),
                "asked": asked[off].tolist(),
                "realised": got[off].tolist(),
                "explained": (explained[off] / drawn).tolist(),
            },
        )


def check_stripes(look: Look) -> Iterator[Finding]:
    """Batches that are blocks of one data set although the order is shuffled."""
    composition = look.composition
    if composition is None or look.unshuffled or composition.spread_kind != "standard deviation":
        return
    # against the shares that are realised: other ones than asked for are told above
    ratio = variance_ratio(composition.per_batch, composition.realised)
    batches = composition.per_batch[..., 0].size
    if ratio > STRIPES and batches > 4 and look.plan.batch_size > 1:
        yield Finding(
            "warning",
            "Batches are blocks of one data set: their shares vary with "
            f"{ratio:.0f} times the variance of a random order.",
            "Shuffle over all data sets, or mix them in each batch (MultiDatasetBatchSampler).",
            {"check": "stripes", "variance ratio": ratio},
        )


def check_rank_shares(look: Look) -> Iterator[Finding]:
    """Ranks whose mixture is not that of the others."""
    composition = look.composition
    if composition is None or len(look.ranks) < 2:
        return
    got = composition.per_batch.sum(axis=0).astype(np.float64)  # (R, D)
    expected = got.sum(axis=1, keepdims=True) * (got.sum(axis=0) / max(1.0, got.sum()))
    off = np.abs(got - expected)
    wrong = (off > FAR * expected) & (off > SIGMAS * np.sqrt(np.maximum(expected, 1)))
    if wrong.any():
        column, j = np.unravel_index(int((off * wrong).argmax()), off.shape)
        own = got[column, j] / got[column].sum()
        dealing = look.plan.source.dealing(look.epochs[0])
        whole_batches = dealing is not None and dealing.unit == look.plan.batch_size
        yield Finding(
            "info" if whole_batches else "warning",
            f"Rank {look.ranks[column]} gets {own:.0%} from data set {j} and all ranks together "
            f"{got[:, j].sum() / got.sum():.0%}{look.looked_at}.",
            "Each step of all ranks is as asked, and DDP averages over it; for ranks that are "
            "alike take a batch_size that holds whole numbers of each data set."
            if whole_batches
            else "Deal out whole batches of the mixture (MultiDatasetBatchSampler), not every R-th "
            "sample.",
            {"check": "rank composition", "rank": int(look.ranks[column]), "dataset": int(j)},
        )


def check_load(look: Look) -> Iterator[Finding]:
    load = look.load
    if load is None:
        return
    big = load.largest
    where = "" if load.all_steps else f" of the {load.cost.size} looked at"
    yield Finding(
        "info",
        f"The largest batch{where} has {amount(big.cost, load.unit)} (epoch {big.epoch}, step "
        f"{big.step}, rank {big.rank}); the data allow {load.bound:.6g}.",
        "Try the largest one on the device before the training.",
        {"check": "largest batch", "largest": big, "bound": load.bound},
    )
    if load.imbalance > look.max_imbalance:
        yield Finding(
            "warning",
            f"The slowest rank has {load.imbalance:.2f} times the mean {load.unit} of its step, so "
            f"DDP works at {load.efficiency:.0%} of what even ranks would.",
            "Deal the samples of a step out by size (BalancedBatchSampler), or use larger batches.",
            {"check": "imbalance", "imbalance": load.imbalance, "efficiency": load.efficiency},
        )


def check_coverage(look: Look) -> Iterator[Finding]:
    coverage = look.coverage
    if coverage is None:
        yield Finding(
            "info",
            f"Samples seen and not seen were not counted: {look.plan.source.name} has to be "
            f"enumerated on {counted(look.plan.world_size, 'rank')}.",
            "Call plan.coverage(exact=True) where the time does not matter.",
            {"check": "not counted"},
        )
        return
    epochs = len(coverage.epochs)
    if coverage.padded:
        each, drawn = coverage.padded // epochs, coverage.drawn // epochs
        harmful = look.unshuffled or each > NOTED_PADDING * drawn
        yield Finding(
            "warning" if harmful else "info",
            f"{each} of {drawn} draws of an epoch {'is' if each == 1 else 'are'} padding: an "
            f"evaluation would count {'this sample' if each == 1 else 'these samples'} twice.",
            "Evaluate with ValidationConfig or ExactEvalSampler, which count each sample once.",
            {"check": "padding", "padded": each, "drawn": drawn},
        )
    if coverage.never:
        part = coverage.never / coverage.samples
        about = "About " if coverage.method == "expected" else ""
        verb = "is" if coverage.never == 1 else "are"
        where = f"in none of the {epochs} planned epochs" if epochs > 1 else "not in the epoch"
        yield Finding(
            "warning" if look.unshuffled or part > NOTED_UNSEEN else "info",
            f"{about}{coverage.never} of {counted(coverage.samples, 'sample')} {verb} {where}.",
            "Use drop_last=False, more epochs, or shares nearer to the lengths.",
            {"check": "never seen", "never": coverage.never, "never_of": coverage.never_of},
        )


def check_drawn(look: Look) -> Iterator[Finding]:
    if look.window is None:
        yield Finding(
            "info",
            f"The order of {counted(len(look.plan.samples), 'sample')} was not drawn: "
            f"{look.plan.source.name} makes it whole, on every rank and in every epoch.",
            "Use EpochSampler as sampler_cls, which starts at once.",
            {"check": "not drawn"},
        )


CHECKS: tuple[Callable[[Look], Iterator[Finding]], ...] = (
    check_steps,
    check_identical,
    check_overlap,
    check_seed,
    check_reproducible,
    check_shares,
    check_load,
    check_coverage,
    check_drawn,
)
# what is looked at in later epochs, too
EPOCH_CHECKS = (check_steps, check_identical, check_overlap, check_shares)
