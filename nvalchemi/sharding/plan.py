"""ShardPlan: what every rank will see, as arrays, before anything runs."""

from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np
from torch.utils.data import DistributedSampler

from nvalchemi.data.datapipes.locality import LocalityPrice, measured_price
from nvalchemi.data.datapipes.order import Indices
from nvalchemi.data.datapipes.weights import check_integer
from nvalchemi.sharding.check import check_plan
from nvalchemi.sharding.choose import default_sampler, source_of_class, source_of_instances
from nvalchemi.sharding.compare import Comparison, RecordedSource, compare_record
from nvalchemi.sharding.composition import Composition, measure_composition
from nvalchemi.sharding.coverage import Coverage, measure_coverage
from nvalchemi.sharding.diff import Diff, compare_plans
from nvalchemi.sharding.finding import Finding
from nvalchemi.sharding.fingerprint import hash_order
from nvalchemi.sharding.load import Load, measure_load
from nvalchemi.sharding.loaders import epochs_of, find_hook, source_of_loader
from nvalchemi.sharding.overlap import Overlap, measure_overlap
from nvalchemi.sharding.record import Record
from nvalchemi.sharding.replan import Made
from nvalchemi.sharding.samples import SampleSet
from nvalchemi.sharding.sources import Source, as_indices, spread_ranks
from nvalchemi.sharding.startup import Startup, measure_startup
from nvalchemi.sharding.table import describe, make_table
from nvalchemi.sharding.view import Chosen, choose_view

LOCALITY_VIEWED = 2**17  # of which chunks are counted, batch by batch
MANY_RANKS = 16  # ranks whose whole epochs are compared unasked where they must be enumerated


