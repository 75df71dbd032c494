"""DataLoader: batches of a data set in the order of a sampler, read ahead in windows."""

import operator
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from itertools import islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from nvalchemi.data.batch import Batch
from nvalchemi.data.datapipes.dataset import check_transforms
from nvalchemi.data.datapipes.indices import index_list
from nvalchemi.data.datapipes.loader_order import LoaderOrder, order_of
from nvalchemi.data.datapipes.weights import check_flag


class DataLoader:
    """Iterate over a data set in batches.

    Parameters
    ----------
    dataset : Dataset, InMemoryDataset, MultiDataset or the like
        Where samples come from: len and ``load_batches``.
    batch_size : int
        Structures in a batch (per rank, once a distributed sampler is installed).
    shuffle : bool
        Whether to draw a new order each epoch, from torch's global generator or `generator`.
    drop_last : bool
        Whether to leave out a last batch that is not full.
    sampler : iterable of int, optional
        Order of the samples, instead of `shuffle`.
    batch_sampler : iterable of list of int, optional
        The batches themselves, instead of batch_size, shuffle, sampler and drop_last.
    prefetch_factor : int
        Batches read at once as one window; while one window is consumed the next is read in the
        background. 0 reads each batch when it is asked for.
    num_streams, use_streams
        Accepted for scripts of the peer; copies to a GPU go to the current stream.
    pin_memory : bool
        Whether to read into page-locked memory; nothing happens where there is no GPU.
    batch_transforms : sequence of callables, optional
        ``batch -> batch``, applied in the foreground.
    generator : torch.Generator, optional
        Source of the seed of each pass when `shuffle` is on.

    Raises
    ------
    ValueError
        For arguments out of range or that exclude each other.
    TypeError
        For arguments of the wrong kind.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        batch_size: int | None = None,
        shuffle: bool = False,
        drop_last: bool = False,
        sampler: Iterable[int] | None = None,
        batch_sampler: Iterable[Sequence[int]] | None = None,
        prefetch_factor: int = 2,
        num_streams: int = 4,
        use_streams: bool = True,
        pin_memory: bool = False,
        batch_transforms: Sequence[Any] | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        if not hasattr(dataset, "load_batches") or not hasattr(dataset, "__len__"):
            raise TypeError(
                "dataset must have load_batches(lists) and a length: got "
                f"{type(dataset).__name__}; for other data sets use torch.utils.data.DataLoader"
            )
        shuffle, drop_last = check_flag("shuffle", shuffle), check_flag("drop_last", drop_last)
        if generator is not None and not isinstance(generator, torch.Generator):
            raise TypeError(f"generator must be a torch.Generator: got {generator!r}")
        _check_exclusive(batch_size, shuffle, drop_last, sampler, batch_sampler)
        _check_order("sampler", sampler)
        _check_order("batch_sampler", batch_sampler)
        self.dataset = dataset
        self.batch_size = 1 if batch_size is None else _integer("batch_size", batch_size, 1)
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.batch_sampler: Any = batch_sampler
        self.sampler: Any = sampler
        if batch_sampler is None and sampler is None:
            self.sampler = (
                RandomSampler(dataset, generator=generator)
                if shuffle and len(dataset)
                else SequentialSampler(dataset)
            )
        self.prefetch_factor = _integer("prefetch_factor", prefetch_factor, 0)
        self.num_streams = num_streams
        self.use_streams = use_streams and torch.cuda.is_available()
        self.pin_memory = pin_memory
        self.batch_transforms: tuple[Any, ...] = check_transforms(
            "batch_transforms", batch_transforms
        )
        self._skip: int | None = None  # batches that the next pass leaves out
        self._pass, self._done = 0, 0  # the number of the last pass, and its batches handed out
        self._known: tuple[tuple[Any, ...], LoaderOrder] | None = None
        if pin_memory and torch.cuda.is_available():
            dataset.pin_memory = True

    @property
    def effective_read_window(self) -> int:
        """Samples read at once."""
        size = getattr(self.batch_sampler, "batch_size", self.batch_size)
        return int(size) * max(self.prefetch_factor, 1)

    def __len__(self) -> int:
        return len(self._batches())

    def _batches(self) -> Any:
        if self.batch_sampler is not None:
            return self.batch_sampler
        return BatchSampler(self.sampler, self.batch_size, self.drop_last)

    def _order(self) -> LoaderOrder:
        """The order of the samplers that are installed at the moment."""
        installed = (self.batch_sampler, self.sampler, self.batch_size, self.drop_last)
        if self._known is None or any(a is not b for a, b in zip(installed, self._known[0])):
            self._known = (installed, order_of(*installed, size=len(self.dataset)))
            self._done = 0
        return self._known[1]

    def set_epoch(self, epoch: int) -> None:
        """Tell the epoch to the first of batch sampler, its sampler and sampler that asks."""
        self._order().set_epoch(epoch)

    def set_epoch_step(self, step: int) -> None:
        """Let the next pass begin at a batch of the epoch; the ones before it are not read.

        With one of our samplers this takes the same time for any step.

        Raises
        ------
        ValueError
            If it is negative.
        """
        self._skip = _integer("step", step, 0)

    def state_dict(self) -> dict[str, Any]:
        """Where the training loop stands: epoch, samples consumed by all ranks, and which order.

        Batches that were read ahead and not yet handed out do not count. All ranks have the same
        state; as JSON it has less than 200 bytes.
        """
        return self._order().state_dict(self._done, self._skip)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next pass go on where `state_dict` was taken.

        The number of ranks may differ, as long as batch_size times ranks is the same. After the
        last batch of an epoch the rest of it is empty: `set_epoch` begins the next.

        Raises
        ------
        ValueError
            If the state belongs to another order, or lies inside a step.
        """
        self._order().load_state_dict(state)
        self._skip = None

    def index_batches(self) -> Iterator[list[int]]:
        """The batches of one pass as lists of sample numbers, without reading anything."""
        order, skip, self._skip = self._order(), self._skip, None
        self._pass, self._done = self._pass + 1, 0
        return map(index_list, order.begin(skip))

    def __iter__(self) -> Iterator[Batch]:
        batches = self.read(self.index_batches())
        return self._counted(batches, self._pass)

    def _counted(self, batches: Generator[Batch, None, None], number: int) -> Iterator[Batch]:
        with closing(batches):
            for batch in batches:
                if number == self._pass:
                    self._done += 1
                yield batch

    def read(self, batches: Iterable[list[int]]) -> Generator[Batch, None, None]:
        """Batches of the given sample numbers, read ahead and transformed as in a pass."""
        if self.prefetch_factor and hasattr(self.dataset, "read_windows"):
            read = self._read_ahead(iter(batches))
        else:
            read = self._read_plainly(batches)
        with closing(read):
            for batch in read:
                yield self._transform(batch)

    def _read_plainly(self, batches: Iterable[list[int]]) -> Generator[Batch, None, None]:
        for indices in batches:
            yield from self.dataset.load_batches([indices])

    def _read_ahead(self, batches: Iterator[list[int]]) -> Generator[Batch, None, None]:
        """One window is consumed while the next are read; nothing is left running on a break."""
        windows = iter(lambda: list(islice(batches, self.prefetch_factor)), [])
        with closing(self.dataset.read_windows(windows)) as read:
            for window in read:
                yield from window

    def _transform(self, batch: Batch) -> Batch:
        for i, transform in enumerate(self.batch_transforms):
            batch = transform(batch)
            if batch is None:
                raise TypeError(f"batch_transforms[{i}] must return a batch: got None")
        return batch

    def __repr__(self) -> str:
        try:
            size = str(len(self))
        except (TypeError, RuntimeError):  # a sampler without length, a closed reader
            size = "an unknown number of"
        return f"DataLoader({self.dataset!r}, batch_size={self.batch_size}, {size} batches)"


