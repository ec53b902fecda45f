"""A logistic model that predicts the label of a sample before the large model sees it.

    z = bias + sum of the weights of its rows + sum over d of v[d] * x[d],   p = 1 / (1 + exp(-z))

Each pair of a lookup and a row has a weight, in one of 2**bits slots; a hash chooses the slot, and
pairs with the same slot share it. All rows of a bag count, each as often as it occurs; weights of
bags are ignored. x are the dense features, cut to [-16, 16].

It learns one sample at a time by Adagrad: with g = w * (p - y) for a sample of weight w and label
y, each weight's sum of squares grows by (g * x)**2, and the weight moves by -lr * g * x / sqrt(sum)
(x = 1 for rows and bias). Sums begin at 1. A sample with an infinite or missing number is passed
over.

Letters: B samples, L lookups, V rows of all samples, K dense features.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from recsys._support.hashing import GOLDEN, mix64
from recsys._support.jit import kernel, kernel_part
from recsys.embeddings.kernels.cpu.intrinsics.prefetch import prefetch, prefetch_to_write
from recsys.embeddings.staleness.host_ids import given_ids

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from recsys.embeddings.lookup.lookup import Part
    from recsys.embeddings.rows.bags import Bags

__all__ = ["Predictor", "SampleFeatures", "Weights", "features_of", "predict"]

_BLOCK = 64  # samples whose slots are written together, so that they stay in the cache
_AHEAD = 4  # samples from one whose slots are fetched into the cache to the one that is learned
_LARGEST = np.float32(16)


class SampleFeatures(NamedTuple):
    """What the model knows about the samples of a mini-batch.

    Attributes:
        slots: The slots of each sample's rows, sample by sample, (V,) uint32.
        bounds: Where the slots of each sample begin, (B + 1,) int64.
        dense: Dense features, (B, K) float32.
    """

    slots: NDArray[np.uint32]
    bounds: NDArray[np.int64]
    dense: NDArray[np.float32]

    def select(self, samples: NDArray[np.int64]) -> SampleFeatures:
        """What is known about some of the samples, (M,); a copy."""
        bounds = np.zeros(len(samples) + 1, np.int64)
        np.cumsum(np.diff(self.bounds)[samples], out=bounds[1:])
        slots = np.empty(bounds[-1], np.uint32)
        _copy_slots(slots, bounds, self.slots, self.bounds, samples)
        return SampleFeatures(slots, bounds, self.dense[samples])


class Weights(NamedTuple):
    """The weights of the model.

    Attributes:
        rows: A weight for each slot, (2**bits,) float32.
        dense: The weights of the dense features, then the bias, (K + 1,) float32.
    """

    rows: NDArray[np.float32]
    dense: NDArray[np.float32]

    def copied(self) -> Weights:
        """A copy that does not change."""
        return Weights(self.rows.copy(), self.dense.copy())


def features_of(
    parts: Sequence[tuple[Part, Bags]],
    dense: NDArray[np.float32] | None,
    batch_size: int,
    bits: int,
) -> SampleFeatures:
    """What the model knows about the samples of a mini-batch.

    Args:
        parts: The lookups, with B bags for each feature. Those of a device are copied to the host.
        dense: Dense features; None if there are none.
        batch_size: B.
        bits: The model has 2**bits slots.

    Shape:
        dense (B, K).
    """
    inputs = [given_ids(lookups, bags) for (_, lookups), bags in parts]
    ends = np.zeros(batch_size + 1, np.int64)
    for _, positions, _, offsets, is_one_hot, size in inputs:
        if is_one_hot:
            ends[1:] += len(positions)
        else:
            _add_lengths(ends[1:], positions, offsets, size)
    bounds = ends.cumsum()
    slots, places = np.empty(bounds[-1], np.uint32), bounds[:-1].copy()
    num_lookups = 0
    for _, positions, values, offsets, is_one_hot, size in inputs:
        numbers = np.arange(num_lookups + 1, num_lookups + len(positions) + 1, dtype=np.uint64)
        with np.errstate(over="ignore"):
            salts = mix64(numbers * GOLDEN)
        num_lookups += len(positions)
        _write_slots(
            slots, places, salts, positions, values, offsets, is_one_hot, size, np.uint64(64 - bits)
        )
    if dense is None:
        dense = np.empty((batch_size, 0), np.float32)
    return SampleFeatures(slots, bounds, dense)


def predict(weights: Weights, features: SampleFeatures) -> NDArray[np.float64]:
    """The probability of label 1 of each sample, (B,).

    Raises:
        ValueError: the weights are of another number of dense features.
    """
    _require_fit(weights, features)
    found = np.empty(len(features.bounds) - 1, np.float64)
    _predict(found, weights.rows, weights.dense, features.slots, features.bounds, features.dense)
    return found


class Predictor:
    """The model with what it has learned.

    Args:
        bits: It has 2**bits slots.
        lr: Learning rate.
        num_dense: K.

    Attributes:
        weights: Its weights. They change as it learns.
        sums: Their sums of squares.
    """

    def __init__(self, bits: int, lr: float, num_dense: int) -> None:
        self._lr = np.float32(lr)
        self.weights = Weights(np.zeros(2**bits, np.float32), np.zeros(num_dense + 1, np.float32))
        self.sums = Weights(np.ones(2**bits, np.float32), np.ones(num_dense + 1, np.float32))

    def learn(
        self,
        features: SampleFeatures,
        labels: NDArray[np.float32],
        sample_weights: NDArray[np.float32],
    ) -> NDArray[np.float64]:
        """Learn from the samples of a mini-batch, one after the other.

        Args:
            features: What is known about them.
            labels: Their labels.
            sample_weights: Their weights.

        Shape:
            labels, sample_weights, result (B,).

        Returns:
            The probability of label 1 of each sample, predicted just before it was learned.

        Raises:
            ValueError: the number of dense features has changed.
        """
        _require_fit(self.weights, features)
        found = np.empty(len(labels), np.float64)
        longest = int(np.diff(features.bounds).max(initial=0))
        _learn(
            found,
            self.weights.rows,
            self.weights.dense,
            self.sums.rows,
            self.sums.dense,
            features.slots,
            features.bounds,
            features.dense,
            labels,
            sample_weights,
            self._lr,
            np.empty(longest, np.float32),
        )
        return found


def _require_fit(weights: Weights, features: SampleFeatures) -> None:
    """Raise if the number of dense features has changed.

    Raises:
        ValueError: it has.
    """
    known, found = len(weights.dense) - 1, features.dense.shape[1]
    if known != found:
        raise ValueError(
            f"dense_features: each mini-batch must have as many columns, got {found} after {known}"
        )


_mix64 = kernel(mix64)


@kernel
def _add_lengths(
    counts_B: NDArray[np.int64],
    positions_L: NDArray[np.uint64],
    offsets: NDArray[Any],
    batch_size: int,
) -> None:
    """Add the lengths of each sample's bags."""
    for lookup in range(len(positions_L)):
        first = np.int64(positions_L[lookup]) * batch_size
        for sample in range(batch_size):
            counts_B[sample] += offsets[first + sample + 1] - offsets[first + sample]


