"""The schema of a table: what each column means, how rows are split, where negatives come from.

A schema is read from TOML (`Schema.from_toml`), from a dictionary of JSON types
(`Schema.from_dict`, the form in a store's meta.json), or built from the classes of
`recsys.datasets.tabular.schemas.schema_parts`. Each way checks it whole.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from datetime import date
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import tomli_w

from recsys._support.untrusted import is_int, is_text, parse_toml
from recsys.datasets.store_writer import Feature
from recsys.datasets.tabular.schemas.schema_parts import (
    TIME_UNITS,
    CategoricalColumn,
    ColumnSplit,
    DenseColumn,
    FractionSplit,
    HistoryColumn,
    LastOneOutSplit,
    MultiColumn,
    Negatives,
    PositiveRule,
    RandomSplit,
    SequenceColumn,
    Split,
    TimestampSplit,
    ValueColumn,
    parse_seconds,
)
from recsys.errors import ConfigError

__all__ = ["Schema", "Table", "check_delimiter"]

_SPLITS: dict[str, type[Split]] = {
    "fraction": FractionSplit,
    "timestamp": TimestampSplit,
    "column": ColumnSplit,
    "random": RandomSplit,
    "last_one_out": LastOneOutSplit,
}
_COLUMN_KINDS: dict[str, type] = {
    "dense": DenseColumn,
    "categorical": CategoricalColumn,
    "multi": MultiColumn,
    "sequence": SequenceColumn,
    "history": HistoryColumn,
}
_T = TypeVar("_T")
# What all columns of one table must say alike.
_TABLE_KEYS = ("values", "numbering", "num_rows", "min_count", "max_rows")


@dataclass(frozen=True, kw_only=True)
class Table:
    """One vocabulary and embedding table.

    Attributes:
        name: Its name.
        values: "string" or "integer".
        numbering: "first" or "hash".
        num_rows: Rows, with "hash".
        min_count: As for a column.
        max_rows: As for a column.
        has_missing_row: Whether row 1 is for missing values.
        columns: The columns that share it, in order of the features; histories are not among them.
    """

    name: str
    values: str
    numbering: str
    num_rows: int
    min_count: int
    max_rows: int
    has_missing_row: bool
    columns: tuple[str, ...]

    @property
    def first_row(self) -> int:
        """The first row that belongs to a value, with numbering "first"."""
        return 2 if self.has_missing_row else 1


@dataclass(frozen=True, kw_only=True)
class Schema:
    """What each column of a table means. A column that it does not name is ignored.

    Attributes:
        label: Column of labels; empty: every row is a positive, and `negatives` is required.
        positive: Rule that makes 0/1 of a number, such as ">= 4", or of text, such as "== yes";
            empty: values are 0/1 or true/false.
        group: Column of groups, such as users; may also be a categorical column. Empty for none.
        timestamp: Column of times; empty for none. They become int64 seconds since 1970.
        timestamp_format: "ms", "us" or "ns" for numbers that are not seconds; or the form of text
            or digits, such as "%y%m%d%H" (UTC). Empty: seconds, ISO text or Arrow timestamps.
        weight: Column of factors of each sample's loss; empty for none.
        delimiter: Character between the fields of text files; empty: tab for .tsv, else a comma.
        quote: Character around fields of text files that hold delimiters or line breaks; empty: no
            field is quoted.
        names: Names of the columns of text files whose first line is data; empty: it names them.
        missing_values: What stands for a missing value in text files, beside an empty field.
        dense: Dense columns by name, in the order of the store.
        categorical: Columns with one value a row, by name.
        multi: Columns with a bag of values a row, by name.
        sequence: Columns with an ordered list of values a row, by name.
        history: Sequences made from earlier rows, by the feature's name.
        split: How rows become train, test and validation.
        negatives: For data without labels.
    """

    label: str = ""
    positive: str = ""
    group: str = ""
    timestamp: str = ""
    timestamp_format: str = ""
    weight: str = ""
    delimiter: str = ""
    quote: str = '"'
    names: tuple[str, ...] = ()
    missing_values: tuple[str, ...] = ()
    dense: Mapping[str, DenseColumn] = field(default_factory=dict)
    categorical: Mapping[str, CategoricalColumn] = field(default_factory=dict)
    multi: Mapping[str, MultiColumn] = field(default_factory=dict)
    sequence: Mapping[str, SequenceColumn] = field(default_factory=dict)
    history: Mapping[str, HistoryColumn] = field(default_factory=dict)
    split: Split = field(default_factory=FractionSplit)
    negatives: Negatives | None = None

    def __post_init__(self) -> None:
        _check_columns(self)
        _check_tables(self)
        _check_history(self)
        _check_label(self)
        if isinstance(self.split, TimestampSplit) and not self.timestamp:
            raise ConfigError("split by 'timestamp' needs the key timestamp, a column of times")
        if isinstance(self.split, LastOneOutSplit):
            _check_last_one_out(self)

    @classmethod
    def from_toml(cls, path: str | Path) -> Schema:
        """Read a schema from a TOML file.

        Args:
            path: The file.

        Raises:
            ConfigError: the file cannot be read or is not TOML, a key is unknown, or a value is
                not what the key accepts. The message begins with the file.
        """
        if Path(path).exists() and not Path(path).is_file():  # a pipe would block, a device not end
            raise ConfigError(f"schema {path} must be a file; name another")
        try:
            tree = parse_toml(Path(path).read_text(encoding="utf-8-sig"))
        except OSError as error:
            raise ConfigError(f"schema {path} cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise ConfigError(f"schema {path} is not TOML: {error}") from error
        try:
            return cls.from_dict(tree)
        except ConfigError as error:
            raise ConfigError(f"schema {path}: {error}") from None

    @classmethod
    def from_dict(cls, tree: Any) -> Schema:
        """Build a schema from nested keys, as in the TOML file or from `as_dict`.

        Args:
            tree: A mapping of keys to values and mappings.

        Raises:
            ConfigError: a key is unknown, or a value is not what the key accepts.
        """
        if not isinstance(tree, Mapping):
            raise ConfigError(f"a schema must be a table of keys, got {str(tree)[:40]!r}")
        built: dict[str, Any] = {}
        for name, value in tree.items():
            if name in _COLUMN_KINDS:
                columns = _require_table(name, value)
                built[name] = {
                    column: _build_from_keys(_COLUMN_KINDS[name], keys, f"{name}.{column}")
                    for column, keys in columns.items()
                }
            elif name == "split":
                built[name] = _build_split(value)
            elif name == "negatives":
                built[name] = _build_from_keys(Negatives, value, name)
            else:
                built[name] = value
        return _build_from_keys(cls, built, "")

    def as_dict(self) -> dict[str, Any]:
        """The schema in JSON types; keys that have their default are left out."""
        tree: dict[str, Any] = {}
        for entry in fields(self):
            value = getattr(self, entry.name)
            if entry.name in _COLUMN_KINDS:
                if value:
                    tree[entry.name] = {name: _keys_of(column) for name, column in value.items()}
            elif entry.name == "split":
                by = next(by for by, kind in _SPLITS.items() if type(value) is kind)
                tree["split"] = {"by": by, **_keys_of(value)}
            elif entry.name == "negatives":
                if value is not None:
                    tree["negatives"] = _keys_of(value)
            elif value != entry.default:
                tree[entry.name] = list(value) if isinstance(value, tuple) else value
        return tree

    def to_toml(self) -> str:
        """The schema as TOML, which `from_toml` reads back to an equal one."""
        return tomli_w.dumps(self.as_dict())

    @property
    def features(self) -> tuple[Feature, ...]:
        """The sparse features in order of the store: categorical, multi, sequence, history."""
        found = [Feature(name, column.table or name) for name, column in self.categorical.items()]
        for kind, columns in (("multi", self.multi), ("sequence", self.sequence)):
            found += [
                Feature(name, each.table or name, kind, bool(each.weights))
                for name, each in columns.items()
            ]
        for name, each in self.history.items():
            table = self.categorical[each.of].table or each.of
            found.append(Feature(name, table, "sequence"))
        return tuple(found)

    @property
    def tables(self) -> tuple[Table, ...]:
        """The embedding tables, in order of their first feature."""
        sharing: dict[str, dict[str, ValueColumn]] = {}
        for name, column in self.value_columns.items():
            sharing.setdefault(column.table or name, {})[name] = column
        found = []
        for table, columns in sharing.items():
            first = next(iter(columns.values()))
            found.append(
                Table(
                    name=table,
                    **{key: getattr(first, key) for key in _TABLE_KEYS},
                    has_missing_row=any(
                        isinstance(each, CategoricalColumn) and each.missing == "own"
                        for each in columns.values()
                    ),
                    columns=tuple(columns),
                )
            )
        return tuple(found)

    @property
    def value_columns(self) -> dict[str, ValueColumn]:
        """Columns with values of embedding tables, in order of the features."""
        return {**self.categorical, **self.multi, **self.sequence}

    @property
    def weights_of(self) -> dict[str, str]:
        """For each column of weights: the column whose values have them."""
        columns: dict[str, MultiColumn] = {**self.multi, **self.sequence}
        return {column.weights: name for name, column in columns.items() if column.weights}

    @property
    def columns(self) -> tuple[str, ...]:
        """Every column of the file that is read, once: features first, then the others."""
        split = self.split.column if isinstance(self.split, ColumnSplit) else ""
        others = (self.label, self.group, self.timestamp, self.weight, split)
        names = [*self.dense, *self.value_columns, *self.weights_of, *filter(None, others)]
        return tuple(dict.fromkeys(names))

    @property
    def has_repeats(self) -> bool:
        """Whether items come again in a group: a history lists the item of the negatives."""
        if self.negatives is None:
            return False
        return any(history.of == self.negatives.item for history in self.history.values())

    @property
    def positive_rule(self) -> PositiveRule | None:
        """The rule of the key `positive`; None without one."""
        return PositiveRule.parse(self.positive) if self.positive else None


def check_delimiter(delimiter: str, quote: str) -> None:
    """Check the keys `delimiter` and `quote`.

    Raises:
        ConfigError: one is not a character of ASCII, or both are the same.
    """
    for name, value in (("delimiter", delimiter), ("quote", quote)):
        if len(value) > 1 or not value.isascii() or value in ("\n", "\r", "\0"):
            is_long = name == "delimiter" and len(value) > 1
            way_out = "; replace it in the file by a tab" if is_long else ""
            raise ConfigError(f"{name} must be one character of ASCII, got {value!r}{way_out}")
    if quote and quote in (delimiter or ",\t"):
        raise ConfigError(f"quote must differ from the delimiter, got {quote!r}")


def _check_columns(schema: Schema) -> None:
    """Check names, and that each column has one meaning."""
    meanings: dict[str, str] = {}
    for kind in _COLUMN_KINDS:
        for name in getattr(schema, kind):
            _check_name(kind, name)
            if name in meanings:
                raise ConfigError(
                    f"{kind}.{name}: {name!r} is named in {meanings[name]} already; a column has "
                    "one meaning, and a history a name of its own"
                )
            meanings[name] = kind
    if not meanings:
        raise ConfigError("a schema must name at least one dense, categorical, multi or sequence")
    _check_weights(schema, meanings)
    for role in ("label", "timestamp", "weight", "group"):
        column = getattr(schema, role)
        if not column:
            continue
        if not is_text(column):
            raise ConfigError(f"{role} must be printable text, got {column!r}")
        kind = meanings.get(column, "")
        if kind and not (role == "group" and kind == "categorical"):
            raise ConfigError(
                f"{role}: column {column!r} is named in {kind}, too; take it out of there"
            )
        for other in ("label", "timestamp", "weight", "group"):
            if other != role and getattr(schema, other) == column:
                raise ConfigError(f"{role} and {other} must be two columns, got {column!r}")
    if isinstance(schema.split, ColumnSplit):
        column = schema.split.column
        if column in (schema.label, schema.timestamp, schema.weight):
            raise ConfigError(f"split.column: {column!r} is the label, timestamp or weight")
        if column in meanings and meanings[column] != "categorical":
            raise ConfigError(f"split.column: {column!r} is named in {meanings[column]}, too")
    check_delimiter(schema.delimiter, schema.quote)
    _check_timestamp_format(schema)


def _check_weights(schema: Schema, meanings: dict[str, str]) -> None:
    """Check that each column of weights has no other meaning, and add its own."""
    columns: dict[str, MultiColumn] = {**schema.multi, **schema.sequence}
    for name, column in columns.items():
        if not column.weights:
            continue
        place = f"{meanings[name]}.{name}.weights"
        _check_name(place, column.weights)
        if column.weights in meanings:
            raise ConfigError(
                f"{place}: column {column.weights!r} is named in {meanings[column.weights]}, too; "
                "a column has one meaning"
            )
        meanings[column.weights] = place


def _check_name(place: str, name: str) -> None:
    if not name or not is_text(name):
        raise ConfigError(f"{place}: a name must be printable text, got {name!r}")
    if name.startswith("/"):
        raise ConfigError(
            f"{place}: a name must not begin with '/', as names of recsys's own do, got {name!r}; "
            "rename the column"
        )


def _check_timestamp_format(schema: Schema) -> None:
    form = schema.timestamp_format
    if not form:
        return
    if not schema.timestamp:
        raise ConfigError("timestamp_format needs the key timestamp, a column of times")
    if form not in TIME_UNITS and "%" not in form:
        raise ConfigError(
            f"timestamp_format must be one of {', '.join(TIME_UNITS)}, or a form such as "
            f'"%Y%m%d"; got {form!r}'
        )
    if ("%I" in form) != ("%p" in form):
        raise ConfigError(
            "timestamp_format must have %I (an hour up to 12) and %p (AM or PM) together, or %H; "
            f"got {form!r}"
        )
    if week := re.search("%[UWVGg]", form):
        raise ConfigError(
            f"timestamp_format must not have {week[0]}, as weeks are not read, got {form!r}; write "
            "dates of days"
        )


def _check_tables(schema: Schema) -> None:
    """Check the names of tables, and that the columns of each agree."""
    columns = schema.value_columns
    for table in schema.tables:
        if not is_text(table.name) or "." in table.name:
            raise ConfigError(
                f"column {table.columns[0]!r}: the name of its table must be printable text "
                f"without a '.', got {table.name!r}; set the key table of the column to another "
                f'name, such as "{_plain_name(table.name)}"'
            )
        for name in table.columns:
            for key in _TABLE_KEYS:
                mine, first = getattr(columns[name], key), getattr(table, key)
                if mine != first:
                    raise ConfigError(
                        f"columns {table.columns[0]!r} and {name!r} share table {table.name!r} and "
                        f"must have the same {key}, got {first!r} and {mine!r}"
                    )
        if table.has_missing_row and table.max_rows == 2:
            raise ConfigError(
                f"table {table.name!r}: max_rows must be 0 or at least 3 with missing 'own'"
            )


def _plain_name(name: str) -> str:
    return "".join("_" if letter == "." or not letter.isprintable() else letter for letter in name)


def _check_history(schema: Schema) -> None:
    for name, history in schema.history.items():
        if history.of not in schema.categorical:
            raise ConfigError(
                f"history.{name}.of must be a categorical column of the schema, got {history.of!r}"
            )
        if not schema.group:
            raise ConfigError(f"history.{name} needs the key group, a column of groups")


def _check_label(schema: Schema) -> None:
    if schema.positive:
        if not schema.label:
            raise ConfigError("positive needs the key label, a column of numbers or text")
        PositiveRule.parse(schema.positive)
    negatives = schema.negatives
    if negatives is None:
        if not schema.label:
            raise ConfigError(
                "a schema needs a label, or negatives (without a label every row is a positive); "
                "set label, or add a table [negatives]"
            )
        return
    if schema.label:
        raise ConfigError("negatives are for data without a label; take one of the two out")
    if not schema.group:
        raise ConfigError("negatives need the key group, a column of groups")
    for column in (negatives.item, *negatives.item_columns):
        if column not in schema.categorical:
            raise ConfigError(f"negatives: {column!r} must be a categorical column of the schema")
        if column == schema.group:
            raise ConfigError(f"negatives: {column!r} is the group, which is never redrawn")
    if schema.categorical[negatives.item].numbering == "hash":
        raise ConfigError(
            f"negatives.item: {negatives.item!r} must have numbering 'first', got 'hash'"
        )


def _check_last_one_out(schema: Schema) -> None:
    if not schema.group:
        raise ConfigError("split by 'last_one_out' needs the key group, a column of groups")
    if schema.label:
        raise ConfigError(
            "split by 'last_one_out' tests on positives alone, which no metric can judge in data "
            f"with a label, got label {schema.label!r}; take another split, or keep the positive "
            "rows alone, leave out label and add [negatives]"
        )


def _build_split(value: Any) -> Split:
    keys = dict(_require_table("split", value))
    by = keys.pop("by", "fraction")
    if not isinstance(by, str) or by not in _SPLITS:
        raise ConfigError(f"split.by must be one of {', '.join(_SPLITS)}; got {by!r}")
    for name in ("test_from", "validation_from"):
        if by == "timestamp" and name in keys:
            keys[name] = parse_seconds(f"split.{name}", keys[name])
    return _build_from_keys(_SPLITS[by], keys, "split")


def _require_table(place: str, value: Any) -> Mapping[str, Any]:
    """The value, which must be a table of keys; `place` names it in messages."""
    if not isinstance(value, Mapping):
        raise ConfigError(f"{place} must be a table of keys, got {str(value)[:40]!r}")
    return value


def _build_from_keys(kind: type[_T], value: Any, place: str) -> _T:
    """Build one of the classes from its keys; `place` names it in messages, "" for the schema."""
    keys, types = _require_table(place, value), get_type_hints(kind)
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


def _keys_of(part: Any) -> dict[str, Any]:
    """Keys of one class that do not have their default, in JSON types."""
    keys = {}
    for entry in fields(part):
        value = getattr(part, entry.name)
        if value != entry.default:
            keys[entry.name] = list(value) if isinstance(value, tuple) else value
    return keys
