"""What an exported program has in it, as JSON for the program's file and as text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from recsys._support.sizes import format_bytes

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["ABOUT", "ProgramReport", "format_program"]

ABOUT = "recsys.json"  # the name of the JSON text inside a program's file
FORMAT_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class ProgramReport:
    """What `export_program` wrote.

    Attributes:
        path: The file of the program.
        table_bytes: Bytes of the tables by the dtype of their rows: "float32", and also "int8" if
            the program has such rows.
        test: `auc` and `logloss` on the test part, and `recall_at_k` if it is ranked, by the dtype
            of the rows; empty if they were not measured.
        not_measured: Why they were not measured; None if they were, or if rows stay float32.
    """

    path: Path
    table_bytes: dict[str, int]
    test: dict[str, dict[str, float | None]]
    not_measured: str | None

    @property
    def rows(self) -> str:
        """The dtype of the program's rows."""
        return list(self.table_bytes)[-1]

    def as_dict(self) -> dict[str, Any]:
        """In JSON types, for the file."""
        return {
            "rows": self.rows,
            "table_bytes": self.table_bytes,
            "test": self.test,
            "not_measured": self.not_measured,
        }


def format_program(report: ProgramReport) -> str:
    """The report as text: a line, and for int8 rows a table that compares them with float32."""
    written = f"wrote {report.path}"
    sizes = report.table_bytes
    if report.rows == "float32":
        return f"{written}: tables of {format_bytes(sizes['float32'])} in float32"
    names = list(report.test.get("float32", ("auc", "logloss")))
    lines = [written, f"{'rows':<10}{'tables':>12}" + "".join(f"{f'test {n}':>18}" for n in names)]
    for rows, size in sizes.items():
        found = report.test.get(rows, {})
        cells = "".join(f"{_number(found.get(name)):>18}" for name in names)
        lines.append(f"{rows:<10}{format_bytes(size):>12}{cells}")
    share = sizes[report.rows] / sizes["float32"]
    lines.append(f"{report.rows} rows with their scales take {share:.3f} of the bytes")
    if any(found["auc"] is None for found in report.test.values()):
        lines.append("the test part has labels of one kind alone, so it has no auc")
    if report.not_measured is not None:
        lines.append(f"auc and logloss are not measured: {report.not_measured}")
    return "\n".join(lines)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.5f}"