@kernel
def _write_slots(
    slots_V: NDArray[np.uint32],
    places_B: NDArray[np.int64],
    salts_L: NDArray[np.uint64],
    positions_L: NDArray[np.uint64],
    values: NDArray[Any],
    offsets: NDArray[Any],
    is_one_hot: int,
    batch_size: int,
    shift: np.uint64,
) -> None:
    """Write the slots of each sample's rows from its place on, and advance the place."""
    num_lookups = len(positions_L)
    for begin in range(0, batch_size, _BLOCK):
        end = min(begin + _BLOCK, batch_size)
        for lookup in range(num_lookups):
            first = np.int64(positions_L[lookup]) * batch_size
            salt = salts_L[lookup]
            if is_one_hot:
                for sample in range(begin, end):
                    row = np.uint64(values[first + sample])
                    slots_V[places_B[sample] + lookup] = _mix64(salt + row * GOLDEN) >> shift
                continue
            for sample in range(begin, end):
                for place in range(offsets[first + sample], offsets[first + sample + 1]):
                    row = np.uint64(values[place])
                    slots_V[places_B[sample]] = _mix64(salt + row * GOLDEN) >> shift
                    places_B[sample] += 1
        if is_one_hot:
            places_B[begin:end] += num_lookups


@kernel
def _copy_slots(
    slots_V: NDArray[np.uint32],
    bounds: NDArray[np.int64],
    from_slots: NDArray[np.uint32],
    from_bounds: NDArray[np.int64],
    samples_M: NDArray[np.int64],
) -> None:
    for number in range(len(samples_M)):
        begin, first = bounds[number], from_bounds[samples_M[number]]
        for place in range(bounds[number + 1] - begin):
            slots_V[begin + place] = from_slots[first + place]


