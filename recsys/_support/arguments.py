"""Whether arguments are numbers: of Python or of numpy, but not true or false."""

from __future__ import annotations

from math import isfinite
from numbers import Integral, Real
from typing import Any

__all__ = ["is_number", "is_whole"]


def is_whole(value: Any, least: int) -> bool:
    """Whether an argument is an integer of 64 bits and at least `least`."""
    return (
        not isinstance(value, bool) and isinstance(value, Integral) and least <= int(value) < 2**63
    )


def is_number(value: Any) -> bool:
    """Whether an argument is a finite number."""
    return not isinstance(value, bool) and isinstance(value, Real) and isfinite(value)
