"""The row optimizer of a rank, as TorchRec's checkpoints and schedules see it.

state         {table: {"<table>.momentum1": a ShardedTensor or DTensor}}
param_groups  the learning rate, which counts from the next `step` or `zero_grad`
step          applies the learning rate; rows are updated at the end of backward
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torchrec.distributed.batched_embedding_kernel import EmbeddingFusedOptimizer

from recsys.embeddings.rows.tables import compute_dtype

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch.distributed as dist

    from recsys.embeddings.update.fused_optimizer import FusedOptimizer

__all__ = ["RowStateOptimizer", "make_state"]


class RowStateOptimizer(EmbeddingFusedOptimizer):  # type: ignore[misc]  # TorchRec has no types
    """TorchRec's optimizer of a kernel's tables, for all tables of a rank.

    Its sharded tensors are made once, and are views of the state in the cold tier. So reading
    `state` first writes the newer state of rows in slots back, and after loading, rows are fetched
    again.

    Args:
        tables: The rank's tables, an `AbstractLocalTables`.
        group: The ranks among which the tables are divided.
    """

    def __init__(self, tables: Any, group: dist.ProcessGroup | None) -> None:
        self._has_dtensors = any(table.dtensor_metadata is not None for table in tables.tables)
        # TorchRec reads nothing else of a kernel's config.
        super().__init__(SimpleNamespace(embedding_tables=tables.tables), tables, group)

    @property
    def state(self) -> Mapping[Any, Any]:
        """The state of each table; the cold tier then has the newest values."""
        if self._has_dtensors:  # writes to them are not noticed
            self._emb_module.purge()
        else:
            self._emb_module.flush()
        return self._state

    @state.setter
    def state(self, state: Mapping[Any, Any]) -> None:
        self._state = state

    def post_load_state_dict(self) -> None:
        """Let the next lookup fetch rows again, with the state that was loaded."""
        self._emb_module.purge()


def make_state(optimizer: FusedOptimizer) -> None:
    """Make the state of tables that have none yet, as zeros.

    TorchRec names the state of a checkpoint before the first step, and every rank must have it.
    """
    known, formula = optimizer.state_dict(), optimizer.formula
    [group], [saved] = optimizer.param_groups, known["param_groups"]
    for key, weight in zip(saved["params"], group["params"], strict=True):
        state = known["state"].setdefault(key, {})
        prefix = key.partition(".")[2].removesuffix("weight")  # of embedding_bags.<table>.weight
        zero = torch.zeros((), dtype=compute_dtype(weight.dtype), device=weight.device)
        for name, size in formula.state_sizes(weight.shape[1]).items():
            columns = () if name in formula.row_states else (size,)
            state.setdefault(prefix + name, zero.expand(len(weight), *columns))
    optimizer.load_state_dict(known)
    for update in optimizer.updates:  # rows in files have their state there
        update.read_state()
