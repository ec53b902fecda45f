"""The ids that a claim was made for, by which its lookup is known when it comes.

Letters: B samples, F features, N values; M samples chosen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from recsys.batch import places_of_samples

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from recsys.embeddings.kernels.pooled_lookup import Bags

__all__ = ["ClaimedIds"]


class ClaimedIds:
    """Copies of the ids of a lookup: the caller's may be overwritten, in the same memory.

    Args:
        values: Rows, (N,).
        offsets: Where bags begin, (F * B + 1,); None where bag i is value i.
        batch_size: B.
    """

    def __init__(self, values: Tensor, offsets: Tensor | None, batch_size: int) -> None:
        self._values, self._offsets, self.batch_size = values, offsets, batch_size

    @classmethod
    def copy(cls, bags: Bags) -> ClaimedIds:
        """Those of a module's input."""
        offsets = None if bags.offsets is None else _tensor(bags.offsets).clone()
        return cls(_tensor(bags.values).clone(), offsets, bags.batch_size)

    def are_of(self, bags: Bags) -> bool:
        """Whether these are the very same; the host waits for a device."""
        return (
            self.batch_size == bags.batch_size
            and torch.equal(self._values, _tensor(bags.values))
            and self._have_offsets(None if bags.offsets is None else _tensor(bags.offsets))
        )

    def _have_offsets(self, offsets: Tensor | None) -> bool:
        if self._offsets is not None and offsets is not None:
            return torch.equal(self._offsets, offsets)
        said = self._offsets if offsets is None else offsets
        # Whether bag i is value i, one of the two may not have found out.
        return said is None or torch.equal(said, torch.arange(len(said)).to(said))

    def samples_with(self, is_meant: Tensor, positions: Sequence[int]) -> Tensor:
        """Which samples have a value that is meant.

        Args:
            is_meant: Of every value.
            positions: Of the features that count.

        Shape:
            is_meant (N,) bool, where the values are; result (B,) bool.
        """
        if not positions or not self.batch_size:
            return is_meant.new_zeros(self.batch_size)
        if self._offsets is None:
            return is_meant.view(-1, self.batch_size)[positions].any(0)
        num_before = torch.nn.functional.pad(is_meant.long().cumsum(0), (1, 0))
        of_bags = num_before[self._offsets.long()].diff()
        return (of_bags.view(-1, self.batch_size)[positions] > 0).any(0)

    def select(self, samples: Tensor) -> tuple[Tensor, ClaimedIds]:
        """The places of some samples' values, and their ids alone.

        Shape:
            samples (M,) int64; places as many as there are values, int64, where these are.
        """
        samples = samples.to(self._values.device)
        offsets = None
        if self._offsets is None:
            numbers = torch.arange(len(self._values), device=samples.device)
            places = numbers.view(-1, self.batch_size)[:, samples].flatten()
        else:
            places, offsets = places_of_samples(self._offsets, self.batch_size, samples)
        return places, ClaimedIds(self._values[places], offsets, len(samples))


def _tensor(ids: Any) -> Tensor:
    """An array's memory as a tensor; a tensor itself."""
    found: Tensor = torch.as_tensor(ids)
    return found
