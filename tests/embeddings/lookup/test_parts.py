"""`parts` of a module: what `forward` of the same arguments looks up, a bag for each sample."""

import pytest
import torch

from recsys.batch import JaggedIds
from recsys.embeddings import (
    SGD,
    HotColdEmbedding,
    HotColdEmbeddingBag,
    HotColdEmbeddingBagCollection,
    HotColdEmbeddingCollection,
    TableConfig,
)

SGD_RULE = SGD(lr=0.1)
TABLES = [
    TableConfig(name="t", num_embeddings=20, embedding_dim=4, feature_names=["a", "b"]),
    TableConfig(name="u", num_embeddings=30, embedding_dim=4, feature_names=["c"]),
]


def rows_of(parts):
    """For each sample, its rows by table, in the order of lookups."""
    found = {}
    for group, lookups, bags in parts:
        for table, position in zip(
            lookups.tables.tolist(), lookups.positions.tolist(), strict=True
        ):
            for sample in range(bags.batch_size):
                bag = position * bags.batch_size + sample
                begin, end = bag, bag + 1
                if bags.offsets is not None:
                    begin, end = bags.offsets[bag : bag + 2].tolist()
                place = found.setdefault(sample, []), group.names[table]
                place[0].append((place[1], bags.values[begin:end].tolist()))
    return [sorted(found[sample]) for sample in sorted(found)]


def some_features(is_one_hot):
    if is_one_hot:
        rows = torch.tensor([[1, 2], [3, 4], [5, 6]])
        return JaggedIds.from_one_hot(["a", "b", "c"], rows), [[[1], [3], [5]], [[2], [4], [6]]]
    values, offsets = torch.tensor([1, 2, 3, 4, 5]), torch.tensor([0, 2, 2, 3, 4, 4, 5])
    return JaggedIds(["a", "b", "c"], values, offsets), [[[1, 2], [3], []], [[], [4], [5]]]


@pytest.mark.parametrize("is_one_hot", [True, False])
@pytest.mark.parametrize("kind", [HotColdEmbeddingBagCollection, HotColdEmbeddingCollection])
@pytest.mark.parametrize("is_torchrec", [False, True])
def test_parts_of_collections(kind, is_one_hot, is_torchrec):
    features, bags = some_features(is_one_hot)
    if is_torchrec:
        pytest.importorskip("torchrec")
        features = features.to_torchrec()

    parts = kind(TABLES, optimizer=SGD_RULE).parts(features)

    assert rows_of(parts) == [sorted([("t", a), ("t", b), ("u", c)]) for a, b, c in bags]


def test_parts_of_a_bag_leave_out_padding():
    module = HotColdEmbeddingBag(20, 4, mode="mean", padding_idx=3, optimizer=SGD_RULE)

    parts = module.parts(torch.tensor([1, 3, 3, 2, 2]), torch.tensor([0, 2, 3]))

    assert rows_of(parts) == [[("weight", [1])], [("weight", [])], [("weight", [2, 2])]]


def test_parts_of_a_bag_of_rows():
    module = HotColdEmbeddingBag(20, 4, mode="sum", optimizer=SGD_RULE)

    parts = module.parts(torch.tensor([[1, 2], [3, 4]]), None, torch.rand(2, 2))

    assert rows_of(parts) == [[("weight", [1, 2])], [("weight", [3, 4])]]


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([1, 2], [[1], [2]]),
        ([[1, 2], [3, 4]], [[1, 2], [3, 4]]),
        ([[[1, 2], [3, 4]], [[5, 6], [7, 8]]], [[1, 2, 3, 4], [5, 6, 7, 8]]),
        ([[1], [2]], [[1], [2]]),
    ],
)
def test_parts_of_an_embedding_have_a_bag_for_each_sample(ids, expected):
    parts = HotColdEmbedding(20, 4, optimizer=SGD_RULE).parts(torch.tensor(ids))

    assert rows_of(parts) == [[("weight", rows)] for rows in expected]
