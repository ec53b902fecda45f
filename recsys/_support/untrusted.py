"""Reads text from files that may be damaged, or come from a stranger; checks values and states.

`AbstractSettings` is the base of dataclasses whose fields check themselves, such as policies.

Every fault of the text is a `ValueError`, so callers have one class to catch. They add the file,
the rule and the way out. Parsed values and saved states have Python's own numbers. Arguments may
have those of numpy, too. True and false are no numbers.
"""

from __future__ import annotations

import json
import operator
import reprlib
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import field, fields
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, ClassVar, TypeGuard

from recsys.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

__all__ = [
    "LIMITS",
    "AbstractSettings",
    "is_int",
    "is_number",
    "is_text",
    "is_whole",
    "parse_json",
    "parse_toml",
    "require_same",
    "require_state",
    "setting",
]

_INT_END = 2**63
# Far more than any file of recsys has, and few enough for functions that call themselves.
_MOST_LEVELS = 64
# The limits of a number, as pydantic names them, and in words.
LIMITS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}


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
    # 0 * inf and 0 * nan are nan. `isfinite` fails for integers above all floats.
    return type(value) is not bool and isinstance(value, Real) and 0 * value == 0


def is_text(value: Any) -> TypeGuard[str]:
    """Whether a parsed value is text that can be printed and written as UTF-8.

    JSON may hold half of a surrogate pair, which no file name and no page can hold.
    """
    return isinstance(value, str) and value.isprintable()


def require_state(location: str, state: Any, keys: Collection[str]) -> Mapping[str, Any]:
    """A state, which must have these keys and no others.

    Args:
        location: The owner of the state, for errors, such as "loader state".
        state: What the owner's `state_dict` returned once.
        keys: The keys.

    Raises:
        ConfigError: it is no mapping with these keys.
    """
    if not isinstance(state, Mapping) or set(state) != set(keys):
        raise ConfigError(
            f"{location} must be a mapping with the keys {sorted(keys)}, got "
            f"{reprlib.repr(state)}; pass the result of state_dict()"
        )
    return state


def require_same(owner: str, state: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Check entries of a state that must be as the `values` of its owner.

    Raises:
        ConfigError: one differs.
    """
    for key, own in values.items():
        # Not only `!=`: True equals 1.
        if type(state[key]) is not type(own) or state[key] != own:
            raise ConfigError(
                f"{owner} state: {key} is {state[key]!r}, but this {owner} has {own!r}; use the "
                f"arguments of the {owner} that was saved"
            )


def _parse(parse: Callable[[Any], Any], text: str | bytes) -> Any:
    with suppress(RecursionError):
        value = parse(text)
        level = [value]
        for _ in range(_MOST_LEVELS):
            level = [
                inner
                for item in level
                if isinstance(item, dict | list)
                for inner in (item.values() if isinstance(item, dict) else item)
            ]
            if not level:
                return value
    raise ValueError(f"it is nested more than {_MOST_LEVELS} levels deep")


def setting(default: Any, meaning: str, **limits: float) -> Any:
    """The field of a dataclass of settings, which a configuration may have as a table of keys.

    Args:
        default: Its default; a class for a table of settings in it.
        meaning: A line for help.
        limits: The numbers that it accepts, by the names of `LIMITS`.
    """
    metadata = {"description": meaning, **limits}
    if isinstance(default, type):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata={**metadata, "strict": True})


_ANY: tuple[Callable[[Any], bool], str] = (lambda _: True, "")
_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "int": (is_int, "a whole number"),
    "float": (is_number, "a number"),
    "bool": (lambda value: type(value) is bool, "True or False"),
}


class AbstractSettings:
    """Settings whose numbers are checked when they are made; the base of dataclasses.

    Raises:
        ConfigError: a number is out of range.
    """

    # For pydantic, which makes them from tables of keys.
    __pydantic_config__: ClassVar[dict[str, Any]] = {
        "extra": "forbid",
        "strict": False,
        "allow_inf_nan": False,
        "revalidate_instances": "always",
    }

    def __post_init__(self) -> None:
        for one in fields(self):  # type: ignore[arg-type]  # a dataclass derives from it
            value, (is_right, kind) = getattr(self, one.name), _KINDS.get(str(one.type), _ANY)
            limits = {name: one.metadata[name] for name in LIMITS if name in one.metadata}
            if not (
                is_right(value)
                and all(getattr(operator, name)(value, limit) for name, limit in limits.items())
            ):
                rules = " and".join(f" {LIMITS[name]} {limit}" for name, limit in limits.items())
                raise ConfigError(
                    f"{type(self).__name__}: {one.name} must be {kind}{rules}, got {value!r}"
                )
