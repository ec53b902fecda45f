"""Samples that were chosen of raw mini-batches, and wait for a mini-batch."""

from __future__ import annotations

from dataclasses import is_dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from recsys.pipeline.micro_batches import concatenate, select_samples

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

__all__ = ["EVERYTHING", "Chosen", "Part", "RawBatch", "WaitingSamples", "join"]


class RawBatch(NamedTuple):
    """A raw mini-batch to choose from.

    Attributes:
        batch: The mini-batch.
        size: B.
        number: Raw mini-batches before it.
        first_index: Raw samples before it.
        offset: The first samples that were used before; they are not chosen again.
        taken_for: Number of the mini-batch that it is taken for.
    """

    batch: Any
    size: int
    number: int
    first_index: int
    offset: int
    taken_for: int


class Chosen(NamedTuple):
    """What was chosen of a raw mini-batch.

    Attributes:
        samples: The samples, (M,) int64 ascending; None for all.
        weights: Their weights, (M,) float32; None for 1.
        is_stale: Which of them have stale rows only, (M,) bool; None if not asked for.
        num_checked: Samples checked for staleness, chosen or not.
        num_stale: How many of these have stale rows only.
    """

    samples: NDArray[np.int64] | None = None
    weights: NDArray[np.float32] | None = None
    is_stale: NDArray[np.bool_] | None = None
    num_checked: int = 0
    num_stale: int = 0


EVERYTHING = Chosen()


class Part(NamedTuple):
    """A part of a mini-batch."""

    batch: Any
    size: int
    is_stale: NDArray[np.bool_] | None
    weights: NDArray[np.float32] | None


class WaitingSamples:
    """Chosen samples of one raw mini-batch that wait; the first `num_used` of them do not."""

    def __init__(self, raw: RawBatch, chosen: Chosen, *, is_scaled: bool) -> None:
        self.raw, self.num_used = raw, 0
        samples, self._weights, self._is_stale = chosen[:3]
        if raw.offset:
            samples = np.arange(raw.size) if samples is None else samples
            begin = int(np.searchsorted(samples, raw.offset))
            samples = samples[begin:]
            self._weights = None if self._weights is None else self._weights[begin:]
            self._is_stale = None if self._is_stale is None else self._is_stale[begin:]
        self._samples = samples  # None for all
        self._size = raw.size if samples is None else len(samples)
        self.num_raw = raw.size - raw.offset
        self._scale = np.float32(self._size / max(1, self.num_raw) if is_scaled else 1)

    def __len__(self) -> int:
        return self._size - self.num_used

    @property
    def next_sample(self) -> int:
        """The first sample that waits."""
        return self.num_used if self._samples is None else int(self._samples[self.num_used])

    def take(self, count: int, setting: str) -> Part:
        """The next samples. They still wait, until `num_used` is raised."""
        chosen = slice(self.num_used, self.num_used + count)
        is_stale = None if self._is_stale is None else self._is_stale[chosen]
        weights = None if self._weights is None else self._weights[chosen]
        batch = self.raw.batch
        if self._samples is not None or count < self.raw.size:
            samples = (
                torch.arange(chosen.start, chosen.stop)
                if self._samples is None
                else torch.from_numpy(self._samples[chosen])
            )
            batch = select_samples(batch, samples, self.raw.size, setting)
        if weights is not None:
            batch = _weighted(batch, torch.from_numpy(weights * self._scale), setting)
        return Part(batch, count, is_stale, weights)


def join(parts: Sequence[Part], setting: str) -> Part:
    """One mini-batch of several parts; a part without a mask is not stale."""
    sizes = [part.size for part in parts]
    batches = [part.batch for part in parts]
    if any(part.weights is not None for part in parts):
        batches = [
            _weighted(part.batch, torch.ones(part.size), setting)
            if part.weights is None
            else part.batch
            for part in parts
        ]
    return Part(
        concatenate(batches, setting),
        sum(sizes),
        _joined_arrays([part.is_stale for part in parts], sizes, False),
        _joined_arrays([part.weights for part in parts], sizes, np.float32(1)),
    )


def _joined_arrays(
    arrays: Sequence[NDArray[Any] | None], sizes: Sequence[int], missing: Any
) -> NDArray[Any] | None:
    """One array of several; None stands for an array of `missing`."""
    if all(array is None for array in arrays):
        return None
    pairs = zip(arrays, sizes, strict=True)
    return np.concatenate(
        [np.full(size, missing) if array is None else array for array, size in pairs]
    )


def _weighted(batch: Any, weights: Tensor, setting: str) -> Any:
    """The same mini-batch with the loss of each sample multiplied by a weight.

    Raises:
        TypeError: the mini-batch has no weights.
    """
    if not is_dataclass(batch) or not hasattr(batch, "weights"):
        raise TypeError(
            f"{setting} gives samples weights, so mini-batches must be recsys.Batch, or "
            f"dataclasses with a field weights, got {type(batch).__name__}"
        )
    tensors = [value for value in vars(batch).values() if isinstance(value, Tensor)]
    weights = weights.to(tensors[0].device) if tensors else weights
    known = batch.weights
    return replace(batch, weights=weights if known is None else known * weights)  # type: ignore[type-var]
