"""Claims of slots on a device that the host does not wait for.

The host cannot take back what it has queued, so it must know before that there are enough slots.
It counts the most rows that each ticket can need, or reads the counts of an earlier claim. If all
tickets together need at most the slots that are not pinned, the claim finds its slots, whatever its
ids are.

Letters: as in `slots`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from recsys.embeddings.kernels.cpu.slot_arrays import NOWHERE
from recsys.embeddings.kernels.torch.slots import (
    LOOKED_AT,
    Transfer,
    claim,
    distinct_rows,
    rows_first,
    slots_of,
)

if TYPE_CHECKING:
    from torch import Tensor

    from recsys.embeddings.kernels.torch.bags import TorchBags
    from recsys.embeddings.kernels.torch.slots import Copies, TorchSlotMap
    from recsys.embeddings.rows.lookups import Lookups

__all__ = ["NO_SLOT", "QueuedClaim", "most_rows", "num_enough", "queue_claim"]

NO_SLOT = -2  # in `QueuedClaim.slot_of_value`; the lookup refuses it, as it refuses no padding


class QueuedClaim(NamedTuple):
    """The claim of one mini-batch, as the device will know it.

    Attributes:
        slot_of_value: (N,); `NO_SLOT` for a value that is not a row of its table.
        held: The slots that count this claim, (U,).
        moves: The rows to copy before the slots are read.
        counts: The numbers of `TierCounts` for this claim, (6,) int32 or int64.
    """

    slot_of_value: Tensor
    held: Tensor
    moves: Transfer
    counts: Tensor


def most_rows(slot_map: TorchSlotMap, lookups: Lookups, bags: TorchBags) -> int:
    """The most distinct rows that a mini-batch can need; the host does not wait.

    A one-hot feature has B values. Of other features the host may only know how many values there
    are in all.

    Args:
        slot_map: Knows the sizes of the tables.
        lookups: As for `queue_claim`.
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


def num_enough(slot_map: TorchSlotMap, num_needed: int) -> int:
    """How many slots from the hand on surely include enough free ones for a claim.

    Args:
        slot_map: The slots.
        num_needed: The most slots that all tickets need, including this claim.
    """
    return max(1, num_needed + slot_map.num_pinned - slot_map.first_slot)


def queue_claim(
    slot_map: TorchSlotMap,
    lookups: Lookups,
    bags: TorchBags,
    num_rows: int,
    num_others: int,
    released: Tensor | None = None,
    copies: Copies | None = None,
) -> QueuedClaim:
    """As `TorchSlotMap.claim`, for a claim that finds enough slots; the host does not wait.

    A value that is not a row gets the slot `NO_SLOT`; the rows of all other values are claimed.

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
    if released is not None:
        slot_map.release(released)
    slots = slot_map.tensors
    rows_N, is_bad_N = slot_map.rows_of_values(lookups, bags)
    is_row_N = rows_N < slots.num_rows
    num_hits = (slots_of(slots, rows_N) != NOWHERE).sum()
    rows_U = distinct_rows(torch.where(is_row_N, rows_N, NOWHERE))
    num_looked_at = max(num_enough(slot_map, num_rows + num_others), LOOKED_AT * len(rows_U))
    slot_U, transfer = claim(slots, rows_U, num_looked_at, first_slot=slot_map.first_slot)
    slot_N = slots_of(slots, rows_N)
    num_distinct = (rows_U != NOWHERE).sum()
    num_fetched = (transfer.fetched_rows != NOWHERE).sum()
    num_written = (transfer.written_rows != NOWHERE).sum()
    counts = [is_row_N.sum(), num_hits, num_distinct]
    counts += [num_distinct - num_fetched, num_fetched, num_written]
    moves = Transfer(
        *rows_first(transfer.written_rows, transfer.written_slots),
        *rows_first(transfer.fetched_rows, transfer.fetched_slots),
        transfer.is_enough,
    )
    if copies is not None:
        copies.launch(moves)
    return QueuedClaim(
        torch.where((slot_N == NOWHERE) & (is_row_N | is_bad_N), NO_SLOT, slot_N),
        slot_U,
        moves,
        torch.stack(counts),
    )
