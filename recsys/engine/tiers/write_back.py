"""Brings cold memory up to date: writes back all rows that updates have changed in slots."""

from __future__ import annotations

from typing import TYPE_CHECKING

from recsys.engine.kernels.cpu.claim import WRITTEN, list_dirty
from recsys.engine.tiers.host_store import Transfer

if TYPE_CHECKING:
    from recsys.engine.rows.tables import TableGroup

__all__ = ["write_back"]


def write_back(group: TableGroup) -> None:
    """Write every changed row of a group, and its state, to its table; rows keep their slots."""
    fetcher = group.fetcher
    if fetcher is None:
        return
    with fetcher.lock:
        fetcher.settle()
        if group.is_on_device:
            fetcher.write_dirty()
            return
        transfer = Transfer(group, group.num_slots, 0)
        fetcher.queue.add(transfer)  # before it is filled; see `TransferQueue`
        marks = fetcher.marks
        list_dirty(marks.row_of_slot, marks.is_dirty, transfer.moves_4M, transfer.counts)
        fetcher.sums[WRITTEN] += transfer.counts[WRITTEN]
        fetcher.settle()
