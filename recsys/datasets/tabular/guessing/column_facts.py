"""Facts about one column of a sample of rows, from which its meaning is guessed.

This module needs pyarrow, so others import it in functions, after `import_pyarrow`.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from recsys.datasets.tabular.reading.columns import plain
from recsys.datasets.tabular.reading.date_forms import (
    FIRST_SECONDS,
    are_iso_times,
    date_form,
    look_like_times,
)

__all__ = ["ColumnFacts", "measure_column"]

_SEPARATORS = "|;, "
_IN_BRACKETS = r"^\s*(\[.*\]|\(.*\)|\{.*\})\s*$"
_LAST_SECONDS = 1_990_010_100  # in 2033; the digits are those of a date


@dataclass(frozen=True, kw_only=True)
class ColumnFacts:
    """What a sample shows of a column.

    Attributes:
        name: The column.
        kind: "integer", "number", "text", "bool", "time", "list", "empty", "unknown time" (text
            that looks like times, but is not ISO text), or "other".
        num_missing: Rows without a value.
        num_distinct: Different values; 0 for lists.
        least: Lowest number; 0.0 for other kinds.
        median: Median of the numbers.
        most: Highest number.
        few_values: The values as lower-case text if there are at most 10, sorted.
        time_format: Key `timestamp_format` under which all values are times; None for no times.
        separator: The character that splits most of the text into repeated parts; else "".
        element_kind: For lists and split text: "integer" or "text".
    """

    name: str
    kind: str
    num_missing: int = 0
    num_distinct: int = 0
    least: float = 0.0
    median: float = 0.0
    most: float = 0.0
    few_values: tuple[str, ...] = ()
    time_format: str | None = None
    separator: str = ""
    element_kind: str = ""


def measure_column(name: str, column: pa.ChunkedArray) -> ColumnFacts:
    """Measure one column.

    Args:
        name: Its name.
        column: Its values in the sample, at least one row; text from text files.
    """
    types = pa.types
    array = given = plain(pa.concat_arrays(column.chunks)).drop_null()
    if types.is_string(given.type):
        array = _parse_numbers(given)  # without texts that are "nan"
    if not len(array):
        return ColumnFacts(name=name, kind="empty", num_missing=len(column))
    if types.is_floating(array.type) and _is_whole_id(name, array):
        # pandas writes integers of a column with missing values so: text "3.0", or doubles
        array = given if types.is_string(given.type) else array.cast(pa.int64())
    facts: dict[str, Any] = {"name": name, "num_missing": len(column) - len(array)}
    kind = array.type
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        element = _element_kind(plain(array.flatten()).drop_null())
        return ColumnFacts(kind="list" if element else "other", element_kind=element, **facts)
    is_value = types.is_primitive(kind) or types.is_string(kind) or types.is_decimal(kind)
    if not is_value or types.is_time(kind) or types.is_duration(kind):
        return ColumnFacts(kind="other", **facts)
    values = array.unique()
    facts["num_distinct"] = len(values)
    if len(values) <= 10:
        facts["few_values"] = tuple(sorted(str(each).lower() for each in values.to_pylist()))
    if types.is_temporal(kind) or (types.is_string(kind) and are_iso_times(values)):
        return ColumnFacts(kind="time", time_format="", **facts)
    if types.is_boolean(kind):
        return ColumnFacts(kind="bool", **facts)
    if types.is_string(kind):
        if look_like_times(values):
            return ColumnFacts(kind="unknown time", **facts)
        return ColumnFacts(kind="text", **_split_facts(array), **facts)
    numbers = array.cast(pa.float64(), safe=False)
    least, median, most = pc.quantile(numbers, [0.0, 0.5, 1.0]).to_pylist()
    return ColumnFacts(
        kind="integer" if types.is_integer(kind) else "number",
        least=least,
        median=median,
        most=most,
        time_format=_time_format(array, least, most),
        **facts,
    )


def _parse_numbers(array: pa.Array) -> pa.Array:
    """Text that is integers or numbers throughout, as these; else the text."""
    # Numbers with leading zeros, and integers beyond 64 bits, are names rather than amounts.
    if pc.any(pc.match_substring_regex(array, "^-?(0[0-9]+|[0-9]{20,})$")).as_py():
        return array
    for kind in (pa.int64(), pa.float64()):
        with suppress(pa.ArrowInvalid):
            return plain(array.cast(kind)).drop_null()
    return array


def _is_whole_id(name: str, array: pa.Array) -> bool:
    """Whether numbers are integers, which floats hold exactly, and the name is that of an id."""
    is_exact = pc.and_(pc.equal(pc.floor(array), array), pc.less(pc.abs(array), 2**53))
    return bool(re.search(r"(^|_|[a-z])(id|Id|ID)$", name) and pc.all(is_exact).as_py())


def _time_format(array: pa.Array, least: float, most: float) -> str | None:
    """The key under which numbers may be times: since 1970 in some unit, or the digits of dates."""
    for form, per_second in (("", 1), ("ms", 10**3), ("us", 10**6), ("ns", 10**9)):
        if FIRST_SECONDS * per_second <= least and most < _LAST_SECONDS * per_second:
            return form
    return (pa.types.is_integer(array.type) and date_form(array)) or None


def _split_facts(array: pa.Array) -> dict[str, Any]:
    """Whether a character splits the text into parts that repeat, as tags do and sentences do not.

    At least a fifth of the values must contain it. The parts must be far fewer than they would be
    if each were new; and a space must not split text that another character splits. Lists as Python
    or JSON writes them are not split: brackets would be part of values.
    """
    if pc.mean(pc.match_substring_regex(array, _IN_BRACKETS)).as_py() >= 0.9:
        return {}
    for separator in _SEPARATORS:
        if pc.mean(pc.match_substring(array, separator)).as_py() < 0.2:
            continue
        parts = plain(pc.split_pattern(array, pattern=separator).flatten()).drop_null()
        if len(parts.unique()) < min(len(array.unique()) + 1, len(parts) / 2):
            return {"separator": separator, "element_kind": _element_kind(parts)}
    return {}


def _element_kind(parts: pa.Array) -> str:
    """The kind of the values of lists; "" if it is none of a feature."""
    is_text = pa.types.is_string(parts.type)
    if is_text and len(parts):
        parts = _parse_numbers(parts)
    if pa.types.is_integer(parts.type):
        return "integer"
    return "text" if is_text else ""
