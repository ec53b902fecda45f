"""Suspects that a text file is written otherwise than it is read.

Its first line may be data rather than names, and spaces may stand around its delimiters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from recsys.datasets.tabular.reading.text_files import TextFile

if TYPE_CHECKING:
    import pyarrow as pa

    from recsys.datasets.tabular.reading.files import ParquetFile

__all__ = ["header_hint", "space_hint"]

_MOST_SHOWN = 5


def header_hint(file: TextFile | ParquetFile, table: pa.Table) -> str:
    """A sentence if the first line is not split, or at least half of the names look like values.

    It is empty if neither is so.

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
    if len(names) == 1:
        return (
            f"the first line of {file.path} has neither tab, comma, semicolon nor |, so each line "
            "is one field; replace the delimiter in the file by a tab"
        )
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


def space_hint(file: TextFile | ParquetFile, table: pa.Table) -> str:
    """A sentence if half of the names, or most values of half of the columns, begin with a space.

    A space after a delimiter belongs to the field. It makes text of numbers and of quoted fields.

    Args:
        file: The file.
        table: Its first rows, as text.
    """
    import pyarrow.compute as pc

    if not isinstance(file, TextFile):
        return ""
    shares = [pc.mean(pc.starts_with(column, " ")).as_py() for column in table.columns]
    spaced = [
        name
        for name, share in zip(file.column_names, shares, strict=True)
        if name.startswith(" ") or (share or 0.0) > 0.5
    ]
    if 2 * len(spaced) < len(shares):
        return ""
    return (
        f"in {file.path} a space follows delimiters, as in column {spaced[0]!r}, and is read as "
        "part of the field, so that numbers and quoted fields are text; write the file without it"
    )


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
