"""Stores of synthetic samples."""

import numpy as np

from recsys.datasets.store_writer import StoreWriter


def write_store(source, path):
    """Write the samples of a synthetic source, in their order, as `recsys prepare` would."""
    batch = source.read(np.arange(source.num_samples))
    counts = np.rint(np.expm1(batch.dense_features.numpy().astype(np.float64)))
    rows = batch.sparse_features.values().numpy().reshape(-1, source.num_samples).T
    with StoreWriter(path) as writer:
        writer.append(
            batch.labels.numpy().astype(np.int8), counts.astype(np.int32), rows.astype(np.int32)
        )
        return writer.finish(
            dense_names=[f"int_{feature}" for feature in range(source.num_dense)],
            splits=source.splits,
            about={"convention": "classic", "sources": []},
            table_sizes=source.table_sizes,
        )