class ShardPlan:
    """Which samples go to which rank, in which step and epoch; computed when it is asked for.

    Parameters
    ----------
    dataset_or_lengths : data set, int, or sequence of int
        A data set, or the length of one, or the lengths of several behind one index (as a
        MultiDataset). Lengths are enough for everything but sizes.
    sampler : class, factory, sampler, list of samplers, or None
        None: what DDPHook installs, torch's DistributedSampler for one data set and
        MultiDatasetBatchSampler for several. A class or factory is called as DDPHook calls its
        ``sampler_cls``. A built sampler must be able to tell the samples of all ranks: one with
        ``window(steps, ranks, epoch)``, or torch's DistributedSampler itself; others come as a
        list with one for each rank, which are iterated.
    world_size : int
        Number of ranks.
    batch_size : int, optional
        Samples in a batch of one rank; needed unless the sampler has its own.
    epochs : int
        Epochs that the training will take.
    shuffle, seed, drop_last
        What the sampler is built with, where it knows them.
    sampler_kwargs : mapping, optional
        Further arguments of the sampler, over those.
    sizes : array, shape (N,), or a pair of them, optional
        Atoms, or atoms and edges, of each sample; by default what ``dataset.sizes()`` says, which
        reads no samples.
    costs : array, shape (N,), optional
        Cost of each sample, instead of its atoms.

    Attributes
    ----------
    samples : SampleSet
        Lengths, offsets and sizes.
    world_size, epochs : int
    source
        Where the indices come from.

    Raises
    ------
    ValueError, TypeError
        For arguments that contradict each other, or that the sampler refuses.

    Notes
    -----
    A sampler with ``window`` is asked for what is needed. The order of torch's DistributedSampler
    is drawn once per epoch (0.1 s and 8 MB per million samples). Any other class is built for each
    rank and iterated once per epoch. Results say whether they follow by construction, were counted,
    or were sampled, and how large the error is then.
    """

    def __init__(
        self,
        dataset_or_lengths: Any,
        *,
        sampler: Any = None,
        world_size: int,
        batch_size: int | None = None,
        epochs: int = 1,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        sampler_kwargs: Mapping[str, Any] | None = None,
        sizes: Any = None,
        costs: Any = None,
    ) -> None:
        samples = SampleSet(dataset_or_lengths, sizes, costs)
        world_size = check_integer("world_size", world_size, 1)
        if batch_size is not None:
            batch_size = check_integer("batch_size", batch_size, 1)
        seed = check_integer("seed", seed)
        for name, value in (("shuffle", shuffle), ("drop_last", drop_last)):
            if not isinstance(value, bool):
                raise TypeError(f"{name} must be True or False, got {value!r}")
        kwargs = dict(sampler_kwargs or {})
        built = hasattr(sampler, "__iter__") and not isinstance(sampler, type)
        given = {"shuffle": shuffle, "seed": seed, "drop_last": drop_last}
        if built:
            if seed or not shuffle or kwargs:
                raise ValueError(
                    "seed, shuffle and sampler_kwargs are for a sampler that the plan builds, and "
                    f"{type(sampler).__name__} is built already: leave them out or pass its class"
                )
            source = source_of_instances(sampler, samples, world_size, batch_size, drop_last)
        elif sampler is None or callable(sampler):
            source = source_of_class(
                sampler or default_sampler(samples),
                samples,
                world_size,
                {**given, "batch_size": batch_size},
                kwargs,
            )
        else:
            raise TypeError(
                "sampler must be a class, a factory, a sampler, or a list of one per rank, got "
                f"{sampler!r}"
            )
        made = None if built else Made(sampler, given={**given, "batch_size": batch_size})
        self._fill(samples, source, epochs, kwargs, made)
        self._seed = int(kwargs.get("seed", seed))

    def _fill(
        self,
        samples: SampleSet,
        source: Source,
        epochs: int,
        sampler_kwargs: dict[str, Any],
        made: Made | None = None,
    ) -> None:
        self.samples = samples
        self.source = source
        self.world_size = source.world_size
        self.epochs = check_integer("epochs", epochs, 1)
        self.sampler_kwargs = sampler_kwargs
        self._seed = int(sampler_kwargs.get("seed") or 0)
        self._hash: str | None = None
        self._made = made

    @classmethod
    def from_loader(
        cls,
        loader: Any,
        *,
        world_size: int,
        epochs: int = 1,
        sampler_cls: Any = DistributedSampler,
        sampler_kwargs: Mapping[str, Any] | None = None,
        sizes: Any = None,
        costs: Any = None,
    ) -> Self:
        """Plan of what DDPHook makes of a loader, which stays as it is.

        Parameters
        ----------
        loader : DataLoader
            Ours or torch's.
        sampler_cls, sampler_kwargs
            As of DDPHook.

        Raises
        ------
        ValueError
            If DDPHook would refuse the loader, with its sentence.
        """
        if not hasattr(loader, "dataset") or not hasattr(loader, "sampler"):
            raise TypeError(
                "loader must have a dataset and a sampler to be planned, got "
                f"{type(loader).__name__}"
            )
        # a list is a data set here, not lengths
        rows = isinstance(loader.dataset, list | tuple)
        samples = SampleSet(len(loader.dataset) if rows else loader.dataset, sizes, costs)
        kwargs = dict(sampler_kwargs or {})
        world_size = check_integer("world_size", world_size, 1)
        plan = cls.__new__(cls)
        source = source_of_loader(loader, samples, world_size, sampler_cls, kwargs)
        plan._fill(samples, source, epochs, kwargs, Made(sampler_cls, loader))
        return plan

    @classmethod
    def from_strategy(cls, strategy: Any, loader: Any, *, world_size: int, **options: Any) -> Self:
        """Plan of ``strategy.run(loader)`` on some ranks, with the settings of its DDPHook.

        Parameters
        ----------
        strategy : TrainingStrategy
        **options
            sizes, costs.
        """
        hook = find_hook(strategy)
        plan = cls.from_loader(
            loader,
            world_size=world_size,
            sampler_cls=hook.sampler_cls,
            sampler_kwargs=hook.sampler_kwargs,
            **options,
        )
        plan.epochs = epochs_of(strategy, plan.num_steps())
        return plan

    @classmethod
    def from_record(
        cls, dataset_or_lengths: Any, record: Record, *, session: int = -1, sizes: Any = None
    ) -> Self:
        """What ranks did see, as a plan: to check, to draw, or to compare with another one."""
        samples = SampleSet(dataset_or_lengths, sizes)
        try:
            recorded = RecordedSource(record.sessions[session], len(samples))
        except IndexError:
            raise ValueError(
                f"session must be one of {len(record.sessions)} of the record, got {session}"
            ) from None
        plan = cls.__new__(cls)
        plan._fill(samples, recorded, int(recorded.epochs.max(initial=0)) + 1, {})
        return plan

    # Sizes.

    @property
    def batch_size(self) -> int:
        """Samples of a full batch of one rank."""
        return self.source.batch_size

    @property
    def global_batch(self) -> int:
        """Samples of a full step of all ranks."""
        return self.batch_size * self.world_size

    def steps_per_rank(self, epoch: int = 0) -> Indices:
        """Batches of each rank in an epoch, int64 (R,)."""
        return self.source.steps(np.arange(self.world_size), check_integer("epoch", epoch, 0))

    def num_steps(self, epoch: int = 0) -> int:
        """Batches of an epoch, of the longest rank."""
        return int(self.steps_per_rank(epoch).max(initial=0))

    @property
    def estimated_draws(self) -> int:
        """Samples of an epoch over all ranks, if these are like rank 0."""
        return int(self.source.steps(np.array([0]), 0)[0]) * self.global_batch

    # What is where.

    def batch(self, rank: int, step: int, epoch: int = 0) -> Indices:
        """Samples of one batch, int64 (b,)."""
        row = self.window([step], [rank], epoch)[0, 0]
        return row[row >= 0]

    def window(self, steps: Chosen, ranks: Chosen = None, epoch: int = 0) -> Indices:
        """Samples of steps and ranks (default all), int64 (S, R, B); -1 where there is none."""
        epoch = check_integer("epoch", epoch, 0)
        chosen = as_indices("ranks", ranks, self.world_size)
        rows = as_indices("steps", steps, int(self.source.steps(chosen, epoch).max(initial=0)))
        return self.source.window(rows, chosen, epoch)

    # What follows.

    def composition(
        self, epoch: int = 0, *, steps: Chosen = None, ranks: Chosen = None
    ) -> Composition:
        """Shares of the data sets, asked and realised; by default of a sample of the steps."""
        rows, chosen, all_steps = choose_view(self, epoch, steps, ranks)
        if not rows.size:
            raise ValueError("composition needs at least one batch: the plan has no steps")
        return measure_composition(self, epoch, rows, chosen, all_steps)

    def load(self, epoch: int = 0, *, steps: Chosen = None, ranks: Chosen = None) -> Load:
        """Cost per rank and step; by default of a sample of the steps.

        Raises
        ------
        ValueError
            If no sizes are known.
        """
        return measure_load(self, epoch, *choose_view(self, epoch, steps, ranks))

    def locality(
        self,
        chunk_size: int | Sequence[int],
        epoch: int = 0,
        *,
        steps: Chosen = None,
        ranks: Chosen = None,
    ) -> LocalityPrice:
        """Different chunks in a batch, and how often chunk-mates share one; by default of a sample.

        Parameters
        ----------
        chunk_size : int or sequence of int
            Consecutive samples that are read together, of all data sets or of each.
        """
        rows, chosen, _ = choose_view(self, epoch, steps, ranks, LOCALITY_VIEWED)
        window = self.source.window(rows, chosen, epoch).reshape(-1, self.batch_size)
        return measured_price(window, self.samples.lengths, chunk_size)

    def coverage(self, epochs: Chosen = None, *, exact: bool = False) -> Coverage:
        """What is seen, padded, dropped, repeated and never seen in some epochs (default: all).

        Parameters
        ----------
        exact : bool
            Count also where that takes long (about 0.1 s per million draws) and an expectation
            with its error would be given.
        """
        chosen = range(self.epochs) if epochs is None else np.atleast_1d(np.asarray(epochs))
        numbers = [check_integer("epochs", epoch, 0) for epoch in chosen]
        return measure_coverage(self, numbers, exact)

    def overlap(self, epoch: int = 0, *, ranks: Chosen = None) -> Overlap:
        """Samples that each two ranks share; by default of all ranks, or of 16 if that is long."""
        dealing = self.source.dealing()
        if ranks is None and (dealing is None or not dealing.even):
            ranks = spread_ranks(self.world_size, MANY_RANKS)
        chosen = as_indices("ranks", ranks, self.world_size)
        return measure_overlap(self, check_integer("epoch", epoch, 0), chosen)

    def diff(
        self,
        other: "ShardPlan",
        *,
        epoch: int = 0,
        stop: int | None = None,
        start: int | None = None,
    ) -> Diff:
        """How another plan differs, also as the one that goes on after a stop.

        Parameters
        ----------
        stop : int, optional
            Steps of the epoch that this plan has done when the other one takes over.
        start : int, optional
            Step at which the other begins; by default where as many samples are consumed.
        """
        if not isinstance(other, ShardPlan):
            raise TypeError(f"other must be a ShardPlan, got {type(other).__name__}")
        return compare_plans(self, other, check_integer("epoch", epoch, 0), stop, start)

    def compare(self, record: Record) -> Comparison:
        """Whether what was recorded is as planned, or where it parted."""
        return compare_record(self, record)

    def check(self, *, max_imbalance: float = 1.25) -> list[Finding]:
        """Findings, the gravest first.

        Parameters
        ----------
        max_imbalance : float
            Highest over mean cost of the ranks from which on it is found.
        """
        return check_plan(self, max_imbalance, self._seed)

    def startup(self) -> Startup:
        """What the sampler itself costs each rank: time to the first batch, and memory."""
        return measure_startup(self)

    @property
    def hash(self) -> str:
        """16 hex digits: plans with equal hashes have equal orders."""
        if self._hash is None:
            self._hash = hash_order(self)
        return self._hash

    def to_dataframe(self, epoch: int = 0, *, steps: Chosen = None, ranks: Chosen = None) -> Any:
        """One row per sample: epoch, step, rank, slot, sample, dataset, and its cost if known.

        Raises
        ------
        ImportError
            Without pandas.
        ValueError
            For more than ten million rows.
        """
        return make_table(self, epoch, steps, ranks)

    def summary(self) -> str:
        """The plan in some lines: sizes, shares, coverage, load, sampler, and what was found."""
        return describe(self)

    def __repr__(self) -> str:
        lengths = " + ".join(map(str, self.samples.lengths[:4]))
        more = " + ..." if len(self.samples.lengths) > 4 else ""
        return (
            f"ShardPlan({lengths}{more} samples, {self.source.name}, {self.world_size} ranks x "
            f"{self.batch_size}, epochs={self.epochs})"
        )
