"""Small tables and mini-batches with histories, for tests of DIN and TBSM."""

import torch
from torch import nn

from recsys import Batch, JaggedIds
from recsys.embeddings import HotColdEmbeddingCollection, TableConfig

DIM = 4
NUM_DENSE = 3
SIZES = {"item": 150, "category": 12, "user": 40, "tag": 9}
TABLE_OF = {
    "user": "user",
    "tags": "tag",
    "item_history": "item",
    "item": "item",
    "category_history": "category",
    "category": "category",
}
HISTORIES = {"item_history": "item", "category_history": "category"}


def make_tables(dim=DIM):
    return [
        TableConfig(
            name=f"t_{table}",
            num_embeddings=size,
            embedding_dim=dim,
            feature_names=tuple(name for name, own in TABLE_OF.items() if own == table),
        )
        for table, size in SIZES.items()
    ]


def make_collection(**options):
    return HotColdEmbeddingCollection(make_tables(), **options)


def make_batch(lengths, seed=0, num_dense=NUM_DENSE, num_popular=0, category_lengths=None):
    """A mini-batch whose histories have these lengths; `tags` have 0 to 3 rows.

    With `category_lengths`, the history of categories has those.

    The first `num_popular` samples look up the first two rows of each table alone.
    """
    generator = torch.Generator().manual_seed(seed)
    lengths, ones = torch.tensor(lengths).long(), torch.ones(len(lengths), dtype=torch.int64)
    of_categories = lengths if category_lengths is None else torch.tensor(category_lengths)
    of_history = {"item_history": lengths, "category_history": of_categories}
    tags = torch.randint(0, 4, (len(lengths),), generator=generator)
    of_feature = {name: tags if name == "tags" else of_history.get(name, ones) for name in TABLE_OF}
    values = [
        torch.randint(0, SIZES[TABLE_OF[name]], (int(each.sum()),), generator=generator)
        for name, each in of_feature.items()
    ]
    for rows, each in zip(values, of_feature.values(), strict=True):
        rows[: int(each[:num_popular].sum())] %= 2
    offsets = nn.functional.pad(torch.cat(list(of_feature.values())).cumsum(0), (1, 0))
    return Batch(
        torch.rand(len(lengths), num_dense, generator=generator),
        JaggedIds(list(TABLE_OF), torch.cat(values), offsets),
        torch.randint(0, 2, (len(lengths),), generator=generator).float(),
    )


def rows_of(weights, batch, feature, sample):
    """The rows of one bag, one by one."""
    ids = batch.sparse_features[feature]
    begin, end = ids.offsets()[sample : sample + 2].tolist()
    table = weights[f"embedding_collection.embeddings.t_{TABLE_OF[feature]}.weight"]
    return [table[row] for row in ids.values()[begin:end].tolist()]


def sum_of(weights, batch, feature, sample):
    rows = rows_of(weights, batch, feature, sample)
    return sum(rows, torch.zeros(DIM, dtype=torch.float64))
