"""Reads text from files that may be damaged, or come from a stranger; checks of values.

Every fault of the text is a `ValueError`, so callers have one class to catch. They add the file,
the rule and the way out. Parsed values and saved states have Python's own numbers. Arguments may
have those of numpy, too. True and false are no numbers.
"""

from __future__ import annotations

import json
import tomllib
from contextlib import suppress
from math import isfinite
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, TypeGuard

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "is_finite_number",
    "is_int",
    "is_number",
    "is_text",
    "is_whole",
    "parse_json",
    "parse_toml",
]

_INT_END = 2**63
# Far more than any file of recsys has, and few enough for functions that call themselves.
_MOST_LEVELS = 64


def parse_json(text: str | bytes) -> Any:
    """Parse JSON.

    Raises:
        ValueError: the text is not JSON, or has more than 64 levels.
    """
    return _parse(json.loads, text)


def parse_toml(text: str) -> dict[str, Any]:
    """Parse TOML.

    Raises:
        ValueError: the text is not TOML, has more than 64 levels, or a number of too many digits.
    """
    tree: dict[str, Any] = _parse(tomllib.loads, text)
    return tree


def is_int(value: Any, least: int = -_INT_END, most: int = _INT_END - 1) -> bool:
    """Whether a parsed value is an integer in [least, most]."""
    return type(value) is int and least <= value <= most


def is_whole(value: Any, least: int) -> bool:
    """Whether an argument is an integer of 64 bits and at least `least`."""
    return (
        not isinstance(value, bool) and isinstance(value, Integral) and least <= int(value) < 2**63
    )


def is_number(value: Any) -> bool:
    """Whether an argument is a finite number."""
    return not isinstance(value, bool) and isinstance(value, Real) and isfinite(value)


def is_finite_number(value: Any) -> bool:
    """Whether a parsed value is an integer of 64 bits, or a finite float."""
    return is_int(value) or (type(value) is float and abs(value) < float("inf"))


def is_text(value: Any) -> TypeGuard[str]:
    """Whether a parsed value is text that can be printed and written as UTF-8.

    JSON may hold half of a surrogate pair, which no file name and no page can hold.
    """
    return isinstance(value, str) and value.isprintable()


def _parse(parse: Callable[[Any], Any], text: str | bytes) -> Any:
    with suppress(RecursionError):
        value = parse(text)
        level = [value]
        for _ in range(_MOST_LEVELS):
            level = [
                inner
                for each in level
                if isinstance(each, dict | list)
                for inner in (each.values() if isinstance(each, dict) else each)
            ]
            if not level:
                return value
    raise ValueError(f"it is nested more than {_MOST_LEVELS} levels deep")
