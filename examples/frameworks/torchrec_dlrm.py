"""TorchRec's own DLRM_DCN and `TrainPipelineBase`, in one process.

    python examples/frameworks/torchrec_dlrm.py

On several processes see `examples/torchrec_distributed.py`.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

import torch
from clicks import BATCH_SIZE, SIZES, make_clicks
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.datasets.utils import Batch
from torchrec.distributed.train_pipeline import TrainPipelineBase
from torchrec.models.dlrm import DLRM_DCN, DLRMTrain

import recsys

if TYPE_CHECKING:
    from collections.abc import Iterator

FEATURES = [f"feature_{number}" for number in range(len(SIZES))]


def train(budget: str | None) -> list[float]:
    """Train for two epochs; returns the loss of every step."""
    torch.manual_seed(0)
    tables = [
        EmbeddingBagConfig(
            name=f"table_of_{feature}",
            num_embeddings=size,
            embedding_dim=16,
            feature_names=[feature],
        )
        for feature, size in zip(FEATURES, SIZES, strict=True)
    ]
    model = DLRMTrain(
        DLRM_DCN(
            EmbeddingBagCollection(tables=tables),
            dense_in_features=1,
            dense_arch_layer_sizes=[16],
            over_arch_layer_sizes=[16, 1],
            dcn_num_layers=2,
            dcn_low_rank_dim=8,
        )
    )
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    if budget:
        print(recsys.accelerate(model, optimizer=optimizer, budget=budget))
    pipeline = TrainPipelineBase(model, optimizer, torch.device("cpu"))
    batches, losses = chain(_batches(), _batches()), []
    for _ in range(2 * len(make_clicks()[0]) // BATCH_SIZE):
        loss, *_ = pipeline.progress(batches)
        losses.append(loss.item())
    return losses


def _batches() -> Iterator[Batch]:
    ids, labels = make_clicks()
    for of_batch, labels_of_batch in zip(
        ids.split(BATCH_SIZE), labels.split(BATCH_SIZE), strict=True
    ):
        yield Batch(
            dense_features=torch.ones(BATCH_SIZE, 1),
            sparse_features=KeyedJaggedTensor.from_lengths_sync(
                FEATURES, of_batch.T.flatten(), torch.ones(of_batch.numel(), dtype=torch.int32)
            ),
            labels=labels_of_batch.int(),
        )


if __name__ == "__main__":
    plain, ours = train(None), train("128KiB")
    print(f"last loss: {plain[-1]:.6f} without recsys, {ours[-1]:.6f} with it")
