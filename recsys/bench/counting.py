"""`recsys bench count`: lookups counted per second, compared with numpy and torch.

    case                  recsys                              numpy            torch
    lookups=criteo|even   `PopularityProfile.count` (store)   `bincount`       `bincount`
    B=...                 `PopularityProfile.add` (batch)     `add.at`         `scatter_add_`

`criteo` are the lookups of `synthetic:criteo-kaggle`. `even` are drawn uniformly from tables of the
same sizes, so lookups in large tables miss every cache. Stores are in the page cache. A profile
allocates new memory in each round, and so does bincount. Recsys also checks the ids. bincount gets
whole columns, because each call allocates an array of the table's size. For mini-batches it would
do little else, so there numpy and torch add in place, feature by feature.

All providers take turns in one process. A round counts every lookup once.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from recsys._support.machine import tune_allocator
from recsys.bench.parts.harness import Row, ratio, rows_by_provider, take_turns, timed
from recsys.bench.parts.scratch import scratch_folder
from recsys.bench.synthetic import finish_store, write_store
from recsys.datasets.criteo.shape import KAGGLE_TABLE_SIZES
from recsys.datasets.store import Store, StoreWriter
from recsys.datasets.synthetic.samples import SyntheticCriteo
from recsys.embeddings.popularity.profile import PopularityProfile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from recsys.batch import Batch

__all__ = ["bench_counting"]

_BLOCK_SAMPLES = 1 << 16


def bench_counting(
    batch_sizes: Sequence[int],
    *,
    num_samples: int,
    num_rounds: int,
    table_sizes: Sequence[int] = KAGGLE_TABLE_SIZES,
) -> Iterator[Row]:
    """Measure lookups per second of every provider, and compare recsys with the others.

    Args:
        batch_sizes: B of the mini-batches. Of each size, at most 100 mini-batches are counted.
        num_samples: Samples in each store.
        num_rounds: Rounds that count.
        table_sizes: Rows per table.
    """
    tune_allocator()
    source = SyntheticCriteo(num_samples=num_samples, table_sizes=table_sizes)
    with scratch_folder() as folder:
        stores = {
            "criteo": Store(write_store(source, folder / "criteo")),
            "even": Store(_write_even(source, folder / "even")),
        }
        for name, store in stores.items():
            case = f"lookups={name},samples={num_samples},tables={len(table_sizes)}"
            calls: dict[str, Callable[[], object]] = {
                "recsys": partial(PopularityProfile.count, store),
                "numpy": partial(_numpy_store, store),
                "torch": partial(_torch_store, store),
            }
            yield from _measure(case, calls, store.sparse.size, num_rounds)
        for batch_size in batch_sizes:
            numbers = np.arange(num_samples)
            batches = [
                stores["criteo"].read(numbers[begin : begin + batch_size])
                for begin in range(0, num_samples - batch_size + 1, batch_size)[:100]
            ]
            case = f"B={batch_size},batches={len(batches)},tables={len(table_sizes)}"
            profile = PopularityProfile(source.table_sizes)
            arrays = [np.zeros(size, np.int32) for size in table_sizes]
            tensors = [torch.zeros(size, dtype=torch.int32) for size in table_sizes]
            ones = torch.ones(batch_size, dtype=torch.int32)
            calls = {
                "recsys": partial(_add, profile, batches),
                "numpy": partial(_numpy_batches, arrays, batches),
                "torch": partial(_torch_batches, tensors, ones, batches),
            }
            num_lookups = len(batches) * batch_size * len(table_sizes)
            yield from _measure(case, calls, num_lookups, num_rounds)


def _measure(
    case: str, calls: Mapping[str, Callable[[], object]], num_lookups: int, num_rounds: int
) -> list[Row]:
    seconds = take_turns(
        {name: timed(call) for name, call in calls.items()}, num_rounds, num_warm_up_rounds=1
    )
    rates = {name: [num_lookups / s for s in spent] for name, spent in seconds.items()}
    rows, ours = (
        rows_by_provider("count", case, "throughput", "lookups/s", rates),
        seconds["recsys"],
    )
    return rows + [
        ratio("count", case, "recsys", f"speed_over_{other}", values=ours, baseline=seconds[other])
        for other in ("numpy", "torch")
    ]


def _numpy_store(store: Store) -> list[NDArray[Any]]:
    return [
        np.bincount(column, minlength=size)
        for column, size in zip(store.sparse.T, store.table_sizes.values(), strict=True)
    ]


def _torch_store(store: Store) -> list[torch.Tensor]:
    # A copy: torch does not take read-only memory, and a column is not contiguous.
    return [
        torch.bincount(torch.from_numpy(np.array(column)), minlength=size)
        for column, size in zip(store.sparse.T, store.table_sizes.values(), strict=True)
    ]


def _add(profile: PopularityProfile, batches: Sequence[Batch]) -> None:
    for batch in batches:
        profile.add(batch)


def _numpy_batches(counts: Sequence[NDArray[Any]], batches: Sequence[Batch]) -> None:
    for batch in batches:
        columns = batch.sparse_features.values().numpy().reshape(len(counts), -1)
        for column, rows in zip(counts, columns, strict=True):
            np.add.at(column, rows, 1)


def _torch_batches(
    counts: Sequence[torch.Tensor], ones: torch.Tensor, batches: Sequence[Batch]
) -> None:
    for batch in batches:
        columns = batch.sparse_features.values().view(len(counts), -1)
        for column, rows in zip(counts, columns, strict=True):
            column.scatter_add_(0, rows, ones)


def _write_even(source: SyntheticCriteo, path: Path) -> Path:
    """Write as many samples as a source has, with rows that are drawn uniformly."""
    rng = np.random.default_rng(0)
    sizes = list(source.table_sizes.values())
    with StoreWriter(path) as writer:
        for begin in range(0, source.num_samples, _BLOCK_SAMPLES):
            num = min(_BLOCK_SAMPLES, source.num_samples - begin)
            writer.append(
                np.zeros(num, np.int8),
                np.zeros((num, source.num_dense), np.int32),
                rng.integers(0, sizes, (num, len(sizes))).astype(np.int32),
            )
        return finish_store(writer, source)
