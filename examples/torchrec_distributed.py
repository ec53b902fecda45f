"""Trains TorchRec's DLRM on several processes, each with its rows in two tiers.

    torchrun --nproc-per-node 2 examples/torchrec_distributed.py --budget 256KiB

This is a program for TorchRec on CPUs. Only the sharder is of recsys, and the pipeline, which may
also be TorchRec's. It prints the loss of every tenth mini-batch, and how many lookups found their
row in fast memory.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.datasets.utils import Batch
from torchrec.distributed import DistributedModelParallel
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from recsys.datasets import BatchLoader, SyntheticCriteo
from recsys.distributed import (
    HotColdEmbeddingBagCollectionSharder,
    HotColdTrainPipelineSparseDist,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from recsys.datasets import SampleSource

CPU = torch.device("cpu")
DIM = 16


def build(data: SampleSource) -> DLRMTrain:
    """A DLRM whose tables have no memory yet, and an optimizer."""
    collection = EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=name, num_embeddings=size, embedding_dim=DIM, feature_names=[name]
            )
            for name, size in data.table_sizes.items()
        ],
        device=torch.device("meta"),
    )
    apply_optimizer_in_backward(RowWiseAdagrad, collection.parameters(), {"lr": 0.05})
    return DLRMTrain(DLRM(collection, data.num_dense, [64, DIM], [64, 1]))


def batches_of_rank(data: SampleSource, batch_size: int) -> Iterator[Batch]:
    """This process's samples of each mini-batch, as TorchRec takes them."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for batch in BatchLoader(data, "train", batch_size, shuffle=True, seed=0):
        samples = torch.arange(rank, len(batch.labels), world)
        yield Batch(
            batch.dense_features[samples],
            batch.sparse_features.select(samples).to_torchrec(),
            batch.labels[samples],
        )


def train(num_samples: int, batch_size: int, budget: str) -> tuple[list[float], float]:
    """Losses of this process, and the share of lookups that found their row in fast memory."""
    data = SyntheticCriteo(num_samples=num_samples, table_sizes=[20_000, 5_000, 300, 1_000])
    torch.manual_seed(dist.get_rank())  # each process draws its own rows
    sharder = HotColdEmbeddingBagCollectionSharder({"budget": budget})
    model = DistributedModelParallel(build(data), device=CPU, sharders=[sharder])
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    optimizer = CombinedOptimizer(
        [
            model.fused_optimizer,
            KeyedOptimizerWrapper(dense, lambda params: torch.optim.SGD(params, lr=0.05)),
        ]
    )
    pipeline = HotColdTrainPipelineSparseDist(model, optimizer, CPU)
    batches, losses = batches_of_rank(data, batch_size), []
    while True:
        try:
            loss, _, _ = pipeline.progress(batches)
        except StopIteration:
            break
        losses.append(float(loss))
    rates = model.module.model.sparse_arch.embedding_bag_collection.hit_rates
    return losses, 1.0 if rates is None else rates.lookups


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budget", default="256KiB", help="fast memory of each process")
    parser.add_argument("--samples", type=int, default=70_000)
    parser.add_argument("--batch-size", type=int, default=512, help="over all processes")
    options = parser.parse_args(arguments)
    dist.init_process_group("gloo")
    losses, hits = train(options.samples, options.batch_size, options.budget)
    if dist.get_rank() == 0:
        for step in range(0, len(losses), 10):
            print(f"mini-batch {step}: loss {losses[step]:.4f}")
        print(f"{hits:.1%} of this process's lookups found their row in fast memory")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
