"""Entry points that take values, not files."""

from functools import partial

import numpy as np
import torch
from fuzz_cases import Reader
from fuzz_data import nothing
from fuzz_mutations import HUGE, hostile_value

import recsys
from recsys._support.sizes import parse_bytes
from recsys.batch import Batch, JaggedIds
from recsys.embeddings import (
    SGD,
    HotColdEmbeddingBag,
    HotColdEmbeddingBagCollection,
    PopularityProfile,
    TableConfig,
)


def odd_tensor(random):
    """A tensor, or what is none, for ids, offsets and weights."""
    size = random.choice([0, 1, 2, 3, 6, 7, 12, 13])
    dtype = random.choice([torch.int64] * 5 + [torch.int32, torch.float32, torch.int8, torch.bool])
    values = [random.choice([0, 0, 1, 2, 3, 5, 9, -1, 2**31, 2**62]) for _ in range(size)]
    kind = random.randint(0, 9)
    if kind == 0:
        return hostile_value(random)
    if kind == 1:
        return np.array(values)
    if kind == 2:
        return torch.tensor(values).reshape(-1, 1) if size else torch.empty(2, 0, dtype=torch.int64)
    if kind == 3:
        return torch.arange(size)
    if kind == 4:
        return torch.tensor(sorted(values[:size]), dtype=torch.int64).clamp(0, size)
    if kind == 5:
        return torch.empty(size, dtype=torch.int64, device="meta")
    return torch.tensor(values).clamp(-1, 9).to(dtype)


def _ids(random):
    """JaggedIds that are good, with a few odd ids in them."""
    lengths = torch.tensor([random.randint(0, 2) for _ in range(6)])
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    values = torch.tensor([random.choice([0, 1, 2, -1, 7, 2**40]) for _ in range(int(offsets[-1]))])
    weights = random.choice(
        [None, None, torch.rand(len(values)), torch.full((len(values),), torch.nan)]
    )
    return JaggedIds(["a", "b"], values.long(), offsets, weights)


def attack_jagged(folder, random):
    keys = random.choice([["a"], ["a", "b"], ["a", "a"], [], None, [None], "ab", 5])

    def use():
        JaggedIds(
            keys, odd_tensor(random), odd_tensor(random), random.choice([None, odd_tensor(random)])
        )

    def one_hot():
        JaggedIds.from_one_hot(keys, odd_tensor(random))

    def batch():
        Batch(odd_tensor(random), random.choice([_ids(random), None]), odd_tensor(random))

    return random.choice([use, use, one_hot, batch])


def attack_lookup(folder, random):
    tables = [
        TableConfig(name="t", num_embeddings=5, embedding_dim=4, feature_names=("a",)),
        TableConfig(name="u", num_embeddings=3, embedding_dim=4, feature_names=("b",)),
    ]

    def collection():
        module = HotColdEmbeddingBagCollection(
            tables, optimizer=SGD(lr=0.1), is_weighted=random.random() < 0.5
        )
        module(_ids(random)).values().sum().backward()

    def bag():
        budget = random.choice([None, 200])
        module = HotColdEmbeddingBag(9, 4, mode="sum", budget=budget, optimizer=SGD(lr=0.1))
        ids = torch.tensor([random.choice([0, 8, 9, -1, 2**40]) for _ in range(4)])
        offsets = torch.tensor(
            [random.choice([0, 1, 4, 5, -1]) for _ in range(random.randint(0, 3))]
        )
        module(ids, offsets.long()).sum().backward()

    def profile():
        PopularityProfile(tables).add(_ids(random))

    return random.choice([collection, bag, profile])


def attack_sizes(folder, random):
    value = random.choice(
        [
            hostile_value(random),
            f"{random.choice(HUGE[:7])}TiB",
            "9" * 500 + "GiB",
            "1.5.GiB",
            1e9,
            "-1",
        ]
    )
    return partial(parse_bytes, value, "budget")


def attack_accelerate(folder, random):
    bag = torch.nn.EmbeddingBag(9, 4, mode="sum", sparse=True)
    model = torch.nn.Sequential(bag)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [torch.arange(6).reshape(3, 2)] * 2
    budget = random.choice([None, "1KiB", "0", "9" * 500, -1, 2**70, "x", 1.5, True, 300])
    if random.random() < 0.5:
        optimizer = random.choice([optimizer, SGD(lr=0.1), None])
        return partial(
            recsys.accelerate,
            model,
            optimizer=optimizer,
            budget=budget,
            cold_tier=random.choice(["host", "host", "disk", None, 5]),
        )
    return partial(
        recsys.verify,
        model,
        random.choice([batches, [], iter(batches), None]),
        loss=lambda each, ids: each(ids).sum(),
        optimizer=optimizer,
        steps=random.choice([1, 2, 0, -1, 2**70, 1.5]),
        budget=budget,
    )


VALUES = (
    Reader(
        "JaggedIds, Batch",
        "shapes, dtypes, other types, offsets, meta tensors",
        nothing,
        attack_jagged,
        names_file=False,
    ),
    Reader(
        "lookups, profiles of batches",
        "ids, offsets, weights out of range, nan",
        nothing,
        attack_lookup,
        names_file=False,
    ),
    Reader(
        "sizes and budgets",
        "huge, negative, other types, text",
        nothing,
        attack_sizes,
        names_file=False,
    ),
    Reader(
        "accelerate, verify",
        "budgets, steps, batches, tiers",
        nothing,
        attack_accelerate,
        names_file=False,
        allowed=(ValueError, TypeError),
    ),
)
