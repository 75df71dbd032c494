"""The loss of the joint batch of all ranks, where ranks hold unequal numbers of labels."""

import torch
from torch import Tensor

from nvalchemi.distributed.collectives import all_reduce, get_world_size


def joint_batch_factors(denominators: Tensor) -> Tensor:
    """Factors that make the mean over ranks of their losses the loss of all their batches as one.

    A rank's loss is n_r / d_r (d_r structures, atoms or labels), the joint one is sum n / sum d.
    DistributedDataParallel averages gradients over R ranks, so each loss is multiplied by
    d_r R / sum d. Equal ranks get exactly 1. One reduction of K numbers.

    Parameters
    ----------
    denominators : Tensor
        d_r of each component of the loss on this rank, [K].

    Returns
    -------
    Tensor
        Factors [K] in double precision.
    """
    own = denominators.detach().to(torch.float64)
    total = all_reduce(own.clone())
    # a loss without any label is 0 / 1 (see LossTerms.value), here and on all ranks together
    return own.clamp_min(1) * get_world_size() / total.clamp_min(1)
