"""One rank of `recsys bench distributed`: its share of the tables of all providers, and its steps.

A step looks up this rank's samples, multiplies the pooled vectors by one fixed linear layer, and
goes backward from the binary cross entropy. The rows are updated in backward. There is nothing else
to compute, so that the time of a step is that of the tables and their exchanges.
"""

from __future__ import annotations

import logging
import time
import warnings
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from recsys._support.machine import set_num_threads, tune_allocator
from recsys.batch import JaggedIds
from recsys.bench.parts.harness import steps_of_turn
from recsys.bench.parts.worker import end_turn, freeze_garbage
from recsys.bench.ranks.collectives import CountedCollectives
from recsys.bench.ranks.sharded import budget_bytes, keys_of, shard
from recsys.datasets.synthetic.samples import SyntheticCriteo

if TYPE_CHECKING:
    from torch import Tensor

    from recsys.bench.ranks.collectives import Use
    from recsys.bench.ranks.providers import Case, Provider

__all__ = ["Rank", "RankTurn"]

_TIMEOUT = timedelta(minutes=5)


class RankTurn(NamedTuple):
    """A turn on one rank: mean seconds of its timed steps, and the loss of its last step."""

    seconds: float
    loss: float


class Rank:
    """Lives in a worker. All ranks must call the same methods in the same order.

    Args:
        rank: This process's number.
        port: The port of the `TCPStore` at which the ranks meet.
        case: What they train.
    """

    def __init__(self, rank: int, port: int, case: Case) -> None:
        set_num_threads(1)
        tune_allocator()
        # TorchRec calls functions of torch by their old names.
        logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
        store = TCPStore("localhost", port, is_master=False, timeout=_TIMEOUT)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=case.world_size, timeout=_TIMEOUT
        )
        self._case = case
        self._steps = [_Steps(provider, case) for provider in case.providers]
        self._ids, self._labels = _samples_of_rank(rank, case)
        freeze_garbage()

    def turn(self, number: int) -> RankTurn:
        """Make untimed and then timed steps of a provider.

        Args:
            number: The provider's place in the case.
        """
        steps, num_steps = self._steps[number], steps_of_turn(self._case.batch_size)
        for batch in self._next_batches(steps, num_steps):
            steps(*batch)
        batches = self._next_batches(steps, num_steps)
        dist.barrier()
        begin = time.perf_counter()
        for batch in batches:
            loss = steps(*batch)
        seconds = (time.perf_counter() - begin) / num_steps
        end_turn()
        return RankTurn(seconds, float(loss))

    def count(self, number: int, num_steps: int) -> list[dict[tuple[str, str], Use]]:
        """Make steps of a provider; the uses of collectives of each.

        Args:
            number: The provider's place in the case.
            num_steps: How many steps.
        """
        steps, found = self._steps[number], []
        for batch in self._next_batches(steps, num_steps):
            dist.barrier()
            with CountedCollectives() as counted:
                steps(*batch)
            found.append(dict(counted.uses))
        return found

    def budget(self, number: int) -> tuple[float, float]:
        """The budget of a provider on this rank, in bytes, and the hit rate of its lookups."""
        case, steps = self._case, self._steps[number]
        num_bytes = budget_bytes(case.providers[number], case.table_sizes, case.dim)
        rates = steps.sharded.hit_rates
        return float(num_bytes or 0), 1.0 if rates is None else rates.lookups

    def _next_batches(self, steps: _Steps, num_steps: int) -> list[tuple[Any, Tensor]]:
        keys, found = keys_of(self._case.table_sizes), []
        for _ in range(num_steps):
            number = steps.number % self._case.num_batches
            steps.number += 1
            features = JaggedIds.from_one_hot(keys, self._ids[number]).to_torchrec()
            found.append((features, self._labels[number]))
        return found


class _Steps:
    """Training steps of one provider's tables on this rank.

    Attributes:
        sharded: The sharded collection.
        number: Steps until now.
    """

    def __init__(self, provider: Provider, case: Case) -> None:
        self.sharded = shard(provider, case.table_sizes, case.dim)
        self.number = 0
        generator = torch.Generator().manual_seed(0)
        keys = keys_of(case.table_sizes)
        drawn = torch.randn(len(keys), case.dim, generator=generator)
        self._weights = dict(zip(keys, drawn, strict=True))

    def __call__(self, features: Any, labels: Tensor) -> Tensor:
        """Make a step; return the loss of this rank's samples."""
        pooled = self.sharded(features).wait()
        # The columns are in the order of the plan.
        weight = torch.cat([self._weights[key] for key in pooled.keys()])  # noqa: SIM118
        loss = nn.functional.binary_cross_entropy_with_logits(pooled.values() @ weight, labels)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()


def _samples_of_rank(rank: int, case: Case) -> tuple[Tensor, Tensor]:
    """Ids (num_batches, F, B / W) and labels (num_batches, B / W) of one rank's share."""
    source = SyntheticCriteo(
        num_samples=max(7, case.num_batches * case.batch_size), table_sizes=case.table_sizes
    )
    share = case.batch_size // case.world_size
    firsts = np.arange(case.num_batches)[:, np.newaxis] * case.batch_size + rank * share
    batch = source.read((firsts + np.arange(share)).ravel())
    ids = batch.sparse_features.values().view(len(case.table_sizes), case.num_batches, share)
    return ids.transpose(0, 1).contiguous(), batch.labels.view(case.num_batches, share)
