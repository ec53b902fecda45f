"""Train recommendation models whose embedding tables are bigger than the fast memory.

Public names and subpackages are imported when they are first used: PyTorch takes seconds, and
`recsys --help` needs none of it.
"""

from typing import TYPE_CHECKING

from recsys._support.lazy_names import lazy_names
from recsys._version import __version__

if TYPE_CHECKING:
    from recsys.batch import Batch, JaggedIds, PooledEmbeddings
    from recsys.conversion.accelerate import accelerate, restore
    from recsys.conversion.estimate import estimate
    from recsys.conversion.verify import verify
    from recsys.datasets.store import Store
    from recsys.embeddings.bag import HotColdEmbeddingBag
    from recsys.embeddings.collection import HotColdEmbeddingBagCollection
    from recsys.models.dlrm import DLRM, DLRMTrain
    from recsys.pipeline.train_pipeline import TrainPipeline
    from recsys.train.checkpoint import Checkpoints, load_checkpoint, save_checkpoint

__all__ = [
    "DLRM",
    "Batch",
    "Checkpoints",
    "DLRMTrain",
    "HotColdEmbeddingBag",
    "HotColdEmbeddingBagCollection",
    "JaggedIds",
    "PooledEmbeddings",
    "Store",
    "TrainPipeline",
    "__version__",
    "accelerate",
    "estimate",
    "load_checkpoint",
    "restore",
    "save_checkpoint",
    "verify",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "DLRM": "models.dlrm",
            "Batch": "batch",
            "Checkpoints": "train.checkpoint",
            "DLRMTrain": "models.dlrm",
            "HotColdEmbeddingBag": "embeddings.bag",
            "HotColdEmbeddingBagCollection": "embeddings.collection",
            "JaggedIds": "batch",
            "PooledEmbeddings": "batch",
            "Store": "datasets.store",
            "TrainPipeline": "pipeline.train_pipeline",
            "accelerate": "conversion.accelerate",
            "estimate": "conversion.estimate",
            "load_checkpoint": "train.checkpoint",
            "restore": "conversion.accelerate",
            "save_checkpoint": "train.checkpoint",
            "verify": "conversion.verify",
        },
        ("datasets", "embeddings", "errors", "models", "pipeline", "train"),
    )
