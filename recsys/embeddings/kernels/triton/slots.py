"""The map of the slots on a CUDA device, with Triton kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from recsys._support.cuda.triton_support import cdiv
from recsys.embeddings.kernels.cpu.slot_arrays import NOWHERE
from recsys.embeddings.kernels.cpu.slots import Moves, NoSuchRow, Shortage, SlotClaim
from recsys.embeddings.kernels.torch.bags import layers_of
from recsys.embeddings.kernels.torch.slots import (
    LOOKED_AT,
    DeviceSlotMap,
    QueuedClaim,
    most_rows,
    num_enough,
)
from recsys.embeddings.kernels.triton.claims import claim, release
from recsys.embeddings.rows.lookups import Lookups

if TYPE_CHECKING:
    from torch import Tensor

    from recsys.embeddings.kernels.torch.bags import TorchBags
    from recsys.embeddings.kernels.torch.slots import Copies
    from recsys.embeddings.kernels.triton.claims import StartedClaim

__all__ = ["TritonSlotMap", "queue_claim"]

_ALIGNMENT = 16  # see `claims.claim`
_NO_LOOKUPS = Lookups.nothing()


class TritonSlotMap(DeviceSlotMap):
    """Claims slots on a device; slots are numbered in int32.

    `start` and `finish` are the halves of `claim`: the host may do other work between them.
    """

    def claim(self, lookups: Lookups, bags: TorchBags) -> SlotClaim:
        """As `SlotMap.claim`; the host waits once, to learn which rows to copy."""
        try:
            return self.finish(self.start(lookups, bags))
        except Shortage:
            return self.finish(self.start(lookups, bags, self.tensors.num_slots))

    def start(
        self,
        lookups: Lookups,
        bags: TorchBags,
        num_looked_at: int = 0,
        num_rows: int | None = None,
        *,
        refuses: bool = True,
        released: Tensor | None = None,
        copies: Copies | None = None,
    ) -> StartedClaim:
        """Start to claim; the host waits for nothing.

        Args:
            lookups: Which features are looked up in which tables; each feature in at most one.
            bags: The input.
            num_looked_at: The claim considers at least this many slots from the hand on, and four
                for each row that the mini-batch can have.
            num_rows: The result of `most_rows`; None if it is not known yet.
            refuses: Whether nothing is claimed if a value is not a row of its table.
            released: Slots of a ticket to release before; None for none.
            copies: Makes the claim's transfer; None for none.
        """
        if not bags.batch_size:
            lookups = _NO_LOOKUPS
        layer, _ = layers_of(self.numbers, lookups, bags.num_features)
        num_rows = most_rows(self, lookups, bags) if num_rows is None else num_rows
        num_places = max(1, cdiv(num_rows, _ALIGNMENT)) * _ALIGNMENT  # U
        num_looked_at = max(num_looked_at, LOOKED_AT * num_places)
        with torch.cuda.device_of(self.flags):
            return claim(
                self.tensors,
                layer,
                bags,
                num_places,
                num_looked_at,
                first_slot=self.first_slot,
                refuses=refuses,
                replays=self.numbers.replays,
                released=released,
                copies=copies,
            )

    def finish(self, started: StartedClaim) -> SlotClaim:
        """Wait for a claim that refuses values, and copy its lists to the host.

        Raises:
            NoSuchRow: a value is not a row of its table; nothing was claimed.
            Shortage: too few of the slots that were looked at are free; nothing was claimed.
        """
        numbers, (written_rows, written_slots, rows, at) = started.wait()
        if numbers.bad:
            raise NoSuchRow(len(started.slot_of_value) - numbers.bad)
        if not numbers.is_enough:
            raise self._shortage(started.rows.long())
        is_written, is_fetched = written_rows != NOWHERE, rows != NOWHERE
        moves = Moves(
            rows[is_fetched], at[is_fetched], written_rows[is_written], written_slots[is_written]
        )
        return SlotClaim(
            started.slot_of_value,
            started.held,
            moves,
            numbers.num_lookups,
            numbers.num_hits,
            numbers.num_rows,
            numbers.num_rows_hit,
        )

    def release(self, held: Tensor) -> None:
        """As `SlotMap.release`."""
        with torch.cuda.device_of(self.flags):
            release(self.tensors, held)


def queue_claim(
    slot_map: TritonSlotMap,
    lookups: Lookups,
    bags: TorchBags,
    num_rows: int,
    num_others: int,
    released: Tensor | None = None,
    copies: Copies | None = None,
) -> QueuedClaim:
    """As `TritonSlotMap.claim`, for a claim that finds enough slots; the host does not wait.

    A value that is not a row gets a negative slot, which the lookup refuses; the rows of all other
    values are claimed.

    Args:
        slot_map: The slots.
        lookups: Which features are looked up in which tables; each feature in at most one.
        bags: The input; its values are rows.
        num_rows: The result of `most_rows`.
        num_others: The most slots that other tickets need; together with `num_rows`, not more than
            there are slots that are not pinned.
        released: Slots of a ticket to release before; None for none.
        copies: Makes the claim's transfer; None for none.
    """
    num_looked_at = num_enough(slot_map, num_rows + num_others)
    started = slot_map.start(
        lookups, bags, num_looked_at, num_rows, refuses=False, released=released, copies=copies
    )
    return QueuedClaim(started.slot_of_value, started.held, started.transfer, started.counts)
