"""Drafts a schema from rows of all parts of a table, for a person to edit."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import tomli_w
from pyarrow import types

from recsys._support.untrusted import is_text
from recsys.datasets.tabular.convert import conform, is_list, plain
from recsys.datasets.tabular.read import TextFile, find_files, open_table
from recsys.datasets.tabular.schema import TIME_UNITS, Schema
from recsys.errors import ConfigError, DatasetFormatError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from pathlib import Path

    from recsys.datasets.tabular.read import ParquetFile

__all__ = ["Draft", "inspect_table"]

_NO_LABEL = """\
# WARNING: no column is known to be the label, and without a label every row counts as a
# positive; if a column is the label, name it by --label COLUMN
"""
_HEAD = """\
# A draft, guessed from {num_rows:,} rows of all parts of the first file. Check it, edit it
# (docs/tables.md lists the keys), and run
# `recsys prepare table FILES --schema THIS.toml --out STORE`.
"""
_NO_FEATURE = {  # kinds of columns
    "empty": "empty in these rows",
    "other": "its type is neither numbers, text, times nor lists of whole numbers or text",
    "time": "times; one column of times, without missing ones, is read",
    "unknown time": "looks like times; to read them, set timestamp and timestamp_format",
}
# Names of columns with a role, the likeliest first; letters alone, and without "id" at the end.
_LABELS = ("label", "click", "clicked", "target", "rating")
_SESSIONS = ("session",)
_USERS = ("user", "visitor", "customer")
_ITEMS = ("item", "product", "movie")
_TIMES = ("timestamp", "ts", "time", "eventtime", "datetime", "createdat", "date", "hour")
_EVENTS = ("event", "eventtype", "behavior", "behaviour", "action")
_PARTS = ("train", "test", "validation")

_KINDS = ("dense", "categorical", "multi", "sequence")
_DELIMITERS = "\t;|,"  # of text files
_SEPARATORS = "|;, "  # of values in one field; a space last, as it is also in what others split
# A field of a first line that is data: 7, -1 or 0.25. Names of columns are not such.
_NUMBER = r"-?[0-9]+(\.[0-9]+)?"
# A list that Python or JSON wrote: ['a', 'b'], (1, 2) or {"a": 1}.
_IN_BRACKETS = r"^\s*(\[.*\]|\(.*\)|\{.*\})\s*$"
# Text that begins with a date (2025-01-15, 2025 Jan 15; 15.01.2025, 1/15/25) or a clock (10:00).
# After it there is no digit or dot: 10.0.0.1 and 1.2.3 are none.
_DATE_OR_CLOCK = (
    r"^\s*([0-9]{4}[-/. ]([0-9]{1,2}|[A-Za-z]{3,9})[-/. ][0-9]{1,2}"
    r"|[0-9]{1,2}[-/. ]([0-9]{1,2}|[A-Za-z]{3,9})[-/. ]([0-9]{4}|[0-9]{2})"
    r"|[0-9]{1,2}:[0-9]{2})([^0-9.]|$)"
)
# A name of ids: id, user_id, userId or visitorid; not paid_ or Idea.
_ID_NAME = "(^|_|[a-z])(id|Id|ID)$"
# Numbers that are names: 007 and 0123, whose zeros would be lost; integers of 20 digits and more.
_DIGITS_OF_A_NAME = "^-?(0[0-9]+|[0-9]{20,})$"
_FORMS = ("%Y%m%d", "%y%m%d%H", "%Y%m%d%H", "%Y%m%d%H%M%S")  # of times in digits
# Seconds of 1990 to 2033: no date in digits, such as 20250115 or 2025011500, is among them.
_FIRST_SECONDS, _LAST_SECONDS = 631_152_000, 1_990_010_100


@dataclass(frozen=True)
class Draft:
    """A draft of a schema.

    Attributes:
        schema: The schema.
        reasons: Why, by column, in order of the file; for columns that are not read, too.
        key_reasons: Why, by the key: `label`, `group`, `split` and so on.
        num_rows: Rows that were looked at.
    """

    schema: Schema
    reasons: dict[str, str]
    key_reasons: dict[str, str]
    num_rows: int

    def to_toml(self) -> str:
        """The schema as TOML, with a comment on each key and column."""
        lines = [] if self.schema.label else [_NO_LABEL]
        lines.append(_HEAD.format(num_rows=self.num_rows))
        tables = []
        for key, value in self.schema.as_dict().items():
            why = self.key_reasons.get(key, "")
            if key in _KINDS:
                for name, keys in value.items():
                    tables += ["", f"# {self.reasons[name]}", _dump({key: {name: keys}})]
            elif isinstance(value, dict):
                tables += ["", *([f"# {why}"] if why else []), _dump({key: value})]
            else:
                lines.append(_dump({key: value}) + (f"  # {why}" if why else ""))
        ignored = [
            f"#   {name!r}: {why}"
            for name, why in self.reasons.items()
            if name not in self.schema.columns
        ]
        lines += ["", "# Not read:", *ignored] if ignored else []
        return "\n".join([*lines, *tables]) + "\n"


def inspect_table(
    paths: Sequence[str | Path],
    *,
    label: str = "",
    group: str = "",
    item: str = "",
    ignore: Collection[str] = (),
    names: Sequence[str] = (),
    quote: str = '"',
) -> Draft:
    """Draft what the columns of a table mean, from rows of all parts of its first file.

    Args:
        paths: Files and folders, as for `TableFiles`.
        label: The column of labels; empty to guess it.
        group: The column of groups, such as users; empty to guess it.
        item: The column of items, for data without a label; empty to guess it.
        ignore: Columns to leave out.
        names: The names of the columns of a text file whose first line is data.
        quote: The key `quote` of the schema.

    Raises:
        FileNotFoundError: a file does not exist.
        ConfigError: an argument names no column; `quote` is not one character; or there is no
            label, and no group and item that negatives could be drawn for.
        DatasetFormatError: the file breaks its format, or has no rows or no line of names.
    """
    Schema.from_dict({"label": "y", "categorical": {"c": {}}, "quote": quote})
    file, delimiter = _open(find_files(paths)[0], quote, names)
    shown = ", ".join(map(repr, file.column_names[:30]))
    read = [
        name
        for name in file.column_names
        if name not in ignore and name and is_text(name) and name[0] != "/"
    ]
    for name in (*{*ignore} - {*file.column_names}, *{label, group, item} - {"", *read}):
        raise ConfigError(
            f"{file.path}: no column that can be read is named {name!r}; its columns are {shown}"
        )
    table = file.sample()
    if not table.num_rows:
        raise DatasetFormatError(f"{file.path} must have at least one row of data, has none")
    facts = {name: _measure(name, table.column(name)) for name in read}
    reasons = dict.fromkeys(
        file.column_names, "its name is empty, not printable, or begins with a slash"
    )
    reasons |= dict.fromkeys(ignore, "named by --ignore") | dict.fromkeys(read, "")
    tree = {"delimiter": delimiter, "quote": quote, "names": list(names)}
    guess = _Guess(facts, reasons, table.num_rows, tree)
    guess.give_roles(label, group, item)
    for found in facts.values():
        if not reasons[found.name]:
            guess.give_kind(found)
    guess.complete(file.path)
    return Draft(Schema.from_dict(tree), reasons, guess.key_reasons, table.num_rows)


def _open(path: str, quote: str, names: Sequence[str]) -> tuple[TextFile | ParquetFile, str]:
    """Open a file; a text file with the delimiter that its first line holds most often."""
    file = open_table(path, quote=quote, check_names=False)
    delimiter = ""
    if isinstance(file, TextFile):
        first = file.delimiter.join(file.column_names)
        best = max((file.delimiter, *_DELIMITERS), key=first.count)
        delimiter = "" if best == file.delimiter else best
        fields = first.split(best)
        is_data = any(re.fullmatch(_NUMBER, text) for text in fields)
        if is_data and not names and fields != [str(number) for number in range(len(fields))]:
            raise DatasetFormatError(
                f"{path}, line 1: must name the columns, got {first[:80]!r}; if this is data, name "
                f"its {len(fields)} columns by --no-header NAME NAME ..., else rename them"
            )
    return open_table(path, delimiter, quote, names), delimiter


@dataclass(frozen=True, kw_only=True)
class _Facts:
    """What a sample shows of a column.

    Attributes:
        name: The column.
        kind: "integer", "number", "text", "bool", "time", "list", "empty", "unknown time" (text
            that looks like times, but is not ISO text), or "other".
        array: The values of all rows; text that is numbers throughout is numbers.
        num_distinct: Different values; 0 for lists.
        counts: How often each value occurs, by the value as text, the rarest first; empty if there
            are more than 10.
        time_format: Key `timestamp_format` under which all values are times; None for no times.
    """

    name: str
    kind: str
    array: pa.Array
    num_distinct: int
    counts: dict[str, int]
    time_format: str | None

    @property
    def stem(self) -> str:
        """The name as the lists of names have it: `user` for "User-ID"."""
        return re.sub("[^a-z]", "", self.name.lower()).removesuffix("id")

    @property
    def is_binary(self) -> bool:
        """Whether a column holds 0 and 1, or true and false, or one of the two."""
        values = {value.lower() for value in self.counts}
        return bool(values) and (values <= {"0", "1", "0.0", "1.0"} or values <= {"false", "true"})

    @property
    def quantiles(self) -> tuple[float, float, float]:
        """Lowest number, median and highest number."""
        numbers = self.array.cast(pa.float64(), safe=False)
        least, median, most = pc.quantile(numbers, [0.0, 0.5, 1.0]).to_pylist()
        return least, median, most


def _measure(name: str, column: pa.ChunkedArray) -> _Facts:
    """Measure one column of at least one row; it is text in text files."""
    given = plain(pa.concat_arrays(column.chunks))
    array = _as_numbers(given) if types.is_string(given.type) else given
    if types.is_floating(array.type) and re.search(_ID_NAME, name):
        # pandas writes integers of a column with missing values so: text "3.0", or doubles
        array = given if types.is_string(given.type) else _as_numbers(given)
    values, kind = array.drop_null(), _kind(array.drop_null())
    counts: dict[str, int] = {}
    counted: Any = [] if kind in ("empty", "other", "list") else values.value_counts()
    if 0 < len(counted) <= 10:
        pairs = sorted((pair["counts"], str(pair["values"])) for pair in counted.to_pylist())
        counts = {value: count for count, value in pairs}
    time_format = "" if kind == "time" else None
    if kind in ("integer", "number"):
        time_format = _time_format(values)
    return _Facts(
        name=name,
        kind=kind,
        array=array,
        num_distinct=len(counted),
        counts=counts,
        time_format=time_format,
    )


def _kind(values: pa.Array) -> str:
    """The kind of a column with these values; see `_Facts`."""
    kind = values.type
    if not len(values):
        return "empty"
    if is_list(kind):
        parts = _as_numbers(plain(values.flatten()).drop_null()).type
        return "list" if types.is_integer(parts) or types.is_string(parts) else "other"
    is_value = types.is_primitive(kind) or types.is_string(kind) or types.is_decimal(kind)
    if not is_value or types.is_time(kind) or types.is_duration(kind):
        return "other"
    is_iso = types.is_string(kind) and "-" in values[0].as_py()
    if types.is_temporal(kind) or (is_iso and _conformed(values, timestamp="x") is not None):
        return "time"
    if types.is_string(kind):
        is_time = pc.mean(pc.match_substring_regex(values, _DATE_OR_CLOCK)).as_py() >= 0.9
        return "unknown time" if is_time else "text"
    names = {pa.bool_(): "bool"}
    return names.get(kind, "integer" if types.is_integer(kind) else "number")


def _as_numbers(array: pa.Array) -> pa.Array:
    """Text or floats that are integers throughout, as these; text of numbers, as floats."""
    is_text, is_float = types.is_string(array.type), types.is_floating(array.type)
    is_name = is_text and pc.any(pc.match_substring_regex(array, _DIGITS_OF_A_NAME)).as_py()
    for kind in (pa.int64(), pa.float64()) if is_float or (is_text and not is_name) else ():
        with suppress(pa.ArrowInvalid):
            return plain(array.cast(kind))
    return array


def _conformed(array: pa.Array, **keys: str) -> pa.Array | None:
    """The array as a schema with these keys reads column "x"; None if it does not."""
    schema = Schema.from_dict({"label": "y", "categorical": {"c": {}}, **keys})
    batch = pa.RecordBatch.from_arrays([array], ["x"])
    with suppress(DatasetFormatError):
        return conform(batch, schema, "row {}".format, optional=["x"]).column(0)
    return None


def _time_format(array: pa.Array) -> str | None:
    """The key under which numbers may be times: since 1970 in some unit, or the digits of dates."""
    for form in ("", *TIME_UNITS, *_FORMS):
        times = _conformed(array, timestamp="x", timestamp_format=form)
        seconds = [] if times is None else [pc.min(times).as_py(), pc.max(times).as_py()]
        if seconds and seconds[0] >= _FIRST_SECONDS and seconds[1] < _LAST_SECONDS:
            return form
    return None


def _separator(array: pa.Array) -> str:
    """The character that splits text into parts that repeat, as tags do and sentences do not.

    At least a fifth of the values must contain it. The parts must be far fewer than they would be
    if each were new; and a space must not split text that another character splits. Lists as Python
    or JSON writes them are not split: brackets would be part of values.
    """
    is_list_of_code = pc.mean(pc.match_substring_regex(array, _IN_BRACKETS)).as_py() >= 0.9
    for separator in "" if is_list_of_code else _SEPARATORS:
        parts = plain(pc.split_pattern(array, pattern=separator).flatten()).drop_null()
        is_found = pc.mean(pc.match_substring(array, separator)).as_py() >= 0.2
        if is_found and len(parts.unique()) < min(len(array.unique()) + 1, len(parts) / 2):
            return separator
    return ""


@dataclass
class _Guess:
    """A schema's keys while they are guessed, and the reasons.

    Attributes:
        facts: The columns that may be read, by name.
        reasons: Why, by column; "" for a column that has no meaning yet.
        num_rows: Rows that were looked at.
        tree: The keys.
        key_reasons: Why, by the key.
        item: The column of items; empty for none.
        event: The column of kinds of events, in data without a label; None for none.
    """

    facts: dict[str, _Facts]
    reasons: dict[str, str]
    num_rows: int
    tree: dict[str, Any]
    key_reasons: dict[str, str] = field(default_factory=dict)
    item: str = ""
    event: _Facts | None = None

    def give_roles(self, label: str, group: str, item: str) -> None:
        """Find label, column of the split, timestamp, group, item and kinds of events."""
        chosen = self.facts.get(label) or self._find(
            _LABELS, lambda facts: facts.is_binary or facts.kind in ("integer", "number")
        )
        if chosen is not None and item and not label:
            self.reasons[chosen.name] = "named like a label, but --item says that there is none"
        elif chosen is not None:
            rule = {} if chosen.is_binary else {"positive": _positive(chosen)}
            self.tree |= rule
            why = "named by --label" if label else "by its name"
            self._take("label", chosen, why + "; the rule is a guess" * bool(rule))
        split = self._find(("split",), lambda facts: set() < {*facts.counts} <= {*_PARTS})
        if split is not None:
            self.reasons[split.name] = self.key_reasons["split"] = "by its name and values"
            parts = {part: [part] for part in _PARTS if part in ("train", "test", *split.counts)}
            self.tree["split"] = {"by": "column", "column": split.name, **parts}
        times = [
            facts
            for facts in self.facts.values()
            if facts.time_format is not None
            and not self.reasons[facts.name]
            and not facts.array.null_count
            and (facts.kind == "time" or facts.stem in _TIMES)
        ]
        if times:
            finest = max(times, key=lambda facts: facts.num_distinct)
            form = self.tree["timestamp_format"] = finest.time_format
            self._take("timestamp", finest, f"times of the form {form}" if form else "times")
        found = self.facts.get(group) or self._find(
            (*_SESSIONS, *_USERS),
            lambda facts: facts.kind in ("integer", "text") and not facts.array.null_count,
        )
        if found is not None:
            self._take("group", found, "named by --group" if group else "by its name")
            # A session does not come again, so it has no table; a user may.
            is_new = found.stem in _SESSIONS
            self.reasons[found.name] = "sessions do not come again" if is_new else ""
        if "label" not in self.tree:
            items = self.facts.get(item) or self._find(
                _ITEMS, lambda facts: facts.kind in ("integer", "text")
            )
            self.item = items.name if items is not None else ""
            self.event = self._find(_EVENTS, lambda facts: len(facts.counts) > 1)
            if self.event is not None:
                self.reasons[self.event.name] = "kinds of events"

    def give_kind(self, facts: _Facts) -> None:
        """Find the kind of a column that has no role but perhaps that of the group or the item."""
        array, num_distinct = facts.array, facts.num_distinct
        missing = f", {array.null_count / self.num_rows:.1%} missing" if array.null_count else ""
        shown = f"{num_distinct:,} different values in {self.num_rows:,} rows{missing}"
        has_role = facts.name in (self.tree.get("group"), self.item)
        is_text = facts.kind == "text" and not has_role
        separator = _separator(array.drop_null()) if is_text else ""
        if facts.kind in _NO_FEATURE:
            self.reasons[facts.name] = _NO_FEATURE[facts.kind]
        elif num_distinct == 1 and self.num_rows > 1 and not has_role:
            self.reasons[facts.name] = "one value in all these rows"
        elif facts.kind == "list" or separator:
            lists = pc.split_pattern(array, pattern=separator) if separator else array
            values = _values(_as_numbers(plain(lists.flatten()).drop_null()))
            what = f"split by {separator!r}" if separator else "lists"
            why = f"{what}{missing}; a sequence if they are in order of time"
            self._add("multi", facts, why, values=values, split=separator)
        elif facts.kind == "number":
            least, median, most = facts.quantiles
            transform = "log" if least >= 0 and most > 20 * median else "standardize"
            why = f"numbers from {least:g} to {most:g}, median {median:g}{missing}"
            self._add("dense", facts, why, transform=transform)
        elif num_distinct > 0.98 * self.num_rows > 100 and not has_role:
            self.reasons[facts.name] = f"a number or name of the row: {shown}"
        else:
            names = {"bool": "true (1) or false (0)", "integer": "integers", "text": "text"}
            hint = "; dense if they are amounts" * (facts.kind == "integer" and not has_role)
            why = f"{names[facts.kind]}, {shown}{hint}"
            self._add("categorical", facts, why, values=_values(array))

    def complete(self, path: str) -> None:
        """Add the split; for data without a label also negatives and a history.

        Args:
            path: The file, for messages.
        """
        tree, shares = self.tree, {"test": "1/10", "validation": "1/10"}
        has_time = "timestamp" in tree
        if "label" not in self.tree:
            if "group" not in tree or self.item not in tree.get("categorical", {}):
                raise ConfigError(
                    f"{path}: no column is named {', '.join(_LABELS)}; name the label by --label "
                    "COLUMN, or, if every row is a positive, name the column of users or sessions "
                    "by --group COLUMN, and that of items by --item COLUMN"
                )
            self._draw_negatives()
            if self.event is not None:
                self._choose_event(self.event)
            split = {"by": "last_one_out"}
            why = f"the last row of each group by {'time' if has_time else 'order in the file'}"
            groups, items = (self.facts[name].array for name in (tree["group"], self.item))
            is_same = pc.equal(groups[1:], groups[:-1])
            is_later = pc.greater_equal(items[1:], items[:-1]).filter(is_same)
            is_in_order = len(is_later) > 100 and pc.mean(is_later).as_py() > 0.95
            if not has_time and is_in_order:
                split = {"by": "random", **shares}
                why = f"rows of a group are in order of {self.item!r}, not of time"
            elif has_time or "split" not in tree or self.facts[tree["group"]].stem in _SESSIONS:
                tree["history"] = {
                    "recent": {"of": self.item},
                    **tree.get("history", {}),
                }
                self.key_reasons["history"] = "earlier items of the group"
        elif has_time:
            split, why = {"by": "timestamp", **shares}, "the latest rows, as in use"
        elif column := self._sorted_by():
            split = {"by": "random", **shares}
            why = f"rows with the same {column!r} stand together, so parts of the file differ"
        else:
            split, why = {"by": "fraction", **shares}, "order in the file, taken for that of time"
        if "split" not in tree:
            tree["split"], self.key_reasons["split"] = split, why

    def _draw_negatives(self) -> None:
        """Add negatives; columns that belong to the item change with it, or are left out."""
        tree, others = self.tree, []
        for name, facts in self.facts.items():
            kind = next((kind for kind in _KINDS if name in tree.get(kind, {})), "")
            if not kind or not facts.num_distinct or name in (self.item, tree["group"]):
                continue
            pairs = pa.table({"item": self.facts[self.item].array, "other": facts.array})
            num_pairs = pairs.group_by(["item", "other"]).aggregate([]).num_rows
            if num_pairs > self.facts[self.item].num_distinct or 2 * num_pairs > self.num_rows:
                continue
            if kind == "categorical":
                others.append(name)
            else:
                del tree[kind][name]
                self.reasons[name] = "belongs to the item, and a negative would keep it"
        tree["negatives"] = {"item": self.item, "item_columns": others}
        self.key_reasons["negatives"] = (
            "items that are not the group's; add per_positive = 0 for sasrec and two_tower"
            + f"; {', '.join(others)} change with the item" * bool(others)
        )

    def _choose_event(self, event: _Facts) -> None:
        """Predict the rarest kind of event that groups have often; histories list the others.

        Often is three times: with less, no row of a group is held back for test.
        """
        kinds, groups = event.array.cast(pa.string()), self.facts[self.tree["group"]].array
        rows = pa.table({"kind": kinds, "group": groups}).group_by("kind")
        counted = rows.aggregate([("group", "count_distinct")]).to_pylist()
        groups_of = {row["kind"]: row["group_count_distinct"] for row in counted}
        often = [kind for kind, count in event.counts.items() if count >= 3 * groups_of[kind]]
        chosen = (often or list(event.counts)[-1:])[0]
        self.tree["filter"] = {event.name: [chosen]}
        shown = (f"{kind} {count / self.num_rows:.1%}" for kind, count in event.counts.items())
        self.key_reasons["filter"] = f"what to predict, of {', '.join(shown)}"
        self.tree["history"] = {
            f"recent_{kind}": {"of": self.item, "where": {event.name: [kind]}}
            for kind in event.counts
            if kind != chosen
        }

    def _sorted_by(self) -> str:
        """The label or the group, if rows with one value of it stand together; else ""."""
        for name in (self.tree["label"], self.tree.get("group")):
            if name and 2 * self.facts[name].num_distinct <= self.num_rows:
                array = self.facts[name].array
                changed = pc.not_equal(array[1:], array[:-1]).true_count
                if changed < 1.1 * self.facts[name].num_distinct:
                    return str(name)
        return ""

    def _find(self, names: Sequence[str], fits: Callable[[_Facts], bool]) -> _Facts | None:
        """The column without a meaning whose name is the earliest of `names`, and that fits."""
        free = [facts for facts in self.facts.values() if not self.reasons[facts.name]]
        by_name = {facts.stem: facts for facts in reversed(free)}
        return next(
            (by_name[name] for name in names if name in by_name and fits(by_name[name])), None
        )

    def _take(self, role: str, facts: _Facts, why: str) -> None:
        self.tree[role] = facts.name
        self.reasons[facts.name] = self.key_reasons[role] = why

    def _add(self, kind: str, facts: _Facts, why: str, **keys: str) -> None:
        if kind != "dense" and "." in facts.name:  # which names of tables do not have
            keys["table"] = facts.name.replace(".", "_")
        self.tree.setdefault(kind, {})[facts.name] = keys
        self.reasons[facts.name] = why


def _values(array: pa.Array) -> str:
    kind = array.type
    return "integer" if types.is_integer(kind) or types.is_boolean(kind) else "string"


def _positive(facts: _Facts) -> str:
    """The key `positive` for a label that is not 0 and 1: a rule for numbers, or the rarest text.

    Raises:
        ConfigError: its values are neither numbers nor a few texts.
    """
    if facts.kind in ("integer", "number"):
        least, median, most = facts.quantiles
        # With ">= MEDIAN", every row would be a positive where the median is the least value.
        return f"{'>' if least == median < most else '>='} {median:.15g}"
    if facts.kind == "text" and facts.counts:
        return f"== {next(iter(facts.counts))}"
    raise ConfigError(
        f"label {facts.name!r} must hold 0 and 1, true and false, numbers, or at most 10 different "
        f"texts, found {facts.kind}; name another column"
    )


def _dump(keys: dict[str, Any]) -> str:
    return tomli_w.dumps(keys).strip("\n")
