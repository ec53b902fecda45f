"""Chooses the samples of a raw mini-batch that are trained on.

A choice depends on the stream indices of the samples, and on the rows that are stale for the
mini-batch that they are taken for. So it is the same at any depth, and again after a resume.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from recsys._support.hashing import GOLDEN, mix64
from recsys.embeddings.staleness.sampled_inputs import MOST_INPUTS
from recsys.pipeline.skip.chosen_samples import EVERYTHING, Chosen, RawBatch
from recsys.pipeline.skip.policies import DropInput, Importance, RandomDrop, Subsample

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from recsys.embeddings.lookup.lookup import Part
    from recsys.embeddings.rows.bags import Bags
    from recsys.embeddings.staleness.tracker import StalenessTracker
    from recsys.pipeline.model_tables import ModelTables
    from recsys.pipeline.skip.guard import QualityGuard
    from recsys.pipeline.skip.policies import FreezeRows, Observe

__all__ = ["SampleChoice", "first_bits", "gives_weights", "leaves_samples_out", "random_bits"]

# Raw mini-batches from one whose samples the threshold is found from to the next one. Policies that
# keep all samples look at no other ones, to cost less.
_MOST_PERIOD = 32


def leaves_samples_out(policy: object) -> bool:
    """Whether a policy leaves samples out; the others only look at them."""
    return isinstance(policy, DropInput | Subsample | Importance | RandomDrop)


def gives_weights(policy: object) -> bool:
    """Whether the samples that a policy keeps have weights."""
    return isinstance(policy, Subsample | Importance) or (
        isinstance(policy, RandomDrop) and policy.weighted
    )


class SampleChoice:
    """Chooses by a policy. Called with a raw mini-batch.

    Args:
        policy: The policy; not `Importance`.
        tables: The tables of the model.
        tracker: Knows which rows are stale; None for `RandomDrop`.
        guard: Says which mini-batches are trained unskipped; None if there is no guard.
        setting: The policy, for errors.
    """

    def __init__(
        self,
        policy: Observe | DropInput | FreezeRows | Subsample | RandomDrop,
        tables: ModelTables,
        tracker: StalenessTracker | None,
        guard: QualityGuard | None,
        setting: str,
    ) -> None:
        self._policy, self._tables, self._setting = policy, tables, setting
        self._tracker, self._guard = tracker, guard
        self._leaves_out = leaves_samples_out(policy)
        self._first_bits = first_bits(getattr(policy, "seed", 0))

    def __call__(self, raw: RawBatch) -> Chosen:
        """Choose; equal arguments give equal choices."""
        policy = self._policy
        if isinstance(policy, RandomDrop):
            return self._choose_random(policy, raw)
        is_open = self._guard is not None and self._guard.is_open(raw.taken_for)
        # As many raw mini-batches as are needed, and at least every 32nd.
        period = min(_MOST_PERIOD, max(1, policy.staleness.window * raw.size // MOST_INPUTS))
        is_sampled = raw.number % period == 0
        if not (self._leaves_out or is_sampled or is_open):
            return EVERYTHING
        tracker = cast("StalenessTracker", self._tracker)
        tracker.use_flags_of(raw.taken_for)
        if not (is_sampled or is_open or tracker.has_stale_rows):
            return Chosen(num_checked=raw.size)
        parts = self._tables.parts(raw.batch, raw.size, self._setting)
        is_stale = tracker.all_stale(parts, raw.size).numpy()
        if is_sampled:
            num_samples = -(-MOST_INPUTS * period // policy.staleness.window)
            self._add_inputs(tracker, raw, parts, num_samples)
        num_stale = int(is_stale.sum())
        if is_open:
            return Chosen(None, None, is_stale, raw.size, num_stale)
        is_stopped = self._guard is not None and not self._guard.factor_of(raw.taken_for)
        if not (self._leaves_out and num_stale) or is_stopped:
            return Chosen(num_checked=raw.size, num_stale=num_stale)
        weights = None
        if isinstance(policy, Subsample):
            is_drawn = is_stale & (random_bits(self._first_bits, raw) < _threshold(policy.keep))
            is_kept = ~is_stale | is_drawn
            if is_drawn.any():
                weights = np.where(is_drawn, 1 / policy.keep, 1).astype(np.float32)[is_kept]
        else:
            is_kept = ~is_stale
        return Chosen(np.flatnonzero(is_kept), weights, None, raw.size, num_stale)

    def _add_inputs(
        self,
        tracker: StalenessTracker,
        raw: RawBatch,
        parts: list[tuple[Part, Bags]],
        num_samples: int,
    ) -> None:
        """Give the tracker evenly spaced samples, from which it finds the threshold."""
        step = max(1, raw.size // num_samples)
        samples = np.arange(0, raw.size, step)
        samples = samples[samples >= raw.offset]  # those before it were added at the first time
        tracker.add_inputs(raw.first_index, parts, raw.size, torch.from_numpy(samples))

    def _choose_random(self, policy: RandomDrop, raw: RawBatch) -> Chosen:
        """Keep each sample with probability 1 - share.

        Without refilling, the number of samples is the same for all mini-batches of a size, give or
        take one: torch prepares its matrix products anew for each new size.
        """
        bits = random_bits(self._first_bits, raw)
        if policy.refill:
            is_kept = bits >= _threshold(policy.share)
        else:
            most = (1 - policy.share) * raw.size + int(mix64(bits[:1])[0]) / 2**64
            is_kept = np.zeros(raw.size, bool)
            is_kept[np.argsort(bits, kind="stable")[: int(most)]] = True
        if is_kept.all() and not policy.weighted:
            return EVERYTHING
        samples, weights = np.flatnonzero(is_kept), None
        if policy.weighted:
            weights = np.full(len(samples), 1 / (1 - policy.share), np.float32)
        return Chosen(samples, weights)


def first_bits(seed: int) -> NDArray[Any]:
    """What `random_bits` starts from for a seed, (1,) uint64."""
    return mix64(np.array([seed + 1], np.uint64) * GOLDEN)


def random_bits(first: NDArray[Any], raw: RawBatch) -> NDArray[np.uint64]:
    """64 random bits for each sample: a hash of the seed and the stream index."""
    indices = np.arange(raw.first_index, raw.first_index + raw.size, dtype=np.uint64)
    return mix64(first + indices * GOLDEN)


def _threshold(share: float) -> Any:
    """The bits of a share of the samples lie below it."""
    return np.uint64(int(share * 2**64))
