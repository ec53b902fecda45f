"""TorchRec's `TrainPipelineSparseDist`, which also fetches the rows of the next mini-batch.

    forward of mini-batch i        ids of i + 1 travel between ranks
    ids of i + 1 have arrived      slots for their rows are claimed, and the rows are fetched
    backward of mini-batch i       rows of i are updated in their slots
    forward of mini-batch i + 1    finds its rows in slots

TorchRec's own `TrainPipelineSparseDist` runs over recsys tables, too, and fetches rows when their
forward begins. Its `PrefetchTrainPipelineSparseDist` needs CUDA.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import NoWait

from recsys.distributed.sharded_tables import AbstractShardedTables

if TYPE_CHECKING:
    from torch import nn
    from torchrec.distributed.train_pipeline.pipeline_context import TrainPipelineContext

__all__ = ["HotColdTrainPipelineSparseDist"]


class HotColdTrainPipelineSparseDist(TrainPipelineSparseDist):  # type: ignore[misc]  # untyped
    """A drop-in for `TrainPipelineSparseDist`; losses and rows are the same to the last bit.

    Ids must have arrived before the backward begins, while TorchRec's pipeline also waits for them
    during the backward.
    """

    def attach(self, model: nn.Module | None = None, sparse_dist: bool = True) -> None:
        """Continue after `detach`; arguments as in TorchRec.

        The ids of the next mini-batch have arrived. TorchRec would send them again, and take the
        batch sizes of all ranks for equal.
        """
        has_arrived = bool(self.contexts) and bool(self.contexts[0].input_dist_tensors_requests)
        super().attach(model, sparse_dist and not has_arrived)

    def wait_sparse_data_dist(self, context: TrainPipelineContext) -> None:
        """Wait for the ids of a mini-batch, and start to fetch their rows."""
        super().wait_sparse_data_dist(context)
        # On CUDA the memory of the ids belongs to this stream, and the forward waits for it.
        with self._stream_context(self._data_dist_stream):
            for module in self._pipelined_modules:
                if isinstance(module, AbstractShardedTables):
                    requests, name = context.input_dist_tensors_requests, module.forward.name
                    ids = requests[name].wait()
                    module.prefetch(ids, ctx=context.module_contexts[name])
                    requests[name] = NoWait(ids)
