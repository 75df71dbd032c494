"""EvenSteps: ranks whose loaders end at different times stop together instead of hanging."""

import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from nvalchemi.distributed.collectives import all_reduce, get_rank

_END = object()


class EvenSteps:
    """A loader whose length nobody knows, ended on all ranks when it ends on the first.

    One reduction of a single number before each batch; what the other ranks still had is left out
    of this pass, with a warning. Everything but iteration is that of the loader.

    Parameters
    ----------
    loader : iterable
        The loader of this rank.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":  # not there yet while unpickling
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __iter__(self) -> Iterator[Any]:
        batches, steps = iter(self._loader), 0
        while True:
            batch = next(batches, _END)
            together = torch.tensor([batch is not _END], dtype=torch.int32)
            if not bool(all_reduce(together, op=dist.ReduceOp.MIN)):
                if batch is not _END:
                    warnings.warn(
                        f"rank {get_rank()} has more batches than another rank: this pass ends "
                        f"after {steps} steps on all, and the rest of it is left out; split the "
                        "data evenly",
                        UserWarning,
                        stacklevel=2,
                    )
                return
            steps += 1
            yield batch
