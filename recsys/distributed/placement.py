"""Which rank has which table, for programs that have no plan of their own.

A table larger than a rank's share of all tables is divided by rows. Each other table goes to one
rank, the costly ones first, each to the rank with the least cost so far. The cost of a table is its
share of all bytes plus its share of all numbers that lookups return, so that no rank has most of
the memory or most of the traffic.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["TableCost", "place_tables"]


class TableCost(NamedTuple):
    """What a table costs.

    Attributes:
        num_rows: E.
        row_bytes: Bytes of a row and its optimizer state.
        traffic: Numbers that a mini-batch looks up in it: lookups times D.
    """

    num_rows: int
    row_bytes: int
    traffic: float


def place_tables(tables: Mapping[str, TableCost], num_ranks: int) -> dict[str, int | None]:
    """Place tables on ranks; the same on every rank.

    Args:
        tables: The cost of each table, by name.
        num_ranks: W, at least 1.

    Returns:
        By name: the rank that has the table, or None for a table divided by rows.
    """
    num_bytes = {name: each.num_rows * each.row_bytes for name, each in tables.items()}
    share_bytes = sum(num_bytes.values()) / num_ranks
    traffic = sum(each.traffic for each in tables.values()) or 1
    placed: dict[str, int | None] = {}
    costs: dict[str, float] = {}
    for name, each in tables.items():
        is_large = num_ranks > 1 and num_bytes[name] > share_bytes and each.num_rows >= num_ranks
        if is_large:
            placed[name] = None
        else:
            costs[name] = num_bytes[name] / (share_bytes * num_ranks) + each.traffic / traffic
    loads = [0.0] * num_ranks
    for name in sorted(costs, key=lambda name: -costs[name]):
        rank = loads.index(min(loads))
        placed[name] = rank
        loads[rank] += costs[name]
    return {name: placed[name] for name in tables}
