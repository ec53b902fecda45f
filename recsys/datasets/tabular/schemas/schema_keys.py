"""Classes of a schema from the keys of a table, and back, with every type checked."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from datetime import date
from typing import Any, TypeVar, get_type_hints

from recsys._support.untrusted import is_int
from recsys.errors import ConfigError

__all__ = ["build_from_keys", "keys_of", "require_table"]

_T = TypeVar("_T")


def require_table(place: str, value: Any) -> Mapping[str, Any]:
    """The value, which must be a table of keys; `place` names it in messages."""
    if not isinstance(value, Mapping):
        raise ConfigError(f"{place} must be a table of keys, got {str(value)[:40]!r}")
    return value


def build_from_keys(kind: type[_T], value: Any, place: str) -> _T:
    """Build one of the classes from its keys; `place` names it in messages, "" for the schema."""
    keys, types = require_table(place, value), get_type_hints(kind)
    prefix = f"{place}." if place else ""
    built: dict[str, Any] = {}
    for name, given in keys.items():
        if name not in types:
            close = difflib.get_close_matches(name, types, n=1)
            hint = f"did you mean {prefix}{close[0]}?" if close else f"keys are {list(types)}"
            raise ConfigError(f"unknown key {prefix}{name}; {hint}")
        built[name] = _checked(prefix + name, given, types[name])
    try:
        return kind(**built)
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}" if place else str(error)) from None


def _checked(place: str, value: Any, kind: Any) -> Any:
    """Check the type of one value; a list becomes a tuple of text."""
    for text in value if isinstance(value, list | tuple) else [value]:
        if isinstance(text, str) and not _is_unicode(text):
            raise ConfigError(f"{place} must be text that UTF-8 can hold, got {text[:40]!r}")
    if kind is str and not isinstance(value, str):
        raise ConfigError(f"{place} must be text, got {str(value)[:40]!r}")
    if kind is int and not is_int(value):
        raise ConfigError(f"{place} must be an integer of 64 bits, got {str(value)[:40]!r}")
    if kind == tuple[str, ...]:
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{place} must be a list, got {str(value)[:40]!r}")
        for each in value:
            if not (isinstance(each, str | bool | date) or is_int(each)):
                raise ConfigError(f"{place} must list text or integers, got {str(each)[:40]!r}")
        return tuple(str(each).lower() if isinstance(each, bool) else str(each) for each in value)
    if kind == float | str and type(value) not in (str, int, float):
        raise ConfigError(f"{place} must be a number or text, got {str(value)[:40]!r}")
    return value


def _is_unicode(text: str) -> bool:
    """Whether text has no surrogates, which JSON allows and UTF-8 does not."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def keys_of(part: Any) -> dict[str, Any]:
    """Keys of one class that do not have their default, in JSON types."""
    keys = {}
    for entry in dataclasses.fields(part):
        value = getattr(part, entry.name)
        if value != entry.default:
            keys[entry.name] = list(value) if isinstance(value, tuple) else value
    return keys
