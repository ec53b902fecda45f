"""The schema of a table: what each column means, how rows are split, where negatives come from.

A schema is read from TOML (`Schema.from_toml`), from a dictionary of JSON types
(`Schema.from_dict`, the form in a store's meta.json), or by the name of a public data set
(`find_schema`). Each way checks it whole.

This module imports pydantic; commands that read no schema do not import it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime
from fractions import Fraction
from itertools import product
from math import floor
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import tomli_w
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    ValidationError,
    model_validator,
)

from recsys._support.untrusted import is_int, is_number, is_text, parse_toml
from recsys.datasets.store_writer import Feature
from recsys.errors import ConfigError, refuse

__all__ = [
    "ALL_FOR_TEST",
    "GROUP",
    "NO_LABEL",
    "PART",
    "TIME",
    "TIME_UNITS",
    "WEIGHT",
    "CategoricalColumn",
    "ColumnSplit",
    "DenseColumn",
    "FractionSplit",
    "HistoryColumn",
    "LastOneOutSplit",
    "MultiColumn",
    "Negatives",
    "RandomSplit",
    "Rule",
    "Schema",
    "SequenceColumn",
    "SharesSplit",
    "Split",
    "Table",
    "TimestampSplit",
    "ValueColumn",
    "find_schema",
    "named_schemas",
    "rule_of",
]

# Columns of rows that are no features; those of a feature have its name, which begins otherwise.
WEIGHT, GROUP, TIME, PART = "/weight", "/group", "/time", "/part"
# The label of a row whose label is missing, which only rows to predict may be.
NO_LABEL: Final = -1
TIME_UNITS = {"ms": 10**3, "us": 10**6, "ns": 10**9}  # ticks of a second
_RULE = re.compile(r"\s*(==|>=|<=|>|<)\s*(\S.*?)\s*")
_NAMED = Path(__file__).with_name("named")
_KINDS = ("dense", "categorical", "multi", "sequence", "history")
# A column may be named in several of these places. In all others it has that one meaning.
_SHARED = {"categorical", "group", "split.column", "filter"}


def _check_name(name: str) -> str:
    is_good = name and is_text(name) and not name.startswith("/")
    fault = f"a name must be printable text that does not begin with '/', got {name!r}"
    refuse((not is_good, f"{fault}; rename the column"))
    return name


def _check_missing(value: Any) -> Any:
    is_float32 = is_number(value) and abs(value) < 2.0**128
    is_good = value in ("mean", "error") if isinstance(value, str) else is_float32
    refuse((not is_good, f'must be a number of float32, "mean" or "error"; got {value!r}'))
    return value


def _check_character(value: str) -> str:
    hint = "; replace it in the file by a tab" if len(value) > 1 else ""
    is_bad = len(value) > 1 or not value.isascii() or value in ("\n", "\r", "\0")
    refuse((is_bad, f"must be one character of ASCII, got {value!r}{hint}"))
    return value


def _parse_share(value: Any) -> Fraction:
    top, slash, bottom = str(value).partition("/")
    try:
        share = Fraction(int(top), int(bottom)) if slash else Fraction(repr(float(top)))
    except (ValueError, ZeroDivisionError):
        share = Fraction(-1)
    fault = f'must be in [0, 1): a number, or text such as "1/14"; got {value!r}'
    refuse((not 0 <= share < 1, fault))
    return share


def _as_texts(value: Any) -> Any:
    """Values of a column as the text that it is compared by; one value stands for a list of it."""
    found = value if isinstance(value, list | tuple) else [value]
    is_good = all(isinstance(one, str | bool | date) or is_int(one) for one in found)
    refuse((not is_good, f"must be text, integers or a list of them, got {str(value)[:40]!r}"))
    texts = tuple(str(one).lower() if isinstance(one, bool) else str(one) for one in found)
    "".join(texts).encode()  # raises for surrogates, which JSON allows and UTF-8 does not
    return texts


def _as_condition(value: Any) -> Any:
    """The values that a column may have, or a rule."""
    texts = _as_texts(value)
    rule_of(texts)
    return texts


def _as_list(value: Any) -> Any:
    refuse((not isinstance(value, list | tuple), f"must be a list, got {str(value)[:40]!r}"))
    return _as_texts(value)


def _as_seconds(value: Any) -> Any:
    """Seconds since 1970 of a moment: seconds, ISO text or a date; UTC where it names no zone."""
    if isinstance(value, str | date):
        moment = datetime.fromisoformat(str(value))
        moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
        return floor(moment.timestamp())
    return value


_Column = Annotated[str, AfterValidator(_check_name)]
_Role = Annotated[str, AfterValidator(lambda name: name and _check_name(name))]
_Share = Annotated[Fraction, PlainValidator(_parse_share), PlainSerializer(str)]
_Texts = Annotated[tuple[str, ...], BeforeValidator(_as_list)]
_Columns = Annotated[tuple[_Column, ...], BeforeValidator(_as_list)]
_Conditions = dict[
    _Column, Annotated[tuple[str, ...], BeforeValidator(_as_condition), Field(min_length=1)]
]
_Character = Annotated[str, AfterValidator(_check_character)]
_Seed = Annotated[int, Field(ge=0, lt=2**63)]
_Rows = Annotated[int, Field(ge=0, lt=2**31)]  # rows are int32 in the store
_Count = Annotated[int, Field(ge=1, lt=2**31)]


@dataclass(frozen=True)
class Rule:
    """A comparison, such as ">= 4" of numbers or "== yes" of text.

    Attributes:
        comparison: One of ==, >=, >, <=, <; == for text.
        value: The number, or the text, on its right; text is compared letter by letter.
    """

    comparison: str
    value: float | str

    @classmethod
    def parse(cls, text: str) -> Rule:
        """Read a rule.

        Raises:
            ValueError: it is neither a comparison and a number, nor == and text.
        """
        match = _RULE.fullmatch(text)
        comparison, value = match.groups() if match else ("", "nan")
        try:
            number = float(value)
        except ValueError:
            if comparison == "==" and is_text(value) and value[0] not in "\"'":
                return cls(comparison, value)
            number = float("nan")
        fault = (
            'must be ==, >=, >, <= or < and a number, such as ">= 4", or == and text without '
            f'quotes, such as "== yes"; got {text!r}'
        )
        refuse((not is_number(number), fault))
        return cls(comparison, number)


def rule_of(texts: tuple[str, ...]) -> Rule | None:
    """The rule of a condition; None if it lists values.

    Raises:
        ValueError: the rule is none.
    """
    return (
        Rule.parse(texts[0]) if len(texts) == 1 and texts[0].startswith(("<", "=", ">")) else None
    )


def _check_rule(text: str) -> str:
    if text:
        Rule.parse(text)
    return text


class _Keys(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class DenseColumn(_Keys):
    """A column of numbers.

    Attributes:
        transform: "none", "log" (log(1 + max(x, 0))), or "standardize" (by mean and standard
            deviation of the training part).
        missing: What stands for a missing value: a number (the transform is applied to it, too),
            "mean" (of the training part), or "error".
    """

    transform: Literal["none", "log", "standardize"] = "none"
    missing: Annotated[Any, AfterValidator(_check_missing)] = 0.0


class ValueColumn(_Keys):
    """Keys of each column whose values are rows of an embedding table.

    Attributes:
        values: "string" or "integer" (of 64 bits).
        numbering: "first" (rows by first appearance in the training part) or "hash".
        num_rows: Rows of the table, with numbering "hash" only.
        min_count: Values that the training part has less often share row 0.
        max_rows: 0 for no limit; else the most frequent `max_rows` - 1 values keep rows of their
            own (of equally frequent ones, the first seen); `max_rows` - 2 of them if missing values
            have a row of their own.
        table: The vocabulary and embedding table; empty for one of the column's own name.
    """

    values: Literal["string", "integer"] = "string"
    numbering: Literal["first", "hash"] = "first"
    num_rows: _Rows = 0
    min_count: Annotated[int, Field(ge=1, lt=2**63)] = 1
    max_rows: _Rows = 0
    table: str = ""

    @model_validator(mode="after")
    def _check_numbering(self) -> ValueColumn:
        is_hash = self.numbering == "hash"
        refuse(
            (
                is_hash == (self.num_rows == 0),
                f"num_rows must be set with numbering 'hash', and only then; got {self.num_rows} "
                f"with {self.numbering!r}",
            ),
            (
                is_hash and (self.min_count > 1 or self.max_rows or self.has_missing_row),
                "min_count, max_rows and missing 'own' are for numbering 'first', got 'hash'; "
                "leave them out",
            ),
            (
                0 < self.max_rows < 2 + self.has_missing_row,
                "max_rows must be 0 (no limit), or at least 2, and 3 with missing 'own'; got "
                f"{self.max_rows}",
            ),
        )
        return self

    @property
    def has_missing_row(self) -> bool:
        """Whether row 1 of the table is for missing values."""
        return getattr(self, "missing", "") == "own"


class CategoricalColumn(ValueColumn):
    """A column with one value in each row.

    Attributes:
        missing: "rare" (row 0), "own" (row 1) or "error". With numbering "hash", "rare" is the row
            that the empty text hashes to, and "own" is refused.
    """

    missing: Literal["rare", "own", "error"] = "rare"


class MultiColumn(ValueColumn):
    """A column with any number of values in each row. Missing or empty: an empty bag.

    Attributes:
        split: The character between the values of text; empty for lists, in Parquet and frames.
        max_length: 0 for no limit; else the first `max_length` values are kept.
    """

    split: Annotated[str, Field(max_length=1)] = ""
    max_length: _Rows = 0


class SequenceColumn(MultiColumn):
    """A column with a list in order of time. The last `max_length` values are kept."""

    max_length: _Count = Field()


class HistoryColumn(_Keys):
    """A sequence made from earlier rows: values of a column in positive rows of the same group.

    Earlier means by timestamp if the schema has one, else by order in the file. With a label and a
    timestamp, rows of an equal time are not earlier. Histories of training rows list training rows
    alone; those of other rows list all earlier positive rows.

    Attributes:
        of: The categorical column; the history shares its table.
        max_length: How many of the last values are kept.
        where: Which rows are listed, as for the schema's `filter`: then all earlier rows of the
            group for which it holds, also those that `filter` leaves out. Empty: positive rows.
    """

    of: _Column
    max_length: _Count = 20
    where: _Conditions = {}


class SharesSplit(_Keys):
    """By shares of the rows.

    Attributes:
        test: Share of the rows: a number, or text such as "1/14".
        validation: Also.
    """

    test: _Share = Fraction(1, 14)
    validation: _Share = Fraction(1, 14)

    @model_validator(mode="after")
    def _check_sum(self) -> SharesSplit:
        fault = f"test + validation must be below 1, got {self.test} + {self.validation}"
        refuse((self.test + self.validation >= 1, fault))
        return self


class FractionSplit(SharesSplit):
    """In file order: first train, then validation, then test."""

    by: Literal["fraction"] = "fraction"


# Of rows like those of another store; no schema says so.
ALL_FOR_TEST = FractionSplit.model_construct(test=Fraction(1), validation=Fraction(0))


class RandomSplit(SharesSplit):
    """At random, by a seed: rows, or whole groups; in each part rows keep the order of the file."""

    by: Literal["random", "group"]
    seed: _Seed = 0


class TimestampSplit(SharesSplit):
    """In order of time: first train, then validation, then test.

    `test` and `validation` are shares of the rows; rows of the same time keep the order of the
    file.

    Attributes:
        test_from: The first moment of the test part, in seconds since 1970, in place of `test`;
            None for the share.
    """

    by: Literal["timestamp"]
    test_from: Annotated[
        Annotated[int, Field(gt=-(2**62), lt=2**62)] | None, BeforeValidator(_as_seconds)
    ] = None


class ColumnSplit(_Keys):
    """By the values of a column, compared as text; booleans are the texts true and false.

    Attributes:
        column: The column.
        train: Its values in rows of the training part.
        test: Of test.
        validation: Of validation; empty: the first half of the rows of test (in file order).
    """

    by: Literal["column"]
    column: _Column
    train: Annotated[_Texts, Field(min_length=1)]
    test: Annotated[_Texts, Field(min_length=1)]
    validation: _Texts = ()

    @model_validator(mode="after")
    def _check_values(self) -> ColumnSplit:
        values = [value for part in self.parts for value in part]
        refuse((len({*values}) < len(values), f"each value must be listed once, got {values}"))
        return self

    @property
    def parts(self) -> tuple[tuple[str, ...], ...]:
        """The values of each part, in the order of `SPLITS`."""
        return self.train, self.test, self.validation


class LastOneOutSplit(_Keys):
    """The last row of each group is test, the one before it validation; for data without a label.

    This holds for groups of at least three rows; all other rows are for training.
    """

    by: Literal["last_one_out"]


Split = FractionSplit | RandomSplit | TimestampSplit | ColumnSplit | LastOneOutSplit


def _with_by(value: Any) -> Any:
    return {"by": "fraction", **value} if isinstance(value, Mapping) else value


class Negatives(_Keys):
    """Rows drawn beside each positive of the training part, when the data has positives only.

    A negative is its positive with another item. Without a history of the item, that is no item of
    the group's training rows. With one, items come again: it is any item but the positive's own.

    Attributes:
        item: The categorical column that is redrawn.
        item_columns: Further categorical columns that belong to the item and change with it.
        per_positive: How many, for each positive; 0 for models that compare items by themselves,
            such as `TwoTower`.
        by: "uniform", or "popularity" (training counts ** 0.75).
        seed: Seed of the draw.
    """

    item: _Column
    item_columns: _Columns = ()
    per_positive: Annotated[int, Field(ge=0, le=1000)] = 4
    by: Literal["uniform", "popularity"] = "uniform"
    seed: _Seed = 0


@dataclass(frozen=True)
class Table:
    """One vocabulary and embedding table.

    Attributes:
        name: Its name.
        rules: A column that shares it; all agree in `_TABLE_KEYS`.
        first_row: The first row that belongs to a value, with numbering "first"; row 1 may be for
            missing values.
        columns: The columns that share it, in order of the features; histories are not among them.
    """

    name: str
    rules: ValueColumn
    first_row: int
    columns: tuple[str, ...]


# What all columns of one table must say alike.
_TABLE_KEYS = ("values", "numbering", "num_rows", "min_count", "max_rows")


class Schema(_Keys):
    """What each column of a table means. A column that it does not name is ignored.

    Attributes:
        label: Column of labels; empty: every row is a positive, and `negatives` is required.
        labels: Several columns of labels, in place of `label`.
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
        filter: Rows that become samples: those in which each of these columns has one of the given
            values, compared as text. A single value may be a rule, such as ">= 4".
        dense: Dense columns by name, in the order of the store.
        categorical: Columns with one value a row, by name.
        multi: Columns with a bag of values a row, by name.
        sequence: Columns with an ordered list of values a row, by name.
        history: Sequences made from earlier rows, by the feature's name.
        split: How rows become train, validation and test.
        negatives: For data without labels.
    """

    label: _Role = ""
    labels: _Columns = ()
    positive: Annotated[str, AfterValidator(_check_rule)] = ""
    group: _Role = ""
    timestamp: _Role = ""
    timestamp_format: str = ""
    weight: _Role = ""
    delimiter: _Character = ""
    quote: _Character = '"'
    names: _Texts = ()
    missing_values: _Texts = ()
    filter: _Conditions = {}
    dense: dict[_Column, DenseColumn] = {}
    categorical: dict[_Column, CategoricalColumn] = {}
    multi: dict[_Column, MultiColumn] = {}
    sequence: dict[_Column, SequenceColumn] = {}
    history: dict[_Column, HistoryColumn] = {}
    split: Annotated[Annotated[Split, Field(discriminator="by")], BeforeValidator(_with_by)] = (
        FractionSplit()
    )
    negatives: Negatives | None = None

    @model_validator(mode="after")
    def _check(self) -> Schema:
        _check_columns(self)
        _check_rules(self)
        return self

    @classmethod
    def from_toml(cls, path: str | Path) -> Schema:
        """Read a schema from a TOML file.

        Args:
            path: The file.

        Raises:
            ConfigError: the file cannot be read or is not TOML, a key is unknown, or a value is
                not what the key accepts. The message begins with the file.
        """
        try:
            return cls.from_dict(parse_toml(Path(path).read_text(encoding="utf-8-sig")))
        except (OSError, ValueError) as error:
            raise ConfigError(f"schema {path}: {error}") from error

    @classmethod
    def from_dict(cls, tree: Any) -> Schema:
        """Build a schema from nested keys, as in the TOML file or from `as_dict`.

        Args:
            tree: A mapping of keys to values and mappings.

        Raises:
            ConfigError: a key is unknown, or a value is not what the key accepts.
        """
        try:
            return cls.model_validate(tree)
        except ValidationError as error:
            raise ConfigError(_explain(error)) from None

    def as_dict(self) -> dict[str, Any]:
        """The schema in JSON types; keys that have their default are left out."""
        tree = self.model_dump(mode="json", exclude_defaults=True)
        return {**tree, "split": {"by": self.split.by, **tree.get("split", {})}}

    def to_toml(self) -> str:
        """The schema as TOML, which `from_toml` reads back to an equal one."""
        return tomli_w.dumps(self.as_dict())

    @property
    def label_columns(self) -> tuple[str, ...]:
        """The columns of labels: one, several, or none."""
        return (self.label,) if self.label else self.labels

    @property
    def features(self) -> tuple[Feature, ...]:
        """The sparse features in order of the store: categorical, multi, sequence, history."""
        kinds = {"one": self.categorical, "multi": self.multi, "sequence": self.sequence}
        found = [
            Feature(name, column.table or name, kind)
            for kind, columns in kinds.items()
            for name, column in columns.items()  # type: ignore[attr-defined]
        ]
        for name, history in self.history.items():
            found.append(
                Feature(name, self.categorical[history.of].table or history.of, "sequence")
            )
        return tuple(found)

    @property
    def tables(self) -> tuple[Table, ...]:
        """The embedding tables, in order of their first feature."""
        sharing: dict[str, dict[str, ValueColumn]] = {}
        for name, column in self.value_columns.items():
            sharing.setdefault(column.table or name, {})[name] = column
        return tuple(
            Table(
                table,
                next(iter(columns.values())),
                2 if any(column.has_missing_row for column in columns.values()) else 1,
                tuple(columns),
            )
            for table, columns in sharing.items()
        )

    @property
    def value_columns(self) -> dict[str, ValueColumn]:
        """Columns with values of embedding tables, in order of the features."""
        return {**self.categorical, **self.multi, **self.sequence}

    @property
    def conditions(self) -> dict[str, Mapping[str, tuple[str, ...]]]:
        """The conditions on rows, by a name of their own: of the filter, and of histories."""
        found = {f"/where/{name}": history.where for name, history in self.history.items()}
        return {name: where for name, where in {"/filter": self.filter, **found}.items() if where}

    @property
    def roles(self) -> dict[str, str]:
        """The columns that are no features, by the names that they have in encoded rows."""
        roles = {f"/label/{number}": name for number, name in enumerate(self.label_columns)}
        split = self.split.column if isinstance(self.split, ColumnSplit) else ""
        roles |= {GROUP: self.group, TIME: self.timestamp, WEIGHT: self.weight, PART: split}
        return {role: name for role, name in roles.items() if name}

    @property
    def columns(self) -> tuple[str, ...]:
        """Every column of the file that is read, once: those that conditions name come last."""
        compared = [name for where in self.conditions.values() for name in where]
        own = (*self.dense, *self.value_columns, *self.roles.values())
        return tuple(dict.fromkeys([*own, *compared]))

    @property
    def positive_rule(self) -> Rule | None:
        """The rule of the key `positive`; None without one."""
        return Rule.parse(self.positive) if self.positive else None

    @property
    def has_repeats(self) -> bool:
        """Whether items come again in a group: a history lists the item of the negatives."""
        item = self.negatives.item if self.negatives else None
        return any(history.of == item for history in self.history.values())


def find_schema(name_or_file: str) -> Schema:
    """A schema by its name, or from a TOML file.

    Args:
        name_or_file: One of `named_schemas()`; anything else is the path of a file.

    Raises:
        ConfigError: it is neither, or the file holds no valid schema.
    """
    known = named_schemas()
    file = _NAMED / f"{name_or_file}.toml" if name_or_file in known else Path(name_or_file)
    if not file.exists():
        raise ConfigError(
            f"schema {name_or_file} does not exist; name a TOML file, or one of {', '.join(known)}"
        )
    return Schema.from_toml(file)


def named_schemas() -> list[str]:
    """The names of the schemas of public data sets."""
    return sorted(file.stem for file in _NAMED.glob("*.toml"))


def _check_columns(schema: Schema) -> None:
    """Check that the meanings of each column go together, and that columns of a table agree."""
    named = [(kind, name) for kind in _KINDS for name in getattr(schema, kind)]
    refuse((not named, "a schema must name at least one dense, categorical, multi or sequence"))
    named += [("label", name) for name in schema.label_columns]
    named += [(role, getattr(schema, role)) for role in ("timestamp", "weight", "group")]
    named.append(("split.column", getattr(schema.split, "column", "")))
    named += [("filter", name) for where in schema.conditions.values() for name in where]
    seen: dict[str, str] = {}
    for location, name in named:
        is_twice = name and name in seen and not {seen[name], location} <= _SHARED
        refuse((is_twice, f"{location}: column {name!r} is named in {seen.get(name)}, too"))
        seen.setdefault(name, location)
    for table in schema.tables:
        plain = re.sub(r"[^\w-]", "_", table.name)
        fault = (
            f"column {table.columns[0]!r}: the name of its table must be printable text without a "
            f"'.', got {table.name!r}; set the key table of the column to another name, such as "
            f'"{plain}"'
        )
        refuse((not is_text(table.name) or "." in table.name, fault))
        for name, key in product(table.columns, _TABLE_KEYS):
            mine, first = getattr(schema.value_columns[name], key), getattr(table.rules, key)
            fault = (
                f"columns {table.columns[0]!r} and {name!r} share table {table.name!r} and must "
                f"have the same {key}, got {first!r} and {mine!r}"
            )
            refuse((mine != first, fault))


def _check_rules(schema: Schema) -> None:
    """Check what keys need of each other."""
    label, negatives, form = schema.label_columns, schema.negatives, schema.timestamp_format
    by, items = schema.split.by, [] if negatives is None else [negatives.item]
    items += [] if negatives is None else negatives.item_columns
    grouped = [f"history.{name}" for name in schema.history] + ["negatives"] * bool(items)
    grouped += [f"split by {by!r}"] * (by in ("group", "last_one_out"))
    categorical = [(f"history.{name}.of", keys.of) for name, keys in schema.history.items()]
    categorical += [("negatives", name) for name in items]
    unknown = [f"{key} {name!r}" for key, name in categorical if name not in schema.categorical]
    refuse(
        (schema.label and schema.labels, "label and labels: take one of the two"),
        (schema.positive and not label, "positive needs the key label"),
        (
            not label and not items,
            "a schema needs a label, or negatives (without a label every row is a positive); set "
            "label, or add a table [negatives]",
        ),
        (label and items, "negatives are for data without a label; take one of the two out"),
        (
            grouped and not schema.group,
            f"{', '.join(grouped)}: set the key group, a column of groups",
        ),
        (unknown, f"{', '.join(unknown)} must be a categorical column of the schema"),
        (schema.group in items, "negatives: the group is never redrawn"),
        (len(set(items)) < len(items), f"negatives: name each column once, got {items}"),
        (
            any(schema.categorical[name].numbering == "hash" for name in items[:1] if not unknown),
            f"negatives.item {items[:1]} must have numbering 'first', got 'hash'",
        ),
        (form and not schema.timestamp, "timestamp_format needs the key timestamp"),
        (
            form and form not in TIME_UNITS and "%" not in form,
            f"timestamp_format must be one of {', '.join(TIME_UNITS)}, or a form such as "
            f'"%Y%m%d"; got {form!r}',
        ),
        (
            "%Z" in form and "%z" not in form,
            "timestamp_format: %Z knows no offsets; write %z for them, or the name itself, such as "
            f'"%d.%m.%Y %H:%M UTC", for times of UTC; got {form!r}',
        ),
        (
            ("%I" in form) != ("%p" in form) or re.search("%[UWVGg]", form),
            "timestamp_format must have %I (an hour up to 12) and %p (AM or PM) together, or %H, "
            f"and days in place of weeks; got {form!r}",
        ),
        (
            by == "timestamp" and not schema.timestamp,
            "split by 'timestamp' needs the key timestamp, a column of times",
        ),
        (
            by == "last_one_out" and label,
            "split by 'last_one_out' tests on positives alone, which no metric can judge in data "
            "with a label; take another split, or keep the positive rows alone by [filter], leave "
            "out label and add [negatives]",
        ),
        (
            schema.quote and schema.quote in (schema.delimiter or ",\t"),
            f"quote must differ from the delimiter, got {schema.quote!r}",
        ),
    )


def _explain(error: ValidationError) -> str:
    """The first fault that pydantic found: key, rule, value and hint."""
    fault = error.errors()[0]
    path = [str(part) for part in fault["loc"] if part != "[key]"]
    if path[:1] == ["split"]:
        del path[1:2]  # the kind of the split
    key, value = ".".join(path), repr(fault["input"])[:40]
    if fault["type"] == "value_error":
        return f"{key}: {fault['ctx']['error']}".removeprefix(": ")
    if fault["type"] == "extra_forbidden":
        return f"unknown key {key}: correct its name, or delete it (docs/tables.md lists the keys)"
    rule = re.sub("^(Input|Value) should", "must", fault["msg"])
    return f"{key or 'a schema'}: {rule}, got {value}"
