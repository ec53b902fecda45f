"""Checks what a model returned to a pipeline, and says why its loss is not finite."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from recsys.pipeline.micro_batches import sizes_in

__all__ = ["explain_loss", "require_loss_and_output"]


def require_loss_and_output(found: Any, model: Any) -> tuple[Tensor, Any]:
    """Check that a model in training returned (loss, output), and return both.

    Args:
        found: What it returned.
        model: The model, for the error.

    Raises:
        TypeError: this is no pair with a tensor first, or its order is (output, loss): the second
            is a number with a gradient, and the first is not a number.
    """
    if isinstance(found, tuple | list) and len(found) == 2 and isinstance(found[0], Tensor):
        second = found[1]
        is_loss = isinstance(second, Tensor) and not second.dim() and second.requires_grad
        if not (is_loss and found[0].dim()):
            return found[0], second
    parts = found if isinstance(found, tuple | list) else [found]
    shown = ", ".join(
        f"{type(part).__name__} {tuple(part.shape)}"
        if isinstance(part, Tensor)
        else type(part).__name__
        for part in parts
    )
    raise TypeError(
        f"{type(model).__name__} must return (loss, output), the loss a tensor () or (B,), got "
        f"({shown}); return both in this order, such as (loss, logits.detach()), or give "
        "custom_model_fwd= a function that does"
    )


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
        if not isinstance(values, Tensor):
            continue
        bad = (~values.isfinite()).nonzero()
        if len(bad):
            index = bad[0].tolist()
            column = f", column {index[1]}" if len(index) > 1 else ""
            return (
                f"{found}; {name} of the mini-batch must be finite numbers, got "
                f"{values[tuple(index)].item()} in sample {index[0]}{column}; replace the number, "
                "or leave the sample out"
            )
    return f"{found}; lower the learning rate, or find the sample that causes it"
