"""Embedding tables, and the modules that look up and update their rows.

    bag, embedding, collection
                   the modules that users build from tables (`table`), on `tables_module`;
                   `optimizer` has the update rules of rows, `attach` lets a torch optimizer update
                   them
    saved_tables   tables and state as a checkpoint saves and loads them
    popularity/    how often each row is looked up, and which rows stay hot
    staleness/     which rows have stopped changing although they are trained
    lookup/        ids become pooled vectors, and gradients become ledger entries
    update/        rows are updated by a ledger and the settings of an optimizer
    tiers/         which row is in which slot; rows move between slots and the cold tier
    rows/          tables, bags, the ledger: the data that all kernels share
    kernels/       the work on rows: by numba (cpu) and by Triton

A folder imports only folders below it in this list.
"""

from typing import TYPE_CHECKING

from recsys._support.lazy_names import lazy_names

if TYPE_CHECKING:
    from recsys.embeddings.bag import HotColdEmbeddingBag
    from recsys.embeddings.collection import (
        HotColdEmbeddingBagCollection,
        HotColdEmbeddingCollection,
    )
    from recsys.embeddings.embedding import HotColdEmbedding
    from recsys.embeddings.optimizer import SGD, Adagrad, Adam, PartialRowWiseAdam, RowWiseAdagrad
    from recsys.embeddings.popularity.counts import PopularityProfile
    from recsys.embeddings.popularity.plan import HotPlan, plan_hot_rows
    from recsys.embeddings.staleness.settings import Staleness
    from recsys.embeddings.staleness.tracker import StalenessTracker
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
    "Staleness",
    "StalenessTracker",
    "TableConfig",
    "plan_hot_rows",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "SGD": "optimizer",
            "Adagrad": "optimizer",
            "Adam": "optimizer",
            "HotColdEmbedding": "embedding",
            "HotColdEmbeddingBag": "bag",
            "HotColdEmbeddingBagCollection": "collection",
            "HotColdEmbeddingCollection": "collection",
            "HotPlan": "popularity.plan",
            "PartialRowWiseAdam": "optimizer",
            "PopularityProfile": "popularity.counts",
            "RowWiseAdagrad": "optimizer",
            "Staleness": "staleness.settings",
            "StalenessTracker": "staleness.tracker",
            "TableConfig": "table",
            "plan_hot_rows": "popularity.plan",
        },
    )
