"""Forms of times: of integers whose digits are dates, such as 20141021, and of text.

Finds them, and finds texts that Arrow reads as another time than they say.

This module needs pyarrow, so others import it in functions, after `import_pyarrow`.
"""

from __future__ import annotations

import re
import warnings
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

__all__ = ["FIRST_SECONDS", "Misread", "TextForm", "date_form", "first_misread", "text_form"]

FIRST_SECONDS: Final = 631_152_000  # 1990: earlier dates are hardly the times of clicks

_LOG_FORM = "%d/%b/%Y:%H:%M:%S %z"  # of Apache and nginx
_NUM_GUESSED = 20  # texts
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


class TextForm(NamedTuple):
    """How text writes times.

    Attributes:
        form: The key `timestamp_format`: "" for ISO text; None if the text is no times, or if there
            is a doubt.
        doubt: Why text that looks like times has no form; else "".
    """

    form: str | None
    doubt: str = ""


def text_form(texts: pa.Array) -> TextForm:
    """The form that all text has, if it is times from 1990 on.

    Args:
        texts: At least one text; no nulls.
    """
    if _are_iso(texts):
        return TextForm("")
    texts = texts.unique()
    forms = [form for form in _guessed(texts) if _are_times(texts, form)]
    if len(forms) == 1:
        return TextForm(forms[0])
    if forms:
        return TextForm(
            None, f"holds times, but the day or the month may be first: {' or '.join(forms)}"
        )
    share = pc.mean(pc.match_substring_regex(texts, _DATE_OR_CLOCK)).as_py()
    return TextForm(None, "looks like times, but not all of one known form" if share >= 0.9 else "")


class Misread(NamedTuple):
    """A text that Arrow reads as another time than it says.

    Attributes:
        row: Its place among the texts.
        rule: What a text of the form must have.
        way_out: What to do.
    """

    row: int
    rule: str
    way_out: str


def first_misread(texts: pa.Array, read: pa.Array, form: str) -> Misread | None:
    """The first text that Arrow reads as another time than it says; None if there is none.

    Arrow reads "1152025" under %m%d%Y as November 5, 25 under %Y as the year 25, and February 31 as
    March 3. The day is checked in forms whose parts Arrow can write again.

    Args:
        texts: They have the form; no nulls.
        read: Their times.
        form: The form.
    """
    parts, written = set(re.findall("%(.)", form)), form.replace("%Z", "")
    if re.search(_TOUCHING, form) and parts <= _WRITTEN and len(texts):
        width = len(pc.strftime(read[:1], format=written)[0].as_py())
        are_odd = pc.not_equal(pc.utf8_length(texts), width)
        if (row := _first_differing(texts, read, written, are_odd)) >= 0:
            way_out = "write times as text, as integers lose leading zeros"
            return Misread(row, "with all of its digits", way_out)
    if parts & set("YF"):
        has_year = pc.match_substring_regex(texts, "[0-9]{4}")
        are_early = pc.and_not(pc.less(pc.year(read), 1000), has_year)
        if (row := pc.index(are_early, True).as_py()) >= 0:
            return Misread(row, "with a year of four digits", "correct it, or write %y in the form")
    if parts & set("deDF") and parts <= _WRITTEN:
        are_first = pc.less_equal(pc.day(read), 3)
        if (row := _first_differing(texts, read, written, are_first, "29|30|31")) >= 0:
            return Misread(row, "with a day that its month has", "correct it")
    return None


def _first_differing(
    texts: pa.Array, read: pa.Array, form: str, are_wanted: pa.Array, pattern: str = ""
) -> int:
    """The first wanted text that has other numbers than its time has in this form; else -1.

    Args:
        texts: All texts.
        read: Their times.
        form: The form.
        are_wanted: Which texts are compared.
        pattern: Only texts that have it are compared.
    """
    rows = np.flatnonzero(are_wanted.to_numpy(zero_copy_only=False))
    if pattern:
        has_it = pc.match_substring_regex(texts.take(pa.array(rows)), pattern)
        rows = rows[has_it.to_numpy(zero_copy_only=False)]
    taken = pa.array(rows)
    again = pc.strftime(read.take(taken), format=form)
    row = pc.index(pc.equal(_digits(texts.take(taken)), _digits(again)), False).as_py()
    return -1 if row < 0 else int(rows[row])


def _digits(text: pa.Array) -> pa.Array:
    """The numbers in text, without leading zeros."""
    numbers = pc.replace_substring_regex(text, "[^0-9]+", " ")
    return pc.utf8_trim(pc.replace_substring_regex(numbers, r"\b0+([0-9])", r"\1"), " ")


def _guessed(texts: pa.Array) -> list[str]:
    """Forms of dates that the first texts may have, with the month first and with the day first."""
    from pandas.tseries.api import guess_datetime_format

    forms = [_LOG_FORM]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about texts in which only one order is possible
        for text in texts.slice(0, _NUM_GUESSED).to_pylist():
            for is_day_first in (False, True):
                form = guess_datetime_format(text, dayfirst=is_day_first)
                if form and _is_of_days(form) and form not in forms:
                    forms.append(form)
    return forms


def _is_of_days(form: str) -> bool:
    """Whether a form has a year and a day, and the month before the day if the year is first."""
    year, month, day = map(form.find, ("%Y", "%m", "%d"))
    return min(year, day) >= 0 and not year < day < month


def _are_iso(texts: pa.Array) -> bool:
    for unit in ("us", "ns"):
        for zone in (None, "UTC"):
            try:
                texts.cast(pa.timestamp(unit, zone))
            except pa.ArrowInvalid:
                continue
            return True
    return False


def _are_dates(numbers: pa.Array, form: str) -> bool:
    return _are_times(numbers.cast(pa.string()), form)


def _are_times(text: pa.Array, form: str) -> bool:
    """Whether all text has a form, as `prepare` reads it, with times from 1990 on."""
    read = pc.strptime(text, format=form, unit="s", error_is_null=True)
    return bool(read.null_count == 0 and pc.min(read.cast(pa.int64())).as_py() >= FIRST_SECONDS)
