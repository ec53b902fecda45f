"""Checks what a model returned to a pipeline."""

from __future__ import annotations

from typing import Any

from torch import Tensor

__all__ = ["require_loss_and_output"]


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
        f"{type(each).__name__} {tuple(each.shape)}"
        if isinstance(each, Tensor)
        else type(each).__name__
        for each in parts
    )
    raise TypeError(
        f"{type(model).__name__} must return (loss, output), the loss a tensor () or (B,), got "
        f"({shown}); return both in this order, such as (loss, logits.detach()), or give "
        "custom_model_fwd= a function that does"
    )
