"""What the tables of the docs are made of: records, ratios, lines in Markdown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = [
    "RECORDS",
    "keys_of_case",
    "machine",
    "markdown",
    "mebibytes",
    "percent",
    "ratio",
    "read_record",
]

RECORDS = Path(__file__).resolve().parent


def read_record(file: str) -> dict[str, Any]:
    """What a command has written, by the file's name here."""
    record: dict[str, Any] = json.loads((RECORDS / file).read_text())
    return record


def markdown(caption: str, header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A caption, and the table under it."""
    rows = [header, ["---"] * len(header), *lines]
    return caption + "\n\n" + "".join(f"| {' | '.join(row)} |\n" for row in rows)


def percent(row: Mapping[str, Any] | None) -> str:
    """A row's median, a share; nothing where there is no row."""
    return f"{100 * row['median']:.1f} %" if row else ""


def mebibytes(row: Mapping[str, Any] | None) -> str:
    """A row's median, in bytes; nothing where there is no row."""
    return f"{row['median'] / 2**20:,.0f}" if row else ""


def ratio(row: Mapping[str, Any], *, mark: str = "") -> str:
    """A ratio, with its 95 % interval where it has one."""
    interval = "" if row["low"] is None else f" ({row['low']:.2f}-{row['high']:.2f})"
    return f"{mark}{row['median']:.2f}{mark}{interval}"


def keys_of_case(case: str) -> dict[str, str]:
    """What a case says, by key."""
    return dict(pair.split("=") for pair in case.split(","))


def machine(environment: dict[str, Any]) -> str:
    """What a record was measured on."""
    threads = environment["num_threads"]
    return f"{environment['cpu']}, {threads} threads, torch {environment['torch']}"
