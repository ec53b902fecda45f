"""Chance that is a function of a number: SplitMix64's finalizer, as numpy arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["GOLDEN", "mix64"]

# 2**64 / golden ratio: multiples of it are the stream that SplitMix64 mixes.
GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)


def mix64(bits: NDArray[np.uint64]) -> NDArray[Any]:
    """One 64-bit hash for each number; neighbours get unrelated ones."""
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))
