"""Lookups with the shape of Criteo's, made before the clock starts.

    fill     the first samples; their lookups fill slots, and rank rows for the coverage
    train    the samples after those, in mini-batches

Providers that keep no rows between steps train on the same few mini-batches again and again. Slots
keep rows, so a schedule never trains on a mini-batch twice, unless the stream is used up.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from recsys.batch import Batch, JaggedIds
from recsys.datasets.synthetic.samples import SyntheticCriteo

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

__all__ = ["NUM_CYCLED", "MiniBatches", "Stream", "coverage_of", "num_distinct"]

_BLOCK = 1 << 16
_MAX_SAMPLES = 1 << 30
NUM_CYCLED = 8  # mini-batches that providers without slots train on


class Samples(NamedTuple):
    """Samples on the host.

    Attributes:
        dense: (B, 13) float32.
        rows: The row of each feature, (F, B) int32.
        labels: (B,) float32.
    """

    dense: Tensor
    rows: Tensor
    labels: Tensor


class Stream:
    """Samples of `synthetic:criteo-kaggle`.

    Args:
        table_sizes: Rows per table.
        num_fill_samples: Samples that fill slots.

    Attributes:
        keys: Name of each feature and table.
        table_sizes: As given.
        fill_rows: Rows of the samples that fill slots, (F, num_fill_samples) int32.
    """

    def __init__(self, table_sizes: Sequence[int], num_fill_samples: int) -> None:
        self._source = SyntheticCriteo(num_samples=_MAX_SAMPLES, table_sizes=table_sizes)
        self.keys = list(self._source.table_sizes)
        self.table_sizes = list(table_sizes)
        self._num_fill = num_fill_samples
        self.fill_rows = torch.cat(
            [
                self._read(begin, min(begin + _BLOCK, num_fill_samples)).rows
                for begin in range(0, num_fill_samples, _BLOCK)
            ],
            dim=1,
        )

    def train(self, begin: int, end: int) -> Samples:
        """Samples after those that fill slots."""
        return self._read(self._num_fill + begin, self._num_fill + end)

    def _read(self, begin: int, end: int) -> Samples:
        batch = self._source.read(np.arange(begin, end))
        rows = batch.sparse_features.values().view(len(self.keys), end - begin).int()
        return Samples(batch.dense_features, rows, batch.labels)


class MiniBatches:
    """The mini-batches of one size.

    Args:
        stream: The samples.
        batch_size: B.
        device: Where models train.
    """

    def __init__(self, stream: Stream, batch_size: int, device: torch.device) -> None:
        self.batch_size, self._stream, self._device = batch_size, stream, device
        self._known: dict[int, Samples] = {}
        self._cycled: dict[tuple[int, bool], Batch] = {}

    def batch(self, number: int) -> Batch:
        """A mini-batch on the device."""
        return self._on_device(number, are_ids_on_host=False)

    def cycled(self, number: int, *, are_ids_on_host: bool = False) -> Batch:
        """One of the first `NUM_CYCLED` mini-batches, kept on the device; ids perhaps on the host.

        Args:
            number: Any number; it is taken modulo `NUM_CYCLED`.
            are_ids_on_host: Whether ids are on the host.
        """
        key = number % NUM_CYCLED, are_ids_on_host
        if key not in self._cycled:
            self._cycled[key] = self._on_device(key[0], are_ids_on_host=are_ids_on_host)
        return self._cycled[key]

    def fill(self, num_samples: int, most: int) -> Iterator[JaggedIds]:
        """Lookups that fill slots, on the device.

        Args:
            num_samples: Samples of each input.
            most: The most inputs.
        """
        rows = self._stream.fill_rows
        for begin in range(0, min(rows.shape[1], most * num_samples), num_samples):
            yield self._ids(rows[:, begin : begin + num_samples], self._device)

    @cached_property
    def most_distinct(self) -> int:
        """The largest number of distinct rows in a mini-batch, among some, with a tenth to spare.

        A tier that has too few slots for a later mini-batch refuses it, and the sample of
        mini-batches is small.
        """
        counts = [
            num_distinct(self._stream.fill_rows[:, begin : begin + self.batch_size])
            for begin in range(0, self._stream.fill_rows.shape[1], self.batch_size)[:NUM_CYCLED]
        ]
        return int(1.1 * max(counts)) + 1

    @cached_property
    def mean_distinct(self) -> float:
        """The mean number of distinct rows in the mini-batches that are cycled."""
        counts = [num_distinct(self._samples(number).rows) for number in range(NUM_CYCLED)]
        return sum(counts) / len(counts)

    def _samples(self, number: int) -> Samples:
        if number not in self._known:
            size = self.batch_size
            self._known[number] = self._stream.train(number * size, (number + 1) * size)
        return self._known[number]

    def _on_device(self, number: int, *, are_ids_on_host: bool) -> Batch:
        samples, device = self._samples(number), self._device
        ids = self._ids(samples.rows, torch.device("cpu") if are_ids_on_host else device)
        return Batch(samples.dense.to(device), ids, samples.labels.to(device))

    def _ids(self, rows: Tensor, device: torch.device) -> JaggedIds:
        return JaggedIds.from_one_hot(self._stream.keys, rows.contiguous().to(device).long())


def num_distinct(rows: Tensor) -> int:
    """Distinct rows, counted over all tables, of lookups (F, B)."""
    by_table = rows.sort(dim=1).values
    return int((by_table[:, 1:] != by_table[:, :-1]).sum()) + len(by_table)


def coverage_of(stream: Stream, shares: Sequence[float]) -> dict[str, float]:
    """The share of later lookups that go to the rows looked up most by the first samples.

    Args:
        stream: The samples.
        shares: Shares of all rows.

    Returns:
        By share of the rows: the share of lookups.
    """
    firsts = np.cumsum([0, *stream.table_sizes])

    def numbered(rows: Tensor) -> NDArray[np.int64]:
        found: NDArray[np.int64] = rows.numpy() + firsts[:-1, np.newaxis]
        return found.reshape(-1)

    counts = np.bincount(numbered(stream.fill_rows), minlength=int(firsts[-1]))
    seen = np.flatnonzero(counts)
    ranked = seen[np.argsort(-counts[seen], kind="stable")]
    later = numbered(stream.train(0, min(_BLOCK, stream.fill_rows.shape[1])).rows)
    is_hot = np.zeros(len(counts), bool)
    found, done = {}, 0
    for share in sorted(shares):
        num_hot = int(share * len(counts))
        is_hot[ranked[done:num_hot]] = True
        done = max(done, num_hot)
        found[f"{share:g}"] = float(is_hot[later].mean())
    return found
