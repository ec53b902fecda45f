"""Reproducible random bits: a 64-bit hash (SplitMix64's finalizer) of numpy arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["GOLDEN", "mix64"]

# 2**64 / golden ratio. SplitMix64 hashes the multiples of it.
GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)


def mix64(bits: NDArray[np.uint64]) -> NDArray[Any]:
    """A 64-bit hash of each number; consecutive numbers get unrelated hashes."""
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))
