"""Suspects that the first line of a text file is data rather than the names of columns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from recsys.datasets.tabular.reading.text_files import TextFile

if TYPE_CHECKING:
    import pyarrow as pa

    from recsys.datasets.tabular.reading.files import ParquetFile

__all__ = ["header_hint"]

_MOST_SHOWN = 5


def header_hint(file: TextFile | ParquetFile, table: pa.Table) -> str:
    """A sentence if at least half of the names look like values; else "".

    A name looks like a value if it is a number, or if its column has it as a value. The numbers
    0, 1, 2 and so on are names that pandas gives.

    Args:
        file: The file.
        table: Its first rows, as text.
    """
    import pyarrow.compute as pc

    names = file.column_names
    if not isinstance(file, TextFile) or names == tuple(map(str, range(len(names)))):
        return ""
    num_values = sum(
        _is_number(name) or bool(pc.any(pc.equal(column, name)).as_py())
        for name, column in zip(names, table.columns, strict=True)
    )
    if 2 * num_values < len(names):
        return ""
    shown = ", ".join(map(repr, names[:_MOST_SHOWN]))
    return (
        f"the first line of {file.path} looks like data rather than names of columns ({shown}); if "
        "it is, add a line with the names above it"
    )


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
