"""Guesses a schema from the first rows of a table: a draft for a person to edit."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import tomli_w

from recsys._support.untrusted import is_text
from recsys.datasets.tabular.reading.files import ParquetFile, open_file
from recsys.datasets.tabular.reading.paths import find_files
from recsys.datasets.tabular.reading.text_files import DELIMITERS, TextFile
from recsys.datasets.tabular.schemas.schema import Schema, check_delimiter
from recsys.errors import ConfigError, DatasetFormatError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from pathlib import Path

    from recsys.datasets.tabular.guessing.column_facts import ColumnFacts

__all__ = ["Guess", "guess_schema"]

_SAMPLE_ROWS = 100_000
_NO_LABEL = """\
# WARNING: no column is known to be the label, and without a label every row counts as a
# positive; if a column is the label, name it by --label COLUMN
"""
_HEAD = """\
# A draft, guessed from the first {num_rows:,} rows. Check it, edit it (docs/tables.md lists
# the keys), and run `recsys prepare table FILES --schema THIS.toml --out STORE`.
"""
_NOT_READ = {  # kinds of columns that are no features
    "empty": "empty in these rows",
    "other": "its type is neither numbers, text, times nor lists of whole numbers or text",
    "time": "times; one column of times is read",
    "unknown time": "looks like times; to read them, set timestamp and timestamp_format",
}

_NO_NAME = "its name is empty, not printable, or begins with a slash"

# Names of columns with a role, the likeliest first.
_LABELS = ("label", "click", "rating")
_SESSIONS = ("session", "session_id")
_USERS = ("user", "user_id")
_ITEMS = ("item", "item_id")
_TIMES = ("timestamp", "time", "date", "hour")
_PARTS = ("train", "test", "validation")


@dataclass(frozen=True)
class Guess:
    """A guessed schema.

    Attributes:
        schema: The schema.
        reasons: Why, by column, in order of the file; for ignored columns, too.
        role_reasons: Why, by the key `label`, `group`, `timestamp` or `weight`.
        num_rows: Rows that were looked at.
    """

    schema: Schema
    reasons: dict[str, str]
    role_reasons: dict[str, str]
    num_rows: int

    def to_toml(self) -> str:
        """The schema as TOML, with a comment on each column."""
        tree = self.schema.as_dict()
        tables = {name: tree.pop(name) for name in list(tree) if isinstance(tree[name], dict)}
        lines = [] if self.schema.label else [_NO_LABEL]
        lines.append(_HEAD.format(num_rows=self.num_rows))
        for key, value in tree.items():
            why = self.role_reasons.get(key, "")
            lines.append(f"{_dump({key: value})}{'  # ' if why else ''}{why}")
        read = self.schema.columns
        ignored = [f"#   {name!r}: {why}" for name, why in self.reasons.items() if name not in read]
        if ignored:
            lines += ["", "# Not read:", *ignored]
        for kind, keys in tables.items():
            if kind in ("split", "negatives"):
                lines += ["", _dump({kind: keys})]
                continue
            for name, of_column in keys.items():
                why = self.reasons.get(name, "earlier items of the group")
                lines += ["", f"# {why}", _dump({kind: {name: of_column}})]
        return "\n".join(lines) + "\n"


def guess_schema(
    paths: Sequence[str | Path],
    *,
    label: str = "",
    ignore: Collection[str] = (),
    quote: str = '"',
) -> Guess:
    """Guess what the columns of a table mean, from the first 100,000 rows of its first file.

    Args:
        paths: Files and folders, as for `TableFiles`.
        label: The column of labels; empty to guess it.
        ignore: Columns to leave out.
        quote: The key `quote` of the schema.

    Raises:
        FileNotFoundError: a file does not exist.
        ConfigError: `label` or `ignore` names no column; `quote` is not one character; or there is
            no label, and no group and item that negatives could be drawn for.
        DatasetFormatError: the file breaks its format, or has no rows.
        MissingDependency: pyarrow is not installed.
    """
    check_delimiter("", quote)
    file, delimiter = _open(find_files(paths)[0], quote)
    shown = ", ".join(map(repr, file.column_names[:30]))
    if unknown := sorted(set(ignore) - set(file.column_names)):
        raise ConfigError(f"{file.path} has no column {unknown[0]!r}; its columns are {shown}")
    read = [
        name
        for name in file.column_names
        if name not in ignore and name and is_text(name) and name[0] != "/"
    ]
    if label and label not in read:
        raise ConfigError(
            f"{file.path}: no column that can be read is named {label!r}, as the label should be; "
            f"its columns are {shown}"
        )
    table = file.sample(_SAMPLE_ROWS)
    if not table.num_rows:
        raise DatasetFormatError(f"{file.path} must have at least one row of data, has none")

    from recsys.datasets.tabular.guessing.column_facts import measure_column

    facts = {name: measure_column(name, table.column(name)) for name in read}
    reasons = dict.fromkeys(file.column_names, _NO_NAME)
    reasons |= dict.fromkeys(ignore, "named by --ignore") | dict.fromkeys(read, "")
    draft = _Draft(facts, reasons, table.num_rows, {"delimiter": delimiter, "quote": quote})
    draft.give_roles(label)
    for each in facts.values():
        if not reasons[each.name]:
            draft.give_kind(each)
    draft.complete(str(file.path))
    return Guess(Schema.from_dict(draft.tree), reasons, draft.role_reasons, table.num_rows)


def _open(path: Path, quote: str) -> tuple[TextFile | ParquetFile, str]:
    """Open a file; a text file with the delimiter that its first line holds most often."""
    file = open_file(path, quote=quote)
    if isinstance(file, TextFile):
        header = file.delimiter.join(file.column_names)
        best = max((file.delimiter, *DELIMITERS), key=header.count)
        if best != file.delimiter:
            return TextFile(path, best, quote), best
    return file, ""


@dataclass
class _Draft:
    """A schema's keys while they are guessed, and the reasons.

    Attributes:
        facts: The columns that may be read, by name.
        reasons: Why, by column; "" for a column that has no meaning yet.
        num_rows: Rows that were looked at.
        tree: The keys.
        role_reasons: Why, by the key of a role.
    """

    facts: dict[str, ColumnFacts]
    reasons: dict[str, str]
    num_rows: int
    tree: dict[str, Any]
    role_reasons: dict[str, str] = field(default_factory=dict)

    def give_roles(self, label: str) -> None:
        """Find label, column of the split, weight, timestamp and group."""
        chosen = self.facts.get(label) or self._find(
            _LABELS, lambda each: _is_binary(each) or each.kind in ("integer", "number")
        )
        if chosen is not None:
            why = "named by --label" if label else "by its name"
            if not _is_binary(chosen):
                self.tree["positive"] = _guess_positive(chosen)
                why += "; the rule is a guess"
            if chosen.few_values:
                why += f"; values {', '.join(chosen.few_values)}"
            self._take("label", chosen, why)
        split = self._find(("split",), lambda each: set(each.few_values) <= set(_PARTS))
        if split is not None and split.few_values:
            self.reasons[split.name] = "by its name and values"
            parts = {
                part: [part] for part in _PARTS if part in {"train", "test", *split.few_values}
            }
            self.tree["split"] = {"by": "column", "column": split.name, **parts}
        weight = self._find(("weight",), lambda each: each.kind == "number" and each.least >= 0)
        if weight is not None:
            self._take("weight", weight, "by its name")
        times = [
            each
            for each in self.facts.values()
            if each.time_format is not None
            and not self.reasons[each.name]
            and (each.kind == "time" or _plain_name(each.name) in _TIMES)
        ]
        if times:
            finest = max(times, key=lambda each: each.num_distinct)
            form = self.tree["timestamp_format"] = finest.time_format
            self._take("timestamp", finest, f"times of the form {form}" if form else "times")
        group = self._find(
            (*_SESSIONS, *_USERS),
            lambda each: each.kind in ("integer", "text") and not each.num_missing,
        )
        if group is not None:
            self._take("group", group, "by its name")
            # A session does not come again, so it has no table; a user may.
            self.reasons[group.name] = (
                "sessions do not come again" if self._is_of_sessions() else ""
            )

    def give_kind(self, each: ColumnFacts) -> None:
        """Find the kind of a column that has no role but perhaps that of the group."""
        is_integer = each.kind == "bool" or "integer" in (each.kind, each.element_kind)
        keys: dict[str, Any] = {"values": "integer" if is_integer else "string"}
        missing = f", {each.num_missing / self.num_rows:.1%} missing" if each.num_missing else ""
        facts = f"{each.num_distinct:,} different values in {self.num_rows:,} rows{missing}"
        is_group = each.name == self.tree.get("group")
        if each.kind in _NOT_READ:
            self.reasons[each.name] = _NOT_READ[each.kind]
        elif each.kind == "list" or (each.separator and not is_group):
            what = f"split by {each.separator!r}" if each.separator else "lists"
            why = f"{what}{missing}; a sequence if they are in order of time"
            self._add("multi", each, keys | {"split": each.separator}, why)
        elif each.num_distinct == 1 and self.num_rows > 1:
            self.reasons[each.name] = "one value in all these rows"
        elif each.kind == "number":
            transform = "log" if each.least >= 0 and each.most > 20 * each.median else "standardize"
            self._add("dense", each, {"transform": transform}, f"numbers from {each.least:g} to "
                      f"{each.most:g}, median {each.median:g}{missing}")  # fmt: skip
        elif each.num_distinct > 0.98 * self.num_rows > 100 and not is_group:
            self.reasons[each.name] = f"a number or name of the row: {facts}"
        elif each.kind == "integer":
            self._add("categorical", each, keys, f"integers, {facts}; dense if they are amounts")
        else:
            what = "true (1) or false (0)" if each.kind == "bool" else "text"
            self._add("categorical", each, keys, f"{what}, {facts}")

    def complete(self, path: str) -> None:
        """Add split, and for data without a label negatives and a history.

        Args:
            path: The file, for messages.
        """
        tree = self.tree
        if "label" not in tree:
            named = [name for name in tree.get("categorical", {}) if _plain_name(name) in _ITEMS]
            if "group" not in tree or not named:
                raise ConfigError(
                    f"{path}: no column is named {', '.join(_LABELS)}; name the label by --label "
                    "COLUMN, or, if every row is a positive, write a schema with [negatives]"
                )
            tree["negatives"] = {"item": named[0]}
            if "timestamp" in tree or self._is_of_sessions():
                name = "recent_" if "recent" in self.reasons else "recent"
                tree["history"] = {name: {"of": named[0]}}
                tree.setdefault("split", {"by": "last_one_out"})
        by = "timestamp" if "timestamp" in tree else "fraction"
        tree.setdefault("split", {"by": by, "test": "1/10", "validation": "1/10"})

    def _find(
        self, names: Sequence[str], fits: Callable[[ColumnFacts], bool]
    ) -> ColumnFacts | None:
        """The column without a meaning whose name is the earliest of `names`, and that fits."""
        free = [each for each in self.facts.values() if not self.reasons[each.name]]
        by_name = {_plain_name(each.name): each for each in reversed(free)}
        found = (by_name[name] for name in names if name in by_name)
        return next(filter(fits, found), None)

    def _take(self, role: str, each: ColumnFacts, why: str) -> None:
        self.tree[role] = each.name
        self.reasons[each.name] = self.role_reasons[role] = why

    def _is_of_sessions(self) -> bool:
        return _plain_name(self.tree["group"]) in _SESSIONS

    def _add(self, kind: str, each: ColumnFacts, keys: dict[str, Any], why: str) -> None:
        if kind != "dense" and "." in each.name:  # which names of tables do not have
            keys["table"] = each.name.replace(".", "_")
        self.tree.setdefault(kind, {})[each.name] = keys
        self.reasons[each.name] = why


def _is_binary(each: ColumnFacts) -> bool:
    """Whether a column holds 0 and 1, or true and false, or one of the two."""
    values = set(each.few_values)
    return bool(values) and (values <= {"0", "1", "0.0", "1.0"} or values <= {"false", "true"})


def _plain_name(name: str) -> str:
    """A column's name as the lists of names have it: `user_id` for "User-ID"."""
    return re.sub(r"[\s_.-]+", "_", name.strip().lower())


def _guess_positive(each: ColumnFacts) -> str:
    """The key `positive` for a label that is not 0 and 1.

    Raises:
        ConfigError: its values are not numbers.
    """
    if each.kind not in ("integer", "number"):
        raise ConfigError(
            f"label {each.name!r} must hold 0 and 1, true and false, or numbers, found {each.kind}"
            '; name another column, or write a schema with a rule for text: positive = "== yes"'
        )
    # With ">= MEDIAN", every row would be a positive where the median is the least value.
    comparison = ">" if each.least == each.median < each.most else ">="
    return f"{comparison} {each.median:.15g}"


def _dump(keys: dict[str, Any]) -> str:
    return tomli_w.dumps(keys).strip("\n")
