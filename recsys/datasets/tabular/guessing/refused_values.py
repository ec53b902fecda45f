"""Warnings about values that `recsys prepare table` refuses in the columns of a draft."""

from __future__ import annotations

from math import isinf
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from recsys.datasets.tabular.guessing.column_facts import ColumnFacts

__all__ = ["missing_values", "refused_values"]

_WAYS_OUT = {
    "timestamp": "leave out the key timestamp, and change [split]",
    "weight": "leave out the key weight",
    "split": "change [split]",
}


def refused_values(facts: Iterable[ColumnFacts], tree: Mapping[str, Any]) -> Iterator[str]:
    """A sentence for each column of a draft with refused values, the label aside.

    Args:
        facts: The columns.
        tree: The keys of the draft.
    """
    roles = {tree.get("timestamp"): "timestamp", tree.get("weight"): "weight"}
    roles[tree["split"].get("column")] = "split"
    for each in facts:
        role = roles.get(each.name, "")
        if role and each.num_missing:
            yield missing_values(role, each, _WAYS_OUT[role])
        is_number = role == "weight" or each.name in tree.get("dense", {})
        if is_number and (isinf(each.least) or isinf(each.most)):
            way_out = _WAYS_OUT.get(role, "leave them out")
            yield (
                f"column {each.name!r} has infinite values in the first {each.num_rows:,} rows, "
                f"and `recsys prepare` refuses them; correct them, or {way_out}"
            )


def missing_values(role: str, each: ColumnFacts, way_out: str) -> str:
    """A sentence about a column that lacks values where its role needs one.

    Args:
        role: The key of the schema that names the column.
        each: The column.
        way_out: What helps besides filling the values in.
    """
    return (
        f"{role} {each.name!r} has no value in {each.num_missing:,} of the first {each.num_rows:,} "
        f"rows, and `recsys prepare` refuses such rows; fill them in, leave them out, or {way_out}"
    )
