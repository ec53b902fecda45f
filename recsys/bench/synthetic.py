"""`recsys bench synthetic`: generating samples, compared with reading them from a store.

    provider            what a `BatchLoader` reads, shuffled
    plain               synthetic samples that do not change with time
    drift               samples with ten cycles of popularity drift
    preference_changes  samples with two preference changes
    all                 samples with both, and a random split
    store               the plain samples from a store, which is in the page cache

A loader works in one thread while the caller waits, so these are rates of one core. In a round
each provider reads one epoch of the training split. All run in one process.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from recsys._support.machine import tune_allocator
from recsys.bench.parts.harness import Row, ratio, rows_by_provider, take_turns, timed
from recsys.bench.parts.scratch import scratch_folder
from recsys.datasets.criteo.shape import KAGGLE_TABLE_SIZES
from recsys.datasets.loader import BatchLoader
from recsys.datasets.store import Store, StoreWriter
from recsys.datasets.synthetic.samples import SyntheticCriteo

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from recsys.batch import SampleSource

__all__ = ["bench_synthetic", "finish_store", "write_store"]

_BATCH_SIZE = 2048
_BLOCK_SAMPLES = 1 << 16


def bench_synthetic(
    *,
    num_samples: int,
    num_rounds: int,
    table_sizes: Sequence[int] = KAGGLE_TABLE_SIZES,
) -> list[Row]:
    """Measure samples per second of every provider, and how each compares with the store.

    Args:
        num_samples: Samples of all splits; a round reads six sevenths of them.
        num_rounds: Rounds that count.
        table_sizes: Rows per table.
    """
    tune_allocator()
    drift: dict[str, Any] = {"drift": 10 * 1e6 / num_samples}
    changes: dict[str, Any] = {"preference_changes": (num_samples // 3, 2 * num_samples // 3)}
    make = partial(SyntheticCriteo, num_samples=num_samples, table_sizes=table_sizes)
    plain = make()
    sources: dict[str, SampleSource] = {
        "plain": plain,
        "drift": make(**drift),
        "preference_changes": make(**changes),
        "all": make(**drift, **changes, split="random"),
    }
    with scratch_folder() as folder:
        sources["store"] = Store(write_store(plain, folder / "store"))
        seconds = take_turns(
            {
                name: timed(
                    partial(_read_epoch, BatchLoader(source, "train", _BATCH_SIZE, shuffle=True))
                )
                for name, source in sources.items()
            },
            num_rounds,
            num_warm_up_rounds=1,
        )
    case = f"B={_BATCH_SIZE},samples={num_samples},tables={len(table_sizes)}"
    num_read = len(plain.splits["train"])
    rates = {name: [num_read / s for s in spent] for name, spent in seconds.items()}
    rows = rows_by_provider("synthetic", case, "throughput", "samples/s", rates)
    baseline = seconds.pop("store")
    return rows + [
        ratio("synthetic", case, name, "speed_over_store", values=spent, baseline=baseline)
        for name, spent in seconds.items()
    ]


def _read_epoch(loader: BatchLoader) -> None:
    deque(loader, maxlen=0)


def write_store(source: SyntheticCriteo, path: Path) -> Path:
    """Write the samples of a source to a store, in their order, as `recsys prepare` would."""
    with StoreWriter(path) as writer:
        for start in range(0, source.num_samples, _BLOCK_SAMPLES):
            numbers = np.arange(start, min(start + _BLOCK_SAMPLES, source.num_samples))
            batch = source.read(numbers)
            counts = np.rint(np.expm1(batch.dense_features.numpy().astype(np.float64)))
            rows = batch.sparse_features.values().numpy().reshape(-1, len(numbers)).T
            writer.append(
                batch.labels.numpy().astype(np.int8), counts.astype(np.int32), rows.astype(np.int32)
            )
        return finish_store(writer, source)


def finish_store(writer: StoreWriter, source: SyntheticCriteo) -> Path:
    """Finish a store that has the features, splits and table sizes of a source."""
    return writer.finish(
        dense_names=[f"int_{feature}" for feature in range(source.num_dense)],
        splits=source.splits,
        about={"convention": "classic", "sources": []},
        table_sizes=source.table_sizes,
    )
