"""Reads text from files that may be damaged, or come from a stranger.

Every fault of the text is a `ValueError`, so callers have one class to catch. They add the file,
the rule and the way out.
"""

from __future__ import annotations

import json
import tomllib
from typing import Any, TypeGuard

__all__ = ["is_count", "is_finite_number", "is_int", "is_text", "parse_json", "parse_toml"]

_INT_END = 2**63
# Far more than any file of recsys has, and few enough for functions that call themselves.
_MOST_LEVELS = 64
_TOO_DEEP = f"it is nested more than {_MOST_LEVELS} levels deep"


def parse_json(text: str | bytes) -> Any:
    """Parse JSON.

    Raises:
        ValueError: the text is not JSON, or has more than 64 levels.
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    _require_few_levels(value)
    return value


def parse_toml(text: str) -> dict[str, Any]:
    """Parse TOML.

    Raises:
        ValueError: the text is not TOML, has more than 64 levels, or a number of too many digits.
    """
    try:
        tree = tomllib.loads(text)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    _require_few_levels(tree)
    return tree


def is_int(value: Any, least: int = -_INT_END, most: int = _INT_END - 1) -> bool:
    """Whether a parsed value is an integer in [least, most]; true and false are not integers."""
    return type(value) is int and least <= value <= most


def is_count(value: Any, least: int = 0) -> bool:
    """Whether a parsed value is an integer from `least` to the largest of 64 bits."""
    return is_int(value, least)


def is_finite_number(value: Any) -> bool:
    """Whether a parsed value is an integer of 64 bits, or a finite float."""
    return is_int(value) or (type(value) is float and abs(value) < float("inf"))


def is_text(value: Any) -> TypeGuard[str]:
    """Whether a parsed value is text that can be printed and written as UTF-8.

    JSON may hold half of a surrogate pair, which no file name and no page can hold.
    """
    return isinstance(value, str) and value.isprintable()


def _require_few_levels(value: Any) -> None:
    level = [value]
    for _ in range(_MOST_LEVELS):
        level = [
            inner
            for each in level
            if isinstance(each, dict | list)
            for inner in (each.values() if isinstance(each, dict) else each)
        ]
        if not level:
            return
    raise ValueError(_TOO_DEEP)
