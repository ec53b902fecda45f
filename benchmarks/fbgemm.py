"""FBGEMM's operator behind the interface of recsys' collections."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from recsys.batch import PooledEmbeddings
from recsys.embeddings.lookup.abstract import AbstractEmbeddingBags

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from recsys.batch import Features
    from recsys.embeddings import TableConfig

__all__ = ["FbgemmEmbeddingBags"]


class FbgemmEmbeddingBags(AbstractEmbeddingBags):
    """FBGEMM's table-batched embedding on the CPU, its optimizer fused into backward.

    Args:
        tables: All tables.
        optimizer: "sgd", "adagrad" or "rowwise_adagrad".
        lr: Its learning rate.

    Attributes:
        optimizer: Its `step` does nothing: backward has updated the rows.
    """

    def __init__(self, tables: Sequence[TableConfig], optimizer: str, lr: float) -> None:
        super().__init__(tables)
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
            BoundsCheckMode,
            EmbeddingLocation,
            PoolingMode,
        )
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            ComputeDevice,
            SplitTableBatchedEmbeddingBagsCodegen,
        )

        optimizers = {
            "sgd": EmbOptimType.EXACT_SGD,
            "adagrad": EmbOptimType.EXACT_ADAGRAD,
            "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        }
        tbe = SplitTableBatchedEmbeddingBagsCodegen(
            [
                (
                    table.num_embeddings,
                    table.embedding_dim,
                    EmbeddingLocation.HOST,
                    ComputeDevice.CPU,
                )
                for table in self._tables
            ],
            feature_table_map=[position for position, _ in self._lookups],
            optimizer=optimizers[optimizer],
            learning_rate=lr,
            eps=1e-8,
            pooling_mode=PoolingMode.SUM,
            stochastic_rounding=False,
            # The default would read row 0 for a row out of range.
            bounds_check_mode=BoundsCheckMode.FATAL,
        )
        # In a tuple, so that nn.Module does not register it: other optimizers must not update its
        # parameters, and `state_dict` must not save them under FBGEMM's keys.
        self._hidden = (tbe,)
        self.optimizer = _FusedOptimizer(list(tbe.parameters()), {"lr": lr})
        self.reset_parameters()

    def table_weights(self) -> Sequence[Tensor]:
        """The rows of every table, (E, D)."""
        weights: list[Tensor] = self._hidden[0].split_embedding_weights()
        return weights

    def forward(self, features: Features) -> PooledEmbeddings:
        """Look up and pool the rows of every bag; features come in the order of the tables."""
        pooled = self._hidden[0](features.values().long(), features.offsets().long())
        return PooledEmbeddings(self._output_keys, self._output_dims, pooled)


class _FusedOptimizer(torch.optim.Optimizer):
    """An optimizer object for rows that backward updates."""

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Does nothing: backward has updated the rows."""
