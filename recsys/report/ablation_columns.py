"""Which metrics of an ablation get a column, and what is said below its tables."""

from __future__ import annotations

from itertools import compress
from typing import TYPE_CHECKING, Any

from recsys.report.ablation_metrics import ALWAYS, column_title, format_number

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["auc_errors", "column_notes", "shown_metrics", "spread_notes"]


def shown_metrics(record: Mapping[str, Any]) -> list[str]:
    """The metrics that tell cells apart, in the order of the table.

    A metric without a value in any cell is left out, and so is one that is equal in all of several
    finished cells, unless it is the AUC, the logloss or the speed. If no metric has a value, all
    are shown.

    Args:
        record: `ablate.json`.
    """
    values = _values(record)
    empty, equal = _empty(values), _equal(values)
    shown = [metric for metric in values if metric not in empty and metric not in equal]
    return shown or list(values)


def column_notes(record: Mapping[str, Any]) -> list[str]:
    """What the metrics are that have no column, a line each for empty and for equal ones."""
    values = _values(record)
    empty, equal = _empty(values), _equal(values)
    notes = []
    if empty and len(empty) < len(values):
        titles = ", ".join(column_title(metric, record["config"]) for metric in empty)
        notes.append(f"No cell has a value of: {titles}.")
    if equal:
        pairs = "; ".join(
            f"{column_title(metric, record['config'])} {format_number(metric, values[metric][0])}"
            for metric in equal
        )
        notes.append(f"Equal in all cells: {pairs}.")
    return notes


def spread_notes(record: Mapping[str, Any]) -> list[str]:
    """What the spread of results is worth: the error of one AUC, and a warning of two seeds."""
    notes = []
    errors = auc_errors(record).values()
    if errors:
        ends = dict.fromkeys(format_number("auc", end) for end in (min(errors), max(errors)))
        notes.append(
            f"The test AUC of one cell has a standard error of {' to '.join(ends)}: other test "
            "samples would give another AUC."
        )
    if record["cells"] and len(record["config"]["seeds"]) == 2:
        notes.append(
            "Two seeds: a spread or an interval of two values says little; give ablate.seeds three "
            "or more."
        )
    return notes


def auc_errors(record: Mapping[str, Any]) -> dict[str, float]:
    """The standard error of each cell's test AUC over the test samples, by the cell's name."""
    found = {}
    for cell in record["cells"]:
        metrics = cell["run"]["metrics"]["test"] or {}
        if cell["run"]["status"] == "finished" and metrics.get("auc_standard_error") is not None:
            found[cell["name"]] = metrics["auc_standard_error"]
    return found


def _values(record: Mapping[str, Any]) -> dict[str, list[float | None]]:
    """The values of the finished cells, by metric; a cell that diverged has none."""
    is_finished: dict[str, list[bool]] = {}
    for cell in record["cells"]:
        is_finished.setdefault(cell["variation"], []).append(cell["run"]["status"] == "finished")
    found: dict[str, list[float | None]] = {}
    for row in record["rows"]:
        found.setdefault(row["metric"], []).extend(
            compress(row["values"], is_finished[row["variation"]])
        )
    return found


def _empty(values: Mapping[str, list[float | None]]) -> list[str]:
    return [metric for metric, found in values.items() if set(found) <= {None}]


def _equal(values: Mapping[str, list[float | None]]) -> list[str]:
    return [
        metric
        for metric, found in values.items()
        if metric not in ALWAYS and len(found) > 1 and len(set(found)) == 1 and found[0] is not None
    ]
