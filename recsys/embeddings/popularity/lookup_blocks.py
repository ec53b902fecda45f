"""Blocks of lookups, for counting: from the columns of a store, another source, or mini-batches.

Blocks are views where the data allows it: columns of a store and mini-batches are not copied.
Letters: B samples, F features, N lookups.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from recsys.batch import (
    Batch,
    feature_tables,
    require_one_batch_size,
)
from recsys.embeddings.rows.bag_input import require_bounds
from recsys.errors import ConfigError, MalformedBags

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from recsys.batch import Features, SampleSource

__all__ = [
    "LookupBlock",
    "block_of",
    "blocks_of_source",
    "samples_of",
]

# Samples per block of a store that is read in place. Threads wait for each other after every block,
# on a busy machine for some milliseconds: blocks of an eighth were counted a quarter slower.
_BLOCK_SAMPLES = 1 << 21
_READ_SAMPLES = 1 << 16  # per call of a source's `read`


class LookupBlock(NamedTuple):
    """The lookups of B samples.

    Attributes:
        features: F names.
        values: Rows, (N,) int32 or int64, contiguous.
        first: Position of each feature's first value.
        num: How many values each has.
        stride: From one value of a feature to its next.
        offsets: Where bags begin, feature by feature, (F * B + 1,); None where every bag has one
            value.
        num_samples: B.
    """

    features: Sequence[str]
    values: NDArray[Any]
    first: NDArray[np.int64]
    num: NDArray[np.int64]
    stride: int
    offsets: NDArray[Any] | None
    num_samples: int

    def sample_of(self, feature: int, place: int) -> int:
        """The sample that the value at position `place` of this feature belongs to."""
        if self.offsets is None:
            return int(place - self.first[feature]) // self.stride
        bounds = self.offsets[feature * self.num_samples : (feature + 1) * self.num_samples + 1]
        return int(np.searchsorted(bounds, place, side="right")) - 1


def blocks_of_source(source: SampleSource, samples: range) -> Iterator[LookupBlock]:
    """A range of a source's samples, in blocks.

    The blocks are views of `source.sparse` if that array has all features (see `SampleSource`).

    Args:
        source: Is read.
        samples: The range.
    """
    features = list(feature_tables(source))
    rows: NDArray[np.int32] | None = getattr(source, "sparse", None)
    if rows is not None and rows.shape[1] != len(features):
        rows = None  # it lacks the features with bags
    size = _READ_SAMPLES if rows is None else _BLOCK_SAMPLES
    for begin in range(samples.start, samples.stop, size):
        end = min(begin + size, samples.stop)
        if rows is not None:
            yield _block_of_columns(features, rows[begin:end])
        else:
            yield block_of(source.read(np.arange(begin, end)))


def block_of(batch: Batch | Features) -> LookupBlock:
    """The lookups of a mini-batch; tensors on the CPU are not copied.

    Args:
        batch: A `Batch` (TorchRec's, too), `JaggedIds` or a `KeyedJaggedTensor`.

    Raises:
        MalformedBags: values are no integers, or the offsets do not fit the values.
        ValueError: features have different batch sizes.
    """
    features: Any = getattr(batch, "sparse_features", batch)
    require_one_batch_size(features)
    names, num_samples = list(features.keys()), int(features.stride())
    values, offsets = features.values().detach().cpu(), features.offsets().detach().cpu()
    if values.dtype not in (torch.int32, torch.int64) or values.dim() != 1:
        raise MalformedBags(
            "values must be (N,) int32 or int64 to be counted, got "
            f"{tuple(values.shape)} {values.dtype}; convert them"
        )
    values_N, bounds = values.contiguous().numpy(), offsets.numpy()
    firsts = np.arange(len(names), dtype=np.int64) * num_samples
    known = getattr(features, "is_known_one_hot", None)
    if known is not None and known():
        num = np.full(len(names), num_samples)
        return LookupBlock(names, values_N, firsts, num, 1, None, num_samples)
    if len(bounds) != len(names) * num_samples + 1:
        raise MalformedBags(
            f"{len(names)} features of {num_samples} samples need {len(names) * num_samples + 1} "
            f"offsets, got {len(bounds)}"
        )
    # `KeyedJaggedTensor` does not check its offsets, and kernels index by them unchecked.
    require_bounds(
        bounds,
        len(values_N),
        lambda bag: f"feature {names[bag // num_samples]!r}, sample {bag % num_samples}",
    )
    ends = bounds[np.append(firsts, len(names) * num_samples)].astype(np.int64)
    return LookupBlock(names, values_N, ends[:-1], np.diff(ends), 1, bounds, num_samples)


def samples_of(source: SampleSource, samples: range | None) -> range:
    """The given range of samples, checked; by default all samples.

    Raises:
        ConfigError: it is not a range of the source's samples with step 1.
    """
    if samples is None:
        return range(source.num_samples)
    if samples.step != 1 or not 0 <= samples.start <= samples.stop <= source.num_samples:
        raise ConfigError(
            f"samples must be a range of step 1 within [0, {source.num_samples}), got {samples}; "
            "choose other samples, or more data"
        )
    return samples


def _block_of_columns(features: Sequence[str], rows_BF: NDArray[np.int32]) -> LookupBlock:
    num_samples, num_features = rows_BF.shape
    return LookupBlock(
        features,
        rows_BF.reshape(-1),
        np.arange(num_features, dtype=np.int64),
        np.full(num_features, num_samples),
        num_features,
        None,
        num_samples,
    )
