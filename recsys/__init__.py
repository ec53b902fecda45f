"""Train recommendation models whose embedding tables are bigger than the fast memory."""

from recsys._version import __version__
from recsys.batch import Batch, JaggedIds, PooledEmbeddings
from recsys.conversion.accelerate import accelerate, restore
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
    "load_checkpoint",
    "restore",
    "save_checkpoint",
    "verify",
]
