"""Rounding to 16 bits with torch operations; int64 overflow gives the hash of the reference."""

from __future__ import annotations

import torch

from recsys.embeddings.rows.rounding import FACTOR1, FACTOR2, GOLDEN, round_by

__all__ = ["fold", "round_rows"]

_GOLDEN, _FACTOR1, _FACTOR2 = (
    number - 2**64 if number >= 2**63 else number for number in (GOLDEN, FACTOR1, FACTOR2)
)


def fold(key: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
    """The hash of a key and one more number; 64 bits, as int64."""
    mixed = key + (number + 1) * _GOLDEN
    mixed = (mixed ^ _shifted(mixed, 30)) * _FACTOR1
    mixed = (mixed ^ _shifted(mixed, 27)) * _FACTOR2
    return mixed ^ _shifted(mixed, 31)


def round_rows(values: torch.Tensor, keys: torch.Tensor | None) -> torch.Tensor:
    """Round rows to bfloat16, like `narrow` of the CPU kernels.

    Args:
        values: The rows.
        keys: The hash of (seed, step, table, row) for each row; None to round to nearest.

    Shape:
        values (U, D) float32; keys (U,) int64; result (U, D).
    """
    chance = None
    if keys is not None:
        columns = torch.arange(values.shape[1], device=values.device)
        chance = _shifted(fold(keys.unsqueeze(1), columns), 32)
    return round_by(values, chance)


def _shifted(number: torch.Tensor, places: int) -> torch.Tensor:
    """Logical shift to the right."""
    return (number >> places) & ((1 << (64 - places)) - 1)
