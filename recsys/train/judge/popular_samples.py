"""Metrics of the test samples that look up popular rows alone, and of the others.

Skipping leaves out samples whose rows have stopped changing. These are samples of popular rows. To
compare policies on samples of this kind, the kind must not depend on the policy:

    counted samples         up to 262,144 training samples at equal distances
    popularity of a row     its lookups in the counted samples, in classes of about 5 %
    popular sample          every row that it looks up has at least the popularity that a given
                            share of the counted samples has, or less where classes are too wide

So the kind is a function of the data and the share. Seed, policy and epochs do not change it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

import numpy as np

from recsys.batch import features_by_table
from recsys.embeddings.kernels.cpu.counting import worst_levels
from recsys.embeddings.popularity.lookup_blocks import block_of
from recsys.embeddings.popularity.row_counts import RowCounts
from recsys.train.metrics.metrics import MetricsAccumulator

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from recsys.batch import Batch, SampleSource
    from recsys.embeddings.popularity.lookup_blocks import LookupBlock

__all__ = ["PopularSamples"]

_MOST_COUNTED = 1 << 18
_READ_SAMPLES = 1 << 16
_NUM_LEVELS = 254  # a level is a byte


@final
class PopularSamples:
    """Collects predictions of test samples, and computes metrics of popular and other samples.

    Args:
        source: The data; some of its training samples are read.
        share: Share of the counted samples that are popular, at most; in (0, 1].
    """

    def __init__(self, source: SampleSource, share: float) -> None:
        train = source.splits["train"]
        num_counted = min(len(train), _MOST_COUNTED)
        numbers = train.start + np.arange(num_counted, dtype=np.int64) * len(train) // num_counted
        self._rows = RowCounts(source.table_sizes, features_by_table(source))
        blocks = []
        for begin in range(0, num_counted, _READ_SAMPLES):
            part = numbers[begin : begin + _READ_SAMPLES]
            blocks.append(block_of(source.read(part)))
            self._rows.add(blocks[-1], part.tolist().__getitem__)
        # The classes by their least count. Level 0 is the most popular class; rows that were never
        # counted have the last level.
        most = max(int(self._rows.values.max()), 1)
        classes = np.unique(np.geomspace(1, most, _NUM_LEVELS).round().astype(np.int64))
        of_counts = len(classes) - np.searchsorted(classes, np.arange(most + 1), "right")
        self._levels: NDArray[np.uint8] = of_counts.astype(np.uint8)[self._rows.values]
        worst = np.sort(np.concatenate([self._worst(block) for block in blocks]))
        # The popular samples have a level below that of the first sample that is not popular.
        num_popular = int(share * num_counted)
        self._end = len(classes) + 1 if num_popular == num_counted else int(worst[num_popular])
        self._parts = {True: MetricsAccumulator(), False: MetricsAccumulator()}

    def are_popular(self, batch: Batch) -> NDArray[np.bool_]:
        """Whether each sample of a mini-batch on the CPU is popular, (B,).

        Raises:
            IdOutOfRange: an id is not a row of its table.
        """
        block = block_of(batch)
        self._rows.add(block, int)  # checks the ids; its counts are no longer needed
        result: NDArray[np.bool_] = self._worst(block) < self._end
        return result

    def add(self, batch: Batch, logits: NDArray[np.float32], labels: NDArray[Any]) -> None:
        """Add the predictions of a mini-batch.

        Shape:
            logits (B,) float32; labels (B,) 0 or 1.

        Raises:
            IdOutOfRange: an id is not a row of its table.
        """
        are_popular = self.are_popular(batch)
        for is_popular, part in self._parts.items():
            chosen = are_popular == is_popular
            part.add(logits[chosen], labels[chosen])

    def results(self) -> dict[str, dict[str, Any] | None]:
        """Metrics as the run record holds them: `test_popular`, `test_other`; None if empty."""
        names = {True: "test_popular", False: "test_other"}
        return {
            names[is_popular]: part.result().as_dict() if part.num_samples else None
            for is_popular, part in self._parts.items()
        }

    def _worst(self, block: LookupBlock) -> NDArray[np.uint8]:
        segments = self._rows.segments(block)
        return worst_levels(self._levels, segments, block.values, block.offsets, block.num_samples)
