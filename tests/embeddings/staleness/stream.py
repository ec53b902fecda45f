"""A small model and a stream of mini-batches, for tests of the staleness tracker."""

import torch

from recsys.batch import JaggedIds
from recsys.embeddings import SGD, HotColdEmbeddingBagCollection, TableConfig

SIZES = [500, 6, 900]
DIMS = [4, 4, 8]  # tables of two groups
BATCH_SIZE = 10
_KEYS = [f"f{number}" for number in range(len(SIZES))]


def make_model(optimizer=None, *, pooling="sum", dims=DIMS, **kinds):
    tables = [
        TableConfig(
            name=f"t{number}",
            embedding_dim=dim,
            num_embeddings=size,
            feature_names=[_KEYS[number]],
            pooling=pooling,
        )
        for number, (size, dim) in enumerate(zip(SIZES, dims, strict=True))
    ]
    model = HotColdEmbeddingBagCollection(
        tables=tables,
        optimizer=optimizer or SGD(lr=0.1),
        **kinds,
    )
    generator = torch.Generator().manual_seed(0)
    for bag in model.embedding_bags.values():
        rows = torch.randn(bag.weight.shape, generator=generator)
        with torch.no_grad():
            bag.weight.copy_(rows)
    return model


def make_batch(number, *, seed=0, is_weighted=False, is_one_hot=False):
    """Mini-batch `number`: low ids are popular; bags have 0 to 3 ids, or one."""
    generator = torch.Generator().manual_seed(1000 * seed + number)
    num_bags = len(SIZES) * BATCH_SIZE
    lengths = torch.randint(0, 4, (num_bags,), generator=generator)
    if is_one_hot:
        lengths = torch.ones_like(lengths)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    values = []
    for size, count in zip(SIZES, lengths.view(len(SIZES), -1).sum(1).tolist(), strict=True):
        values.append((torch.rand(count, generator=generator) ** 3 * size).long())
    values = torch.cat(values)
    weights = torch.rand(len(values), generator=generator) if is_weighted else None
    return JaggedIds(keys=_KEYS, values=values, offsets=offsets, weights=weights)


def step(model, features, number):
    """One step towards targets that change half-way, with a gradient that fades in between."""
    generator = torch.Generator().manual_seed(number)
    pooled = model(features).values()
    noise = torch.randn(pooled.shape, generator=generator)
    loss = (pooled * noise).sum() * 0.985 ** (number % 240)
    loss.backward()
    return loss.item()


def train(model, tracker, numbers):
    """Train mini-batches, and tell the tracker all of it; returns the losses."""
    losses = []
    for number in numbers:
        features = make_batch(number)
        first, samples = number * BATCH_SIZE, torch.arange(BATCH_SIZE)
        tracker.add_inputs(first, model.lookups(features), BATCH_SIZE, samples)
        tracker.begin_step(number)
        losses.append(step(model, features, number))
        tracker.end_step((number + 1) * BATCH_SIZE)
    return losses


def rows_of(model):
    """A copy of each table."""
    return [bag.weight.detach().clone() for bag in model.embedding_bags.values()]
