"""Inputs sampled to find the threshold: which rows each of them looks up.

The level of an input is the greatest level of its rows; that of an input without rows is infinite.
If a share of the inputs is to be stale, the threshold is the level at that rank: a quantile. The
authors of Slipstream find it by bisection; the quantile is exact, and the levels are known anyway.

Letters: G groups, S inputs, V their rows, M followed rows.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from recsys._support.jit import kernel
from recsys.embeddings.staleness.host_ids import NO_LOOKUP, given_ids

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from recsys.embeddings.rows.bags import Bags, Lookups

__all__ = [
    "MOST_INPUTS",
    "InputRows",
    "SampledInputs",
    "bags_per_sample",
    "below_ties",
    "quantile",
]

MOST_INPUTS = 4096  # the newest inputs, which the threshold is found from
_MOST_TIES = 1.5  # times the share
_NO_ROW = -1


class InputRows(NamedTuple):
    """The rows of some inputs, for one table group.

    Attributes:
        rows: Row numbers, counted over all tables, (V,) int64; -1 for an id that is no row.
        bounds: Where the rows of each input begin, (S + 1,) int64.
    """

    rows: NDArray[np.int64]
    bounds: NDArray[np.int64]

    def raise_levels(
        self, followed: NDArray[np.int64], levels: NDArray[np.float64], found: NDArray[np.float64]
    ) -> None:
        """Raise the level of each input to that of its rows.

        Args:
            followed: The rows that have a level, (M,) ascending; others are unknown: infinite.
            levels: Their levels, (M,).
            found: The levels of the inputs, (S,).
        """
        places = np.searchsorted(followed, self.rows)
        is_known = places < len(followed)
        is_known[is_known] = followed[places[is_known]] == self.rows[is_known]
        of_rows = np.full(len(self.rows), np.inf)
        of_rows[is_known] = levels[places[is_known]]
        np.maximum.at(found, np.arange(len(found)).repeat(np.diff(self.bounds)), of_rows)

    def select(self, begin: int, end: int) -> InputRows:
        """The inputs from `begin` to `end`."""
        bounds = self.bounds[begin : end + 1]
        return InputRows(self.rows[bounds[0] : bounds[-1]], bounds - bounds[0])

    @classmethod
    def join(cls, parts: Sequence[InputRows]) -> InputRows:
        """The inputs of all parts, in order."""
        lengths = [np.diff(each.bounds) for each in parts]
        return cls(
            np.concatenate([np.empty(0, np.int64), *(each.rows for each in parts)]),
            np.concatenate([[0], *lengths]).astype(np.int64).cumsum(),
        )


class _Chunk(NamedTuple):
    """Inputs that were added together.

    Attributes:
        end: Number of inputs added up to the end of the chunk, those before it included.
        indices: Their stream indices, (S,).
        groups: Their rows for each group.
    """

    end: int
    indices: NDArray[np.int64]
    groups: list[InputRows]


class SampledInputs:
    """The newest sampled inputs, in the order of the stream.

    Args:
        first_rows: For each group, where each table's rows begin, (T + 1,) uint64.
    """

    def __init__(self, first_rows: Sequence[NDArray[np.uint64]]) -> None:
        self._first_rows = list(first_rows)
        self._chunks: deque[_Chunk] = deque()

    def add(
        self,
        indices: NDArray[np.int64],
        parts: Sequence[tuple[int, Lookups, Bags]],
        batch_size: int,
        samples: NDArray[np.int64],
    ) -> None:
        """Add some samples of a mini-batch.

        Inputs with the same or a higher index are forgotten, because they were taken by an iterator
        that was dropped.

        Args:
            indices: Stream index of each sample, (S,) ascending.
            parts: The lookups of the mini-batch, each with the number of its group.
            batch_size: B.
            samples: Numbers of the samples, (S,).
        """
        if not len(indices):
            return
        while self._chunks and self._chunks[-1].indices[0] >= indices[0]:
            self._chunks.pop()
        if self._chunks:
            self._chunks[-1] = _cut(self._chunks[-1], int(indices[0]))
        groups = []
        for number, first_rows in enumerate(self._first_rows):
            inputs: list[Any] = [
                (bags_per_sample(bags, batch_size), given_ids(lookups, bags))
                for group, lookups, bags in parts
                if group == number
            ]
            ends = np.zeros(len(samples) + 1, np.int64)
            for per_sample, arguments in inputs:
                _count_values(per_sample, samples, ends[1:], *arguments)
            bounds = ends.cumsum()
            rows, places = np.empty(bounds[-1], np.int64), bounds[:-1].copy()
            for per_sample, arguments in inputs:
                _list_rows(per_sample, samples, first_rows, places, rows, *arguments)
            groups.append(InputRows(rows, bounds))
        end = (self._chunks[-1].end if self._chunks else 0) + len(indices)
        self._chunks.append(_Chunk(end, indices, groups))

    def trim(self, num_seen: int) -> None:
        """Forget the inputs before the last `MOST_INPUTS` with an index below `num_seen`.

        Some more of the mini-batch that the first of these came with are kept.
        """
        for chunk in reversed(self._chunks):
            if chunk.indices[0] < num_seen:
                first = _cut(chunk, num_seen).end - MOST_INPUTS
                while self._chunks[0].end <= first:
                    self._chunks.popleft()
                return

    def newest(self, num_seen: int) -> tuple[NDArray[np.int64], list[InputRows]]:
        """The last `MOST_INPUTS` inputs with an index below `num_seen`; calls `trim`.

        Returns:
            Their indices, (S,), and their rows for each group.
        """
        self.trim(num_seen)
        chosen = [_cut(each, num_seen) for each in self._chunks if each.indices[0] < num_seen]
        if chosen:
            first, size = chosen[0], len(chosen[0].indices)
            begin = max(0, chosen[-1].end - MOST_INPUTS - (first.end - size))
            groups = [each.select(begin, size) for each in first.groups]
            chosen[0] = _Chunk(first.end, first.indices[begin:], groups)
        return (
            np.concatenate([np.empty(0, np.int64), *(each.indices for each in chosen)]),
            [
                InputRows.join([each.groups[number] for each in chosen])
                for number in range(len(self._first_rows))
            ],
        )

    def clear(self) -> None:
        """Forget all inputs."""
        self._chunks.clear()

    def replace(self, indices: NDArray[np.int64], groups: list[InputRows]) -> None:
        """Forget all inputs, and have those that `newest` returned once."""
        self._chunks.clear()
        if len(indices):
            self._chunks.append(_Chunk(len(indices), indices, groups))


def quantile(levels: NDArray[np.float64], share: float) -> float:
    """The threshold for a target share: at most this share of the levels is below or at it.

    Levels that are equal to the threshold may exceed the share; see `below_ties`.

    Args:
        levels: Levels of inputs, (S,); infinite for an input with an unknown row, or without rows.
        share: The share of inputs that are to be stale.

    Returns:
        The level at rank share * S; -inf for rank 0. If it is infinite, the share cannot be
        reached.
    """
    rank = int(share * len(levels))
    return float(np.partition(levels, rank - 1)[rank - 1]) if rank else -np.inf


def below_ties(levels: NDArray[np.float64], threshold: float, share: float) -> float:
    """A threshold that exceeds a share by a half at most.

    Many levels are equal if rows do not move at all: with learning rate 0, or if small changes are
    rounded away.

    Args:
        levels: Levels of inputs, (S,).
        threshold: Their `quantile`.
        share: The share of inputs that are to be stale.

    Returns:
        `threshold`; the next lower level if more than 1.5 times the share are at or under
        `threshold`; -inf if there is none.
    """
    if np.count_nonzero(levels <= threshold) <= _MOST_TIES * share * len(levels):
        return threshold
    return float(levels[levels < threshold].max(initial=-np.inf))


def bags_per_sample(bags: Bags, batch_size: int) -> int:
    """How many bags of each feature a sample has: B, or a multiple of it.

    Raises:
        ValueError: the number of bags is no multiple of B.
    """
    num_bags = bags.num_samples
    if batch_size and num_bags % batch_size:
        raise ValueError(
            f"a lookup of {num_bags} bags is not of {batch_size} samples: each sample must have as "
            "many bags"
        )
    return num_bags // batch_size if batch_size else 0


def _cut(chunk: _Chunk, end: int) -> _Chunk:
    """The inputs of a chunk with an index below `end`."""
    count = int(np.searchsorted(chunk.indices, end))
    if count == len(chunk.indices):
        return chunk
    end = chunk.end - len(chunk.indices) + count
    return _Chunk(end, chunk.indices[:count], [each.select(0, count) for each in chunk.groups])


_ONE = np.uint64(1)


@kernel
def _count_values(
    per_sample: int,
    samples_S: NDArray[np.int64],
    counts_S: NDArray[np.int64],
    tables_L: NDArray[np.uint64],
    positions_L: NDArray[np.uint64],
    values: NDArray[Any],
    offsets: NDArray[Any],
    is_one_hot: int,
    batch_size: int,
) -> None:
    """Add the number of values of each sample; `batch_size` counts bags."""
    for lookup in range(len(tables_L)):
        for number in range(len(samples_S)):
            begin = positions_L[lookup] * np.uint64(batch_size)
            begin += np.uint64(samples_S[number] * per_sample)
            end = begin + np.uint64(per_sample)
            if not is_one_hot:
                begin, end = np.uint64(offsets[begin]), np.uint64(offsets[end])
            for place in range(begin, end):
                counts_S[number] += np.uint64(values[place]) != NO_LOOKUP


@kernel
def _list_rows(
    per_sample: int,
    samples_S: NDArray[np.int64],
    first_rows: NDArray[np.uint64],
    places_S: NDArray[np.int64],
    rows_V: NDArray[np.int64],
    tables_L: NDArray[np.uint64],
    positions_L: NDArray[np.uint64],
    values: NDArray[Any],
    offsets: NDArray[Any],
    is_one_hot: int,
    batch_size: int,
) -> None:
    """Write the rows of each sample from its place on, and advance the place."""
    for lookup in range(len(tables_L)):
        first_row = first_rows[tables_L[lookup]]
        size = first_rows[tables_L[lookup] + _ONE] - first_row
        for number in range(len(samples_S)):
            begin = positions_L[lookup] * np.uint64(batch_size)
            begin += np.uint64(samples_S[number] * per_sample)
            end = begin + np.uint64(per_sample)
            if not is_one_hot:
                begin, end = np.uint64(offsets[begin]), np.uint64(offsets[end])
            for place in range(begin, end):
                row = np.uint64(values[place])
                if row != NO_LOOKUP:
                    at = places_S[number]
                    rows_V[at] = np.int64(first_row + row) if row < size else _NO_ROW
                    places_S[number] = at + 1
