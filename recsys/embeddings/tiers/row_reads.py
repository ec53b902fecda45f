"""Reads rows where they are: in their slots, or in the cold store.

No slot is claimed, no row moves, and nothing is written back.

Letters: M rows, D dim.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from recsys.embeddings.rows.row_space import RowSpace
from recsys.embeddings.tiers.cold.staging import RowsAlone

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from recsys.embeddings.tiers.table_tiers import Tiers

__all__ = ["read_rows_of_tables", "read_rows_of_tiers"]


def read_rows_of_tables(tables: Sequence[Tensor], rows: NDArray[np.int64]) -> Tensor:
    """Copy rows of tables, (M, D), on the device of the tables.

    Args:
        tables: The tables, (E, D) each.
        rows: Row numbers, counted over all tables, (M,) ascending.
    """
    first_rows = np.cumsum([0, *map(len, tables)])
    bounds = np.searchsorted(rows, first_rows).tolist()
    found = torch.empty(
        len(rows), tables[0].shape[1], dtype=tables[0].dtype, device=tables[0].device
    )
    for number, table in enumerate(tables):
        begin, end = bounds[number : number + 2]
        if begin < end:
            ids = torch.from_numpy(rows[begin:end] - first_rows[number]).to(table.device)
            torch.index_select(table, 0, ids, out=found[begin:end])
    return found


def read_rows_of_tiers(tiers: Tiers, tables: RowSpace, rows: NDArray[np.int64]) -> Tensor:
    """Copy rows of tables in two tiers, (M, D), to the device of the slots.

    Args:
        tiers: The tiers.
        tables: The tables of the cold store.
        rows: Row numbers, counted over all tables, (M,).

    Raises:
        ConflictingWrite: tables were written to while slots held updated rows.
        TiersFailed: a transfer has failed.
    """
    with tiers.lock:
        return _read_rows_of_tiers(tiers, tables, rows)


def _read_rows_of_tiers(tiers: Tiers, tables: RowSpace, rows: NDArray[np.int64]) -> Tensor:
    is_exposed = tiers.is_exposed
    try:
        tiers.reload_if_tables_changed(tables)
    finally:
        # Code that has a reference to the tables may still write to them before a lookup.
        tiers.is_exposed = tiers.is_exposed or is_exposed
    residency, hot = tiers.residency, tiers.hot
    residency.settle()
    residency.queue.require_intact()
    slots = hot.where(rows)
    is_here = slots >= 0
    found = torch.empty(len(rows), hot.rows.shape[1], dtype=hot.rows.dtype, device=hot.rows.device)
    here, there = (torch.from_numpy(each).to(found.device) for each in (is_here, ~is_here))
    found[here] = hot.rows[torch.from_numpy(slots[is_here]).to(found.device)]
    others = rows[~is_here].astype(np.int32)
    if len(others):
        if hot._staging is not None:
            found[there] = hot._staging.read(residency._cold, others)
        else:
            copies = torch.empty(len(others), found.shape[1], dtype=found.dtype)
            memory = RowsAlone([RowSpace([copies]).flat.reshape(copies.shape)], hot.first_rows)
            residency._cold.fetch(memory, others, np.arange(len(others), dtype=np.int32))
            found[there] = copies
    return found
