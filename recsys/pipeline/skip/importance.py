"""Chooses samples by importance: the policy `Importance` at work.

A logistic model predicts the label of a sample before the large model sees it:

    z = bias + sum of the weights of its rows + sum over d of v[d] * x[d],   p = 1 / (1 + exp(-z))

Each pair of a lookup and a row has a weight, in one of 2**bits slots; a hash chooses the slot, and
pairs with the same slot share it. All rows of a bag count, each as often as it occurs; weights of
bags are ignored. x are the dense features, cut to [-16, 16].

It learns one sample at a time by Adagrad: with g = w * (p - y) for a sample of weight w and label
y, each weight's sum of squares grows by (g * x)**2, and the weight moves by -lr * g * x / sqrt(sum)
(x = 1 for rows and bias). Sums begin at 1. A sample with an infinite or missing number is passed
over.

A choice depends on the samples, on their stream indices, and on the *version* that holds for the
mini-batch that they are taken for. A version has the weights of the model as they were after some
step. One is made after every 16th step s, and holds for mini-batches from s + 32 on. The versions
that mini-batches not yet trained on may need are kept, so mini-batches can be taken ahead, and
taken again.

Systematic sampling chooses the samples: with a random number u in [0, 1), sample i is kept if one
of u, 1 + u, 2 + u, ... lies between q_1 + ... + q_{i-1} and q_1 + ... + q_i. So it is kept with
probability q_i, and all mini-batches of equal raw size get equally many samples, give or take one.
That matters for speed: torch prepares its matrix products anew for every new size of a mini-batch,
which took longer than what was saved.

Letters: B samples, L lookups, V rows of all samples, K dense features.

References:
    Madow (1949), On the theory of systematic sampling, II, Annals of Mathematical Statistics 20.
"""

from __future__ import annotations

import reprlib
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from recsys._support.hashing import GOLDEN, mix64
from recsys._support.jit import kernel, kernel_part
from recsys.embeddings.kernels.cpu.intrinsics.prefetch import prefetch, prefetch_to_write
from recsys.embeddings.staleness.marks import host_input
from recsys.embeddings.staleness.settings import LEAD
from recsys.pipeline.skip.refill import EVERYTHING, Chosen, RawBatch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from recsys.embeddings.lookup.lookup import Part
    from recsys.embeddings.rows.bags import Bags
    from recsys.pipeline.model_tables import ModelTables
    from recsys.pipeline.skip.policies import Importance
    from recsys.pipeline.skip.refill import Refilled

__all__ = [
    "ImportanceChoice",
    "SampleFeatures",
    "Weights",
    "draw_systematically",
    "features_of",
    "keep_probabilities",
    "learn",
    "predict",
]

_PERIOD = 16  # steps from one version to the next
_MOST_FACTOR = 1e6
_NUM_HALVINGS = 24
_BLOCK = 64  # samples whose slots are written together, so that they stay in the cache
_AHEAD = 4  # samples from one whose slots are fetched into the cache to the one that is learned
_LARGEST = np.float32(16)


