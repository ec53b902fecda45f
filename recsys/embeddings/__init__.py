"""Embedding tables, and the modules that look up and update their rows.

    bag, embedding, collection, embedding_collection
                   the modules that users build from tables (`table`); `optimizer` has the update
                   rules of rows, `baselines` the same modules by PyTorch and FBGEMM
    popularity/    how often each row is looked up, and which rows stay hot
    staleness/     which rows have stopped changing although they are trained
    lookup/        ids become pooled vectors, and gradients become ledger entries
    update/        rows are updated by a ledger and the settings of an optimizer
    tiers/         which row is in which slot; rows move between slots and the cold store
    kernels/       the work on rows: on the CPU by numba (cpu), elsewhere by torch (torch)
    rows/          the data that all kernels share

A folder imports only folders below it in this list. A resident table does not use `tiers/`; a table
with tiers uses the same kernels on slots instead of rows.
"""

from typing import TYPE_CHECKING

from recsys._support.lazy_names import lazy_names

if TYPE_CHECKING:
    from recsys.embeddings.bag import HotColdEmbeddingBag
    from recsys.embeddings.collection import HotColdEmbeddingBagCollection
    from recsys.embeddings.embedding import HotColdEmbedding
    from recsys.embeddings.embedding_collection import HotColdEmbeddingCollection
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
            "HotColdEmbeddingCollection": "embedding_collection",
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
