"""Tables in two tiers under TorchRec's `DistributedModelParallel`. Needs TorchRec.

    sharder          what users give to `DistributedModelParallel`
    collection       the sharded collections, with and without pooling
    sharded_tables   what they share: ids out, lookup, vectors back
    exchange         what travels for row-wise tables
    local_tables     the rows of one rank: lookups and checkpoints
    row_state        the row optimizer as TorchRec's checkpoints and schedules see it
    input_checks     checks a rank's own mini-batch, before its ids go to other ranks
    planner          what a table costs under a budget, for TorchRec's planner
    train_pipeline   TorchRec's pipeline, which also fetches the rows of the next mini-batch

TorchRec moves ids and vectors between ranks. Each rank holds the rows that the plan gives
it, in slots and a cold tier of its own, and updates them at the end of backward.
"""

try:
    import torchrec  # noqa: F401
except (ImportError, OSError) as error:
    from recsys.batch.jagged_ids import cannot_import_torchrec

    raise cannot_import_torchrec("recsys.distributed", error) from error

from recsys.distributed.planner import HotPlanStorageEstimator
from recsys.distributed.sharder import (
    HotColdEmbeddingBagCollectionSharder,
    HotColdEmbeddingCollectionSharder,
)
from recsys.distributed.train_pipeline import HotColdTrainPipelineSparseDist
from recsys.errors import OtherRankFailed

__all__ = [
    "HotColdEmbeddingBagCollectionSharder",
    "HotColdEmbeddingCollectionSharder",
    "HotColdTrainPipelineSparseDist",
    "HotPlanStorageEstimator",
    "OtherRankFailed",
]
