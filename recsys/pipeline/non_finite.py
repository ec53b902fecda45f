"""Says why a loss is not finite: a number in the mini-batch, or the training."""

from __future__ import annotations

from typing import Any

import torch

from recsys.pipeline.micro_batches import sizes_in

__all__ = ["explain_loss"]

_INPUTS = ("dense_features", "labels", "weights")


def explain_loss(loss: float, batch: Any) -> str:
    """The message for a loss that is nan or inf.

    Args:
        loss: The loss.
        batch: The mini-batch; its dense features, labels and weights are looked at, if it has them
            under the names of `recsys.Batch`.
    """
    found = f"the loss is {loss} but must be finite; no parameter was updated"
    if set(sizes_in(batch)) == {0}:
        return f"{found}; the mini-batch has no samples; leave it out"
    for name in _INPUTS:
        values = getattr(batch, name, None)
        if not isinstance(values, torch.Tensor):
            continue
        bad = (~values.isfinite()).nonzero()
        if len(bad):
            place = bad[0].tolist()
            column = f", column {place[1]}" if len(place) > 1 else ""
            return (
                f"{found}; {name} of the mini-batch must be finite numbers, got "
                f"{values[tuple(place)].item()} in sample {place[0]}{column}; replace the number, "
                "or leave the sample out"
            )
    return f"{found}; lower the learning rate, or find the sample that causes it"
