"""Configuration dataclasses in general: their fields, checks, construction and help.

A field states once what its key accepts. `check_fields` enforces it; `format_keys` prints it.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import shutil
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from itertools import groupby
from math import inf, isfinite
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_type_hints

from recsys.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from dataclasses import Field
    from pathlib import Path

__all__ = [
    "build",
    "build_with_file",
    "check_fields",
    "flat",
    "format_keys",
    "key",
    "keys_set",
    "walk_keys",
]

_T = TypeVar("_T")
_MOST_MEANT = 3  # keys that the error for an unknown one names
_MEANING_COLUMN = 34  # of the help
_WORDS = {int: "an integer", float: "a number", bool: "true or false", str: "a text"}
_TYPE_NAMES: dict[Any, str] = {
    int: "integer",
    float: "number",
    str: "text",
    bool: "true or false",
    tuple[int, ...]: "list of integers",
    tuple[float, ...]: "list of numbers",
    tuple[str, ...]: "list of texts",
    dict[str, int]: "integers by name",
    dict[str, str]: "texts by name",
}
# The types that items of a list may have; they become the first one.
_ITEM_TYPES: dict[Any, tuple[type, ...]] = {
    tuple[int, ...]: (int,),
    tuple[float, ...]: (float, int),
    tuple[str, ...]: (str,),
}


@dataclass(frozen=True, kw_only=True)
class Range:
    """An interval of finite numbers.

    Attributes:
        least: The lower end.
        most: The upper end, included; infinite for none.
        excludes_least: Whether the lower end itself is outside.
    """

    least: float
    most: float = inf
    excludes_least: bool = False

    def __contains__(self, value: float) -> bool:
        is_above = value > self.least if self.excludes_least else value >= self.least
        return is_above and value <= self.most and abs(value) < inf  # isfinite fails for huge ints

    def __str__(self) -> str:
        if isfinite(self.most):
            return f"in {'(' if self.excludes_least else '['}{self.least:g}, {self.most:g}]"
        return f"{'above' if self.excludes_least else 'at least'} {self.least:g}"


def key(
    default: Any,
    meaning: str,
    *,
    derived: str = "",
    choices: tuple[str, ...] = (),
    least: float | None = None,
    above: float | None = None,
    most: float = inf,
) -> Any:
    """A dataclass field for one key.

    Args:
        default: Its default; a class for a table of keys of its own; None if it is derived.
        meaning: The line that `recsys train --help` prints.
        derived: The default in words, where the dataclass derives it from other keys.
        choices: The values it accepts; empty for any.
        least: The lowest number it accepts.
        above: A number it must exceed; instead of `least`.
        most: The highest number it accepts.
    """
    least, excludes_least = (least, False) if above is None else (above, True)
    interval = (
        None if least is None else Range(least=least, most=most, excludes_least=excludes_least)
    )
    metadata = {"meaning": meaning, "derived": derived, "choices": choices, "range": interval}
    if isinstance(default, type):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def check_fields(config: Any) -> None:
    """Check every key of a configuration dataclass against its choices and its range.

    Raises:
        ConfigError: a value is not one of the choices, or is out of range.
    """
    for entry in fields(config):
        value = getattr(config, entry.name)
        choices, interval = entry.metadata["choices"], entry.metadata["range"]
        if choices and value not in choices:
            shown = ", ".join(repr(choice) for choice in choices if choice)
            raise ConfigError(f"{entry.name} must be one of {shown}; got {value!r}")
        if interval is not None and value not in interval:
            finite = "finite and " if isinstance(value, float) and interval.most == inf else ""
            raise ConfigError(f"{entry.name} must be {finite}{interval}, got {value}")


def keys_set(config: Any) -> list[str]:
    """The keys of a configuration dataclass that differ from their defaults."""
    return [each.name for each in fields(config) if getattr(config, each.name) != _default(each)]


def _default(entry: Field[Any]) -> Any:
    made = entry.default_factory
    return entry.default if made is dataclasses.MISSING else made()


def build(kind: type[_T], tree: Any, prefix: str) -> _T:
    """Build a configuration dataclass from nested mappings.

    Args:
        kind: The class.
        tree: Its keys; those of its tables are mappings.
        prefix: Dotted name of `tree` with a dot at its end, for messages; empty for the whole.

    Raises:
        ConfigError: a key is unknown, or a value is not what the key accepts.
    """
    if not isinstance(tree, Mapping):
        raise _not_a_table(kind, tree, prefix)
    types = get_type_hints(kind)
    names = [entry.name for entry in fields(kind)]  # type: ignore[arg-type]  # always a dataclass
    built: dict[str, Any] = {}
    for name, value in tree.items():
        if name not in names:
            raise ConfigError(f"unknown key {prefix}{name}; {_hint(kind, name, names, prefix)}")
        table = _table_of(types[name])
        if table is not None:
            built[name] = build(table, value, f"{prefix}{name}.")
        else:
            built[name] = _checked(prefix + name, value, types[name])
    try:
        return kind(**built)
    except ConfigError as error:
        raise ConfigError(f"{prefix}{error}") from None


def build_with_file(
    make: Callable[[Mapping[str, Any]], _T],
    tree: Mapping[str, Any],
    others: Mapping[str, Any],
    file: Path | None,
) -> _T:
    """Build a configuration of which some keys are from a file, which errors name.

    Args:
        make: Builds a configuration from nested keys.
        tree: All keys.
        others: The keys without those of the file. If they have the same fault, it is not the
            file's.
        file: The file; None for none.

    Raises:
        ConfigError: as `make` raises it.
    """
    try:
        return make(tree)
    except ConfigError as error:
        fault = str(error)
    try:
        make(others)
    except ConfigError as error:
        if str(error) == fault:
            raise
    raise ConfigError(f"{file}: {fault}")


def _hint(kind: type, name: str, names: list[str], prefix: str) -> str:
    """Keys that an unknown one may mean: of the same name in a table, or of a similar name."""
    meant = [each for each in _names_in_tables(kind, prefix) if each.endswith(f".{name}")]
    meant = meant or [f"{prefix}{each}" for each in difflib.get_close_matches(name, names, n=1)]
    if not meant:
        return f"keys are {names}"
    *others, last = meant[:_MOST_MEANT]
    return f"did you mean {', '.join(others)}{' or ' if others else ''}{last}?"


def _names_in_tables(kind: type, prefix: str) -> Iterator[str]:
    """Dotted names of the keys in the tables of a configuration class, at any depth."""
    types = get_type_hints(kind)
    for entry in fields(kind):
        table = _table_of(types[entry.name])
        if table is not None:
            inner = f"{prefix}{entry.name}."
            yield from (f"{inner}{each.name}" for each in fields(table))
            yield from _names_in_tables(table, inner)


def _not_a_table(kind: type, value: Any, prefix: str) -> ConfigError:
    """The error for a value in place of a table of keys; it names the key that takes the value."""
    meant = [each.name for each in fields(kind) if value in each.metadata.get("choices", ())]
    if isinstance(value, str):  # names of models are not limited to a list
        meant += [each.name for each in fields(kind) if each.name == "name"]
    hint = f"; did you mean {prefix}{meant[0]}={value}?" if meant else ""
    return ConfigError(f"{prefix.rstrip('.')} must be a table of keys, got {value!r}{hint}")


def _table_of(kind: Any) -> type | None:
    """The configuration class of a key that is a table, optional or not; None for a plain key."""
    for choice in (kind, *get_args(kind)):
        if dataclasses.is_dataclass(choice) and isinstance(choice, type):
            return choice
    return None


def _checked(name: str, value: Any, kind: Any) -> Any:
    """Check the type of a value; numbers become floats or text, and lists tuples, if needed."""
    for number in value if isinstance(value, list | tuple) else (value,):
        if isinstance(number, int) and not -(2**63) <= number < 2**63:
            raise ConfigError(
                f"{name} must be less than 2**63, and not below -2**63, got {str(number)[:40]}"
            )
    if kind in (float, str) and type(value) in (int, float):  # text: `budget=135050380`, in bytes
        return kind(value)
    if kind in _ITEM_TYPES:
        allowed = _ITEM_TYPES[kind]
        if not isinstance(value, list | tuple) or any(type(each) not in allowed for each in value):
            raise ConfigError(f"{name} must be a {_TYPE_NAMES[kind]}, got {value!r}")
        return tuple(map(allowed[0], value))
    if kind in (dict[str, int], dict[str, str]):
        if not isinstance(value, Mapping):
            raise ConfigError(f"{name} must be a table of {_TYPE_NAMES[kind]}, got {value!r}")
        of_value = get_args(kind)[1]
        return {each: _checked(f"{name}.{each}", found, of_value) for each, found in value.items()}
    if type(value) is not kind:
        raise ConfigError(f"{name} must be {_WORDS.get(kind, kind.__name__)}, got {value!r}")
    return value


@dataclass(frozen=True, kw_only=True)
class Key:
    """One key of a configuration, as help shows it.

    Attributes:
        group: Title of the table that it is in.
        name: Its dotted name.
        default: Its default, or words for one that depends on other keys.
        meaning: What it means.
        accepts: The values it accepts, in words.
    """

    group: str
    name: str
    default: Any
    meaning: str
    accepts: str


def walk_keys(kind: type, prefix: str = "", group: str = "run") -> Iterator[Key]:
    """Every key of a configuration dataclass and of the tables in it."""
    types = get_type_hints(kind)
    for entry in fields(kind):
        meaning, table = entry.metadata["meaning"], _table_of(types[entry.name])
        if table is not None:
            yield from walk_keys(table, f"{prefix}{entry.name}.", f"{entry.name}: {meaning}")
            continue
        choices, interval = entry.metadata["choices"], entry.metadata["range"]
        accepts = _TYPE_NAMES[types[entry.name]] + (f" {interval}" if interval else "")
        if choices:
            accepts = f"one of {', '.join(filter(None, choices))}"
        default = entry.metadata["derived"] or _default(entry)
        if prefix == "dense_optimizer.":
            default = "as in optimizer"
        yield Key(
            group=group,
            name=prefix + entry.name,
            default=default,
            meaning=meaning,
            accepts=accepts,
        )


def format_keys(kind: type) -> str:
    """Every key with its meaning, type, range and default, in groups, as `--help` prints them.

    Args:
        kind: The configuration dataclass.
    """
    width = max(80, shutil.get_terminal_size().columns)
    lines = ["configuration keys, for --set and for the TOML file"]
    for group, keys in groupby(walk_keys(kind), lambda each: each.group):
        lines += ["", group]
        for each in keys:
            is_bare = isinstance(each.default, str) and each.default
            default = each.default if is_bare else json.dumps(each.default)
            meaning = textwrap.wrap(
                f"{each.meaning} ({each.accepts}; default {default})",
                width - _MEANING_COLUMN,
                break_long_words=False,
                break_on_hyphens=False,
            )
            name = f"  {each.name}"
            if len(name) > _MEANING_COLUMN - 2:  # the meaning begins on the next line
                lines.append(name)
                name = ""
            lines.append(f"{name:<{_MEANING_COLUMN}}{meaning[0]}")
            lines += [" " * _MEANING_COLUMN + line for line in meaning[1:]]
    return "\n".join(lines)


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of nested keys, by dotted key: `{"eval": {"split": x}}` has `eval.split`."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found
