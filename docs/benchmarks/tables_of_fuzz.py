"""The table of fuzz cases in docs/reliability.md."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from table_cells import machine, markdown, read_record

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["fuzz_table"]


def fuzz_table(file: str = "fuzz.json") -> str:
    """A line for each reader: faults, cases, and their outcomes."""
    record = read_record(file)
    readers: dict[str, dict[str, Any]] = record["readers"]
    lines = [
        [
            name,
            each["faults"],
            f"{each['num_cases']:,}",
            _outcomes(each["outcomes"]),
            f"{each['num_wrong']:,}",
        ]
        for name, each in readers.items()
    ]
    num_cases = sum(each["num_cases"] for each in readers.values())
    seconds = sum(each["seconds"] for each in readers.values())
    num_wrong = sum(each["num_wrong"] for each in readers.values())
    lines.append(["all", "", f"{num_cases:,}", "", f"{num_wrong:,}"])
    caption = f"{seconds:,.0f} s of cases, {machine(record['environment'])}"
    return markdown(caption, ["reader", "faults", "cases", "outcomes", "wrong"], lines)


def _outcomes(counts: Mapping[str, int]) -> str:
    """How many cases were read, and how many each error refused."""
    read = [f"{counts['read']:,} read"] if "read" in counts else []
    errors = sorted(((num, name) for name, num in counts.items() if name != "read"), reverse=True)
    return ", ".join([*read, *(f"{num:,} {name}" for num, name in errors)])