class ImportanceChoice:
    """Chooses samples by `Importance`. Called with a raw mini-batch.

    Args:
        policy: The policy.
        tables: The tables of the model.
        factor_of: The part of the policy's share that holds for a mini-batch; 0: keep everything.
        setting: The policy, for errors.

    Attributes:
        num_steps: Steps that the model has learned from.
        weights: Its weights; None before the first step, when K is not known.
        sums: Their sums of squares.
        versions: By the number of the first mini-batch that each holds for, ascending.
    """

    def __init__(
        self,
        policy: Importance,
        tables: ModelTables,
        factor_of: Callable[[int], float],
        setting: str,
    ) -> None:
        self._policy, self._tables = policy, tables
        self._factor_of, self._setting = factor_of, setting
        self.num_steps = 0
        self.weights: Weights | None = None
        self.sums: Weights | None = None
        self.versions: dict[int, Weights] = {}

    def __call__(self, raw: RawBatch) -> Chosen:
        """Choose; equal arguments give equal choices.

        Raises:
            ValueError: the mini-batch has no labels of 0 and 1, or its features do not fit.
            Exception: as for `ModelTables.parts`.
        """
        labels = self._labels_of(raw.batch, raw.size)
        share = self._policy.share * self._factor_of(raw.taken_for)
        holding = [weights for first, weights in self.versions.items() if first <= raw.taken_for]
        if not share or not holding:
            return EVERYTHING
        features = self._features_of(raw.batch, raw.size)
        scores = np.abs(labels - predict(holding[-1], features))
        probabilities = keep_probabilities(scores, share, self._policy.least)
        start = int(raw.random_bits(self._policy.seed)[0] >> np.uint64(11)) / 2**53
        samples = draw_systematically(probabilities, start)
        return Chosen(samples, (1 / probabilities[samples]).astype(np.float32))

    def end_step(self, refilled: Refilled, batch: Any) -> None:
        """Learn from the mini-batch that was trained on.

        Args:
            refilled: Its number and weights.
            batch: The mini-batch, on its device.
        """
        labels = self._labels_of(batch, None)
        features = self._features_of(batch, len(labels))
        weights = refilled.weights
        if weights is None:
            weights = np.ones(len(labels), np.float32)
        if self.weights is None or self.sums is None:
            sizes = 2**self._policy.bits, features.dense.shape[1] + 1
            self.weights = Weights(*(np.zeros(size, np.float32) for size in sizes))
            self.sums = Weights(*(np.ones(size, np.float32) for size in sizes))
        learn(self.weights, self.sums, features, labels, weights, self._policy.lr)
        self.num_steps += 1
        number = refilled.number + 1
        if not number % _PERIOD and self.num_steps >= self._policy.warm_up - LEAD:
            self.versions[number + LEAD] = Weights(*(array.copy() for array in self.weights))
        # The newest version that holds for the next mini-batch, and later ones.
        oldest = max((first for first in self.versions if first <= number), default=0)
        self.versions = {first: of for first, of in self.versions.items() if first >= oldest}

    def state_dict(self) -> dict[str, Any]:
        """The state after the last step, in JSON types and tensors."""
        known = {} if self.weights is None else {-1: self.weights, -2: self.sums, **self.versions}
        return {
            "num_steps": self.num_steps,
            "weights": {
                str(first): [torch.from_numpy(array.copy()) for array in of or ()]
                for first, of in known.items()
            },
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned under the same policy."""
        known = {
            int(first): Weights(*(array.detach().cpu().numpy().copy() for array in of))
            for first, of in state["weights"].items()
        }
        self.num_steps = state["num_steps"]
        self.weights, self.sums = known.pop(-1, None), known.pop(-2, None)
        self.versions = known

    def _features_of(self, batch: Any, size: int) -> SampleFeatures:
        dense = getattr(batch, "dense_features", None)
        if not isinstance(dense, Tensor) or dense.dim() != 2 or len(dense) != size:
            dense = torch.empty(size, 0)
        known = dense.shape[1] if self.weights is None else len(self.weights.dense) - 1
        if dense.shape[1] != known:
            raise ValueError(
                "dense_features: each mini-batch must have as many columns, got "
                f"{dense.shape[1]} after {known}"
            )
        parts = self._tables.parts(batch, size, self._setting)
        return features_of(parts, _to_numpy(dense), size, self._policy.bits)

    def _labels_of(self, batch: Any, size: int | None) -> NDArray[np.float32]:
        """The labels, (B,).

        Raises:
            ValueError: there are none, or not of 0 and 1.
        """
        labels = getattr(batch, "labels", None)
        if (
            not isinstance(labels, Tensor)
            or size not in (None, labels.numel())
            or not ((labels == 0) | (labels == 1)).all()
        ):
            raise ValueError(
                f"{self._setting} compares labels with predictions, so mini-batches must have an "
                f"attribute labels (B,) of 0 and 1, got {reprlib.repr(labels)} in "
                f"{type(batch).__name__}; use recsys.Batch, or another policy"
            )
        return _to_numpy(labels).reshape(-1)


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


class Weights(NamedTuple):
    """A number for each weight of the model.

    Attributes:
        rows: One for each slot, (2**bits,) float32.
        dense: Those of the dense features, then that of the bias, (K + 1,) float32.
    """

    rows: NDArray[np.float32]
    dense: NDArray[np.float32]


def features_of(
    parts: Sequence[tuple[Part, Bags]],
    dense: NDArray[np.float32],
    batch_size: int,
    bits: int,
) -> SampleFeatures:
    """What the model knows about the samples of a mini-batch.

    Args:
        parts: The lookups, with B bags for each feature. Those of a device are copied to the host.
        dense: Dense features; K may be 0.
        batch_size: B.
        bits: The model has 2**bits slots.

    Shape:
        dense (B, K).
    """
    bounds, inputs = np.zeros(batch_size + 1, np.int64), []
    for (_, lookups), bags in parts:
        positions, (ids, offsets) = lookups.arrays[1], host_input(bags)
        inputs.append((positions, ids, offsets))
        if len(offsets):
            bounds[1:] += np.diff(offsets).reshape(-1, batch_size)[positions].sum(0)
        else:
            bounds[1:] += len(positions)
    bounds = bounds.cumsum()
    slots, next_slots = np.empty(bounds[-1], np.uint32), bounds[:-1].copy()
    num_lookups, shift = 0, np.uint64(64 - bits)
    for positions, ids, offsets in inputs:
        numbers = np.arange(num_lookups + 1, num_lookups + len(positions) + 1, dtype=np.uint64)
        num_lookups += len(positions)
        _write_slots(slots, next_slots, mix64(numbers * GOLDEN), positions, ids, offsets, shift)
    return SampleFeatures(slots, bounds, dense)


def predict(weights: Weights, features: SampleFeatures) -> NDArray[np.float64]:
    """The probability of label 1 of each sample, (B,)."""
    found = np.empty(len(features.bounds) - 1, np.float64)
    _predict(found, *weights, features.slots, features.bounds, features.dense)
    return found


def learn(
    weights: Weights,
    sums: Weights,
    features: SampleFeatures,
    labels: NDArray[np.float32],
    sample_weights: NDArray[np.float32],
    lr: float,
) -> None:
    """Learn from the samples of a mini-batch, one after the other.

    Args:
        weights: The weights of the model; changed in place.
        sums: Their sums of squares; changed in place.
        features: What is known about the samples.
        labels: Their labels.
        sample_weights: Their weights.
        lr: The learning rate.

    Shape:
        labels, sample_weights (B,).
    """
    steps = np.empty(int(np.diff(features.bounds).max(initial=0)), np.float32)
    slots, bounds, dense = features
    step_lr = np.float32(lr)
    _learn(*weights, *sums, slots, bounds, dense, labels, sample_weights, step_lr, steps)


def keep_probabilities(
    scores: NDArray[np.float64], share: float, least: float
) -> NDArray[np.float64]:
    """The q = min(1, max(least, c * score)) with the c at which they sum to (1 - share) * B.

    The sum rises with c, so halving an interval finds c. A score that is not finite has q = 1: if
    it comes from the sample, training on it raises an error.

    Shape:
        scores, result (B,).
    """
    scores = np.where(np.isfinite(scores), scores, np.inf)
    target = (1 - share) * len(scores)
    low, high = np.log(1 / _MOST_FACTOR), np.log(_MOST_FACTOR)
    for _ in range(_NUM_HALVINGS):
        middle = (low + high) / 2
        if _sum_probabilities(scores, np.exp(middle), least) > target:
            high = middle
        else:
            low = middle
    found: NDArray[np.float64] = np.clip(np.exp((low + high) / 2) * scores, least, 1)
    return found


def draw_systematically(probabilities: NDArray[np.float64], start: float) -> NDArray[np.int64]:
    """The samples in which one of start, 1 + start, 2 + start, ... lies; see the module.

    Args:
        probabilities: q of each sample.
        start: A random number in [0, 1).

    Shape:
        probabilities (B,); result (M,) ascending.
    """
    totals = np.concatenate([[-start], probabilities]).cumsum()[1:]
    return np.flatnonzero(np.diff(np.floor(totals), prepend=-1))


@kernel
def _sum_probabilities(scores_B: NDArray[np.float64], factor: float, least: float) -> float:
    """The sum of the probabilities; four sums side by side take less time than one."""
    first = second = third = fourth = 0.0
    whole = len(scores_B) - len(scores_B) % 4
    for sample in range(0, whole, 4):
        first += min(1.0, max(least, factor * scores_B[sample]))
        second += min(1.0, max(least, factor * scores_B[sample + 1]))
        third += min(1.0, max(least, factor * scores_B[sample + 2]))
        fourth += min(1.0, max(least, factor * scores_B[sample + 3]))
    for sample in range(whole, len(scores_B)):
        first += min(1.0, max(least, factor * scores_B[sample]))
    return (first + second) + (third + fourth)


_mix64 = kernel(mix64)


@kernel
def _write_slots(
    slots_V: NDArray[np.uint32],
    places_B: NDArray[np.int64],
    salts_L: NDArray[np.uint64],
    positions_L: NDArray[np.int64],
    ids: NDArray[Any],
    offsets: NDArray[Any],
    shift: np.uint64,
) -> None:
    """Write the slots of each sample's rows from its place on, and advance the place.

    Without offsets, bag i is id i: a loop of its own, which is vectorised.
    """
    batch_size = len(places_B)
    for begin in range(0, batch_size, _BLOCK):
        end = min(begin + _BLOCK, batch_size)
        for lookup in range(len(positions_L)):
            first, salt = positions_L[lookup] * batch_size, salts_L[lookup]
            for sample in range(begin, end if not len(offsets) else begin):
                bits = _mix64(salt + np.uint64(ids[first + sample]) * GOLDEN)
                slots_V[places_B[sample] + lookup] = bits >> shift
            for sample in range(begin, end if len(offsets) else begin):
                for number in range(offsets[first + sample], offsets[first + sample + 1]):
                    bits = _mix64(salt + np.uint64(ids[number]) * GOLDEN)
                    slots_V[places_B[sample]] = bits >> shift
                    places_B[sample] += 1
        if not len(offsets):
            places_B[begin:end] += len(positions_L)


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
    for position in range(begin, whole, 4):
        first += of_slots[slots_V[position]]
        second += of_slots[slots_V[position + 1]]
        third += of_slots[slots_V[position + 2]]
        fourth += of_slots[slots_V[position + 3]]
    for position in range(whole, end):
        first += of_slots[slots_V[position]]
    num_dense = dense_BK.shape[1]
    of_numbers = zero
    for number in range(num_dense):
        of_numbers += of_dense[number] * min(max(dense_BK[sample, number], -_LARGEST), _LARGEST)
    return ((first + second) + (third + fourth)) + (of_numbers + of_dense[num_dense])


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
        for position in range(bounds[ahead], bounds[ahead + 1]):
            prefetch(of_slots, slots_V[position])
        z = _logit(sample, of_slots, of_dense, slots_V, bounds, dense_BK)
        found_B[sample] = 1 / (1 + np.exp(-np.float64(z)))


@kernel
def _learn(
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
    for sample in range(len(labels_B)):
        ahead = min(sample + _AHEAD, len(labels_B) - 1)
        for position in range(bounds[ahead], bounds[ahead + 1]):
            prefetch_to_write(of_slots, slots_V[position])
            prefetch_to_write(sums_of_slots, slots_V[position])
        z = _logit(sample, of_slots, of_dense, slots_V, bounds, dense_BK)
        predicted = np.float32(1 / (1 + np.exp(-np.float64(z))))
        gradient = weights_B[sample] * (predicted - labels_B[sample])
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
            x = min(max(dense_BK[sample, number], -_LARGEST), _LARGEST)
            total = sums_of_dense[number] + square * x * x
            sums_of_dense[number] = total
            of_dense[number] -= step * x / np.sqrt(total)
        total = sums_of_dense[num_dense] + square
        sums_of_dense[num_dense] = total
        of_dense[num_dense] -= step / np.sqrt(total)


def _to_numpy(tensor: Tensor) -> NDArray[np.float32]:
    """A contiguous array on the host."""
    found: NDArray[np.float32] = tensor.detach().cpu().float().contiguous().numpy()
    return found
