"""Trains a DLRM built the classic way, without and with the line that accelerates it, by seed.

    python examples/accelerate_classic.py stores/kaggle --out accelerate.json

The model is a `ModuleList` of `nn.EmbeddingBag(mode="sum", sparse=True)` between two perceptrons.
One `torch.optim.SGD` trains all of it. Both runs start from the same weights and train one epoch on
the same batches. The output has the test AUC and the seconds of training of each seed.
"""

from __future__ import annotations

import argparse
import json
import time
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import recsys
from recsys._support.machine import describe_environment
from recsys.datasets import BatchLoader, Store, SyntheticCriteo
from recsys.train.metrics import auc

if TYPE_CHECKING:
    from collections.abc import Sequence

    from recsys.datasets import SampleSource


class ClassicDLRM(nn.Module):
    """A DLRM as in facebookresearch/dlrm with dot interaction; returns logits."""

    def __init__(
        self,
        table_sizes: Sequence[int],
        dim: int = 16,
        dense_arch: Sequence[int] = (512, 256, 64),
        over_arch: Sequence[int] = (512, 256),
    ) -> None:
        super().__init__()
        num_vectors = len(table_sizes) + 1
        self.emb_l = nn.ModuleList()
        for size in table_sizes:
            bag = nn.EmbeddingBag(size, dim, mode="sum", sparse=True)
            nn.init.uniform_(bag.weight, -((1 / size) ** 0.5), (1 / size) ** 0.5)
            self.emb_l.append(bag)
        self.bot_l = perceptron([13, *dense_arch, dim])
        self.top_l = perceptron([dim + num_vectors * (num_vectors - 1) // 2, *over_arch, 1])[:-1]
        self.register_buffer("pairs", torch.tril_indices(num_vectors, num_vectors, -1))

    def forward(self, dense: Tensor, offsets: Sequence[Tensor], ids: Sequence[Tensor]) -> Tensor:
        """Logits, (B,), of dense features (B, 13) and each table's bags."""
        bottom = self.bot_l(dense)
        pooled = [bag(*each) for bag, *each in zip(self.emb_l, ids, offsets, strict=True)]
        vectors = torch.stack([bottom, *pooled], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        return self.top_l(torch.cat([bottom, products[:, *self.pairs]], dim=1)).squeeze(1)


def perceptron(sizes: Sequence[int]) -> nn.Sequential:
    layers = [(nn.Linear(inputs, outputs), nn.ReLU()) for inputs, outputs in pairwise(sizes)]
    return nn.Sequential(*(layer for pair in layers for layer in pair))


def logits_of(model: nn.Module, batch: recsys.Batch) -> Tensor:
    features = batch.sparse_features
    bounds = features.offsets()
    size = features.stride()
    bags = [bounds[first : first + size + 1] for first in range(0, len(bounds) - 1, size)]
    dense = batch.dense_features.to(next(model.parameters()).dtype)
    return model(
        dense,
        [each[:-1] - each[0] for each in bags],
        [features.values()[each[0] : each[-1]] for each in bags],
    )


def loss_of(model: nn.Module, batch: recsys.Batch) -> Tensor:
    logits = logits_of(model, batch)
    return functional.binary_cross_entropy_with_logits(logits, batch.labels.to(logits.dtype))


def train_and_test(data: SampleSource, seed: int, batch_size: int, **sizes: Any) -> dict[str, Any]:
    """Train one epoch, plain and accelerated; return the test AUC and the seconds of each."""
    result: dict[str, Any] = {"seed": seed}
    for way in ("plain", "accelerated"):
        torch.manual_seed(seed)
        model = ClassicDLRM(list(data.table_sizes.values()), **sizes)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if way == "accelerated":
            recsys.accelerate(model, optimizer=optimizer)  # the one line
        begin = time.perf_counter()
        for batch in BatchLoader(data, "train", batch_size, shuffle=True, seed=seed):
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
        seconds = time.perf_counter() - begin
        with torch.no_grad():
            found = [
                (logits_of(model, batch), batch.labels)
                for batch in BatchLoader(data, "test", 16384, shuffle=False)
            ]
        logits, labels = (torch.cat(parts).numpy() for parts in zip(*found, strict=True))
        result[way] = {"auc": auc(logits, labels), "seconds": seconds}
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("store", help="a store, or synthetic:N for N synthetic samples")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--batch-size", type=int, default=128)
    options = parser.parse_args(arguments)
    kind, _, number = options.store.partition(":")
    data = SyntheticCriteo(num_samples=int(number)) if kind == "synthetic" else Store(options.store)
    # Compile the kernels first, so that compilation is not counted as training time.
    train_and_test(SyntheticCriteo(num_samples=700, table_sizes=[9, 9]), 0, 128)
    runs = [train_and_test(data, seed, options.batch_size) for seed in range(3)]
    result = {"environment": describe_environment(), "batch_size": options.batch_size, "runs": runs}
    options.out.write_text(json.dumps(result, indent=2) + "\n")
    for run in runs:
        for way in ("plain", "accelerated"):
            print(f"seed {run['seed']}, {way}: {run[way]['auc']:.4f}, {run[way]['seconds']:.1f} s")


if __name__ == "__main__":
    main()
