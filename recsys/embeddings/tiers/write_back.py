"""Brings the cold tier up to date: writes back all rows that updates have changed in slots."""

from __future__ import annotations

from typing import TYPE_CHECKING

from recsys.embeddings.kernels.cpu.claim import WRITTEN, list_dirty
from recsys.embeddings.tiers.transfer import Transfer

if TYPE_CHECKING:
    from recsys.embeddings.rows.tables import TableGroup

__all__ = ["write_back"]


def write_back(group: TableGroup, *, is_checked: bool = True) -> None:
    """Write every changed row of a group, and its state, to its table; rows keep their slots.

    Args:
        group: The group.
        is_checked: Whether the tables must be as `Fetcher` knows them.

    Raises:
        ConflictingWrite: a caller has written to the tables while slots had newer rows.
    """
    fetcher = group.fetcher
    if fetcher is None:
        return
    with fetcher.lock:
        if is_checked:
            fetcher.notice_writes()
        fetcher.settle()
        if group.is_on_device:
            fetcher.write_dirty()
            return
        marks = fetcher.marks
        if not marks.is_dirty.any():  # no kernel may be compiled while numba collects garbage
            return
        # Of generation 0, which is older than all others: until it is done no slot is taken.
        transfer = Transfer(group, group.num_slots, 0)
        fetcher.queue.add(transfer)  # before it is filled; see `TransferQueue`
        list_dirty(marks.row_of_slot, marks.is_dirty, transfer.moves_4M, transfer.counts)
        fetcher.sums[WRITTEN] += transfer.counts[WRITTEN]
        fetcher.settle()
