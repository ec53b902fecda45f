"""The tables of a schema: one class for each kind of column, of split, and for negatives.

A class states its keys once. `recsys.datasets.tabular.schemas.schema` reads them, and checks what
needs more than one of them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, date, datetime, time
from fractions import Fraction
from typing import Any

from recsys._support.config_fields import check_fields
from recsys._support.config_fields import key as _key
from recsys._support.untrusted import is_finite_number, is_text
from recsys.errors import ConfigError

__all__ = [
    "TIME_UNITS",
    "CategoricalColumn",
    "ColumnSplit",
    "DenseColumn",
    "FractionSplit",
    "HistoryColumn",
    "LastOneOutSplit",
    "MultiColumn",
    "Negatives",
    "PositiveRule",
    "RandomSplit",
    "SequenceColumn",
    "Split",
    "TimestampSplit",
    "ValueColumn",
    "parse_seconds",
]

TIME_UNITS = {"ms": 10**3, "us": 10**6, "ns": 10**9}  # ticks of a second
_MOST_ROWS = 2**31 - 1  # rows are int32 in the store
_RULE = re.compile(r"\s*(==|>=|<=|>|<)\s*(\S.*?)\s*")


@dataclass(frozen=True, kw_only=True)
class PositiveRule:
    """What makes a 0/1 label of a number, such as ">= 4", or of text, such as "== yes".

    Attributes:
        comparison: One of ==, >=, >, <=, <; == for text.
        number: The number on its right; 0.0 for text.
        text: The text on its right, which a positive label equals letter by letter; empty for a
            number.
    """

    comparison: str
    number: float = 0.0
    text: str = ""

    @classmethod
    def parse(cls, text: str) -> PositiveRule:
        """Read a rule.

        Raises:
            ConfigError: it is neither a comparison and a number, nor == and text.
        """
        match = _RULE.fullmatch(text)
        comparison, value = match.groups() if match else ("", "nan")
        try:
            number = float(value)
        except ValueError:
            if value[0] in "\"'":
                raise ConfigError(
                    f'positive must be == and text without quotes, such as "== yes"; got {text!r}'
                ) from None
            if comparison == "==" and is_text(value):
                return cls(comparison=comparison, text=value)
            number = float("nan")
        if not is_finite_number(number):
            raise ConfigError(
                'positive must be ==, >=, >, <= or < and a number, such as ">= 4", or == and text, '
                f'such as "== yes"; got {text!r}'
            )
        return cls(comparison=comparison, number=number)


@dataclass(frozen=True, kw_only=True)
class DenseColumn:
    """A column of numbers.

    Attributes:
        transform: "none", "log" (log(1 + max(x, 0))), or "standardize" (by mean and standard
            deviation of the training part).
        missing: What stands for a missing value: a number (the transform is applied to it, too),
            "mean" (of the training part), or "error".
    """

    transform: str = _key(
        "none", "function applied to each value", choices=("none", "log", "standardize")
    )
    missing: float | str = _key(0.0, 'for missing values: a number, "mean" or "error"')

    def __post_init__(self) -> None:
        check_fields(self)
        if self.missing not in ("mean", "error") and not is_finite_number(self.missing):
            raise ConfigError(
                f'missing must be a finite number, "mean" or "error"; got {self.missing!r}'
            )


@dataclass(frozen=True, kw_only=True)
class ValueColumn:
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

    values: str = _key("string", "type of the values", choices=("string", "integer"))
    numbering: str = _key("first", "how values become rows", choices=("first", "hash"))
    num_rows: int = _key(0, "rows of the table, with hash", least=0, most=_MOST_ROWS)
    min_count: int = _key(1, "rarer values share row 0", least=1)
    max_rows: int = _key(0, "most rows of the table; 0: no limit", least=0, most=_MOST_ROWS)
    table: str = _key("", "table that it shares; empty: one of its own")

    def __post_init__(self) -> None:
        check_fields(self)
        if self.numbering == "hash":
            if self.num_rows == 0:
                raise ConfigError("num_rows must be at least 1 with numbering 'hash'; set it")
            if self.min_count > 1 or self.max_rows > 0:
                raise ConfigError(
                    "min_count and max_rows are for numbering 'first', got 'hash'; leave them out"
                )
        elif self.num_rows > 0:
            raise ConfigError(
                f"num_rows is for numbering 'hash', got {self.num_rows} with 'first'; leave it "
                "out, or set max_rows"
            )
        if self.max_rows == 1:
            raise ConfigError("max_rows must be 0 (no limit) or at least 2, got 1")


@dataclass(frozen=True, kw_only=True)
class CategoricalColumn(ValueColumn):
    """A column with one value in each row.

    Attributes:
        missing: "rare" (row 0), "own" (row 1) or "error". With numbering "hash", "rare" is the row
            that the empty text hashes to, and "own" is refused.
    """

    missing: str = _key("rare", "for missing values", choices=("rare", "own", "error"))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.numbering == "hash" and self.missing == "own":
            raise ConfigError(
                "missing 'own' is for numbering 'first'; with 'hash' a missing value is always "
                "hashed as a value of its own; leave it out"
            )


@dataclass(frozen=True, kw_only=True)
class MultiColumn(ValueColumn):
    """A column with any number of values in each row. Missing or empty: an empty bag.

    Attributes:
        split: The character between the values of text; empty for lists, in Parquet and frames.
        max_length: 0 for no limit; else the first `max_length` values are kept.
        weights: The column with a number for each value, in the form of this column; empty for 1.
    """

    split: str = _key("", "character between values; empty: lists")
    max_length: int = _key(0, "most values kept; 0: no limit", least=0, most=_MOST_ROWS)
    weights: str = _key("", "column with a number for each value; empty: 1")

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.split) > 1:
            raise ConfigError(f"split must be one character, got {self.split!r}")


@dataclass(frozen=True, kw_only=True)
class SequenceColumn(MultiColumn):
    """A column with a list in order of time. The last `max_length` values are kept."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_length == 0:
            raise ConfigError("max_length is required for a sequence, and must be at least 1")


