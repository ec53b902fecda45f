"""Numbers of things in messages."""

from __future__ import annotations

__all__ = ["counted"]


def counted(number: int, thing: str) -> str:
    """A number of things: "1 table", "2 tables", "1,000 tables" for the thing "table"."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"
