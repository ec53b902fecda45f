"""`PooledEmbeddings`: the pooled vectors of several features, side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = ["PooledEmbeddings"]


class PooledEmbeddings:
    """One pooled vector per feature and sample, side by side.

    Args:
        keys: Feature names, distinct, in column order.
        length_per_key: Columns of each feature.
        values: The vectors.

    Shape:
        values (B, sum(length_per_key)).

    Raises:
        ValueError: keys are not distinct, or lengths do not fit keys or values.
    """

    def __init__(self, keys: Sequence[str], length_per_key: Sequence[int], values: Tensor) -> None:
        self._keys = list(keys)
        self._length_per_key = list(length_per_key)
        self._values = values
        if len(self._keys) != len(self._length_per_key):
            raise ValueError(
                f"PooledEmbeddings: length_per_key must have one entry per key, got "
                f"{len(self._length_per_key)} for {len(self._keys)} keys"
            )
        if len(set(self._keys)) != len(self._keys):
            raise ValueError(f"PooledEmbeddings: keys must be distinct, got {self._keys}")
        if values.dim() != 2 or values.shape[1] != sum(self._length_per_key):
            raise ValueError(
                f"PooledEmbeddings: values must be (B, {sum(self._length_per_key)}), "
                f"got {tuple(values.shape)}"
            )

    @classmethod
    def _unchecked(
        cls, keys: list[str], length_per_key: list[int], values: Tensor
    ) -> PooledEmbeddings:
        """Skip the checks, for what fits by construction; the lists are not copied."""
        made = object.__new__(cls)
        made._keys, made._length_per_key, made._values = keys, length_per_key, values
        return made

    def keys(self) -> list[str]:
        """Feature names, in column order."""
        return self._keys

    def values(self) -> Tensor:
        """All vectors, (B, sum of dims)."""
        return self._values

    def length_per_key(self) -> list[int]:
        """Columns of each feature."""
        return self._length_per_key

    def __getitem__(self, key: str) -> Tensor:
        """The vectors of one feature, (B, D); a view. Raises KeyError for an unknown feature."""
        if key not in self._keys:
            raise KeyError(f"PooledEmbeddings has no feature {key!r}; it has {self._keys}")
        position = self._keys.index(key)
        begin = sum(self._length_per_key[:position])
        return self._values[:, begin : begin + self._length_per_key[position]]

    def to_dict(self) -> dict[str, Tensor]:
        """Vectors by feature name; views, not copies."""
        return dict(
            zip(self._keys, torch.split(self._values, self._length_per_key, dim=1), strict=True)
        )

    def __repr__(self) -> str:
        return f"PooledEmbeddings(keys={self._keys}, shape={tuple(self._values.shape)})"