@dataclass(frozen=True, kw_only=True)
class HistoryColumn:
    """A sequence made from earlier rows: values of a column in positive rows of the same group.

    Earlier means by timestamp if the schema has one, else by order in the file. With a label and a
    timestamp, rows of an equal time are not earlier. Histories of training rows list training rows
    alone; those of other rows list all earlier positive rows.

    Attributes:
        of: The categorical column; the history shares its table.
        max_length: How many of the last values are kept.
    """

    of: str = _key("", "categorical column whose earlier values are listed")
    max_length: int = _key(20, "most values kept, the last ones", least=1, most=_MOST_ROWS)

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.of:
            raise ConfigError("of is required: the categorical column whose values are listed")


@dataclass(frozen=True, kw_only=True)
class FractionSplit:
    """In file order: first train, then test, then validation.

    Attributes:
        test: Share of the rows: a number, or text such as "1/14".
        validation: Also.
    """

    test: float | str = _key("1/14", "share of the rows")
    validation: float | str = _key("1/14", "share of the rows")

    def __post_init__(self) -> None:
        check_fields(self)
        if self.test_share + self.validation_share >= 1:
            raise ConfigError(
                f"test + validation must be below 1, got {self.test} + {self.validation}"
            )

    @property
    def test_share(self) -> Fraction:
        """`test` as an exact fraction of the rows."""
        return _parse_share("test", self.test)

    @property
    def validation_share(self) -> Fraction:
        """`validation` as an exact fraction of the rows."""
        return _parse_share("validation", self.validation)


@dataclass(frozen=True, kw_only=True)
class RandomSplit(FractionSplit):
    """At random, by a seed; rows keep the order of the file within each part."""

    seed: int = _key(0, "seed of the draw", least=0)


@dataclass(frozen=True, kw_only=True)
class TimestampSplit(FractionSplit):
    """By time: by two moments, or by shares of the rows in order of time.

    With moments, training rows are before both. The rows from the earlier moment to the later one
    are the part of the earlier moment; those from the later one on are the other part. Without
    `validation_from`, the first half of the rows from `test_from` on (in order of the file) is
    test, the rest validation. With shares, train comes first, then test, then validation; rows of
    the same time keep the order of the file.

    Attributes:
        test_from: Seconds since 1970; None for shares.
        validation_from: Also; only with `test_from`.
    """

    test_from: int | None = _key(None, "first moment of test: seconds or ISO text")
    validation_from: int | None = _key(None, "first moment of validation")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.test_from is None and self.validation_from is not None:
            raise ConfigError("validation_from needs test_from; give both, or shares")
        if self.test_from is not None and self.test_from == self.validation_from:
            raise ConfigError(
                f"test_from and validation_from must differ, got {self.test_from} twice"
            )


