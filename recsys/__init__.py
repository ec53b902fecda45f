"""Train recommendation models whose embedding tables are bigger than the fast memory."""

from recsys._version import __version__
from recsys.batch import Batch, JaggedIds, PooledEmbeddings
from recsys.conversion.accelerate import accelerate, restore
from recsys.conversion.verify import verify
from recsys.models.dlrm import DLRM, DLRMTrain
from recsys.train.checkpoint import Checkpoints, load_checkpoint, save_checkpoint

__all__ = [
    "DLRM",
    "Batch",
    "Checkpoints",
    "DLRMTrain",
    "JaggedIds",
    "PooledEmbeddings",
    "__version__",
    "accelerate",
    "load_checkpoint",
    "restore",
    "save_checkpoint",
    "verify",
]
