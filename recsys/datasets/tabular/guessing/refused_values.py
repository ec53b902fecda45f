"""Warnings about what `recsys prepare table` refuses in a draft."""

from __future__ import annotations

from math import isinf
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from recsys.datasets.tabular.guessing.column_facts import ColumnFacts

__all__ = ["missing_values", "refused_values"]

_MOST = float(np.finfo(np.float32).max)
_WAYS_OUT = {
    "timestamp": "leave out the key timestamp, and change [split]",
    "weight": "leave out the key weight",
    "split": "change [split]",
}


def refused_values(facts: Iterable[ColumnFacts], tree: Mapping[str, Any]) -> Iterator[str]:
    """A sentence for each refusal: of values in a column, the label aside, or of the whole draft.

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
        most = max(abs(each.least), abs(each.most))
        if is_number and most > _MOST:
            way_out = _WAYS_OUT.get(role, "leave them out")
            values = "infinite values" if isinf(most) else "values beyond float32"
            yield (
                f"column {each.name!r} has {values} in the first {each.num_rows:,} rows, "
                f"and `recsys prepare` refuses them; correct them, or {way_out}"
            )
    if not tree.keys() & {"categorical", "multi", "sequence"}:
        yield (
            "no column is drafted as categorical, multi or sequence, and `recsys prepare` needs "
            "one; change the table of one in the draft, or add a column"
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
