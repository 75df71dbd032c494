"""What all our samplers share: one global order dealt to ranks, epochs, positions, and state.

An epoch is a sequence of `num_units` units (batches of `unit` samples, or single samples) over
positions 0, 1, 2, ... with no reference to ranks. At step t rank r of R takes unit t * R + r, so
the samples of a step are the same for every R with the same R * unit; a sampler may deal the
samples of a step out in another way (`_deal`). A block of steps is computed at a time.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch.utils.data import Sampler

from nvalchemi.data.datapipes.order import Indices, derive_key
from nvalchemi.data.datapipes.sequence import EpochOrder
from nvalchemi.data.datapipes.weights import check_flag, check_integer, check_state

T = TypeVar("T", int, list[int])

FIRST_BLOCK = 512  # samples computed for the first block, so that the first batch is quick
BLOCK = 16384  # and at most so many for the blocks to which it grows


class ShardedSampler(Sampler[T], Generic[T]):
    """Base of our samplers; a subclass says how large an epoch is and in what order.

    Attributes
    ----------
    num_replicas, rank, seed, epoch, drop_last
        As given.
    num_units : int
        Batches (or samples) of an epoch over all ranks, before padding or truncation.
    """

    num_replicas: int
    rank: int

    def __init__(
        self,
        *,
        unit: int,
        positions: int,
        num_replicas: int | None,
        rank: int | None,
        distributed_manager: Any,
        seed: int,
        generator: torch.Generator | None,
        drop_last: bool,
    ) -> None:
        self.num_replicas, self.rank = resolve_rank(num_replicas, rank, distributed_manager)
        self.seed = resolve_seed(seed, generator)
        self.drop_last = check_flag("drop_last", drop_last)
        self.epoch = 0
        self._unit = unit
        self._computed = unit  # samples computed for a step
        self.num_units = positions // unit if drop_last else -(-positions // unit)
        self._positions = min(positions, self.num_units * unit)
        self._all_positions = positions  # with those that drop_last leaves out
        self._position = 0  # where the iterator stands
        self._next_start: int | None = None  # where the next one begins, if not at 0
        self._running = 0
        self._order: tuple[int, int, EpochOrder] | None = None
        if len(self) == 0:
            raise ValueError(
                f"every rank must have a step: {self.num_units} "
                f"{'batches' if unit > 1 else 'samples'} for {self.num_replicas} ranks with "
                "drop_last=True leave none; use fewer ranks, a smaller batch_size or "
                "drop_last=False"
            )

    def _sequence(self, epoch: int) -> EpochOrder:
        """The order of an epoch."""
        raise NotImplementedError

    def _signature(self) -> str:
        """All that the order depends on beside seed, epoch and position."""
        raise NotImplementedError

    def _emit(self, rows: Indices) -> Iterator[T]:
        """Rows of a window, shape (steps, unit), as what the sampler yields."""
        raise NotImplementedError

    def __len__(self) -> int:
        """Number of steps of this rank, the same on all ranks."""
        return self._steps_from(0)

    def _steps_from(self, first_unit: int) -> int:
        left = max(self.num_units - first_unit, 0)
        return left // self.num_replicas if self.drop_last else -(-left // self.num_replicas)

    def order(self, positions: Indices, epoch: int | None = None) -> Indices:
        """Sample indices at positions of the global order of an epoch (default: the present)."""
        epoch = self.epoch if epoch is None else epoch
        if self._order is None or self._order[:2] != (self.seed, epoch):
            self._order = (self.seed, epoch, self._sequence(epoch))
        return self._order[2](positions)

    def window(
        self,
        steps: Sequence[int] | Indices,
        ranks: Sequence[int] | Indices,
        epoch: int | None = None,
    ) -> Indices:
        """Samples of any steps and ranks, without iterating.

        Returns
        -------
        int64 array, shape (len(steps), len(ranks), batch_size or 1)
            -1 where a last batch is short.
        """
        first_units = np.asarray(steps, dtype=np.int64) * self.num_replicas
        epoch = self.epoch if epoch is None else epoch
        return self._deal(first_units, np.asarray(ranks, dtype=np.int64), epoch)

    def _deal(self, first_units: Indices, ranks: Indices, epoch: int) -> Indices:
        """Samples that ranks get at steps, each given by its first unit: (steps, ranks, unit)."""
        return self._units(first_units[:, None] + ranks, epoch)

    def _units(self, units: Indices, epoch: int) -> Indices:
        """Samples of units, shape units.shape + (unit,); past the end the first ones again."""
        positions = (units % self.num_units)[..., None] * self._unit + np.arange(self._unit)
        inside = np.minimum(positions, self._positions - 1)
        indices = self.order(inside.ravel(), epoch).reshape(positions.shape)
        indices[positions >= self._positions] = -1
        return indices

    def __iter__(self) -> Iterator[T]:
        start, self._next_start = self._next_start or 0, None
        self._position = start
        self._running += 1
        return self._run(start // self._unit + (start % self._unit > 0), self.epoch, self._running)

    def _run(self, first_unit: int, epoch: int, running: int) -> Iterator[T]:
        steps = self._steps_from(first_unit)
        own = np.array([self.rank])
        step, block = 0, max(1, FIRST_BLOCK // self._computed)
        while step < steps:
            numbers = np.arange(step, min(step + block, steps))
            rows = self._deal(first_unit + numbers * self.num_replicas, own, epoch)
            for batch in self._emit(rows[:, 0]):
                step += 1
                if self._running == running:
                    self._position = self.position_after(first_unit * self._unit, step)
                yield batch
            block = max(1, min(4 * block, BLOCK // self._computed))

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass. A new epoch begins at its first step."""
        epoch = check_integer("epoch", epoch, 0)
        if epoch != self.epoch:
            self.epoch, self._position, self._next_start = epoch, 0, None

    def set_epoch_step(self, step: int) -> None:
        """Let the next pass begin at a step of the epoch, in O(1); `len` stays the same."""
        step = check_integer("step", step, 0)
        if step > len(self):
            raise ValueError(f"step must be <= {len(self)}, the steps of an epoch, got {step}")
        self.set_position(min(step * self.num_replicas * self._unit, self._positions))

    def set_position(self, position: int) -> None:
        """Let the next pass begin at a position of the global order, in O(1).

        Parameters
        ----------
        position : int
            Samples of the epoch that all ranks together have consumed: a multiple of the batch
            size, or the end of the epoch.
        """
        position = check_integer("position", position, 0)
        if position > self._positions or (position % self._unit and position != self._positions):
            raise ValueError(
                f"position must be a multiple of the batch size {self._unit} and at most "
                f"{self._positions}, got {position}"
            )
        self._position = self._next_start = position

    @property
    def next_position(self) -> int | None:
        """Where the next pass begins, if it was set and the pass has not begun."""
        return self._next_start

    def position_after(self, position: int, steps: int) -> int:
        """Position of all ranks when each has taken `steps` steps of a pass begun at `position`."""
        first_unit = -(-position // self._unit)
        return min((first_unit + steps * self.num_replicas) * self._unit, self._positions)

    def state_dict(self, position: int | None = None) -> dict[str, Any]:
        """Where the order stands: seed, epoch, samples consumed by all ranks, and its signature.

        Parameters
        ----------
        position : int, optional
            Samples consumed, if not those of the batches that the sampler has given out: what reads
            ahead of the training loop knows better.
        """
        return {
            "seed": self.seed,
            "epoch": self.epoch,
            "position": self._position if position is None else position,
            "order": self._order_hash(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on exactly where `state_dict` was taken, on any number of ranks.

        A position after which the ranks have no step left means the end of the epoch.

        Raises
        ------
        TypeError
            If the state is no dict.
        ValueError
            If the state belongs to another order, or its position lies inside a batch.
        """
        check_state(state)
        missing = {"seed", "epoch", "position", "order"} - set(state)
        if missing:
            raise ValueError(f"a sampler's state must have {sorted(missing)}, got {sorted(state)}")
        if state["order"] != self._order_hash():
            raise ValueError(
                "the state belongs to another order: lengths, weights, samples_per_dataset ratios, "
                "replacement, shuffle and locality must be the same; this sampler has "
                f"{self._signature()[:300]}"
            )
        seed = check_integer("seed", state["seed"])
        epoch = check_integer("epoch", state["epoch"], 0)
        position = check_integer("position", state["position"], 0)
        self.set_position(self._positions if self._is_end(position) else position)
        self.seed, self.epoch = seed, epoch

    def _is_end(self, position: int) -> bool:
        """Whether a state's position, of other ranks or drop_last, leaves no step here."""
        step = self.num_replicas * self._unit
        last = -(-self._all_positions // step) * step
        return len(self) * step <= position <= last

    def _order_hash(self) -> str:
        return format(int(derive_key("signature", self._signature())[0]), "016x")


def resolve_seed(seed: int, generator: torch.Generator | None) -> int:
    """The seed, or one drawn from `generator` once."""
    seed = check_integer("seed", seed)
    if generator is None:
        return seed
    if not isinstance(generator, torch.Generator):
        raise TypeError(f"generator must be a torch.Generator, got {generator!r}; or give seed")
    if seed != 0:
        raise ValueError(f"give seed or generator, not both: got seed={seed} and a generator")
    return int(torch.randint(2**62, (), generator=generator, device=generator.device))


def resolve_rank(num_replicas: int | None, rank: int | None, manager: Any) -> tuple[int, int]:
    """World size and rank: those of an initialised manager, else those given, else 1 and 0."""
    if manager is not None and is_initialised(manager):
        if not hasattr(manager, "world_size") or not hasattr(manager, "rank"):
            raise TypeError(
                f"distributed_manager must have rank and world_size, got {manager!r}; give a "
                "DistributedManager, or num_replicas and rank"
            )
        own = (int(manager.world_size), int(manager.rank))
        for name, given, known in zip(("num_replicas", "rank"), (num_replicas, rank), own):
            if given is not None and given != known:
                raise ValueError(
                    f"{name}={given} contradicts the distributed_manager, which has {known}; "
                    "give one of the two"
                )
        return own
    replicas = 1 if num_replicas is None else check_integer("num_replicas", num_replicas, 1)
    own_rank = 0 if rank is None else check_integer("rank", rank)
    if not 0 <= own_rank < replicas:
        raise ValueError(f"rank must be in [0, {replicas}), got {own_rank}")
    return replicas, own_rank


def is_initialised(manager: Any) -> bool:
    answer = getattr(manager, "is_initialized", True)
    return bool(answer() if callable(answer) else answer)
