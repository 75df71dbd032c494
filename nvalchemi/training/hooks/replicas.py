"""Whether all ranks still hold the same parameters, bit by bit."""

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nvalchemi.distributed.collectives import all_reduce

_BITS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


def named_parameters(models: Mapping[str, nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """Parameters with the name of their model in front."""
    for key, model in models.items():
        for name, parameter in model.named_parameters():
            yield f"{key}.{name}", parameter


@torch.no_grad()
def checksums(models: Mapping[str, nn.Module]) -> Tensor:
    """Sum of the bits of each parameter read as integers, [P] int64: exact in any order."""
    sums = []
    for _, parameter in named_parameters(models):
        value = torch.view_as_real(parameter) if parameter.is_complex() else parameter
        bits = value.detach().contiguous().view(_BITS[value.element_size()])
        sums.append(bits.sum(dtype=torch.int64))
    return torch.stack(sums)


def check_replicas(models: Mapping[str, nn.Module], epoch: int) -> None:
    """Check that the parameters are the same on all ranks: one reduction of two numbers each.

    Raises
    ------
    RuntimeError
        On every rank, naming the first parameter that differs.
    """
    own = checksums(models)
    # the largest of x and of -x at once: equal on all ranks when max(x) == -max(-x)
    both = torch.cat([own, -own])
    all_reduce(both, op=dist.ReduceOp.MAX)
    high, low = both[: len(own)], -both[len(own) :]
    differing = (high != low).nonzero().flatten().tolist()
    if differing:
        names = [name for name, _ in named_parameters(models)]
        more = f" and {len(differing) - 1} more" if len(differing) > 1 else ""
        raise RuntimeError(
            f"the parameters of the ranks have come apart by epoch {epoch}: "
            f"{names[differing[0]]}{more} differ. Something changes parameters outside of the "
            "optimizer: a renormalisation in forward, an edit on one rank, a gradient that is not "
            "reduced"
        )
