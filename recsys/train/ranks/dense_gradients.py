"""Gradients of the dense part, averaged over processes in an order that does not change.

`DistributedDataParallel` puts gradients into buckets, and arranges them anew after the first steps
of a process. gloo's all_reduce adds the parts of a bucket in different orders. So with three
processes or more, the first steps after a run is resumed would round sums differently. Here every
process adds its share of a bucket, in the order of the processes:

    bucket of each process    -- all_to_all -->    its share of all buckets
    the share's mean          -- all_gather -->    the mean of all buckets

Both send as many bytes as an all_reduce.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed import GradBucket  # type: ignore[attr-defined]

__all__ = ["average_in_order"]


def average_in_order(parallel: nn.Module) -> None:
    """Average the gradients of the dense part in the order of the processes, from now on.

    Args:
        parallel: The model with its tables divided. With fewer than three processes it stays as it
            is, because the sum of two numbers has one order.
    """
    if dist.get_world_size() < 3:
        return
    for module in parallel.modules():
        if isinstance(module, DistributedDataParallel):
            # PyTorch refuses a function with annotations in strings, such as those of this file.
            module.register_comm_hook(None, lambda _, bucket: _average(bucket))


def _average(bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """The mean of a bucket over all processes. A collective."""
    gradients, num_ranks = bucket.buffer(), dist.get_world_size()
    if gradients.is_sparse:  # of a table of the user's own; gloo adds these in order
        return allreduce_hook(None, bucket)  # type: ignore[arg-type]  # None stands for all
    padding = -len(gradients) % num_ranks
    shares = torch.nn.functional.pad(gradients, (0, padding)).view(num_ranks, -1)
    received = torch.empty_like(shares)
    dist.all_to_all_single(received, shares)
    total = received[0]
    for each in received[1:]:
        total += each
    dist.all_gather(list(shares), total / num_ranks)
    gradients.copy_(shares.view(-1)[: len(gradients)])
    found: torch.futures.Future[Tensor] = torch.futures.Future()
    found.set_result(gradients)
    return found
