"""Measures how closely synthetic data follows the real sample; `make coverage` calls this.

    python docs/benchmarks/synthetic_coverage.py STORE --out FILE [--max-samples N]

STORE is the prepared real sample of Criteo Kaggle. FILE is JSON and contains only aggregates of it.
These are counts, not times, so every machine gives the same result. Use fewer samples for a trial.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from recsys._support.machine import describe_environment
from recsys.datasets import Store, SyntheticCriteo
from recsys.train.metrics.metrics import auc

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from recsys.batch import SampleSource

_FULL_SIZE = 45_840_617  # samples in the challenge's training file
_SIZES = (1_000_000, 10_000_000, _FULL_SIZE)
_TOPS = (0.001, 0.01, 0.1)
_BATCH_SIZES = (256, 1_024, 4_096, 16_384)
_BLOCK_SAMPLES = 1 << 16
_NUM_ABLATION_SAMPLES = 500_000
_BACKFITTING_ROUNDS = 5
# Larger tables have no interactions, and backfitting would fit noise to rows that occur once.
_MAX_BACKFITTED_ROWS = 10_000


def popularity(source: SampleSource, sizes: Sequence[int]) -> list[dict[str, Any]]:
    """Lookups of the first samples of a source, for increasing numbers of samples.

    `top_shares` are the shares of all lookups that go to the most frequent 0.1, 1 and 10 % of the
    rows that occur. The rows of all columns are ranked together.
    """
    counts = [np.zeros(size, np.int32) for size in source.table_sizes.values()]
    found, start = [], 0
    for size in sizes:
        while start < size:
            stop = min(start + _BLOCK_SAMPLES, size)
            for column, ids in zip(counts, _ids(source, start, stop), strict=True):
                np.add.at(column, ids, 1)
            start = stop
        falling = np.concatenate([column[column > 0] for column in counts])
        falling[::-1].sort()
        tops = [int(np.ceil(share * len(falling))) for share in _TOPS]
        shares = [float(falling[:top].sum(dtype=np.int64)) / (size * len(counts)) for top in tops]
        found.append({"num_samples": size, "num_rows": len(falling), "top_shares": shares})
    return found


def distinct_rows(source: SampleSource, num_samples: int) -> list[float]:
    """Distinct rows per lookup in mini-batches of consecutive samples, for each mini-batch size.

    This is the mean over all complete mini-batches of the first samples.
    """
    column_ids = _ids(source, 0, num_samples)
    return [
        float(
            np.mean(
                [
                    len(np.unique(ids[start : start + size])) / size
                    for ids in column_ids
                    for start in range(0, num_samples - size + 1, size)
                ]
            )
        )
        for size in _BATCH_SIZES
    ]


def planted(source: SyntheticCriteo, num_samples: int) -> dict[str, float]:
    """The best AUC of models that know everything, no interactions, or only the dense features.

    The second model is the additive function of the rows with the least squared error. Backfitting
    finds the part of the interactions that each column contributes.
    """
    numbers = np.arange(num_samples)
    batch, parts = source.read(numbers), source.logit_parts(numbers)
    labels = batch.labels.numpy()
    column_ids = batch.sparse_features.values().numpy().reshape(-1, len(numbers))
    additive = np.zeros(column_ids.shape)
    for _ in range(_BACKFITTING_ROUNDS):
        for column, size in enumerate(source.table_sizes.values()):
            if size > _MAX_BACKFITTED_ROWS:
                continue
            rest = parts["pairs"] - additive.sum(axis=0) + additive[column]
            ids = column_ids[column]
            met = np.maximum(np.bincount(ids, minlength=size), 1)
            additive[column] = (np.bincount(ids, weights=rest, minlength=size) / met)[ids]
    singly = parts["dense"] + parts["rows"] + additive.sum(axis=0)
    everything = parts["dense"] + parts["rows"] + parts["pairs"]
    models = {"everything": everything, "no_interactions": singly, "no_tables": parts["dense"]}
    return {name: float(auc(logits, labels) or 0) for name, logits in models.items()}


def _ids(source: SampleSource, start: int, stop: int) -> NDArray[np.int64]:
    """Rows of the lookups, by column and sample."""
    batch = source.read(np.arange(start, stop))
    ids: NDArray[np.int64] = batch.sparse_features.values().numpy().reshape(-1, stop - start)
    return ids


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure both sources and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("store")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--max-samples", type=int, default=_FULL_SIZE)
    options = parser.parse_args(arguments)
    real, synthetic = Store(options.store), SyntheticCriteo(num_samples=_FULL_SIZE)
    sample_size = real.num_samples
    sizes = [sample_size, *(size for size in _SIZES if sample_size < size <= options.max_samples)]
    result = {
        "environment": describe_environment(),
        "tops": _TOPS,
        "batch_sizes": _BATCH_SIZES,
        "real": {
            "popularity": popularity(real, [sample_size]),
            "distinct_rows": distinct_rows(real, sample_size),
        },
        "synthetic": {
            "popularity": popularity(synthetic, sizes),
            "distinct_rows": distinct_rows(synthetic, sample_size),
            "planted": planted(synthetic, min(_NUM_ABLATION_SAMPLES, options.max_samples)),
        },
    }
    options.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
