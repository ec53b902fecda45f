"""What `report.html` shows about an ablation: the values of its template."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from recsys.errors import ConfigError
from recsys.report.ablation_columns import auc_errors, shown_metrics
from recsys.report.ablation_metrics import column_title, format_number
from recsys.report.ablation_notes import ONE_SEED_NOTE, table_notes
from recsys.report.ablation_pictures import draw_memory, draw_quality, draw_stages
from recsys.report.paired import paired_cells, paired_note
from recsys.report.texts import as_base64, as_text
from recsys.train.run_files.run_folder import RunFolder

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["ablation_values"]

_SPREAD_NOTE = (
    "Mean over seeds, and sample standard deviation (sd); the mean alone where all are the same."
)
_ERROR_NOTE = "After a cell's test AUC is its standard error."


def ablation_values(folder: Path, record: Mapping[str, Any]) -> dict[str, Any]:
    """The values of the template.

    Args:
        folder: The folder of the ablation, from which the histories of its cells are read.
        record: `ablate.json`.

    Raises:
        ConfigError: a cell is not named as a folder.
    """
    config, cells = record["config"], record["cells"]
    _require_folder_names(folder, cells)
    split = cells[0]["run"]["config"]["eval"]["split"] if cells else "validation"
    histories = [
        (
            cell["variation"],
            RunFolder(folder / "cells" / cell["name"]).read_history(),
            cell["run"]["status"] == "finished",
        )
        for cell in cells
    ]
    note = _SPREAD_NOTE if len(config["seeds"]) > 1 else ONE_SEED_NOTE
    metrics, errors = shown_metrics(record), auc_errors(record)
    if errors:
        note += f" {_ERROR_NOTE}"
    has_differences = bool(record.get("differences"))
    return {
        "title": f"Ablation {folder.resolve().name}",
        "facts": [
            f"{record['status']}: {len(cells)} of {record['num_cells']} cells, "
            f"{len(config['variations'])} variations, seeds {as_text(config['seeds'])}"
        ],
        "record": record,
        "titles": [column_title(metric, config) for metric in metrics],
        "variations": _variation_lines(record, metrics, errors),
        "notes": [note, *table_notes(record)],
        "differences": paired_cells(record) if has_differences else None,
        "differences_note": paired_note(record) if has_differences else "",
        "quality": as_base64(draw_quality(histories, split)),
        "memory": as_base64(draw_memory(record)),
        "stages": as_base64(draw_stages(record)),
        "cells": _cell_lines(record, metrics, errors),
        "keys": [(name, as_text(keys)) for name, keys in config["variations"].items()],
    }


def _require_folder_names(folder: Path, cells: Sequence[Mapping[str, Any]]) -> None:
    """Check that each cell's name is one of a folder; such as ".." would lead out of `folder`."""
    for cell in cells:
        if cell["name"] == ".." or Path(cell["name"]).name != cell["name"]:
            raise ConfigError(
                f"{folder / 'ablate.json'} is damaged: a cell must be named as its folder in "
                f"cells/, got {cell['name']!r}; run `recsys ablate` again"
            )


def _variation_lines(
    record: Mapping[str, Any], metrics: Sequence[str], errors: Mapping[str, float]
) -> list[list[str]]:
    """The name of each variation, and its metrics; `errors` has those of the AUC by cell."""
    rows = {(row["variation"], row["metric"]): row for row in record["rows"]}
    own_errors = {
        cell["variation"]: errors[cell["name"]]
        for cell in record["cells"]
        if cell["name"] in errors
    }
    return [
        [
            variation,
            *(_summary(rows[variation, metric], own_errors.get(variation)) for metric in metrics),
        ]
        for variation in dict.fromkeys(variation for variation, _ in rows)
    ]


def _cell_lines(
    record: Mapping[str, Any], metrics: Sequence[str], errors: Mapping[str, float]
) -> list[list[str]]:
    """The name of each cell, its metrics and its status; arguments as for `_variation_lines`."""
    values = {  # in the order of the cells
        (row["variation"], row["metric"]): iter(row["values"]) for row in record["rows"]
    }
    return [
        [
            cell["name"],
            *(
                format_number(name, next(values[cell["variation"], name]))
                + (_plus_minus(errors.get(cell["name"])) if name == "auc" else "")
                for name in metrics
            ),
            cell["run"]["status"],
        ]
        for cell in record["cells"]
    ]


def _summary(row: Mapping[str, Any], auc_error: float | None) -> str:
    """Mean and standard deviation of a metric of one variation, a line each.

    Args:
        row: A row of the record.
        auc_error: The standard error of the AUC of one cell of the variation; it is told where the
            variation has a single run.
    """
    lines = [format_number(row["metric"], row["mean"])]
    if row["num_runs"] > 1 and row["min"] < row["max"]:
        lines.append(f"sd {format_number(row['metric'], row['std'], mean=row['mean'])}")
    elif row["metric"] == "auc" and row["num_runs"] == 1:
        lines[0] += _plus_minus(auc_error)
    if 0 < row["num_runs"] < row["num_cells"]:
        lines.append(f"{row['num_cells'] - row['num_runs']} of {row['num_cells']} have none")
    return "\n".join(lines)


def _plus_minus(error: float | None) -> str:
    """The standard error of an AUC, to be written after it."""
    return "" if error is None else f" \N{PLUS-MINUS SIGN} {format_number('auc', error)}"
