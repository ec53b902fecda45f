"""Makes the slots of tiers and what moves their rows, and makes them again with other slots."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, NamedTuple

from recsys.embeddings.kernels.choice import kernels_on
from recsys.embeddings.tiers.cold.device_copies import DeviceCopies
from recsys.embeddings.tiers.cold.file_store import FileStore
from recsys.embeddings.tiers.cold.host_store import HostStore
from recsys.embeddings.tiers.residency import Residency
from recsys.embeddings.tiers.slots import Slots

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy as np
    import torch
    from numpy.typing import NDArray

    from recsys.embeddings.rows.row_space import RowSpace
    from recsys.embeddings.tiers.cold.cold_files import ColdFiles
    from recsys.embeddings.tiers.counts import TierCounts
    from recsys.embeddings.tiers.transfers import TransferClock
    from recsys.embeddings.update.changed_rows import ChangedRows

__all__ = ["KeptParts", "TierSpec"]


class TierSpec(NamedTuple):
    """What tiers are made of.

    Attributes:
        names: Name of every table, for errors.
        sizes: E of every table.
        dim: D.
        dtype: Dtype of the rows.
        state_sizes: Numbers per row of every state array, by name.
        num_slots: S.
        pinned: Rows to pin, counted over all tables, the most popular first.
        device: Device of the slots. The cold store is in host memory or in files.
    """

    names: Sequence[str]
    sizes: Sequence[int]
    dim: int
    dtype: torch.dtype
    state_sizes: Mapping[str, int]
    num_slots: int
    pinned: NDArray[np.int32]
    device: torch.device

    def make_slots(self) -> Slots:
        """Empty slots, some of them pinned."""
        hot = Slots(self.sizes, self.dim, self.dtype, self.state_sizes, self.num_slots, self.device)
        hot.pin(self.pinned)
        return hot

    def make_residency(
        self, hot: Slots, files: ColdFiles | None, spaces: Callable[[], Sequence[RowSpace]]
    ) -> Residency:
        """What moves rows between slots and the cold store.

        Args:
            hot: The slots.
            files: The files of the cold store; None if it is in memory.
            spaces: Returns the tables, then each state array.
        """
        device = hot.rows.device
        kernels = kernels_on(device).host_copies
        if files is None:
            memories, copies = [hot.rows, *hot.states], None
            if kernels is not None:
                copies = DeviceCopies(memories, self.sizes, spaces, kernels)
            return Residency(hot, HostStore(spaces), copies)
        if kernels is not None:
            warnings.warn(
                f"cold_tier='file': '{device}' cannot read files by itself, so each mini-batch "
                "waits for the list of its rows; if the tables fit in memory, leave cold_tier out",
                stacklevel=2,
            )
        return Residency(hot, FileStore(files, spaces))


class KeptParts(NamedTuple):
    """The parts of a residency that its successor continues with."""

    counts: TierCounts
    num_repeated: int
    times: TransferClock
    changed_rows: ChangedRows | None

    @classmethod
    def of(cls, old: Residency) -> KeptParts:
        """The parts of a residency that ends."""
        return cls(old.counts, old.counter.num_repeated, old.times, old.changed_rows)

    def give_to(self, new: Residency) -> None:
        """Continue with these parts."""
        new.counter.start_from(self.counts, self.num_repeated)
        new.times, new.changed_rows = self.times, self.changed_rows
