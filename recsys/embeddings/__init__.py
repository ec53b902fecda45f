"""Embedding tables and those who look up and update their rows."""

from recsys.embeddings.bag import HotColdEmbeddingBag
from recsys.embeddings.collection import HotColdEmbeddingBagCollection
from recsys.embeddings.optimizer import SGD, Adagrad, Adam, PartialRowWiseAdam, RowWiseAdagrad
from recsys.embeddings.plan import HotPlan, plan_hot_rows
from recsys.embeddings.popularity import PopularityProfile
from recsys.embeddings.table import TableConfig

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "HotColdEmbeddingBag",
    "HotColdEmbeddingBagCollection",
    "HotPlan",
    "PartialRowWiseAdam",
    "PopularityProfile",
    "RowWiseAdagrad",
    "TableConfig",
    "plan_hot_rows",
]
