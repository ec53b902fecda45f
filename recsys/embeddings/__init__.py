"""Embedding tables, and the modules that look up and update their rows.

    bag, embedding, collection, embedding_collection
                   the modules that users build, of tables (`table`); `optimizer` has the formulas
                   that update rows, `baselines` the same modules by PyTorch and FBGEMM
    popularity/    how often each row is looked up, and which rows stay hot
    lookup/        from ids to pooled vectors, and from gradients to the ledger
    update/        from a ledger and the settings of an optimizer to updated rows
    tiers/         which row is in which slot, and its way from and to the cold store
    kernels/       what is done to rows: on the CPU by numba (cpu), elsewhere by torch (torch)
    rows/          the data that all kernels share

A room imports the rooms below it, never one above it. A resident table takes none of the tiers'
path; a tiered one goes through the same kernels, with slots for rows.
"""

from recsys.embeddings.bag import HotColdEmbeddingBag
from recsys.embeddings.collection import HotColdEmbeddingBagCollection
from recsys.embeddings.embedding import HotColdEmbedding
from recsys.embeddings.embedding_collection import HotColdEmbeddingCollection
from recsys.embeddings.optimizer import SGD, Adagrad, Adam, PartialRowWiseAdam, RowWiseAdagrad
from recsys.embeddings.popularity.plan import HotPlan, plan_hot_rows
from recsys.embeddings.popularity.profile import PopularityProfile
from recsys.embeddings.table import TableConfig

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "HotColdEmbedding",
    "HotColdEmbeddingBag",
    "HotColdEmbeddingBagCollection",
    "HotColdEmbeddingCollection",
    "HotPlan",
    "PartialRowWiseAdam",
    "PopularityProfile",
    "RowWiseAdagrad",
    "TableConfig",
    "plan_hot_rows",
]
