"""How far each of M rows has moved between two points in time.

Rows of 16 bits are computed in float32. A row that is no number, then or now, has moved infinitely
far.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["largest_change", "mean_change"]


def mean_change(before: Tensor, now: Tensor) -> Tensor:
    """The mean over d of |now - before|, (M,) float32, of rows (M, D)."""
    return _finite(_change(before, now).mean(1))


def largest_change(before: Tensor, now: Tensor) -> Tensor:
    """The greatest |now - before| of the columns, (M,) float32, of rows (M, D).

    References:
        The authors' code of Slipstream (`slipstream.py`): every column's change is compared with
        the threshold.
    """
    return _finite(_change(before, now).amax(1))


def _change(before: Tensor, now: Tensor) -> Tensor:
    dtype = torch.promote_types(now.dtype, torch.float32)
    return (now.to(dtype) - before.to(dtype)).abs()


def _finite(drift: Tensor) -> Tensor:
    return drift.float().nan_to_num(nan=inf, posinf=inf)
