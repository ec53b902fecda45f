"""Lookups as a counter reads them: from a store's columns, a source, or mini-batches.

Whatever they come from, they are read block by block, and no block is copied that need not be.

Letters: B samples, F features, N lookups.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from recsys.batch import Batch, expand_to_one_batch_size, varies_in_batch_size
from recsys.datasets.store import Store
from recsys.embeddings.bag_input import require_bounds
from recsys.errors import ConfigError, MalformedBags

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from recsys.batch import Features
    from recsys.datasets.source import SampleSource

__all__ = [
    "LookupBlock",
    "block_of",
    "blocks_of_batches",
    "blocks_of_source",
    "chosen_of",
    "samples_of",
]

# Of a store, where nothing is copied. Threads wait for each other behind every block, on a busy
# machine for some milliseconds: blocks of an eighth were counted a quarter slower there.
_BLOCK_SAMPLES = 1 << 21
_CHOSEN_SAMPLES = 1 << 18  # of a store of which some samples are copied
_READ_SAMPLES = 1 << 16  # of a source that makes arrays of them


class LookupBlock(NamedTuple):
    """The lookups of B samples.

    Attributes:
        features: Their names, F of them.
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
        """Which sample the value at a position belongs to, where a feature has it."""
        if self.offsets is None:
            return int(place - self.first[feature]) // self.stride
        bounds = self.offsets[feature * self.num_samples : (feature + 1) * self.num_samples + 1]
        return int(np.searchsorted(bounds, place, side="right")) - 1


def blocks_of_source(
    source: SampleSource, samples: range, *, is_chosen_from: bool = False
) -> Iterator[LookupBlock]:
    """A run of a source's samples; a store's are taken where they lie.

    Args:
        source: Where samples come from.
        samples: Which.
        is_chosen_from: Whether samples of a block will be chosen, and copied.
    """
    size = _READ_SAMPLES
    if isinstance(source, Store):
        size = _CHOSEN_SAMPLES if is_chosen_from else _BLOCK_SAMPLES
    for begin in range(samples.start, samples.stop, size):
        end = min(begin + size, samples.stop)
        if isinstance(source, Store):
            yield _block_of_columns(list(source.table_sizes), source.sparse[begin:end])
        else:
            yield block_of(source.read(np.arange(begin, end)))


def blocks_of_batches(batches: Iterable[Batch | Features]) -> Iterator[LookupBlock]:
    """Mini-batches, or the features of mini-batches."""
    for batch in batches:
        yield block_of(batch)


def block_of(batch: Batch | Features) -> LookupBlock:
    """The lookups of a mini-batch; nothing is copied of what lies in the CPU's memory.

    Args:
        batch: A `Batch` (TorchRec's, too), `JaggedIds` or a `KeyedJaggedTensor`. Bags that several
            samples share (features with batch sizes of their own) count for each of them.

    Raises:
        MalformedBags: values are no integers, or the offsets do not make bags of them.
        ValueError: features have batch sizes of their own and no `inverse_indices`.
    """
    features: Any = getattr(batch, "sparse_features", batch)
    if varies_in_batch_size(features):
        features = expand_to_one_batch_size(features)
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
    # A `KeyedJaggedTensor` takes any offsets, and a kernel goes where they say.
    require_bounds(
        bounds,
        len(values_N),
        lambda bag: f"feature {names[bag // num_samples]!r}, sample {bag % num_samples}",
    )
    ends = bounds[np.append(firsts, len(names) * num_samples)].astype(np.int64)
    return LookupBlock(names, values_N, ends[:-1], np.diff(ends), 1, bounds, num_samples)


def chosen_of(block: LookupBlock, is_chosen: NDArray[np.bool_]) -> LookupBlock:
    """The lookups of some samples of a block, as a block; they are copied.

    Shape:
        is_chosen (B,).
    """
    samples = np.flatnonzero(is_chosen)
    num_features = len(block.features)
    if block.offsets is None:
        places_FB = block.first[:, None] + samples * block.stride
        num = np.full(num_features, len(samples))
        first = np.arange(num_features, dtype=np.int64) * len(samples)
        values = block.values[places_FB.reshape(-1)]
        return LookupBlock(block.features, values, first, num, 1, None, len(samples))
    bags = (np.arange(num_features)[:, None] * block.num_samples + samples).reshape(-1)
    begins = block.offsets[bags].astype(np.int64)
    lengths = block.offsets[bags + 1].astype(np.int64) - begins
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    places = np.arange(offsets[-1]) + np.repeat(begins - offsets[:-1], lengths)
    ends = offsets[np.arange(num_features + 1) * len(samples)]
    values = block.values[places]
    return LookupBlock(block.features, values, ends[:-1], np.diff(ends), 1, offsets, len(samples))


def samples_of(source: SampleSource, samples: range | None) -> range:
    """The samples meant; all where none are named.

    Raises:
        ConfigError: they are no run of the source's samples.
    """
    if samples is None:
        return range(source.num_samples)
    if samples.step != 1 or not 0 <= samples.start <= samples.stop <= source.num_samples:
        raise ConfigError(
            f"samples must be a run within [0, {source.num_samples}), got {samples}; "
            "name others, or more data"
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
