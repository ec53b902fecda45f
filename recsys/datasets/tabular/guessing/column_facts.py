"""Facts about one column of a sample of rows, from which its meaning is guessed.

This module needs pyarrow, so others import it in functions, after `import_pyarrow`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from recsys.datasets.tabular.reading.columns import plain
from recsys.datasets.tabular.reading.date_forms import FIRST_SECONDS, date_form, text_form

__all__ = ["ColumnFacts", "measure_column"]

_SEPARATORS = "|;, "
_IN_BRACKETS = r"^\s*(\[.*\]|\(.*\)|\{.*\})\s*$"
_LAST_SECONDS = 1_990_010_100  # in 2033; the digits are those of a date


@dataclass(frozen=True, kw_only=True)
class ColumnFacts:
    """What a sample shows of a column.

    Attributes:
        name: The column.
        kind: "integer", "number", "text", "bool", "time", "list", "empty", "rounded" (ids in floats
            that do not hold them exactly), or "other".
        num_rows: Rows of the sample.
        num_missing: Those without a value.
        num_distinct: Different values; -1 for lists.
        least: Lowest number; 0.0 for other kinds.
        median: Median of the numbers.
        most: Highest number.
        few_values: The values as lower-case text if there are at most 10, sorted.
        few_texts: These values as the sample has them, sorted.
        time_format: Key `timestamp_format` under which all values are times; None for no times.
        time_doubt: Why text that looks like times has no `time_format`; else "".
        separator: The character that splits most of the text into repeated parts; else "".
        num_parts: Mean number of values of a list, or of parts of the text.
        element_kind: For lists and split text: "integer", "number", "text", or "other".
    """

    name: str
    kind: str
    num_rows: int
    num_missing: int = 0
    num_distinct: int = 0
    least: float = 0.0
    median: float = 0.0
    most: float = 0.0
    few_values: tuple[str, ...] = ()
    few_texts: tuple[str, ...] = ()
    time_format: str | None = None
    time_doubt: str = ""
    separator: str = ""
    num_parts: float = 0.0
    element_kind: str = ""

    @property
    def unread_type(self) -> str:
        """Why the type of the column is none of a feature; "" if it is one."""
        if self.kind == "other" or self.element_kind == "other":
            return "its type is neither numbers, text, times nor lists of these"
        if self.kind == "rounded":
            return "ids in floats, which round them beyond 2^53: write them as integers or text"
        if self.kind == "list" and self.element_kind == "number":
            return (
                "lists of numbers that are not whole; if they weigh the values of another column, "
                f'set weights = "{self.name}" there'
            )
        return ""


def measure_column(name: str, column: pa.ChunkedArray) -> ColumnFacts:
    """Measure one column.

    Args:
        name: Its name.
        column: Its values in the sample; text from text files.
    """
    types = pa.types
    array = plain(pa.concat_arrays(column.chunks)) if column.num_chunks else pa.nulls(0)
    array = _as_text_if_unsigned(array)
    facts: dict[str, Any] = {"name": name, "num_rows": len(array), "num_missing": array.null_count}
    array = array.drop_null()
    text = array if types.is_string(array.type) else None
    if text is not None:
        array = _parse_numbers(text)  # without texts that are "nan"
        facts["num_missing"] += len(text) - len(array)
    if not len(array):
        return ColumnFacts(kind="empty", **facts)
    if types.is_floating(array.type) and _is_whole_id(name, array):
        if pc.max(pc.abs(array)).as_py() >= 2**53:
            return ColumnFacts(kind="rounded", **facts)
        # pandas writes integers of a column with missing values so: text "3.0", or doubles
        array = text if text is not None else array.cast(pa.int64())
        facts["num_missing"] = facts["num_rows"] - len(array)
    kind = array.type
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        parts = _as_text_if_unsigned(plain(array.flatten()).drop_null())
        facts["num_parts"] = len(parts) / len(array)
        return ColumnFacts(kind="list", num_distinct=-1, element_kind=_element_kind(parts), **facts)
    if not (types.is_primitive(kind) or types.is_string(kind) or types.is_decimal(kind)):
        return ColumnFacts(kind="other", **facts)
    counts = array.value_counts()
    facts["num_distinct"] = len(counts)
    if len(counts) <= 10:
        texts = [str(each) for each in counts.field("values").to_pylist()]
        facts["few_texts"] = tuple(sorted(texts))
        facts["few_values"] = tuple(sorted(text.lower() for text in texts))
    if types.is_time(kind) or types.is_duration(kind):
        return ColumnFacts(kind="other", **facts)
    if types.is_temporal(kind):
        return ColumnFacts(kind="time", time_format="", **facts)
    if types.is_boolean(kind):
        return ColumnFacts(kind="bool", **facts)
    if types.is_string(kind):
        facts["time_format"], facts["time_doubt"] = text_form(array)
        if facts["time_format"] is None and not facts["time_doubt"]:
            facts |= _split_facts(array)
        return ColumnFacts(kind="text", **facts)
    numbers = array.cast(pa.float64(), safe=False)
    facts["least"], facts["most"] = pc.min_max(numbers).as_py().values()
    facts["median"] = pc.quantile(numbers)[0].as_py()
    facts["time_format"] = _time_format(array, facts["least"], facts["most"])
    return ColumnFacts(kind="integer" if types.is_integer(kind) else "number", **facts)


def _as_text_if_unsigned(array: pa.Array) -> pa.Array:
    """Integers beyond 2^63 - 1, such as hashes, as text: `values = "integer"` refuses them."""
    if pa.types.is_uint64(array.type) and (pc.max(array).as_py() or 0) >= 2**63:
        return array.cast(pa.string())
    return array


def _parse_numbers(array: pa.Array) -> pa.Array:
    """Text that is integers or numbers throughout, as these; else the text."""
    for kind in (pa.int64(), pa.float64()):
        try:
            numbers = array.cast(kind)
        except pa.ArrowInvalid:
            continue
        # Integers beyond 64 bits, and numbers with leading zeros, are names rather than amounts.
        too_long = "" if kind == pa.int64() else "|[0-9]{16,}"
        is_name = pc.match_substring_regex(array, f"^-?(0[0-9]+{too_long})$")
        if pc.any(is_name).as_py():
            return array
        return plain(numbers).drop_null()
    return array


def _is_whole_id(name: str, array: pa.Array) -> bool:
    is_id = bool(re.search(r"(^|_|[a-z])(id|Id|ID)$", name))
    return is_id and bool(pc.all(pc.equal(pc.floor(array), array)).as_py())


def _time_format(array: pa.Array, least: float, most: float) -> str | None:
    """The key under which numbers may be times: since 1970 in some unit, or the digits of dates."""
    for form, per_second in (("", 1), ("ms", 10**3), ("us", 10**6), ("ns", 10**9)):
        if FIRST_SECONDS * per_second <= least and most < _LAST_SECONDS * per_second:
            return form
    if pa.types.is_integer(array.type):
        return date_form(array) or None
    return None


def _split_facts(array: pa.Array) -> dict[str, Any]:
    """Whether a character splits the text into parts that repeat, as tags do and sentences do not.

    At least a fifth of the values must contain it. The parts must be far fewer than they would be
    if each were new; and a space must not split text that another character splits. Lists as Python
    or JSON writes them are not split: brackets would be part of values.
    """
    if pc.mean(pc.match_substring_regex(array, _IN_BRACKETS)).as_py() >= 0.9:
        return {}
    num_distinct = len(array.unique())
    for separator in _SEPARATORS:
        has_it = pc.match_substring(array, separator)
        if pc.sum(has_it).as_py() < 0.2 * len(array):
            continue
        parts = plain(pc.split_pattern(array, pattern=separator).flatten()).drop_null()
        num_parts = len(parts.unique())
        if num_parts <= num_distinct and 2 * num_parts < len(parts):
            return {
                "separator": separator,
                "num_parts": len(parts) / len(array),
                "element_kind": _element_kind(parts),
            }
    return {}


def _element_kind(parts: pa.Array) -> str:
    if pa.types.is_string(parts.type):
        parts = _parse_numbers(parts) if len(parts) else parts
        return "integer" if pa.types.is_integer(parts.type) else "text"
    if pa.types.is_integer(parts.type):
        return "integer"
    return "number" if pa.types.is_floating(parts.type) else "other"
