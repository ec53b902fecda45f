"""`Batch`: a mini-batch of labelled samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from recsys.batch.jagged_ids import JaggedIds
from recsys.errors import MalformedBags

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

__all__ = ["Batch"]

_PER_SAMPLE = ("dense_features", "labels", "weights")


@dataclass
class Batch:
    """One mini-batch; the field names are TorchRec's, so TorchRec's `DLRMTrain` accepts it too.

    Args:
        dense_features: Numbers of each sample.
        sparse_features: Rows that each sample looks up.
        labels: Labels.
        weights: Factor of each sample's loss; None for 1. Only models with
            `uses_sample_weights = True` read it.

    Shape:
        dense_features (B, I) float32; labels (B,) float32, or (B, K) with K labels; weights (B,)
        float32.

    Raises:
        MalformedBags: the parts have different numbers of samples.
    """

    dense_features: Tensor
    sparse_features: JaggedIds
    labels: Tensor
    weights: Tensor | None = None

    def __post_init__(self) -> None:
        features: object = self.sparse_features
        if not isinstance(features, JaggedIds):
            return  # TorchRec checks its own
        num_samples = features.stride()
        for name in _PER_SAMPLE if self.weights is not None else _PER_SAMPLE[:2]:
            value = getattr(self, name)
            if not isinstance(value, torch.Tensor) or value.shape[:1] != (num_samples,):
                shown = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value)
                raise MalformedBags(
                    f"Batch: {name} must be a tensor of {num_samples} samples, as sparse_features "
                    f"has, got {shown}"
                )

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """The batch on `device`.

        Args:
            device: Device of the result.
            non_blocking: Whether to return before a copy from page-locked memory is finished.
        """
        return self._map(lambda part: part.to(device, non_blocking=non_blocking))

    def select(self, samples: Tensor) -> Batch:
        """The chosen samples, in the order given; a copy.

        Shape:
            samples (M,) int32 or int64.

        Raises:
            MalformedBags: `samples` are of another shape or dtype.
        """
        samples = samples.to(self.labels.device)
        sparse_features = self.sparse_features.select(samples)  # checks `samples`
        return Batch(
            self.dense_features.index_select(0, samples),
            sparse_features,
            self.labels.index_select(0, samples),
            None if self.weights is None else self.weights.index_select(0, samples),
        )

    @classmethod
    def concatenate(cls, parts: Sequence[Batch]) -> Batch:
        """The samples of several mini-batches, one after the other; a copy.

        If only some of them have weights, the samples of the others get weight 1.

        Args:
            parts: The mini-batches, with the same features.

        Raises:
            MalformedBags: there is no mini-batch, or their features differ.
        """
        if not parts:
            raise MalformedBags("Batch.concatenate: give at least one mini-batch, got none")
        weights = None
        if any(part.weights is not None for part in parts):
            weights = torch.cat(
                [
                    part.labels.new_ones(len(part), dtype=torch.float32)
                    if part.weights is None
                    else part.weights
                    for part in parts
                ]
            )
        return cls(
            torch.cat([part.dense_features for part in parts]),
            JaggedIds.concatenate([part.sparse_features for part in parts]),
            torch.cat([part.labels for part in parts]),
            weights,
        )

    def pin_memory(self) -> Batch:
        """The batch in page-locked memory."""
        return self._map(lambda part: part.pin_memory())

    def record_stream(self, stream: torch.Stream) -> None:
        """Tell the allocator that `stream` uses this batch."""
        for part in (self.dense_features, self.sparse_features, self.labels, self.weights):
            if part is not None:
                part.record_stream(stream)

    def _map(self, change: Callable[[Any], Any]) -> Batch:
        return Batch(
            change(self.dense_features),
            change(self.sparse_features),
            change(self.labels),
            None if self.weights is None else change(self.weights),
        )

    def __len__(self) -> int:
        return self.labels.shape[0]  # `len` of a tensor is Python
