"""The loss of a model that takes whole mini-batches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn import functional

if TYPE_CHECKING:
    from recsys.batch import Batch

__all__ = ["BatchTrain"]


class BatchTrain(nn.Module):
    """A model of mini-batches with its loss, in the form that training pipelines call.

    Args:
        model: Maps a `Batch` of B samples to logits, (B,) or (B, 1).

    Attributes:
        uses_sample_weights: True: each sample's loss is multiplied by the mini-batch's `weights`,
            if it has any, and the sum is divided by B.

    Shape:
        result (loss, (loss, logits, labels)): loss () with gradient, then detached tensors: loss
        (), logits (B,) and labels (B,).

    Raises:
        ValueError: logits are of another shape, or no tensor.
    """

    uses_sample_weights = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Batch) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        """Mean binary cross-entropy of the batch, and the tensors that a pipeline reports."""
        logits: Any = self.model(batch)
        num_samples = len(batch.labels)
        found = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        if found not in ((num_samples,), (num_samples, 1)):
            raise ValueError(
                f"{type(self.model).__name__}: forward must return logits of shape "
                f"({num_samples},) or ({num_samples}, 1), got {found}"
            )
        logits = logits.reshape(-1).float()
        loss = functional.binary_cross_entropy_with_logits(
            logits, batch.labels.float(), batch.weights
        )
        return loss, (loss.detach(), logits.detach(), batch.labels.detach())
