"""Finds integers whose digits are dates, such as 20141021."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["FIRST_SECONDS", "date_form"]

FIRST_SECONDS: Final = 631_152_000  # 1990: earlier dates are hardly the times of clicks

_FORMS = {8: ("%Y%m%d", "%y%m%d%H"), 10: ("%Y%m%d%H",), 14: ("%Y%m%d%H%M%S",)}


def date_form(numbers: pa.Array) -> str:
    """The form under which the digits of all integers are dates from 1990 on; "" if there is none.

    Args:
        numbers: Integers, at least one of them; no nulls.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    least, most = pc.min_max(numbers).as_py().values()
    if least <= 0 or len(str(least)) != len(str(most)):
        return ""
    for form in _FORMS.get(len(str(least)), ()):
        if _are_dates(pa.array([least, most]), form) and _are_dates(numbers.unique(), form):
            return form
    return ""


def _are_dates(numbers: pa.Array, form: str) -> bool:
    import pyarrow as pa
    import pyarrow.compute as pc

    text = numbers.cast(pa.string())
    read = pc.strptime(text, format=form, unit="s", error_is_null=True)
    return bool(read.null_count == 0 and pc.min(read.cast(pa.int64())).as_py() >= FIRST_SECONDS)
