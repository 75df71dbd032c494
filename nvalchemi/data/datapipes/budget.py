"""BudgetBatchSampler: batches up to a number of atoms or edges, drawn anew each epoch."""

import hashlib
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np

from nvalchemi.data.datapipes.lpt import Costs
from nvalchemi.data.datapipes.order import MAX_SIZE, Indices, child_key, derive_key
from nvalchemi.data.datapipes.sample_sizes import Sizes, sample_sizes
from nvalchemi.data.datapipes.sharded import ShardedSampler, resolve_rank
from nvalchemi.data.datapipes.weights import check_flag, check_integer
from nvalchemi.data.datapipes.windows import (
    find_pattern,
    number_of_windows,
    pack_window,
    stratify,
)

HASHED_AT_ONCE = 2**20  # sizes widened to 8 bytes at a time


class BudgetBatchSampler(ShardedSampler[list[int]]):
    """Batches of as many structures as fit in a budget of atoms, edges or both.

    In an epoch every structure has exactly one place. Batches are drawn anew each epoch, but their
    number stays the same, and so does the number of steps: batch i of an epoch goes to rank
    i mod R at step i div R, whatever the number of ranks R, and a position counts batches. Any step
    is reached without those before it (`windows.py` says how).

    Batches are filled evenly, to 0.97 to 0.999 of the budget on average where structures are small
    beside it, so ranks are balanced as well; the numbers of structures in them differ. DDPHook
    weighs the losses of the ranks so that a step is that of their joint batch; with bare DDP, its
    mean over ranks of mean losses is then not quite the mean over structures.

    Starting takes a sort of the sizes (some 30 bytes for each structure for a moment); 4 bytes for
    each stay in memory, beside the sizes.

    Give it to a loader as ``DataLoader(dataset, batch_sampler=...)``, with the manager of a run on
    one rank too, where DDPHook changes nothing; or name it as ``DDPHook(sampler_cls=...)``.

    Parameters
    ----------
    dataset : Dataset, InMemoryDataset, MultiDataset, or anything with a length
        Its ``sizes() -> (atoms, edges)`` is asked once, which reads no structure.
    max_atoms, max_edges : int, optional
        The budget of a batch of one rank; at least one of them.
    oversize : {"error", "alone"}
        What to do with a structure larger than the budget: refuse it by its index, or give it a
        batch of its own.
    sizes : array of shape (N,), or a pair of them, optional
        Atoms, or atoms and edges, of each structure instead of those of the data set.
    num_replicas, rank : int, optional
        Default 1 and 0.
    distributed_manager : DistributedManager, optional
        Gives both, if it is initialised.
    shuffle : bool
        False: every epoch has the batches of epoch 0.
    seed : int
        Batches are a function of seed and epoch.
    drop_last : bool
        False: the first batches come again at the end until all ranks have the same number. True:
        batches that do not fill a step of all ranks are left out.

    Attributes
    ----------
    length : int
        Structures of the data set; each has one place in an epoch.
    num_batches : int
        Batches of an epoch over all ranks, before padding or truncation.
    num_padded, num_dropped : int
        Batches that come again, or that are left out, in an epoch.
    batch_size : int
        Structures that no batch has more of; `window` has so many columns.
    fill : float
        Mean part of the budget (of the scarcer of the two) that batches use.

    Raises
    ------
    ValueError, TypeError
        For no budget or one out of range, sizes that do not fit the data, a structure that does not
        fit, or fewer batches than ranks with drop_last=True.
    """

    yields_batches = True

    def __init__(
        self,
        dataset: Any,
        *,
        max_atoms: int | None = None,
        max_edges: int | None = None,
        oversize: Literal["error", "alone"] = "error",
        sizes: Any = None,
        num_replicas: int | None = None,
        rank: int | None = None,
        distributed_manager: Any = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        self.max_atoms, self.max_edges = check_budget(max_atoms, max_edges)
        if oversize not in ("error", "alone"):
            raise ValueError(f"oversize must be 'error' or 'alone', got {oversize!r}")
        self.oversize, self.shuffle = oversize, check_flag("shuffle", shuffle)
        self._budgets = budgeted_sizes(dataset, sizes, self.max_atoms, self.max_edges)
        if oversize == "error":
            refuse_oversize(self._budgets)
        self._limit = float(np.prod([float(budget) for _, _, budget in self._budgets]))
        self._plan()
        ranks = resolve_rank(num_replicas, rank, distributed_manager)[0]
        if check_flag("drop_last", drop_last) and self.num_batches < ranks:
            raise ValueError(
                f"every rank must have a step: {self.num_batches} batches for {ranks} ranks with "
                "drop_last=True leave none; use fewer ranks, a smaller budget or drop_last=False"
            )
        super().__init__(
            unit=1,
            positions=self.num_batches,
            num_replicas=num_replicas,
            rank=rank,
            distributed_manager=distributed_manager,
            seed=seed,
            generator=None,
            drop_last=drop_last,
        )
        self.length = len(self._strata.order)
        self._computed = -(-self.length * self.num_replicas // self.num_batches)
        dealt = len(self) * self.num_replicas
        self.num_padded = max(0, dealt - self.num_batches)
        self.num_dropped = max(0, self.num_batches - dealt)
        self._packed: tuple[tuple[int, int, int], Indices] | None = None

    def _plan(self) -> None:
        """Sort the data set into strata and find the number of batches; the same in all epochs."""
        costs = self._costs(slice(None))
        samples = len(costs)
        strata = stratify(costs, number_of_windows(samples))
        pattern = find_pattern(strata.largest, self._limit)
        if pattern.batches > samples // strata.windows:
            # hardly two fit together: windows of one sample, so that no batch is ever empty
            strata = stratify(costs, samples)
            pattern = find_pattern(strata.largest, self._limit)
        self._strata, self._pattern = strata, pattern
        self.batch_size = pattern.most
        self.num_batches = strata.windows * pattern.batches
        self.fill = float(costs.sum(axis=0).max() / self._limit / self.num_batches)
        totals = [(name, int(sizes.sum(dtype=np.int64)), n) for name, sizes, n in self._budgets]
        self._totals = (samples, strata.windows, pattern.batches, totals)
        self._sizes_hash = hash_sizes([sizes for _, sizes, _ in self._budgets])

    def _costs(self, samples: Indices | slice) -> Costs:
        """Costs of samples in whole numbers, with one limit for both resources."""
        columns = [
            np.maximum(sizes[samples].astype(np.float64), 1) * (self._limit / budget)
            for _, sizes, budget in self._budgets
        ]
        costs = np.minimum(np.stack(columns, axis=1), self._limit)
        # nothing has room beside a structure that fills or exceeds one of the budgets
        costs[costs.max(axis=1) >= self._limit] = self._limit
        return costs if len(columns) > 1 else costs[:, 0]

    def _window(self, number: int, epoch: int) -> Indices:
        """All batches of a window, shape (batches, batch_size), -1 after the last of each."""
        name = (self.seed, epoch, number)
        if self._packed is None or self._packed[0] != name:
            key = derive_key("budget", self.seed, epoch)
            samples, strata = self._strata.window(number, child_key(key, 0))
            costs = self._costs(samples)
            own = child_key(child_key(key, 1), number)
            rows = pack_window(costs, strata, self._pattern, self._limit, own)
            self._packed = (name, np.append(samples, -1)[rows])
        return self._packed[1]

    def _deal(self, first_units: Indices, ranks: Indices, epoch: int) -> Indices:
        units = (first_units[:, None] + ranks) % self.num_batches
        windows, places = np.divmod(units, self._pattern.batches)
        epoch = epoch if self.shuffle else 0
        out = np.empty((*units.shape, self.batch_size), dtype=np.int64)
        for number in np.unique(windows).tolist():
            here = windows == number
            out[here] = self._window(number, epoch)[places[here]]
        return out

    def _sequence(self, epoch: int) -> Any:
        raise TypeError("BudgetBatchSampler has no order of single samples: use window(...)")

    def _signature(self) -> str:
        return f"{self._totals} sizes={self._sizes_hash} shuffle={self.shuffle}"

    def _emit(self, rows: Indices) -> Iterator[list[int]]:
        for batch, count in zip(rows.tolist(), (rows >= 0).sum(axis=1).tolist()):
            yield batch[:count]


def check_budget(max_atoms: Any, max_edges: Any) -> tuple[int | None, int | None]:
    if max_atoms is None and max_edges is None:
        raise ValueError("a budget must be given: max_atoms, max_edges or both, got neither")
    return (
        None if max_atoms is None else check_integer("max_atoms", max_atoms, 1),
        None if max_edges is None else check_integer("max_edges", max_edges, 1),
    )


def budgeted_sizes(
    dataset: Any, sizes: Any, max_atoms: int | None, max_edges: int | None
) -> list[tuple[str, Sizes, int]]:
    """Name, sizes and budget of each resource that is limited."""
    if not hasattr(dataset, "__len__"):
        raise TypeError(f"dataset must have a length, got {type(dataset).__name__}")
    length = len(dataset)
    if not 1 <= length <= MAX_SIZE:
        raise ValueError(f"dataset must hold 1 to 2^40 samples, got {length}")
    atoms, edges = sample_sizes(dataset, sizes, length)
    limited = [] if max_atoms is None else [("atoms", atoms, max_atoms)]
    if max_edges is not None:
        if edges is None or not edges.any():
            what = "only atoms are given" if edges is None else "no structure has an edge"
            raise ValueError(
                f"max_edges={max_edges} limits edges, and {what}; store neighbour lists, give "
                "sizes=(atoms, edges), or use max_atoms alone"
            )
        limited.append(("edges", edges, max_edges))
    return limited


def hash_sizes(resources: list[Sizes]) -> str:
    """Hash of the sizes of all structures in their order, whatever integers hold them."""
    digest = hashlib.blake2b(digest_size=8, person=b"nvalchemi-sizes")
    for sizes in resources:
        for first in range(0, len(sizes), HASHED_AT_ONCE):
            part = sizes[first : first + HASHED_AT_ONCE]
            digest.update(part.astype("<i8").tobytes())
    return digest.hexdigest()


def refuse_oversize(budgets: list[tuple[str, Sizes, int]]) -> None:
    for name, sizes, budget in budgets:
        above = np.flatnonzero(sizes > budget)
        if above.size:
            first = ", ".join(f"{i} ({sizes[i]} {name})" for i in above[:3].tolist())
            more = f" and {above.size - 3} more" if above.size > 3 else ""
            raise ValueError(
                f"a structure must fit in max_{name}={budget}: samples {first}{more} do not; raise "
                "the budget, leave them out, or pass oversize='alone' for batches of their own"
            )
