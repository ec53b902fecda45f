"""Measures whether the loss of a mini-batch is the mean or the sum of the losses of its parts."""

from __future__ import annotations

from contextlib import contextmanager
from math import isfinite
from typing import TYPE_CHECKING, Any

import torch

from recsys.pipeline.micro_batches import join_outputs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor, nn

    from recsys.pipeline.schedule import Hotline

__all__ = ["is_loss_a_sum"]

_TOLERANCE = 1e-3


def is_loss_a_sum(
    schedule: Hotline,
    model: nn.Module,
    compute: Callable[[Any], tuple[Tensor, Any]],
    batch: Any,
    parts: Sequence[Any],
    sizes: Sequence[int],
) -> bool | None:
    """Whether the loss of a mini-batch is the sum of its parts' losses, or their weighted mean.

    The model computes the loss of the mini-batch and of each part, in evaluation mode and without
    gradient. So dropout and BatchNorm have no effect, and no slot is claimed. Afterwards every
    module's mode and torch's random state are as before.

    Two values count as equal if they differ by at most 0.001 of the largest loss, or by 4 times the
    machine epsilon of the loss's dtype if that is more. Losses in float32 differ by about 1e-6,
    because floats are summed in another order. Under bfloat16 autocast, where the loss is float32,
    they differ by less than 1e-4. A loss in bfloat16 is itself rounded to 0.004. A term of the loss
    that is smaller than this tolerance is not detected.

    Args:
        schedule: Named in errors.
        model: Its modules are in evaluation mode while this function runs.
        compute: Maps a mini-batch to (loss, output).
        batch: The mini-batch.
        parts: Its two parts.
        sizes: The number of samples of each part.

    Returns:
        None if this mini-batch cannot decide it: both hold (losses near 0), or a loss is not
        finite.

    Raises:
        ValueError: neither holds, or there is a loss for each sample; or an output does not have
            one row for each sample.
    """
    with _evaluating(model):
        found: list[Any] = [compute(each) for each in (batch, *parts)]
    if not all(isinstance(each, tuple | list) and len(each) == 2 for each in found):
        raise ValueError(
            f"schedule={schedule} measures the loss in evaluation mode, and there the model must "
            f"return (loss, output) as in training, got {type(found[0]).__name__}; return both, or "
            "use LookAhead"
        )
    # Raises if the output does not have one row for each sample of the mini-batch.
    join_outputs(found[:1], [torch.arange(sum(sizes))])
    losses: list[Tensor] = [loss for loss, _ in found]
    if losses[0].dim():
        raise ValueError(
            f"schedule={schedule} needs a loss that is a mean or a sum over samples, got one of "
            f"shape {tuple(losses[0].shape)}; return its mean or sum, or use LookAhead"
        )
    whole, *of_parts = (loss.item() for loss in losses)
    if not all(isfinite(loss) for loss in (whole, *of_parts)):
        return None
    mean = sum(loss * size for loss, size in zip(of_parts, sizes, strict=True)) / sum(sizes)
    tolerance = max(_TOLERANCE, 4 * torch.finfo(losses[0].dtype).eps)
    allowed = tolerance * max(map(abs, (whole, *of_parts)))
    is_mean, is_sum = (bool(abs(whole - made) <= allowed) for made in (mean, sum(of_parts)))
    if is_mean and is_sum:
        return None
    if is_mean or is_sum:
        return is_sum
    raise ValueError(
        f"schedule={schedule} computes on a mini-batch in two parts, so the loss must be a mean or "
        f"a sum over samples, but it is {whole:.6g} of {sum(sizes)} samples, {of_parts[0]:.6g} of "
        f"{sizes[0]} of them and {of_parts[1]:.6g} of the other {sizes[1]}; return a mean over "
        "samples, or use LookAhead"
    )


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; modes and torch's random state are restored afterwards."""
    # Not `model.eval()`: a module may override it and do more.
    modes = [(module, module.training) for module in model.modules()]
    devices = {each.device for each in model.parameters() if each.is_cuda}
    try:
        for module, _ in modes:
            module.training = False
        with torch.random.fork_rng(devices), torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode
