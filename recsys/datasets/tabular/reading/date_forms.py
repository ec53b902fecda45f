"""Finds integers whose digits are dates, such as 20141021, and text that is times.

Also finds texts that Arrow reads as another time than they say.

This module needs pyarrow, so others import it in functions, after `import_pyarrow`.
"""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

__all__ = [
    "FIRST_SECONDS",
    "are_iso_times",
    "date_form",
    "first_misread",
    "look_like_times",
]

FIRST_SECONDS: Final = 631_152_000  # 1990: earlier dates are hardly the times of clicks

_DATE_OR_CLOCK = (
    r"^\s*([0-9]{4}[-/. ]([0-9]{1,2}|[A-Za-z]{3,9})[-/. ][0-9]{1,2}"
    r"|[0-9]{1,2}[-/. ]([0-9]{1,2}|[A-Za-z]{3,9})[-/. ]([0-9]{4}|[0-9]{2})"
    r"|[0-9]{1,2}:[0-9]{2})([^0-9.]|$)"
)
_WRITTEN = set("YymdejDFbBhaAHIMSTRpZ")  # parts of times that Arrow writes as they were read
_TOUCHING = "%[YymdHIMSj]%[YymdHIMSj]"  # two numbers without a character between them
_FORMS = {8: ("%Y%m%d", "%y%m%d%H"), 10: ("%Y%m%d%H",), 14: ("%Y%m%d%H%M%S",)}


def date_form(numbers: pa.Array) -> str:
    """The form under which the digits of all integers are dates from 1990 on; "" if there is none.

    Args:
        numbers: Integers, at least one of them; no nulls.
    """
    least, most = pc.min_max(numbers).as_py().values()
    if least <= 0 or len(str(least)) != len(str(most)):
        return ""
    for form in _FORMS.get(len(str(least)), ()):
        if _are_dates(pa.array([least, most]), form) and _are_dates(numbers.unique(), form):
            return form
    return ""


def are_iso_times(texts: pa.Array) -> bool:
    """Whether all text is ISO text of times."""
    for unit in ("us", "ns"):
        for zone in (None, "UTC"):
            with suppress(pa.ArrowInvalid):
                texts.cast(pa.timestamp(unit, zone))
                return True
    return False


def look_like_times(texts: pa.Array) -> bool:
    """Whether most text begins like a date or a time of day."""
    return bool(pc.mean(pc.match_substring_regex(texts, _DATE_OR_CLOCK)).as_py() >= 0.9)


def first_misread(texts: pa.Array, read: pa.Array, form: str) -> int:
    """The first text that Arrow reads as another time than it says; -1 if there is none.

    Arrow reads "1152025" under %m%d%Y as November 5, 25 under %Y as the year 25, and February 31 as
    March 3. Except for years, this is found in forms whose parts Arrow can write again: texts that
    may be such ones must have the numbers of their times.

    Args:
        texts: They have the form; no nulls.
        read: Their times.
        form: The form.
    """
    parts, written = set(re.findall("%(.)", form)), form.replace("%Z", "")
    row = -1
    if parts & set("YF"):
        has_year = pc.match_substring_regex(texts, "[0-9]{4}")
        row = pc.index(pc.and_not(pc.less(pc.year(read), 1000), has_year), True).as_py()
    if row >= 0 or not parts <= _WRITTEN or not len(texts):
        return int(row)
    is_late = pc.match_substring_regex(texts, "29|30|31")
    are_odd = pc.and_(pc.less_equal(pc.day(read), 3), is_late)
    if re.search(_TOUCHING, form):
        width = len(pc.strftime(read[:1], format=written)[0].as_py())
        are_odd = pc.or_(are_odd, pc.not_equal(pc.utf8_length(texts), width))
    rows = pa.array(np.flatnonzero(are_odd.to_numpy(zero_copy_only=False)))
    again = pc.strftime(read.take(rows), format=written)
    found = pc.index(pc.equal(_digits(texts.take(rows)), _digits(again)), False).as_py()
    return -1 if found < 0 else rows[found].as_py()


def _digits(text: pa.Array) -> pa.Array:
    """The numbers in text, without leading zeros."""
    numbers = pc.replace_substring_regex(text, "[^0-9]+", " ")
    return pc.utf8_trim(pc.replace_substring_regex(numbers, r"\b0+([0-9])", r"\1"), " ")


def _are_dates(numbers: pa.Array, form: str) -> bool:
    """Whether the digits of all integers have a form, as `prepare` reads it, from 1990 on."""
    read = pc.strptime(numbers.cast(pa.string()), format=form, unit="s", error_is_null=True)
    return bool(read.null_count == 0 and pc.min(read.cast(pa.int64())).as_py() >= FIRST_SECONDS)
