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
