"""Train recommendation models whose embedding tables are bigger than the fast memory.

Public names and subpackages are imported when they are first used: PyTorch takes seconds, and
`recsys --help` needs none of it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from recsys._version import __version__

if TYPE_CHECKING:
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

_MODULES = {
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
    "load_checkpoint": "train.checkpoint",
    "restore": "conversion.accelerate",
    "save_checkpoint": "train.checkpoint",
    "verify": "conversion.verify",
}
_SUBPACKAGES = ("datasets", "embeddings", "errors", "models", "pipeline", "train")


def __getattr__(name: str) -> Any:
    if name in _SUBPACKAGES:
        return import_module(f"recsys.{name}")
    if name not in _MODULES:
        raise AttributeError(f"module 'recsys' has no attribute {name!r}")
    value = getattr(import_module(f"recsys.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_SUBPACKAGES})
