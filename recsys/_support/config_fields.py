"""Models of configuration keys: what a key accepts is stated once, in its field.

Checks, errors, `--help`, the page of keys and what may differ on resume come from the fields.
"""

from __future__ import annotations

import difflib
import json
import re
import shutil
import textwrap
from itertools import groupby
from math import inf
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    Self,
    TypeVar,
    cast,
    get_args,
    get_origin,
)

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    model_serializer,
    model_validator,
)

from recsys.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = [
    "Key",
    "Keys",
    "Kinds",
    "Resume",
    "flat",
    "format_keys",
    "key",
    "replace",
    "table_of",
    "walk_keys",
]

_KeysT = TypeVar("_KeysT", bound="Keys")
Resume = Literal["", "free", "fixed", "free without fae"]
_MEANING_COLUMN = 34  # of the help
_WORDS: dict[Any, str] = {
    int: "integer",
    float: "number",
    str: "text",
    bool: "true or false",
}


def key(
    default: Any,
    meaning: str,
    *,
    derived: str = "",
    least: float | None = None,
    above: float | None = None,
    most: float = inf,
    resume: Resume = "",
    common: bool = False,
) -> Any:
    """The field of one key, or of a table of keys.

    Args:
        default: Its default; a class of keys for a table of them; None if it is derived.
        meaning: The line that `recsys train --help` prints.
        derived: The default in words, where it is derived from other keys.
        least: The lowest number it accepts.
        above: A number it must exceed; instead of `least`.
        most: The highest number it accepts.
        resume: Whether a run that continues may have another value: "free", "fixed", or
            "free without fae"; empty: as the table that it is in. The whole is fixed.
        common: Whether most runs set it; help shows it first.
    """
    begin = "at least" if above is None else "above"
    low = least if above is None else above
    words = "" if low is None else f" {begin} {low:g}"
    if low is not None and most < inf:
        words = f" in {'[' if above is None else '('}{low:g}, {most:g}]"
    about: Any = {"derived": derived, "range": words, "resume": resume, "common": common}
    ends: dict[str, Any] = {"ge": least, "gt": above, "le": most if most < inf else None}
    if type(default) is int and most == inf:
        ends["lt"] = 2**63
    limits = {name: end for name, end in ends.items() if end is not None}
    if isinstance(default, type):
        return Field(default_factory=default, description=meaning, json_schema_extra=about)
    return Field(default, description=meaning, json_schema_extra=about, **limits)


class Keys(BaseModel):
    """A table of keys; valid once built, and never changed.

    Raises:
        ConfigError: a key is unknown, or a value is not what the key accepts.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    def __init__(self, /, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(_explain(type(self), error)) from None

    def keys_set(self) -> list[str]:
        """The keys that differ from their defaults."""
        fields = type(self).model_fields.items()
        return [
            name
            for name, field in fields
            if getattr(self, name) != field.get_default(call_default_factory=True)
        ]


class Kinds(Keys):
    """Tables of keys of which one is set at most: its name, the kind, says what is done.

    A kind whose keys have their defaults may be given by its name: "lookahead" is
    `{"lookahead": {}}`.
    """

    default_kind: ClassVar[str] = ""

    @classmethod
    def from_text(cls, value: Any) -> Any:
        """The table of a kind that is given by its name; any other `value` as it is.

        Raises:
            ValueError: there is no such kind.
        """
        if not isinstance(value, str) or not value:
            return value or {}
        if value not in cls.model_fields:
            raise ValueError(f"must be one of {', '.join(map(repr, cls.model_fields))}")
        return {value: {}}

    @model_validator(mode="after")
    def _check_kinds(self) -> Self:
        if len(self._chosen()) > 1:
            raise ConfigError(f"{' and '.join(self._chosen())} are set; drop one of the tables")
        default = table_of(type(self), self.default_kind)
        if not self._chosen() and default is not None:
            object.__setattr__(self, self.default_kind, default())
        return self

    @model_serializer
    def _as_tree(self) -> Any:
        keys = getattr(self, self.kind, None)
        tree = {} if keys is None else keys.model_dump(exclude_none=True)
        return {self.kind: tree} if tree else self.kind

    @property
    def kind(self) -> str:
        """The name of the kind."""
        return next(iter(self._chosen()), self.default_kind)

    def _chosen(self) -> list[str]:
        return [name for name in type(self).model_fields if getattr(self, name) is not None]


def replace(keys: _KeysT, **changes: Any) -> _KeysT:
    """Keys with some of them changed; what is derived from others is derived anew.

    Args:
        keys: The keys.
        changes: The new values, by name.

    Raises:
        ConfigError: a value is not what its key accepts.
    """
    kept = {name: getattr(keys, name) for name in keys.model_fields_set}
    return type(keys)(**kept | changes)


class Key(NamedTuple):
    """One key of a configuration, as help shows it.

    Attributes:
        group: Title of the table that it is in.
        name: Its dotted name.
        default: Its default, or words for one that depends on other keys.
        meaning: What it means.
        accepts: The values it accepts, in words.
        resume: As in `key`, and never empty.
        common: As in `key`.
    """

    group: str
    name: str
    default: Any
    meaning: str
    accepts: str
    resume: Resume
    common: bool


def walk_keys(
    keys: type[Keys], prefix: str = "", group: str = "run", resume: Resume = "fixed"
) -> Iterator[Key]:
    """Every key of a table and of the tables in it.

    Args:
        keys: The table.
        prefix: What stands before each name, with a dot at its end.
        group: The title of the table.
        resume: What holds for keys of it that do not say.
    """
    for name, field in keys.model_fields.items():
        about = cast("dict[str, Any]", field.json_schema_extra)
        meaning, table = field.description or "", table_of(keys, name)
        of_resume = about["resume"] or resume
        if table is not None:
            title = f"{prefix}{name}: {meaning}"
            if issubclass(table, Kinds):
                accepts = f"one of {', '.join(table.model_fields)}"
                default = about["derived"] or table.default_kind
                yield Key(
                    group, prefix + name, default, meaning, accepts, of_resume, about["common"]
                )
            yield from walk_keys(table, f"{prefix}{name}.", title, of_resume)
            continue
        default = about["derived"] or field.get_default(call_default_factory=True)
        is_common = about["common"]
        if prefix == "dense_optimizer.":
            default, is_common = "as in optimizer", False
        accepts = _words(field.annotation) + about["range"]
        yield Key(group, prefix + name, default, meaning, accepts, of_resume, is_common)


def table_of(keys: type[Keys] | None, name: str) -> type[Keys] | None:
    """The class of a key that is a table of keys, optional or not; None for any other key.

    Args:
        keys: The table that it is in; None for none.
        name: The key.
    """
    annotation = (
        None
        if keys is None or name not in keys.model_fields
        else keys.model_fields[name].annotation
    )
    for choice in (annotation, *get_args(annotation)):
        if isinstance(choice, type) and issubclass(choice, Keys):
            return choice
    return None


def _words(kind: Any) -> str:
    """What values of a type are."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Literal:
        return f"one of {', '.join(filter(None, inner))}"
    if origin is Annotated:
        return _words(inner[0])
    if origin is tuple:
        return f"list of {_words(inner[0])}s"
    if origin is dict:
        return f"by name: {_words(inner[1])}"
    return _WORDS[kind]


