"""Rounding to 16 bits in operations of torch: the hash of the reference, by int64 that wraps."""

from __future__ import annotations

import torch

from recsys.embeddings.rows.rounding import FACTOR1, FACTOR2, GOLDEN, round_by

__all__ = ["fold", "round_rows"]

_GOLDEN, _FACTOR1, _FACTOR2 = (
    number - 2**64 if number >= 2**63 else number for number in (GOLDEN, FACTOR1, FACTOR2)
)


def fold(key: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
    """What the hash makes of a key and one more number; 64 bits, as int64."""
    mixed = key + (number + 1) * _GOLDEN
    mixed = (mixed ^ _shifted(mixed, 30)) * _FACTOR1
    mixed = (mixed ^ _shifted(mixed, 27)) * _FACTOR2
    return mixed ^ _shifted(mixed, 31)


def round_rows(values: torch.Tensor, dtype: torch.dtype, keys: torch.Tensor | None) -> torch.Tensor:
    """What `narrow` makes of rows, in a kernel.

    Args:
        values: Computed.
        dtype: bfloat16 or float16.
        keys: What the hash has made of each row and all that comes before it; None rounds to
            nearest.

    Shape:
        values (U, D) float32; keys (U,) int64; result (U, D).
    """
    chance = None
    if keys is not None:
        columns = torch.arange(values.shape[1], device=values.device)
        chance = _shifted(fold(keys.unsqueeze(1), columns), 32)
    return round_by(values, dtype, chance)


def _shifted(number: torch.Tensor, places: int) -> torch.Tensor:
    """To the right, zeros from the left."""
    return (number >> places) & ((1 << (64 - places)) - 1)