@dataclass(frozen=True, kw_only=True)
class ColumnSplit:
    """By the values of a column, compared as text; booleans are the texts true and false.

    Attributes:
        column: The column.
        train: Its values in rows of the training part.
        test: Of test.
        validation: Of validation; empty: the second half of the rows of test (in file order).
    """

    column: str = _key("", "column that names the part of each row")
    train: tuple[str, ...] = _key((), "its values for train")
    test: tuple[str, ...] = _key((), "its values for test")
    validation: tuple[str, ...] = _key((), "its values for validation; empty: half of test")

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.column:
            raise ConfigError("column is required with by = 'column'")
        if not self.train or not self.test:
            raise ConfigError("train and test must each list at least one value")
        values = [*self.train, *self.test, *self.validation]
        for value in values:
            if values.count(value) > 1:
                raise ConfigError(f"a value must be listed once, got {value!r} again")


@dataclass(frozen=True, kw_only=True)
class LastOneOutSplit:
    """The last row of each group is test, the one before it validation; for data without a label.

    This holds for groups of at least three rows; all other rows are for training.
    """


Split = FractionSplit | RandomSplit | TimestampSplit | ColumnSplit | LastOneOutSplit


@dataclass(frozen=True, kw_only=True)
class Negatives:
    """Rows drawn beside each positive of the training part, when the data has positives only.

    A negative is its positive with another item. Without a history of the item, that is no item of
    the group's training rows. With one, items come again: it is any item but the positive's own.

    Attributes:
        item: The categorical column that is redrawn.
        item_columns: Further categorical columns that belong to the item and change with it.
        per_positive: How many, for each positive.
        by: "uniform", or "popularity" (training counts ** 0.75).
        seed: Seed of the draw.
    """

    item: str = _key("", "categorical column that is redrawn")
    item_columns: tuple[str, ...] = _key((), "columns that change with the item")
    per_positive: int = _key(4, "negatives for each positive", least=1, most=1000)
    by: str = _key("uniform", "chance of an item", choices=("uniform", "popularity"))
    seed: int = _key(0, "seed of the draw", least=0)

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.item:
            raise ConfigError("item is required: the categorical column that is redrawn")
        if self.item in self.item_columns or len(set(self.item_columns)) < len(self.item_columns):
            raise ConfigError(
                f"item_columns must name each further column once, got {list(self.item_columns)}"
            )


def parse_seconds(name: str, value: Any) -> int:
    """Seconds since 1970 of a moment: seconds, ISO text or a date; UTC where it names no zone.

    Raises:
        ConfigError: it is none of these.
    """
    if isinstance(value, str):
        try:
            value = datetime.fromisoformat(value)
        except ValueError:
            raise ConfigError(
                f'{name} must be seconds since 1970 or ISO text such as "2014-10-29"; got {value!r}'
            ) from None
    if isinstance(value, date) and not isinstance(value, datetime):
        value = datetime.combine(value, time())
    if isinstance(value, datetime):
        value = value if value.tzinfo else value.replace(tzinfo=UTC)
        return int((value - datetime(1970, 1, 1, tzinfo=UTC)).total_seconds() // 1)
    if type(value) is int and abs(value) < 2**62:
        return value
    raise ConfigError(f"{name} must be seconds since 1970 or ISO text, got {value!r}")


def _parse_share(name: str, value: float | str) -> Fraction:
    top, slash, bottom = str(value).partition("/")
    try:
        share = Fraction(int(top), int(bottom)) if slash else Fraction(repr(float(top)))
    except (ValueError, ZeroDivisionError):
        share = Fraction(-1)
    if not 0 <= share < 1:
        raise ConfigError(
            f'{name} must be in [0, 1): a number, or text such as "1/14"; got {value!r}'
        )
    return share
