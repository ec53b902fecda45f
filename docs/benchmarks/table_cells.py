"""Helpers for the tables in the docs: read records, format numbers, write Markdown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = [
    "RECORDS",
    "cells_of",
    "cells_of_recsys",
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
    """The record in a file of this folder."""
    record: dict[str, Any] = json.loads((RECORDS / file).read_text())
    return record


def cells_of(record: Mapping[str, Any]) -> dict[tuple[str, str, str], dict[str, Any]]:
    """The rows of a record, by case, provider and metric."""
    return {(row["case"], row["provider"], row["metric"]): row for row in record["rows"]}


def cells_of_recsys(
    cells: Mapping[tuple[str, str, str], dict[str, Any]], case: str
) -> dict[str, dict[str, Any]]:
    """The rows of recsys in a case, by metric."""
    return {key[2]: row for key, row in cells.items() if key[:2] == (case, "recsys")}


def markdown(caption: str, header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A caption, with the table below it."""
    rows = [header, ["---"] * len(header), *lines]
    return caption + "\n\n" + "".join(f"| {' | '.join(row)} |\n" for row in rows)


def percent(row: Mapping[str, Any] | None) -> str:
    """A row's median, which is a share, in percent; empty without a row."""
    return f"{100 * row['median']:.1f} %" if row else ""


def mebibytes(row: Mapping[str, Any] | None) -> str:
    """A row's median, which is in bytes, in MiB; empty without a row."""
    return f"{row['median'] / 2**20:,.0f}" if row else ""


def ratio(row: Mapping[str, Any], *, mark: str = "") -> str:
    """A ratio, with its 95 % interval if it has one."""
    interval = "" if row["low"] is None else f" ({row['low']:.2f}-{row['high']:.2f})"
    return f"{mark}{row['median']:.2f}{mark}{interval}"


def keys_of_case(case: str) -> dict[str, str]:
    """The parameters of a case, by key."""
    return dict(pair.split("=") for pair in case.split(","))


def machine(environment: dict[str, Any]) -> str:
    """The machine on which a record was measured."""
    threads = environment["num_threads"]
    return f"{environment['cpu']}, {threads} threads, torch {environment['torch']}"
