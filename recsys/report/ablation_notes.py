"""What is said below the table of an ablation, on its page and in `table.md`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from recsys.report.ablation_columns import column_notes, spread_notes
from recsys.report.ablation_table import format_commits, format_evaluations, format_outcomes
from recsys.report.summary import format_auc_error, format_metric

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["ONE_SEED_NOTE", "table_notes"]

ONE_SEED_NOTE = "One seed, so no spread."

_TARGET_NOTE = (
    "Seconds to {target_split} AUC {target_auc}: training time until the first evaluation that "
    "reached it, without interpolation; {evaluations}. The clock leaves evaluations out."
)
_MEMORY_NOTE = (
    "Fast memory: all that a budget counts; where every row is resident, the rows and their "
    "optimizer state. Moved: rows fetched and written back."
)


def table_notes(record: Mapping[str, Any]) -> list[str]:
    """The notes that do not depend on how a cell is written, a paragraph each.

    Args:
        record: `ablate.json`.
    """
    config, cells = record["config"], record["cells"]
    notes = []
    if config["target_auc"] is not None:
        notes.append(_TARGET_NOTE.format(**config, evaluations=format_evaluations(record)))
    if any(cell["run"].get("tiers") for cell in cells):
        notes.append(_MEMORY_NOTE)
    best = [cell["run"]["data"].get("best_auc") for cell in cells]
    tested = {cell["name"]: cell["run"]["metrics"]["test"] for cell in cells}
    return [
        *notes,
        *format_outcomes(record),
        *column_notes(record),
        *spread_notes(record),
        *format_auc_error(tested),
        *dict.fromkeys(
            f"Best AUC possible: {format_metric(auc)}." for auc in best if auc is not None
        ),
        *format_commits(record),
    ]
