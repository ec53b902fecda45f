"""Lookups of ids, offsets and weights that are out of range: kernels must not read beyond rows."""

import torch
from fuzz_cases import Reader
from fuzz_data import nothing

from recsys.batch import JaggedIds
from recsys.embeddings import (
    SGD,
    HotColdEmbeddingBag,
    HotColdEmbeddingBagCollection,
    PopularityProfile,
    TableConfig,
)

TABLES = [
    TableConfig(name="t", num_embeddings=5, embedding_dim=4, feature_names=("a",)),
    TableConfig(name="u", num_embeddings=3, embedding_dim=4, feature_names=("b",)),
]


def _ids(random):
    """JaggedIds that are good, with a few odd ids in them."""
    lengths = torch.tensor([random.randint(0, 2) for _ in range(6)])
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    values = torch.tensor([random.choice([0, 1, 2, -1, 7, 2**40]) for _ in range(int(offsets[-1]))])
    weights = [None, None, torch.rand(len(values)), torch.full((len(values),), torch.nan)]
    return JaggedIds(["a", "b"], values.long(), offsets, random.choice(weights))


def attack_lookup(folder, random):
    def collection():
        weighted = random.random() < 0.5
        module = HotColdEmbeddingBagCollection(TABLES, optimizer=SGD(lr=0.1), is_weighted=weighted)
        module(_ids(random)).values().sum().backward()

    def bag():
        budget = random.choice([None, 200])
        module = HotColdEmbeddingBag(9, 4, mode="sum", budget=budget, optimizer=SGD(lr=0.1))
        ids = torch.tensor([random.choice([0, 8, 9, -1, 2**40]) for _ in range(4)])
        ends = [random.choice([0, 1, 4, 5, -1]) for _ in range(random.randint(0, 3))]
        module(ids, torch.tensor(ends).long()).sum().backward()

    return random.choice([collection, bag, lambda: PopularityProfile(TABLES).add(_ids(random))])


VALUES = (
    Reader(
        "lookups, profiles of batches",
        "ids, offsets, weights out of range, nan",
        nothing,
        attack_lookup,
        names_file=False,
    ),
)
