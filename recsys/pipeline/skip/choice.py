"""Chooses the samples of a raw mini-batch that are trained on; `importance` does it by predictions.

A choice depends on the stream indices of the samples, and on the rows that are stale for the
mini-batch that they are taken for. So it is the same at any depth, and again after a resume.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from recsys._support.hashing import GOLDEN, mix64
from recsys.embeddings.staleness.tracker import MOST_INPUTS
from recsys.pipeline.skip.policies import DropInput, FreezeRows, Observe, RandomDrop, Subsample
from recsys.pipeline.skip.refill import EVERYTHING, Chosen, RawBatch

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from recsys.embeddings.staleness.tracker import StalenessTracker
    from recsys.pipeline.model_tables import ModelTables

__all__ = ["choose_random", "choose_stale", "random_bits"]

# Raw mini-batches from one whose samples the threshold is found from to the next one. Policies that
# keep all samples look at no other ones, to cost less.
_MOST_PERIOD = 32


def choose_stale(
    policy: Observe | DropInput | FreezeRows | Subsample,
    tables: ModelTables,
    tracker: StalenessTracker,
    factor_of: Callable[[int], float],
    setting: str,
    raw: RawBatch,
) -> Chosen:
    """Leave out samples all of whose rows are stale; equal arguments give equal choices.

    Args:
        policy: The policy; `Observe` and `FreezeRows` keep every sample.
        tables: The tables of the model.
        tracker: Knows which rows are stale; it gets samples to find the threshold from.
        factor_of: The part of the policy's share that holds for a mini-batch; 0: keep everything.
        setting: The policy, for errors.
        raw: The raw mini-batch.
    """
    leaves_out = isinstance(policy, DropInput | Subsample) and bool(factor_of(raw.taken_for))
    # As many raw mini-batches as are needed, and at least every 32nd.
    period = min(_MOST_PERIOD, max(1, policy.staleness.window * raw.size // MOST_INPUTS))
    is_sampled = raw.number % period == 0
    if leaves_out:
        tracker.use_flags_of(raw.taken_for)
        leaves_out = tracker.has_stale_rows
    if not (is_sampled or leaves_out):
        return EVERYTHING
    parts = tables.parts(raw.batch, raw.size, setting)
    if is_sampled:  # evenly spaced samples, from which the tracker finds the threshold
        num_samples = -(-MOST_INPUTS * period // policy.staleness.window)
        samples = np.arange(0, raw.size, max(1, raw.size // num_samples))
        samples = samples[samples >= raw.offset]  # the others were added at the first time
        tracker.add_inputs(raw.first_index, parts, raw.size, torch.from_numpy(samples))
    if not leaves_out:
        return EVERYTHING
    is_stale = tracker.all_stale(parts, raw.size).numpy()
    if not isinstance(policy, Subsample):
        return Chosen(np.flatnonzero(~is_stale))
    is_drawn = is_stale & (random_bits(policy.seed, raw) < _threshold(policy.keep))
    samples, weights = np.flatnonzero(~is_stale | is_drawn), None
    if is_drawn.any():
        weights = np.where(is_drawn, 1 / policy.keep, 1).astype(np.float32)[samples]
    return Chosen(samples, weights)


def choose_random(policy: RandomDrop, raw: RawBatch) -> Chosen:
    """Leave out random samples; equal arguments give equal choices.

    Without refilling, the number of samples is the same for all mini-batches of a size, give or
    take one: torch prepares its matrix products anew for each new size.
    """
    bits = random_bits(policy.seed, raw)
    if policy.refill:
        samples = np.flatnonzero(bits >= _threshold(policy.share))
    else:
        most = (1 - policy.share) * raw.size + int(mix64(bits[:1])[0]) / 2**64
        samples = np.sort(np.argsort(bits, kind="stable")[: int(most)])
    weights = None
    if policy.weighted:
        weights = np.full(len(samples), 1 / (1 - policy.share), np.float32)
    return Chosen(samples, weights)


def random_bits(seed: int, raw: RawBatch) -> NDArray[np.uint64]:
    """64 random bits for each sample: a hash of the seed and the stream index."""
    first = mix64(np.array([seed + 1], np.uint64) * GOLDEN)
    indices = np.arange(raw.first_index, raw.first_index + raw.size, dtype=np.uint64)
    return mix64(first + indices * GOLDEN)


def _threshold(share: float) -> Any:
    """The bits of a share of the samples lie below it."""
    return np.uint64(int(share * 2**64))
