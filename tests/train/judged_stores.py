"""Small stores with groups and times, and stores that are judged by rankings."""

import numpy as np

from recsys.datasets import Store
from recsys.datasets.store_writer import Feature, StoreWriter

FEATURES = (
    Feature("user", "user"),
    Feature("item", "item"),
    Feature("genre", "genre"),
    Feature("history", "item", "sequence"),
)
SIZES = {"user": 40, "item": 31, "genre": 6}
FIRST_SECOND = 1_413_849_600  # 2014-10-21 in UTC
SMALL_MODEL = (
    "model.embedding_dim=4",
    "model.dense_arch=[8, 4]",
    "model.over_arch=[8, 1]",
    "batch_size=32",
    "optimizer.lr=0.2",
    "num_threads=1",
)


def write_store(path, *, is_ranked=False, num_samples=700, seed=0):
    """Write a store of 40 users over four days, and open it.

    With `is_ranked`, test and validation hold positives alone.
    """
    rng = np.random.default_rng(seed)
    users = rng.integers(0, 40, num_samples).astype(np.int32)
    items = rng.integers(0, 31, num_samples).astype(np.int32)
    genres = np.arange(31, dtype=np.int32) % 6
    taste = rng.normal(size=(40, 31))
    labels = (taste[users, items] + rng.normal(size=num_samples) > 0).astype(np.int8)
    bounds = [0, num_samples * 5 // 7, num_samples * 6 // 7, num_samples]
    if is_ranked:
        labels[bounds[1] :] = 1
    lengths = rng.integers(0, 4, (num_samples, 1))
    about = {"convention": "table", "sources": []}
    if is_ranked:
        about["ranking"] = {"item": "item", "item_features": ["genre"]}
    with StoreWriter(
        path, dense_transform="none", features=FEATURES, has_groups=True, has_times=True
    ) as writer:
        writer.append(
            labels,
            rng.normal(size=(num_samples, 2)).astype(np.float32),
            np.stack([users, items, genres[items]], 1),
            bag_values=rng.integers(0, 31, lengths.sum()).astype(np.int32),
            bag_lengths=lengths,
            groups=users,
            times=FIRST_SECOND + np.arange(num_samples) * 4 * 86_400 // num_samples,
        )
        writer.finish(
            dense_names=["age", "price"],
            splits={
                split: range(*bounds[place : place + 2])
                for place, split in enumerate(("train", "test", "validation"))
            },
            about=about,
            table_sizes=SIZES,
            catalog=genres[:, None] if is_ranked else None,
        )
    return Store(path)


def write_random_store(path, *, come_again):
    """Write a store of 40 users whose 60 items say nothing of them, and open it.

    A user has 20 positives and 60 negatives in training, then 25 positives for test, then 5 for
    validation. All are drawn with equal chances. With `come_again` a user may have an item many
    times, otherwise at most once. The dense feature makes each sample a question of its own.
    """
    rng = np.random.default_rng(0)
    draws = rng.integers(0, 60, (40, 60))
    if not come_again:
        draws = rng.permuted(np.tile(np.arange(60), (40, 1)), axis=1)
    negatives = rng.integers(0, 60, (40, 60))
    parts = [draws[:, :20], negatives, draws[:, 20:45], draws[:, 45:50]]
    items = np.concatenate([part.ravel() for part in parts]) + 1
    users = np.concatenate([np.repeat(np.arange(40), part.shape[1]) for part in parts])
    ends = np.cumsum([0, 3200, 1000, 200]).tolist()
    labels = np.ones(len(items), np.int8)
    labels[800:3200] = 0
    ranking = {"item": "item", "item_features": [], "repeats": come_again}
    about = {"convention": "table", "sources": [], "ranking": ranking}
    features = (Feature("item", "item"), Feature("user", "user"))
    with StoreWriter(path, dense_transform="none", features=features, has_groups=True) as writer:
        writer.append(
            labels,
            rng.normal(size=(len(items), 1)).astype(np.float32),
            np.stack([items, users], 1).astype(np.int32),
            groups=users.astype(np.int32),
        )
        writer.finish(
            dense_names=["noise"],
            splits={
                split: range(*ends[place : place + 2])
                for place, split in enumerate(("train", "test", "validation"))
            },
            about=about,
            table_sizes={"item": 61, "user": 40},
        )
    return Store(path)
