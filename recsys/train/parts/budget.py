"""The fast memory with which every row of a mini-batch has a slot, before tables are built."""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING

import numpy as np
import torch

from recsys.batch import feature_tables, features_by_table
from recsys.embeddings.staleness.drift import tracked_bytes
from recsys.embeddings.tiers.budget import floor_bytes, row_bytes, slot_bytes
from recsys.train.parts.providers import row_optimizer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from recsys.batch import Batch, SampleSource
    from recsys.config import TrainConfig

__all__ = [
    "MemoryNeeds",
    "enough_bytes",
    "first_batch",
    "tracker_bytes",
    "window_lookups",
]

_NUM_DRAWN = 8  # mini-batches in which the rows of bags are counted


class MemoryNeeds:
    """Bytes of fast memory for the tables of a run.

    Args:
        config: The configuration of the run; its `budget` is not read.
        source: The data.
    """

    def __init__(self, config: TrainConfig, source: SampleSource) -> None:
        self._sizes, self._tables = source.table_sizes, feature_tables(source)
        self._dims = {table: config.model.dim_of(table) for table in self._sizes}
        optimizer = row_optimizer(config.optimizer)
        self._states = {dim: optimizer.state_sizes(dim) for dim in self._dims.values()}

    @property
    def everything(self) -> int:
        """Bytes of all rows and their state."""
        return sum(
            self._sizes[table] * row_bytes(dim, torch.float32, self._states[dim])
            for table, dim in self._dims.items()
        )

    @property
    def least(self) -> int:
        """Bytes of the row maps, and of one slot of each dim."""
        return self._with_slots(dict.fromkeys(self._states, 1))

    def holding(self, num_distinct: Mapping[str, int]) -> int:
        """Bytes of the row maps, and of a slot for each of these rows.

        Args:
            num_distinct: Rows by table.
        """
        slots = dict.fromkeys(self._states, 0)
        for table, count in num_distinct.items():
            slots[self._dims[table]] += count
        return self._with_slots(slots)

    def num_distinct(self, batch: Batch) -> dict[str, int]:
        """Distinct rows of a mini-batch by table."""
        features = batch.sparse_features
        bounds = features.offsets()[:: features.stride()].tolist()
        parts = np.split(features.values().numpy(), bounds[1:-1])
        rows: dict[str, list[NDArray[np.int64]]] = {}
        for feature, part in zip(features.keys(), parts, strict=True):
            rows.setdefault(self._tables[feature], []).append(part)
        return {table: len(np.unique(np.concatenate(parts))) for table, parts in rows.items()}

    def _with_slots(self, slots: Mapping[int, int]) -> int:
        of_dims = [
            (count, slot_bytes(dim, torch.float32, self._states[dim]))
            for dim, count in slots.items()
        ]
        return floor_bytes(sum(self._sizes.values()), of_dims)


def enough_bytes(config: TrainConfig, source: SampleSource) -> int:
    """A budget that holds any mini-batch, of a run without a plan."""
    features, sizes = features_by_table(source), source.table_sizes
    # The length of a bag has no bound but the rows of its table.
    is_one_hot = first_batch(config, source).sparse_features.is_known_one_hot()
    most = {
        table: min(size, config.batch_size * len(features[table])) if is_one_hot else size
        for table, size in sizes.items()
    }
    needs = MemoryNeeds(config, source)
    of_tracker = tracker_bytes(config, source)
    floor = needs.holding(most) + of_tracker
    # Where every row is resident there is no row map, so everything may take less.
    is_resident = config.cold_tier == "host" and needs.everything <= floor
    return needs.everything + of_tracker if is_resident else floor


def tracker_bytes(config: TrainConfig, source: SampleSource) -> int:
    """Bytes of the budget that following the drift of rows takes; 0 without it."""
    keys = config.skip.staleness
    if keys is None:
        return 0
    tables = [
        torch.empty(size, config.model.dim_of(table), device="meta")
        for table, size in source.table_sizes.items()
    ]
    return tracked_bytes(tables, keys.settings())


def first_batch(config: TrainConfig, source: SampleSource) -> Batch:
    """The first mini-batch of the training split."""
    train = source.splits["train"]
    samples = range(train.start, min(train.stop, train.start + config.batch_size))
    return source.read(np.array(samples, np.int64))


def window_lookups(config: TrainConfig, source: SampleSource) -> int:
    """The rows that a plan reserves for each feature in one mini-batch.

    With one row a sample these are as many as samples. The rows of bags are counted in mini-batches
    that are drawn from the training split, by the table with the most for each of its features.
    """
    if first_batch(config, source).sparse_features.is_known_one_hot():
        return config.batch_size
    features, needs = features_by_table(source), MemoryNeeds(config, source)
    train = source.splits["train"]
    generator = np.random.default_rng(config.seed)
    most = 1
    for _ in range(_NUM_DRAWN):
        size = min(config.batch_size, len(train))
        samples = train.start + generator.choice(len(train), size, replace=False)
        for table, count in needs.num_distinct(source.read(samples)).items():
            most = max(most, ceil(count / len(features[table])))
    return most
