"""Gathers the bags of a store: features of which a sample may look up any number of rows.

    bag_values = [4, 9, 9 | 2 | 7, 0]        sample by sample, in a sample feature by feature
    bag_ends   = [[2, 3], [3, 4], [6, 6]]    where each bag ends

              sample 0   sample 1   sample 2
    tags      [4, 9]     []         [7, 0]
    history   [9]        [2]        []

A bag begins where the one before it ends. `bag_weights`, if a store has them, are numbers for the
`bag_values`. Letters: N samples of the store, F2 features with bags, V rows of all bags, B samples
that are read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from recsys._support.jit import kernel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

__all__ = ["Bags", "join_features"]


class Bags(NamedTuple):
    """The bags of a store.

    Attributes:
        values: Rows, (V,) int32.
        ends: Where each bag ends, (N, F2) int64.
        weights: A weight for each value, (V,) float32; None for 1.
    """

    values: NDArray[np.int32]
    ends: NDArray[np.int64]
    weights: NDArray[np.float32] | None = None

    def gather(
        self, samples: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
        """The bags of some samples, feature by feature; None if one does not lie in the values.

        Shape:
            samples (B,) in [0, N); results: rows (v,) and where each bag begins, (F2 * B + 1,).
        """
        ends = self.ends.reshape(-1)
        offsets = np.zeros(self.ends.shape[1] * len(samples) + 1, np.int64)
        if not _lengths_kernel(ends, len(self.values), samples, self.ends.shape[1], offsets):
            return None
        np.cumsum(offsets, out=offsets)
        rows = np.empty(offsets[-1], np.int64)
        _rows_kernel(self.values, ends, samples, self.ends.shape[1], offsets, rows)
        return rows, offsets

    def gather_weights(
        self, samples: NDArray[np.int64], offsets: NDArray[np.int64]
    ) -> NDArray[np.float32]:
        """The weights of the rows that `gather` found.

        Args:
            samples: As for `gather`.
            offsets: Where each bag begins, from `gather`.
        """
        assert self.weights is not None
        # From the place of a bag in the result to its place in the file.
        moves = self.ends[samples].T.reshape(-1) - offsets[1:]
        places = np.arange(offsets[-1]) + np.repeat(moves, np.diff(offsets))
        weights: NDArray[np.float32] = self.weights[places]
        return weights


def join_features(
    rows_FB: NDArray[Any],
    bag_rows: NDArray[Any],
    bag_offsets: NDArray[np.int64],
    are_bags: Sequence[bool],
) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Values and offsets of all features, in their order.

    Args:
        rows_FB: Rows, or their weights, of the features with one row for each sample.
        bag_rows: The same of the features with bags, feature by feature.
        bag_offsets: Where these bags begin.
        are_bags: For each feature, whether it has bags.

    Shape:
        rows_FB (F1, B); bag_rows (v,); bag_offsets (F2 * B + 1,); are_bags (F,); results: values
        (F1 * B + v,) and offsets (F * B + 1,).
    """
    num_samples = rows_FB.shape[1]
    lengths_FB = np.ones((len(are_bags), num_samples), np.int64)
    lengths_FB[np.array(are_bags)] = np.diff(bag_offsets).reshape(sum(are_bags), num_samples)
    offsets = np.zeros(lengths_FB.size + 1, np.int64)
    np.cumsum(lengths_FB.reshape(-1), out=offsets[1:])
    parts, one, bag = [], 0, 0
    for is_bag in are_bags:
        if is_bag:
            begin, end = bag_offsets[bag * num_samples], bag_offsets[(bag + 1) * num_samples]
            parts.append(bag_rows[begin:end])
            bag += 1
        else:
            parts.append(rows_FB[one])
            one += 1
    return np.concatenate(parts), offsets


@kernel
def _lengths_kernel(
    ends: NDArray[np.int64],
    num_values: int,
    samples: NDArray[np.int64],
    num_features: int,
    offsets: NDArray[np.int64],
) -> bool:
    """Write the length of bag i to offsets[i + 1]; returns whether all bags lie in the values."""
    is_good = True
    for position, sample in enumerate(samples):
        for feature in range(num_features):
            place = sample * num_features + feature
            begin = ends[place - 1] if place else np.int64(0)
            is_good &= 0 <= begin <= ends[place] <= num_values
            offsets[feature * len(samples) + position + 1] = ends[place] - begin
    return is_good


@kernel
def _rows_kernel(
    values: NDArray[np.int32],
    ends: NDArray[np.int64],
    samples: NDArray[np.int64],
    num_features: int,
    offsets: NDArray[np.int64],
    rows: NDArray[np.int64],
) -> None:
    """Copy the rows of all bags."""
    for position, sample in enumerate(samples):
        for feature in range(num_features):
            end = ends[sample * num_features + feature]
            begin = offsets[feature * len(samples) + position]
            length = offsets[feature * len(samples) + position + 1] - begin
            for number in range(length):
                rows[begin + number] = values[end - length + number]
