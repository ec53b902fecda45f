"""Mini-batches, the sources they are read from, and the result of a lookup.

    protocols          what modules and loaders require of features, results and sources
    bags_of_samples    where the bags of samples are in jagged data
    feature_tables     which features of a source look up which tables
    jagged_ids         JaggedIds: the rows that samples look up
    pooled_embeddings  PooledEmbeddings: the result of a lookup
    mini_batch         Batch: dense features, sparse features, labels

`JaggedIds` and `PooledEmbeddings` are the light counterparts of TorchRec's `KeyedJaggedTensor` and
`KeyedTensor`: the same layout and method names, without the dependency. Modules accept either.

    keys    = ["cat_0", "cat_1"]          batch of 3 samples
    values  = [4, 9, 9 | 0, 2]            the rows of cat_0, then those of cat_1
    offsets = [0, 1, 3, 3, 4, 4, 5]       bag (f, b) begins at offsets[f * B + b]

               sample 0   sample 1   sample 2
    cat_0      [4]        [9, 9]     []
    cat_1      [0]        []         [2]

Shape letters: B samples, F features, I dense features, N lookups, D embedding_dim.
"""

from recsys.batch.bags_of_samples import (
    places_of_samples,
    require_all_in_bags,
    require_one_batch_size,
)
from recsys.batch.feature_tables import (
    feature_tables,
    features_by_table,
    has_bags,
    histories_of,
)
from recsys.batch.jagged_ids import JaggedIds
from recsys.batch.mini_batch import Batch
from recsys.batch.pooled_embeddings import PooledEmbeddings
from recsys.batch.protocols import Features, Pooled, SampleSource

__all__ = [
    "Batch",
    "Features",
    "JaggedIds",
    "Pooled",
    "PooledEmbeddings",
    "SampleSource",
    "feature_tables",
    "features_by_table",
    "has_bags",
    "histories_of",
    "places_of_samples",
    "require_all_in_bags",
    "require_one_batch_size",
]
