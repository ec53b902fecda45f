"""Embedding tables and those who look up and update their rows.

    built by users   bag and embedding (table_module), collection, embedding_collection, table;
                     optimizer: how rows move. abstract, baselines and providers: the same beside
                     others; tracing: one call of theirs in a traced model
    a lookup         bag_input (bag_lookup, collection_input) -> fused_lookup
                     -> kernels/pooled_lookup
    a gradient       -> the ledger of a table_group; table_parameter shows it as `grad`,
                     by sparse_gradients
    an update        fused_optimizer, or torch's by translate and in_backward
                     -> row_updater -> group_updater (state_arrays) -> kernels/row_update
    two tiers        budget, tiering -> tiers -> residency: tickets keep rows in slots
                     (kernels/slots); transfers: the queue of moves between slots and cold_store or
                     the file_store (kernels/file_moves), with its files in cold_files; staging:
                     their way to a device; ahead: tickets for later lookups; evaluation reads rows
                     where they are (kernels/tiered_lookup);
                     table_versions: writes from outside; forecast: what a larger budget would save;
                     interrupts: Ctrl-C held back while several lines must run together
    popularity       popularity (row_counts, lookup_blocks, coverage, rand_em, profile_file)
                     -> plan: which rows stay hot; model_plan: by which names
    memory           row_space: tables as kernels see them; memory: huge pages
    devices          kernel_choice -> kernels on the CPU, torch_kernels on CUDA; device_tables: how
                     tables get there
    accelerate       attach: which updater moves which tables of a model

A resident table takes none of the tiers' path; a tiered one goes through the same kernels, with
slots for rows.
"""

from recsys.embeddings.bag import HotColdEmbeddingBag
from recsys.embeddings.collection import HotColdEmbeddingBagCollection
from recsys.embeddings.embedding import HotColdEmbedding
from recsys.embeddings.embedding_collection import HotColdEmbeddingCollection
from recsys.embeddings.optimizer import SGD, Adagrad, Adam, PartialRowWiseAdam, RowWiseAdagrad
from recsys.embeddings.plan import HotPlan, plan_hot_rows
from recsys.embeddings.popularity import PopularityProfile
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
