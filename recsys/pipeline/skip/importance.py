"""Chooses samples by importance: the policy `Importance` at work.

A choice depends on the samples, on their stream indices, and on the *version* that holds for the
mini-batch that they are taken for. A version has the weights of the predictor as they were after
some step. One is made after every 16th step s, and holds for mini-batches from s + 32 on. The
versions that mini-batches not yet trained on may need are kept, so mini-batches can be taken ahead,
and taken again.

Systematic sampling chooses the samples: with a random number u in [0, 1), sample i is kept if one
of u, 1 + u, 2 + u, ... lies between q_1 + ... + q_{i-1} and q_1 + ... + q_i. So it is kept with
probability q_i, and all mini-batches of equal raw size get equally many samples, give or take one.
That matters for speed: torch prepares its matrix products anew for every new size of a mini-batch,
which took longer than what was saved.

Letters: B samples.

References:
    Madow (1949), On the theory of systematic sampling, II, Annals of Mathematical Statistics 20.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from recsys._support.jit import kernel
from recsys._support.states import SavedState
from recsys.embeddings.staleness.settings import LEAD
from recsys.pipeline.skip.chosen_samples import EVERYTHING, Chosen, RawBatch
from recsys.pipeline.skip.predictor import Predictor, SampleFeatures, Weights, features_of, predict
from recsys.pipeline.skip.sample_choice import first_bits, random_bits

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from recsys.pipeline.model_tables import ModelTables
    from recsys.pipeline.skip.guard import QualityGuard
    from recsys.pipeline.skip.policies import Importance
    from recsys.pipeline.skip.refill import Refilled

__all__ = ["ImportanceSampler", "draw_systematically", "keep_probabilities"]

_PERIOD = 16  # steps from one version to the next
_MOST_VERSIONS = LEAD // _PERIOD + 2
_MOST_FACTOR = 1e6
_NUM_HALVINGS = 24
_LOGLOSS_RATE = 0.125
_ARRAYS = ("weights", "dense_weights", "sums", "dense_sums")  # of the predictor
_STATE_KEYS = ("num_steps", *_ARRAYS, "logloss", "versions")
_VERSION_KEYS = ("first_number", "weights", "dense_weights")


class _Version(NamedTuple):
    """The weights of the predictor that hold for some mini-batches.

    Attributes:
        first_number: Number of the first mini-batch that it holds for.
        weights: The weights.
    """

    first_number: int
    weights: Weights


class ImportanceSampler:
    """Chooses samples by `Importance`. Called with a raw mini-batch.

    Args:
        policy: The policy.
        tables: The tables of the model.
        guard: Says which mini-batches are trained unskipped; None if there is no guard.
        setting: The policy, for errors.
    """

    def __init__(
        self, policy: Importance, tables: ModelTables, guard: QualityGuard | None, setting: str
    ) -> None:
        self._policy, self._tables, self._guard = policy, tables, guard
        self._setting = setting
        self._predictor: Predictor | None = None  # until the first step: K is not known
        self._num_steps = 0
        self._logloss: float | None = None
        self._versions: list[_Version] = []
        # Of mini-batches that were taken and not yet trained on, by their numbers.
        self._features: dict[int, SampleFeatures] = {}

    def __call__(self, raw: RawBatch) -> Chosen:
        """Choose; equal arguments give equal choices.

        Raises:
            ValueError: the mini-batch has no labels, or its features do not fit.
            Exception: as for `ModelTables.parts`.
        """
        self._features.pop(raw.taken_for, None)  # it may be taken again
        labels = self._labels_of(raw.batch, raw.size)
        version = self._version_of(raw.taken_for)
        guard, share = self._guard, self._policy.share
        if version is None or not share:
            return EVERYTHING
        if guard is not None and guard.is_open(raw.taken_for):
            # Every sample is of the kind that is left out at times. Samples chosen by their labels
            # would have other statistics.
            return Chosen(None, None, np.ones(raw.size, bool))
        if guard is not None:
            share *= guard.factor_of(raw.taken_for)
        if not share:
            return EVERYTHING
        features = self._features_of(raw.batch, raw.size)
        scores = np.abs(_to_numpy(labels).reshape(-1) - predict(version.weights, features))
        probabilities = keep_probabilities(scores, share, self._policy.least)
        start = int(random_bits(first_bits(self._policy.seed), raw)[0] >> np.uint64(11)) / 2**53
        samples = draw_systematically(probabilities, start)
        if len(samples) and not raw.offset:
            self._features[raw.taken_for] = features.select(samples)
        return Chosen(samples, (1 / probabilities[samples]).astype(np.float32))

    def end_step(self, refilled: Refilled, batch: Any) -> None:
        """Learn from the mini-batch that was trained on.

        Args:
            refilled: Its number and weights.
            batch: The mini-batch, on its device.
        """
        labels = _to_numpy(self._labels_of(batch, None)).reshape(-1)
        features = self._features.get(refilled.number)
        later = ((number, of) for number, of in self._features.items() if number > refilled.number)
        self._features = dict(later)
        if features is None:
            features = self._features_of(batch, len(labels))
        num_dense = features.dense.shape[1]
        if self._predictor is None:
            if not len(features.slots) and not num_dense:
                raise ValueError(
                    f"{self._setting} predicts labels from rows and dense features, but there are "
                    "no rows that a recsys optimizer updates and no dense_features; build the "
                    "embeddings with optimizer=, or use RandomDrop"
                )
            self._predictor = Predictor(self._policy.bits, self._policy.lr, num_dense)
        weights = refilled.weights
        if weights is None:
            weights = np.ones(len(labels), np.float32)
        errors = np.abs(labels - self._predictor.learn(features, labels, weights))
        self._num_steps += 1
        next_number = refilled.number + 1
        if not next_number % _PERIOD:
            self._update_logloss(errors, weights)
            if self._num_steps >= self._policy.warm_up - LEAD:
                weights_now = self._predictor.weights.copied()
                self._versions.append(_Version(next_number + LEAD, weights_now))
        while len(self._versions) > 1 and self._versions[1].first_number <= next_number:
            del self._versions[0]

    def report(self) -> dict[str, Any]:
        """Steps that the predictor has learned from, and a running mean of its logloss."""
        return {"num_steps": self._num_steps, "predictor_logloss": self._logloss}

    def state_dict(self) -> dict[str, Any]:
        """The state after the last step, in JSON types and tensors."""
        predictor = self._predictor
        arrays = [None] * 4 if predictor is None else [*predictor.weights, *predictor.sums]
        tensors = [None if each is None else _to_tensor(each) for each in arrays]
        return {
            "num_steps": self._num_steps,
            **dict(zip(_ARRAYS, tensors, strict=True)),
            "logloss": self._logloss,
            "versions": [
                {
                    "first_number": each.first_number,
                    "weights": _to_tensor(each.weights.rows),
                    "dense_weights": _to_tensor(each.weights.dense),
                }
                for each in self._versions
            ],
        }

    def reset(self) -> None:
        """Forget all that was learned."""
        self._predictor, self._logloss = None, None
        self._num_steps, self._versions = 0, []
        self._features = {}

    def load_state_dict(self, state: Any, num_batches: int) -> None:
        """Continue from a state.

        Args:
            state: What `state_dict` returned once, under a policy with the same `bits`.
            num_batches: Mini-batches that were trained on.

        Raises:
            ConfigError: it is no such state.
        """
        found = SavedState("importance state", state, _STATE_KEYS)
        num_steps = found.whole("num_steps", most=num_batches)
        predictor, num_dense = None, -1
        if num_steps:
            predictor, num_dense = self._read_predictor(found)
        elif any(found[key] is not None for key in _ARRAYS):
            raise found.error("num_steps", "above 0 if there are weights")
        logloss = None if found["logloss"] is None else found.number("logloss")
        versions = self._read_versions(found, num_dense, num_batches)
        self._num_steps, self._predictor, self._versions = num_steps, predictor, versions
        self._logloss, self._features = logloss, {}

    def _read_predictor(self, found: SavedState) -> tuple[Predictor, int]:
        policy = self._policy
        sizes = range(2**policy.bits, 2**policy.bits + 1)
        dense = _read_array(found, "dense_weights", range(1, 2**31))
        lengths = range(len(dense), len(dense) + 1)
        predictor = Predictor(policy.bits, policy.lr, len(dense) - 1)
        predictor.weights = Weights(_read_array(found, "weights", sizes), dense)
        predictor.sums = Weights(
            _read_array(found, "sums", sizes, least=1),
            _read_array(found, "dense_sums", lengths, least=1),
        )
        return predictor, len(dense) - 1

    def _read_versions(self, found: SavedState, num_dense: int, num_batches: int) -> list[_Version]:
        entries = found.items("versions", range(_MOST_VERSIONS + 1), "versions")
        if entries and num_dense < 0:
            raise found.error("versions", "empty without weights")
        rows = range(2**self._policy.bits, 2**self._policy.bits + 1)
        versions: list[_Version] = []
        for each in entries:
            of_version = SavedState("importance state: versions", each, _VERSION_KEYS)
            least = versions[-1].first_number + 1 if versions else LEAD
            first_number = of_version.whole("first_number", least=least, most=num_batches + LEAD)
            weights = Weights(
                _read_array(of_version, "weights", rows),
                _read_array(of_version, "dense_weights", range(num_dense + 1, num_dense + 2)),
            )
            versions.append(_Version(first_number, weights))
        return versions

    def _version_of(self, number: int) -> _Version | None:
        """The version that holds for a mini-batch; None if there is none yet."""
        for version in reversed(self._versions):
            if version.first_number <= number:
                return version
        return None

    def _update_logloss(self, errors: NDArray[np.float64], weights: NDArray[np.float32]) -> None:
        """Add the logloss of a mini-batch, which is -log(1 - |y - p|) for labels of 0 and 1."""
        losses = -np.log1p(-np.minimum(errors, 1 - 1e-6))
        found = float(losses @ weights / weights.sum())
        if np.isfinite(found):
            known = found if self._logloss is None else self._logloss
            self._logloss = known + _LOGLOSS_RATE * (found - known)

    def _features_of(self, batch: Any, size: int) -> SampleFeatures:
        dense = getattr(batch, "dense_features", None)
        if not isinstance(dense, Tensor) or dense.dim() != 2 or len(dense) != size:
            dense = None
        parts = self._tables.parts(batch, size, self._setting)
        found = None if dense is None else _to_numpy(dense)
        return features_of(parts, found, size, self._policy.bits)

    def _labels_of(self, batch: Any, size: int | None) -> Tensor:
        labels = getattr(batch, "labels", None)
        if not isinstance(labels, Tensor) or size not in (None, labels.numel()):
            shape = "none" if labels is None else f"{getattr(labels, 'shape', type(labels))}"
            raise ValueError(
                f"{self._setting} compares labels with predictions, so mini-batches must have an "
                f"attribute labels (B,), got {shape} in {type(batch).__name__}; use recsys.Batch, "
                "or another policy"
            )
        if not bool(((labels == 0) | (labels == 1)).all()):
            found = labels[(labels != 0) & (labels != 1)][0].item()
            raise ValueError(
                f"{self._setting} needs labels of 0 and 1, because it compares them with "
                f"probabilities, got {found:g}; use another policy"
            )
        return labels


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


def _to_numpy(tensor: Tensor) -> NDArray[np.float32]:
    """A contiguous array on the host."""
    found: NDArray[np.float32] = tensor.detach().cpu().float().contiguous().numpy()
    return found


def _to_tensor(array: NDArray[Any]) -> Tensor:
    return torch.from_numpy(array.copy())


def _read_array(
    found: SavedState, key: str, lengths: range, least: float = -np.inf
) -> NDArray[np.float32]:
    """A copy of a float32 array (n,) of finite numbers of at least `least`; n is one of `lengths`.

    Raises:
        ConfigError: the entry is none.
    """
    array = found.tensor(key).detach().cpu().numpy()
    if array.dtype != np.float32 or len(array) not in lengths or (array < least).any():
        raise found.error(key, f"float32 of length {lengths[0]} to {lengths[-1]}, each >= {least}")
    copied: NDArray[np.float32] = array.copy()
    return copied
