"""How far a row has moved in a window: the measures of drift, behind one interface.

A measure maps the values of M rows at the ends of a window to one number per row, at least 0. Stale
rows have small numbers. The measures are torch operations, so they run where the rows are. PyTorch
is imported when they run: the configuration reads their names alone.

Letters: M rows, D dim.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

__all__ = ["MEASURES", "NEEDS_EARLIER", "Movement", "measure_drift"]


class Movement(NamedTuple):
    """How M rows moved in one window.

    Attributes:
        before: The rows when the window began, (M, D).
        now: The rows at its end, (M, D).
        earlier: The rows one window before `before`, (M, D); None unless the measure needs them.
        updates: How often each row was updated in the window, (M,), at least 1.
        step_size: The learning rate of the rows at the window's end.
    """

    before: Tensor
    now: Tensor
    earlier: Tensor | None
    updates: Tensor
    step_size: float


def measure_drift(measure: str, movement: Movement) -> Tensor:
    """The drift of each row, (M,) float32, at least 0; infinite if it is no number.

    Args:
        measure: A key of `MEASURES`.
        movement: The rows, in any floating dtype; 16-bit rows are computed in float32.
    """
    drift = MEASURES[measure](_widened(movement)).float()
    return drift.nan_to_num(nan=inf, posinf=inf)


def largest_change(movement: Movement) -> Tensor:
    """Greatest |now - before| of the columns.

    References:
        The authors' code of Slipstream (`slipstream.py`): every column's change is compared with
        the threshold.
    """
    return _change(movement).amax(1)


def mean_change(movement: Movement) -> Tensor:
    """Mean over d of |now - before|."""
    return _change(movement).mean(1)


def relative_change(movement: Movement) -> Tensor:
    """Mean over d of |now - before|, divided by the mean over d of |before|.

    A row of zeros has no relative change; its drift is infinite.

    References:
        Wang et al. (2023), FLuID: an update is invariant if it is small relative to the weight.
    """
    return _change(movement).mean(1) / movement.before.abs().mean(1)


def change_per_update(movement: Movement) -> Tensor:
    """Mean over d of |now - before|, divided by the row's number of updates."""
    return mean_change(movement) / movement.updates


def change_per_step_size(movement: Movement) -> Tensor:
    """Mean over d of |now - before|, divided by the learning rate at the window's end.

    A learning rate that falls makes every row move less. This measure does not take such a row for
    stale.
    """
    return mean_change(movement) / movement.step_size


def signal_to_noise(movement: Movement) -> Tensor:
    """How much of the movement of two windows has one direction, in [0, 1].

    With d1 = before - earlier and d2 = now - before: max(0, d1 . d2) / ((|d1|^2 + |d2|^2) / 2).

    Rows that are still learning move the same way in both windows: the number is near 1. If only
    the noise of the gradients moves a row, d1 and d2 are unrelated: the number is near 0, however
    far the row moves. A row that has not moved in two windows has drift 0.

    This estimates the mean gradient against its noise from three points in time, without a record
    of gradients. It is from no paper.
    """
    assert movement.earlier is not None
    first, second = movement.before - movement.earlier, movement.now - movement.before
    signal = (first * second).sum(1).clamp(min=0)
    size = ((first * first).sum(1) + (second * second).sum(1)) / 2
    return (signal / size).masked_fill(size == 0, 0)


MEASURES: Mapping[str, Callable[[Movement], Tensor]] = {
    each.__name__: each
    for each in (
        largest_change,
        mean_change,
        relative_change,
        change_per_update,
        change_per_step_size,
        signal_to_noise,
    )
}
# Measures that need the rows at three points in time.
NEEDS_EARLIER = frozenset({"signal_to_noise"})


def _change(movement: Movement) -> Tensor:
    return (movement.now - movement.before).abs()


def _widened(movement: Movement) -> Movement:
    """The movement in the dtype of the computation, at least float32."""
    import torch

    dtype = torch.promote_types(movement.now.dtype, torch.float32)
    before, now, earlier, updates, step_size = movement
    return Movement(
        before.to(dtype),
        now.to(dtype),
        None if earlier is None else earlier.to(dtype),
        updates.to(dtype),
        step_size,
    )
