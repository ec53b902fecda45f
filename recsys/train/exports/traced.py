"""Models as programs of plain tensors, traced by `torch.export` for mini-batches of any size.

data with one row per feature and sample    program(dense_features, ids)
data with bags                              program(dense_features, values, offsets)
data with weights for the rows of bags      program(dense_features, values, offsets, weights)

dense_features    (B, I) float32
ids               (B, F) int64, a column for each feature
values            (N,) int64, the rows of the first feature, then those of the second
offsets           (F * B + 1,) int64; bag (f, b) begins at offsets[f * B + b]
weights           (N,) float32, a factor for each of values
result            (B,) float32 logits
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from recsys.batch import Batch, JaggedIds
from recsys.errors import ConfigError
from recsys.models.dlrm import DLRMTrain

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["trace"]

_TRACED_SAMPLES = 3  # any number but 0 and 1, which torch.export would take for a constant


def trace(
    model: nn.Module,
    features: Sequence[str],
    num_dense: int,
    *,
    has_bags: bool,
) -> ExportedProgram:
    """Trace a model that serves.

    Args:
        model: Maps a `Batch` to (loss, (loss, logits, labels)), and its `model` computes the
            logits: of `DLRMTrain` from dense and sparse features, else from a `Batch`. In
            evaluation mode, without gradients, on plain tables.
        features: The features, in the order of a batch.
        num_dense: I.
        has_bags: Whether a sample may look up any number of rows of a feature.

    Returns:
        The program. It holds the tensors of the model, not copies.

    Raises:
        ConfigError: `torch.export` cannot trace the model.
    """
    batch, lookups = Dim("batch", min=1), Dim("lookups", min=0)
    num_bags = len(features) * _TRACED_SAMPLES
    dense = torch.zeros(_TRACED_SAMPLES, num_dense)
    program: nn.Module
    inputs: tuple[Tensor, ...]
    if has_bags:
        program = _OfBags(model, features)
        # Two rows in each bag: more lookups than bags, so that the two sizes are not confused.
        inputs = dense, torch.zeros(2 * num_bags, dtype=torch.int64), 2 * torch.arange(num_bags + 1)
        shapes = {
            "dense_features": {0: batch},
            "values": {0: lookups},
            "offsets": {0: len(features) * batch + 1},
        }
    else:
        program = _OfIds(model, features)
        inputs = dense, torch.zeros(_TRACED_SAMPLES, len(features), dtype=torch.int64)
        shapes = {"dense_features": {0: batch}, "ids": {0: batch}}
    try:
        with torch.no_grad():
            return torch.export.export(program.eval(), inputs, dynamic_shapes=shapes, strict=False)
    except Exception as error:  # torch raises errors of many kinds
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ConfigError(
            f"torch.export cannot trace {type(model.model).__name__}: {reason}; its forward must "
            "be operations on tensors that do not depend on the values of its input, with sizes "
            "from tensor.shape, not from len(); see the documentation of torch.export"
        ) from error


class _Scores(nn.Module):
    """The logits of a model, without its loss."""

    def __init__(self, model: nn.Module, features: Sequence[str]) -> None:
        super().__init__()
        self.model: nn.Module = model.model  # type: ignore[assignment]  # Module.__getattr__
        self._takes_batch = not isinstance(model, DLRMTrain)
        self._features = list(features)

    def score(self, dense_features: Tensor, sparse_features: JaggedIds) -> Tensor:
        """Logits, (B,)."""
        if self._takes_batch:
            no_labels = dense_features.new_zeros(dense_features.shape[0])
            logits: Tensor = self.model(Batch(dense_features, sparse_features, no_labels))
        else:
            logits = self.model(dense_features, sparse_features)
        return logits.reshape(-1).float()


class _OfIds(_Scores):
    def forward(self, dense_features: Tensor, ids: Tensor) -> Tensor:
        return self.score(dense_features, JaggedIds.from_one_hot(self._features, ids.t()))


class _OfBags(_Scores):
    def forward(self, dense_features: Tensor, values: Tensor, offsets: Tensor) -> Tensor:
        num_features, batch_size = len(self._features), dense_features.shape[0]
        # The comparison also tells torch.export how the two sizes depend on each other.
        if offsets.shape[0] != num_features * batch_size + 1:
            raise ValueError(
                f"offsets must have F * B + 1 entries with F = {num_features} and B = "
                f"{batch_size}, got {offsets.shape[0]}"
            )
        # The constructor of JaggedIds reads offsets, which have no values while they are traced.
        sparse = JaggedIds._unchecked(self._features, values, offsets, None)
        return self.score(dense_features, sparse)
