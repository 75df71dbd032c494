"""Index arithmetic for rows that belong to structures: pointers, owners, gathered ranges."""

import torch
from torch import Tensor


def pointers(counts: Tensor) -> Tensor:
    """Cumulative offsets [B + 1] of counts [B], int64."""
    ptr = torch.zeros(counts.shape[0] + 1, dtype=torch.int64, device=counts.device)
    torch.cumsum(counts, 0, out=ptr[1:])
    return ptr


def owners(counts: Tensor, total: int) -> Tensor:
    """For each of the `total` rows the structure that owns it, int64."""
    index = torch.arange(counts.shape[0], device=counts.device)
    return torch.repeat_interleave(index, counts, output_size=total)


def gather_rows(starts: Tensor, counts: Tensor) -> Tensor:
    """Concatenate the ranges [start, start + count) of all structures, int64."""
    total = int(counts.sum())
    first = pointers(counts)[:-1]
    shift = torch.repeat_interleave(starts - first, counts, output_size=total)
    return shift + torch.arange(total, device=counts.device)