@kernel_part
def _logit(
    sample: int,
    of_slots: NDArray[np.float32],
    of_dense: NDArray[np.float32],
    slots_V: NDArray[np.uint32],
    bounds: NDArray[np.int64],
    dense_BK: NDArray[np.float32],
) -> Any:
    """The logit of a sample.

    Several sums that grow side by side take less time than one. The bias comes last, because in
    learning it is known last.
    """
    zero = np.float32(0)
    first = second = third = fourth = zero
    begin, end = bounds[sample], bounds[sample + 1]
    whole = end - (end - begin) % 4
    for place in range(begin, whole, 4):
        first += of_slots[slots_V[place]]
        second += of_slots[slots_V[place + 1]]
        third += of_slots[slots_V[place + 2]]
        fourth += of_slots[slots_V[place + 3]]
    for place in range(whole, end):
        first += of_slots[slots_V[place]]
    num_dense = dense_BK.shape[1]
    of_numbers = zero
    for number in range(num_dense):
        of_numbers += of_dense[number] * _cut(dense_BK[sample, number])
    return ((first + second) + (third + fourth)) + (of_numbers + of_dense[num_dense])


@kernel_part
def _cut(number: np.float32) -> Any:
    return min(max(number, -_LARGEST), _LARGEST)


@kernel
def _predict(
    found_B: NDArray[np.float64],
    of_slots: NDArray[np.float32],
    of_dense: NDArray[np.float32],
    slots_V: NDArray[np.uint32],
    bounds: NDArray[np.int64],
    dense_BK: NDArray[np.float32],
) -> None:
    for sample in range(len(found_B)):
        ahead = min(sample + _AHEAD, len(found_B) - 1)
        for place in range(bounds[ahead], bounds[ahead + 1]):
            prefetch(of_slots, slots_V[place])
        z = _logit(sample, of_slots, of_dense, slots_V, bounds, dense_BK)
        found_B[sample] = 1 / (1 + np.exp(-np.float64(z)))


@kernel
def _learn(
    found_B: NDArray[np.float64],
    of_slots: NDArray[np.float32],
    of_dense: NDArray[np.float32],
    sums_of_slots: NDArray[np.float32],
    sums_of_dense: NDArray[np.float32],
    slots_V: NDArray[np.uint32],
    bounds: NDArray[np.int64],
    dense_BK: NDArray[np.float32],
    labels_B: NDArray[np.float32],
    weights_B: NDArray[np.float32],
    lr: np.float32,
    steps: NDArray[np.float32],
) -> None:
    """Learn; `steps` has room for those of the rows of each sample.

    They are computed in a loop of their own, which is vectorised.
    """
    num_dense = dense_BK.shape[1]
    for sample in range(len(found_B)):
        ahead = min(sample + _AHEAD, len(found_B) - 1)
        for place in range(bounds[ahead], bounds[ahead + 1]):
            prefetch_to_write(of_slots, slots_V[place])
            prefetch_to_write(sums_of_slots, slots_V[place])
        z = _logit(sample, of_slots, of_dense, slots_V, bounds, dense_BK)
        found_B[sample] = 1 / (1 + np.exp(-np.float64(z)))
        gradient = weights_B[sample] * (np.float32(found_B[sample]) - labels_B[sample])
        square = gradient * gradient
        if not np.isfinite(square):
            continue
        step = lr * gradient
        begin, count = bounds[sample], bounds[sample + 1] - bounds[sample]
        for number in range(count):
            slot = slots_V[begin + number]
            sums_of_slots[slot] += square
            steps[number] = sums_of_slots[slot]
        for number in range(count):
            steps[number] = step / np.sqrt(steps[number])
        for number in range(count):
            of_slots[slots_V[begin + number]] -= steps[number]
        for number in range(num_dense):
            x = _cut(dense_BK[sample, number])
            total = sums_of_dense[number] + square * x * x
            sums_of_dense[number] = total
            of_dense[number] -= step * x / np.sqrt(total)
        total = sums_of_dense[num_dense] + square
        sums_of_dense[num_dense] = total
        of_dense[num_dense] -= step / np.sqrt(total)
