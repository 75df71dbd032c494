"""The plan for reading: a table of samples, and a summary in some lines."""

from typing import TYPE_CHECKING, Any

import numpy as np

from nvalchemi.sharding.sources import as_indices

if TYPE_CHECKING:
    from nvalchemi.sharding.plan import ShardPlan

ROWS = 10_000_000


def make_table(plan: "ShardPlan", epoch: int, steps: Any, ranks: Any) -> Any:
    try:
        import pandas as pd  # type: ignore[import-untyped]
    except ImportError:
        raise ImportError("to_dataframe() needs pandas: pip install pandas") from None
    columns = as_indices("ranks", ranks, plan.world_size)
    total = int(plan.source.steps(columns, epoch).max(initial=0))
    rows = as_indices("steps", steps, total)
    if len(rows) * len(columns) * plan.batch_size > ROWS:
        raise ValueError(
            f"a table must have at most {ROWS} rows: {len(rows)} steps x {len(columns)} ranks x "
            f"{plan.batch_size} samples are more; choose steps or ranks"
        )
    window = plan.window(rows, columns, epoch)
    step, rank, slot = np.nonzero(window >= 0)
    sample = window[step, rank, slot]
    table = {
        "epoch": np.full(len(sample), epoch),
        "step": rows[step],
        "rank": columns[rank],
        "slot": slot,
        "sample": sample,
        "dataset": plan.samples.dataset_of(sample),
    }
    if plan.samples.costs is not None:
        table[plan.samples.unit] = plan.samples.costs[sample]
    return pd.DataFrame(table)


def describe(plan: "ShardPlan") -> str:
    drawn_late = plan.source.dealing() is not None and not plan.source.cheap
    lines = [
        repr(plan),
        f"hash {plan.hash}; {plan.num_steps()} steps an epoch, {plan.global_batch} samples a step",
    ]
    if plan.source.dealing() is not None:
        lines.append(str(plan.coverage(0)))
    if len(plan.samples.lengths) > 1 and not drawn_late:
        lines.append(str(plan.composition()))
    if plan.samples.costs is not None and plan.num_steps() and not drawn_late:
        lines.append(str(plan.load()))
    lines.append(f"sampler: {plan.startup()}")
    lines += [str(finding) for finding in plan.check()]
    return "\n".join(lines)
