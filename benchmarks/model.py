"""The default model over tables of `SyntheticCriteo`, by public names of `recsys` alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from recsys import DLRM, DLRMTrain, HotColdEmbeddingBagCollection
from recsys.datasets import SyntheticCriteo
from recsys.embeddings import TableConfig

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn
    from torch.optim import Optimizer

    from recsys import Batch
    from recsys.datasets import SampleSource

__all__ = [
    "NUM_DENSE",
    "build_dlrm",
    "build_model",
    "kaggle_sizes",
    "read_batch",
    "samples",
    "tables_of",
]

NUM_DENSE = 13


def kaggle_sizes(most: int) -> tuple[int, ...]:
    """Rows of Criteo Kaggle's 26 tables.

    Args:
        most: The most rows of a table.
    """
    sizes = SyntheticCriteo(num_samples=7).table_sizes.values()
    return tuple(min(size, most) for size in sizes)


def samples(num_samples: int, table_sizes: Sequence[int]) -> SyntheticCriteo:
    """Synthetic samples with these tables; with Kaggle's if there are none."""
    if not table_sizes:
        return SyntheticCriteo(num_samples=max(14, num_samples))
    return SyntheticCriteo(num_samples=max(14, num_samples), table_sizes=table_sizes)


def read_batch(source: SampleSource, batch_size: int, number: int) -> Batch:
    """Mini-batch `number` of a source."""
    return source.read(np.arange(number * batch_size, (number + 1) * batch_size))


def tables_of(source: SyntheticCriteo, dim: int) -> list[TableConfig]:
    """A table for each feature of a source."""
    return [
        TableConfig(name=key, num_embeddings=size, embedding_dim=dim, feature_names=(key,))
        for key, size in source.table_sizes.items()
    ]


def build_model(
    source: SyntheticCriteo, dim: int, formula: Any, *, lr: float = 0.01, **settings: Any
) -> tuple[DLRMTrain, list[Optimizer]]:
    """The default DLRM over a collection, and its optimizers: dense part by SGD, then rows.

    Args:
        source: Names the tables.
        dim: D.
        formula: The update rule of the rows.
        lr: Learning rate of the dense part.
        settings: More arguments of the collection.
    """
    collection = HotColdEmbeddingBagCollection(
        tables_of(source, dim), optimizer=formula, auto_apply=False, **settings
    )
    assert collection.row_optimizer is not None
    return build_dlrm(collection, dim, [collection.row_optimizer], lr=lr)


def build_dlrm(
    embeddings: nn.Module,
    dim: int,
    of_rows: Sequence[Optimizer],
    *,
    lr: float = 0.01,
    device: torch.device | None = None,
) -> tuple[DLRMTrain, list[Optimizer]]:
    """The default DLRM over any embeddings, and its optimizers."""
    # The interaction needs a dense vector of the rows' length.
    hidden = [width for width in (512, 256, 64) if width > dim]
    model = DLRMTrain(DLRM(embeddings, NUM_DENSE, [*hidden, dim], [512, 256, 1], device))
    in_tables = set(embeddings.parameters())
    dense = [each for each in model.parameters() if each not in in_tables]
    return model, [torch.optim.SGD(dense, lr=lr), *of_rows]
