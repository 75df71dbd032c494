"""EpochSampler: every sample of one data set once an epoch, without a list of it."""

from collections.abc import Iterator, Sized

from nvalchemi.data.datapipes.order import MAX_SIZE, Indices, derive_key
from nvalchemi.data.datapipes.sequence import EpochOrder, choose_drawing
from nvalchemi.data.datapipes.sharded import ShardedSampler


class EpochSampler(ShardedSampler[int]):
    """Every sample of one data set once an epoch, dealt to ranks, without a list of the data set.

    A replacement for torch's DistributedSampler, also as ``DDPHook(sampler_cls=EpochSampler)``: the
    first sample of 1e8 comes within a millisecond, and the samples of a step do not depend on the
    number of ranks that share a global batch.

    Parameters
    ----------
    dataset : sized
        One data set.
    num_replicas, rank : int, optional
        Default 1 and 0.
    shuffle : bool
        Whether the order is drawn anew from (seed, epoch), or is that of the data set.
    seed : int
    drop_last : bool
        False: the first samples come again at the end until all ranks have the same number. True:
        samples that do not fill a step of all ranks are left out.
    locality : int
        0 shuffles globally. Otherwise the shuffle goes through the data set in windows of so many
        chunks, each of which a rank then reads once an epoch: `locality.shuffle_price` says what
        that does to batches.
    chunk_size : int, optional
        Consecutive samples that are read together, as the store is chunked; for `locality`.

    Attributes
    ----------
    num_samples, total_size : int
        Samples of this rank and of all ranks, with the padding.
    """

    def __init__(
        self,
        dataset: Sized,
        *,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        locality: int = 0,
        chunk_size: int | None = None,
    ) -> None:
        if not hasattr(dataset, "__len__"):
            raise TypeError(f"dataset must have a length, got {type(dataset).__name__}")
        self.length = len(dataset)
        if not 1 <= self.length <= MAX_SIZE:
            raise ValueError(f"dataset must hold 1 to 2^40 samples, got {self.length}")
        self.shuffle = shuffle
        self._drawing = choose_drawing(
            [self.length], shuffle=shuffle, locality=locality, chunk_size=chunk_size
        )
        super().__init__(
            unit=1,
            positions=self.length,
            num_replicas=num_replicas,
            rank=rank,
            distributed_manager=None,
            seed=seed,
            generator=None,
            drop_last=drop_last,
        )
        self.num_samples = len(self)
        self.total_size = self.num_samples * self.num_replicas

    def _sequence(self, epoch: int) -> EpochOrder:
        return EpochOrder(self._drawing, derive_key(self.seed, epoch), None)

    def _signature(self) -> str:
        return str(self._drawing)

    def _emit(self, rows: Indices) -> Iterator[int]:
        return iter(rows[:, 0].tolist())
