"""Findings about epochs that repeat the order of another one, on all ranks or on some."""

from collections.abc import Iterator

from nvalchemi.sharding.finding import Finding
from nvalchemi.sharding.look import Look

FEW = 12  # of so few samples or batches, two epochs may have the same order by chance

Orders = list[int | None]


def later_epochs(look: Look) -> list[int]:
    """Epochs that are looked at after the first.

    The rule of our samplers and torch's is known and the same in all epochs, and the second is
    enough. Of others the second and the last are looked at, of a record all.
    """
    if not look.drawn:
        return []
    source = look.plan.source
    recorded = getattr(source, "epochs", None)
    if recorded is not None:
        return [int(epoch) for epoch in recorded[1:]]
    if source.dealing() is not None:
        return look.epochs[1:]
    return sorted({1, look.plan.epochs - 1} - {0})


def check_epochs(look: Look, orders: dict[int, Orders]) -> Iterator[Finding]:
    """Epochs that repeat the order of an earlier one."""
    pairs = [repeats([orders[e][i] for e in orders], list(orders)) for i in range(len(look.ranks))]
    drawing = [pair for pair, order in zip(pairs, orders[look.epochs[0]]) if order is not None]
    everywhere = set.intersection(*drawing) if drawing else set()
    if everywhere:
        if look.variety() >= FEW:
            yield everywhere_equal(look, *min(everywhere))
    elif not look.unshuffled:
        alone = [i for i, pair in enumerate(pairs) if pair and look.variety(i) >= FEW]
        if alone:
            yield repeated_by_some(look, alone, *min(pairs[alone[0]]))


def repeats(orders: Orders, epochs: list[int]) -> set[tuple[int, int]]:
    """Pairs of epochs, the first and a later one of the same order."""
    first: dict[int, int] = {}
    pairs = set()
    for epoch, order in zip(epochs, orders):
        if order is not None and first.setdefault(order, epoch) != epoch:
            pairs.add((first[order], epoch))
    return pairs


def everywhere_equal(look: Look, a: int, b: int) -> Finding:
    if look.unshuffled:
        return Finding(
            "info",
            "Every epoch has the same order, that of the data set, because shuffle is off.",
            "Set shuffle=True for a training; for an evaluation this is right.",
            {"check": "no shuffle"},
        )
    return Finding(
        "warning",
        f"Epochs {a} and {b} have the same shuffled order on every rank: set_epoch is missing, not "
        "called, or without effect.",
        "Call sampler.set_epoch(epoch) before each epoch, and let the order depend on it.",
        {"check": "equal epochs", "epochs": [a, b]},
    )


def repeated_by_some(look: Look, columns: list[int], a: int, b: int) -> Finding:
    ranks = look.ranks[columns].tolist()
    named = f"{', '.join(map(str, ranks[:8]))}{', ...' if len(ranks) > 8 else ''}"
    who = f"Rank {named} repeats" if len(ranks) == 1 else f"Ranks {named} repeat"
    return Finding(
        "error",
        f"{who} epoch {a} in epoch {b} and the others do not: ranks deal from other orders, so "
        "that some samples are seen twice and others never.",
        "Call sampler.set_epoch(epoch) on every rank before each epoch.",
        {"check": "epochs of some ranks", "ranks": ranks, "epochs": [a, b]},
    )
