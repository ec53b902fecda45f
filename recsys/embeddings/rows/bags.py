"""What a lookup is given: bags of ids, and which features are looked up in which tables."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from recsys.embeddings.kernels.cpu.lookup import Input

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

__all__ = ["Bags", "Lookups", "addresses"]


class Bags(NamedTuple):
    """The bags of ids of F features and B samples, feature by feature; kernels check and copy them.

    Attributes:
        ids: int32 or int64, contiguous, on the device of the tables.
        offsets: Where bags begin, of the dtype of the ids, with or without the end of the last;
            None if all bags have the same number of ids.
        weights: A factor for each id, in the dtype of the computation; None for 1.
        num_samples: B.
        num_bags: F * B.
        origin: For errors: the shape of ids given to `nn.Embedding`, each of which is a bag, or the
            names of the features.
    """

    ids: Tensor
    offsets: Tensor | None
    weights: Tensor | None
    num_samples: int
    num_bags: int
    origin: torch.Size | Sequence[str] = ()


class Lookups:
    """Lookups of features in the tables of one group; compared by identity.

    Args:
        locations: Of each lookup: the number of the table, the position of the feature in the
            input, and the first column of the result.
        is_mean: Whether bags are averaged.

    Attributes:
        locations: As given, by table.
        is_mean: As given.
        tables: The distinct tables.
        most_repeats: In how many lookups a feature is at most.
    """

    def __init__(self, locations: Sequence[tuple[int, int, int]], *, is_mean: bool) -> None:
        self.locations = sorted(locations)
        self.is_mean = is_mean
        self.tables = sorted({table for table, _, _ in locations})
        positions = [position for _, position, _ in locations]
        self.most_repeats = max(map(positions.count, positions), default=0)
        self._parts: dict[tuple[int, ...], Lookups] = {}

    def in_tables(self, tables: Collection[int]) -> Lookups:
        """The lookups in some of the tables; the same object in each call."""
        found = tuple(table for table in self.tables if table in tables)
        if len(found) == len(self.tables):
            return self
        if found not in self._parts:
            kept = [location for location in self.locations if location[0] in found]
            self._parts[found] = Lookups(kept, is_mean=self.is_mean)
        return self._parts[found]

    @cached_property
    def arrays(self) -> NDArray[Any]:
        """Tables, positions and columns of the lookups, (3, L) int64."""
        return np.array(self.locations, np.int64).reshape(-1, 3).T.copy()


def addresses(bags: Bags, kept_at: int, *, is_mean: bool) -> Input:
    """Bags as kernels take them.

    Args:
        bags: The input.
        kept_at: Address of room for the copy; 0 where nothing is kept.
        is_mean: Whether bags are averaged.
    """
    ids, offsets, weights, num_samples, num_bags, _ = bags
    return Input(
        ids.data_ptr(),
        ids.numel(),
        int(ids.dtype is torch.int64),
        0 if offsets is None else offsets.data_ptr(),
        0 if offsets is None else offsets.numel(),
        kept_at,
        num_samples,
        num_bags,
        int(is_mean),
        0 if weights is None else weights.data_ptr(),
    )
