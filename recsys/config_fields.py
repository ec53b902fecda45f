"""What a configuration's dataclasses are written with: fields, and checks of their values."""

from __future__ import annotations

from dataclasses import field
from typing import Any

from recsys.errors import ConfigError

__all__ = ["at_least", "key", "one_of"]


def one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Check that a key has one of its values.

    Raises:
        ConfigError: it has none of them.
    """
    if value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(map(repr, choices))}; got {value!r}")


def at_least(name: str, value: int, least: int) -> None:
    """Check that a key has no lower value.

    Raises:
        ConfigError: it has.
    """
    if value < least:
        raise ConfigError(f"{name} must be at least {least}, got {value}")


def key(default: Any, meaning: str) -> Any:
    """A field with its default and the line that help shows for it."""
    if isinstance(default, type):
        return field(default_factory=default, metadata={"meaning": meaning})
    return field(default=default, metadata={"meaning": meaning})