def _integer(name: str, value: Any, low: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer: got {value!r}") from None
    if isinstance(value, bool):
        raise TypeError(f"{name} must be an integer: got {value!r}")
    if number < low:
        raise ValueError(f"{name} must be at least {low}: got {number}")
    return number


def _check_order(name: str, order: Any) -> None:
    """Refuse what can not be iterated, or only once: the second epoch would be empty."""
    if order is None:
        return
    if not isinstance(order, Iterable) and not hasattr(order, "__getitem__"):
        raise TypeError(f"{name} must be iterable: got {type(order).__name__}")
    if isinstance(order, Iterator) and type(order).__module__ in ("builtins", "itertools"):
        raise TypeError(
            f"{name} must be iterable once per epoch: a {type(order).__name__} is used up by the "
            f"first; pass list({name}) or an object with __iter__"
        )


def _check_exclusive(
    batch_size: int | None, shuffle: bool, drop_last: bool, sampler: Any, batch_sampler: Any
) -> None:
    if sampler is not None and shuffle:
        raise ValueError("sampler and shuffle=True exclude each other: the sampler says the order")
    if batch_sampler is None:
        return
    given = {
        "batch_size": batch_size is not None,
        "sampler": sampler is not None,
        "shuffle": shuffle,
        "drop_last": drop_last,
    }
    clash = [name for name, there in given.items() if there]
    if clash:
        raise ValueError(
            f"batch_sampler says the batches: {', '.join(clash)} can not be given beside it"
        )