def _explain(keys: type[Keys], error: ValidationError) -> str:
    """The first fault that pydantic found: key, rule, value and hint."""
    fault = error.errors()[0]
    path, kind, cause = fault["loc"], fault["type"], fault.get("ctx", {}).get("error")
    name, value = ".".join(map(str, path)), repr(fault["input"])[:60]
    if isinstance(cause, ConfigError):  # of keys beside each other, or in a table
        return f"{name}.{cause}" if name else str(cause)
    if kind == "missing":
        return f"{name} is required; set it"
    if kind == "extra_forbidden":
        return f"{name} is not a key; {_nearest(keys, str(path[-1]))}"
    if kind == "model_type":
        table = table_of(keys, str(path[0]))
        has_name = isinstance(fault["input"], str) and table and "name" in table.model_fields
        hint = f"; did you mean {name}.name={fault['input']}?" if has_name else ""
        return f"{name} must be a table of keys, got {value}{hint}"
    rule = re.sub(r"^(Value error,|\w+) (should|must)", "must", fault["msg"])
    rule = rule.replace("tuple", "list").replace("dictionary", "table")
    return f"{name} {rule}, got {value}"


def _nearest(keys: type[Keys], name: str) -> str:
    """The keys of a table, or of the tables in it, whose own name is most like a mistyped one."""
    places = {own: [own] for own in keys.model_fields}
    for found in walk_keys(keys):
        if "." in found.name:
            places.setdefault(found.name.rpartition(".")[2], []).append(found.name)
    close = difflib.get_close_matches(name, places, n=1)
    if not close:
        return f"keys are {', '.join(keys.model_fields)}"
    return f"did you mean {' or '.join(places[close[0]][:3])}?"


def format_keys(keys: type[Keys], *, common: bool = False) -> str:
    """Every key with its meaning, type, range and default, in groups, as `--help` prints them.

    Args:
        keys: The keys.
        common: Show those alone that most runs set.
    """
    width = max(80, shutil.get_terminal_size().columns)
    lines: list[str] = []
    shown = [found for found in walk_keys(keys) if found.common or not common]
    for group, members in groupby(shown, lambda found: "" if common else found.group):
        lines += ["", group] if group else []
        for found in members:
            is_bare = isinstance(found.default, str) and found.default
            default = found.default if is_bare else json.dumps(found.default)
            meaning = textwrap.wrap(
                f"{found.meaning} ({found.accepts}; default {default})",
                width - _MEANING_COLUMN,
                break_long_words=False,
                break_on_hyphens=False,
            )
            name = f"  {found.name}"
            if len(name) > _MEANING_COLUMN - 2:  # the meaning begins on the next line
                lines.append(name)
                name = ""
            lines.append(f"{name:<{_MEANING_COLUMN}}{meaning[0]}")
            lines += [" " * _MEANING_COLUMN + line for line in meaning[1:]]
    return "\n".join(lines)


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of nested keys, by dotted key: `{"eval": {"split": x}}` has `eval.split`."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found
