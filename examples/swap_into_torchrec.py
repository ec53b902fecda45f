"""TorchRec's DLRM, plain and with the tables of recsys in the place of TorchRec's, in two ways.

    python examples/swap_into_torchrec.py

Either one line replaces the `EmbeddingBagCollection` of a model, or the model is built on a
`HotColdEmbeddingBagCollection`, which takes the same tables and has the same `state_dict`. The
losses are the same. On several processes see `torchrec_distributed.py`.
"""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING

import torch

try:
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
    from torchrec.datasets.utils import Batch
    from torchrec.models.dlrm import DLRM, DLRMTrain
except (ImportError, OSError) as error:  # OSError: FBGEMM for another torch
    raise SystemExit(f"this example needs TorchRec: pip install '.[torchrec]' ({error})") from error

import recsys
from recsys.datasets import BatchLoader, SyntheticCriteo
from recsys.embeddings import Adagrad

if TYPE_CHECKING:
    from torch import nn

DIM, LR, BUDGET = 16, 0.05, "256KiB"


def build(collection: nn.Module, data: SyntheticCriteo) -> DLRMTrain:
    return DLRMTrain(DLRM(collection, data.num_dense, [64, DIM], [64, 1]))


def train(model: DLRMTrain, optimizer: torch.optim.Optimizer, data: SyntheticCriteo) -> str:
    """Train one epoch; returns the first loss and the last."""
    losses = []
    for batch in BatchLoader(data, "train", 256, shuffle=True, seed=0):
        features = batch.sparse_features.to_torchrec()
        optimizer.zero_grad()
        loss, _ = model(Batch(batch.dense_features, features, batch.labels))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return f"first loss {losses[0]:.6f}, last {losses[-1]:.6f}"


def main(num_samples: int = 14_000) -> None:
    data = SyntheticCriteo(num_samples=num_samples, table_sizes=[3, 300, 3_000, 10_000])
    tables = [
        EmbeddingBagConfig(
            name=f"t_{name}", num_embeddings=size, embedding_dim=DIM, feature_names=[name]
        )
        for name, size in data.table_sizes.items()
    ]

    torch.manual_seed(0)
    model = build(EmbeddingBagCollection(tables), data)
    start = deepcopy(model.state_dict())
    print("TorchRec:", train(model, torch.optim.Adagrad(model.parameters(), lr=LR), data))

    model = build(EmbeddingBagCollection(tables), data)
    model.load_state_dict(start)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=LR)
    print(recsys.accelerate(model, optimizer=optimizer, budget=BUDGET))  # the one line
    print("accelerate:", train(model, optimizer, data))

    # The other way. This collection updates its rows itself, at the end of backward.
    bags = recsys.HotColdEmbeddingBagCollection(tables, optimizer=Adagrad(lr=LR), budget=BUDGET)
    model = build(bags, data)
    model.load_state_dict(start)
    dense = [weight for name, weight in model.named_parameters() if "embedding_bags" not in name]
    print("collection:", train(model, torch.optim.Adagrad(dense, lr=LR), data))
    print(f"{bags.hit_rates.lookups:.0%} of the lookups found their row in {BUDGET}")


if __name__ == "__main__":
    main()
