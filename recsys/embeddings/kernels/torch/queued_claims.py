"""Claims of slots on a device that the host does not wait for.

The host cannot take back what it has queued, so it must know before that there are enough slots.
It counts the most rows that each ticket can need, or reads the counts of an earlier claim. If all
tickets together need at most the slots that are not pinned, the claim finds its slots, whatever its
ids are.

Letters: as in `slots`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

    from recsys.embeddings.kernels.torch.bags import TorchBags
    from recsys.embeddings.kernels.torch.slots import DeviceSlotMap, Transfer
    from recsys.embeddings.rows.lookups import Lookups

__all__ = ["QueuedClaim", "most_rows", "num_enough"]


class QueuedClaim(NamedTuple):
    """The claim of one mini-batch, as the device will know it.

    Attributes:
        slot_of_value: (N,); negative for a value without a slot: `NOWHERE` if it is padding or not
            looked up, another number if it is not a row of its table.
        held: The slots that count this claim, (U,).
        moves: The rows to copy before the slots are read.
        counts: The numbers of `TierCounts` for this claim, (6,) int32 or int64.
    """

    slot_of_value: Tensor
    held: Tensor
    moves: Transfer
    counts: Tensor


def most_rows(slot_map: DeviceSlotMap, lookups: Lookups, bags: TorchBags) -> int:
    """The most distinct rows that a mini-batch can need; the host does not wait.

    A one-hot feature has B values. Of other features the host may only know how many values there
    are in all.

    Args:
        slot_map: Knows the sizes of the tables.
        lookups: Which features are looked up in which tables; each feature in at most one.
        bags: The input.
    """
    sizes = list(map(slot_map.numbers.sizes.__getitem__, lookups.distinct_tables))
    if bags.offsets is None:
        return sum(map(min, (count * bags.batch_size for count in lookups.num_in_tables), sizes))
    if not bags.counts:
        return min(len(bags.values), sum(sizes))
    of_tables = dict.fromkeys(lookups.distinct_tables, 0)
    for table, position in zip(lookups.tables.tolist(), lookups.positions.tolist(), strict=True):
        of_tables[table] += bags.counts[position]
    return sum(map(min, of_tables.values(), sizes))


def num_enough(slot_map: DeviceSlotMap, num_needed: int) -> int:
    """How many slots from the hand on surely include enough free ones for a claim.

    Args:
        slot_map: The slots.
        num_needed: The most slots that all tickets need, including this claim.
    """
    return max(1, num_needed + slot_map.num_pinned - slot_map.first_slot)
