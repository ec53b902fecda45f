"""The table of an ablation as Markdown, for people, and as CSV, for programs."""

from __future__ import annotations

import csv
from io import StringIO
from typing import TYPE_CHECKING, Any

from recsys.report.ablation_columns import shown_metrics
from recsys.report.ablation_metrics import column_title, format_number
from recsys.report.ablation_notes import ONE_SEED_NOTE, table_notes
from recsys.report.paired import paired_cells, paired_note

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["csv_table", "markdown_table"]

_NUMBERS = ("mean", "std", "min", "max", "num_runs", "num_cells")
_SPREAD_NOTE = "Mean \N{PLUS-MINUS SIGN} sample standard deviation over seeds."
# What a grid's values may hold and Markdown would read as its own.
_ESCAPES = str.maketrans({"|": "\\|", "<": "&lt;", "\n": " ", "\r": " "})


def markdown_table(record: Mapping[str, Any], title: str) -> str:
    """A line for each variation and a column for each metric, with the notes of the page.

    A cell is `mean +- standard deviation`, or the mean alone where a single cell has a value.

    Args:
        record: `ablate.json`.
        title: The heading.
    """
    config, metrics = record["config"], shown_metrics(record)
    rows = {(row["variation"], row["metric"]): row for row in record["rows"]}
    parts = [
        f"# {title.translate(_ESCAPES)}",
        f"{record['status']}: {len(record['cells'])} of {record['num_cells']} cells, seeds "
        f"{', '.join(map(str, config['seeds']))}",
        _table(
            [column_title(metric, config) for metric in metrics],
            [
                [variation, *(_cell(rows[variation, metric]) for metric in metrics)]
                for variation in dict.fromkeys(row["variation"] for row in record["rows"])
            ],
        ),
        _SPREAD_NOTE if len(config["seeds"]) > 1 else ONE_SEED_NOTE,
        *(note.translate(_ESCAPES) for note in table_notes(record)),
    ]
    if record.get("differences"):
        header, lines = paired_cells(record)
        parts += [paired_note(record), _table(header, lines)]
    return "\n\n".join(parts) + "\n"


def csv_table(record: Mapping[str, Any]) -> str:
    """A line for each variation and metric, with unrounded numbers in the units of `ablate.json`.

    Columns: `variation`, `metric`, `unit`, `mean`, `std`, `min`, `max`, `num_runs` with a value,
    `num_cells`, and `seed_<k>` for each seed. What has no value is empty.

    Args:
        record: `ablate.json`.
    """
    seeds = record["config"]["seeds"]
    out = StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["variation", "metric", "unit", *_NUMBERS, *(f"seed_{each}" for each in seeds)])
    own: dict[str, list[int]] = {}
    for cell in record["cells"]:
        own.setdefault(cell["variation"], []).append(cell["seed"])
    for row in record["rows"]:
        values = dict(zip(own[row["variation"]], row["values"], strict=True))
        writer.writerow(
            [row["variation"], row["metric"], row["unit"]]
            + [row[key] for key in _NUMBERS]
            + [values.get(seed) for seed in seeds]
        )
    return out.getvalue()


def _cell(row: Mapping[str, Any]) -> str:
    text = format_number(row["metric"], row["mean"])
    if row["std"] is not None:
        text += f" \N{PLUS-MINUS SIGN} {format_number(row['metric'], row['std'], mean=row['mean'])}"
    if 0 < row["num_runs"] < row["num_cells"]:
        text += f" ({row['num_cells'] - row['num_runs']} of {row['num_cells']} have none)"
    return text


def _table(titles: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [["variation", *titles], ["---", *["---:"] * len(titles)]]
    rows += [[cell.replace("\n", ", ").translate(_ESCAPES) for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
