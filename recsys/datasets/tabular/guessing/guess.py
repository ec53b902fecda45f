"""Guesses a schema from the first rows of a table: a draft for a person to edit."""

from __future__ import annotations

import re
import textwrap
from contextlib import suppress
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, Any

import tomli_w

from recsys._support.untrusted import is_text
from recsys.datasets.tabular.reading.files import ParquetFile, open_file
from recsys.datasets.tabular.reading.optional_pyarrow import import_pyarrow
from recsys.datasets.tabular.reading.paths import find_files
from recsys.datasets.tabular.reading.text_files import DELIMITERS, TextFile
from recsys.datasets.tabular.schemas.schema import Schema, check_delimiter
from recsys.datasets.tabular.schemas.schema_parts import PositiveRule
from recsys.datasets.tabular.store_parts.item_values import columns_of_items
from recsys.errors import ConfigError, DatasetFormatError

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from pathlib import Path

    import pyarrow as pa

    from recsys.datasets.tabular.guessing.column_facts import ColumnFacts

__all__ = ["Guess", "guess_schema"]

_SAMPLE_ROWS = 100_000
_HISTORY_LENGTH = 20
_UNNAMED = "a column without a name, as `to_csv` writes the index of a frame"
_NO_LABEL = (
    "no column is known to be the label, and without a label every row counts as a positive; if a "
    "column is the label, name it by --label COLUMN"
)

# Names of columns with a role, the likeliest first.
_LABELS = ("label", "click", "rating")
_SESSIONS = ("session", "session_id")
_USERS = ("user", "user_id")
_ITEMS = ("item", "item_id")
_TIMES = ("timestamp", "time", "date", "hour")
_PARTS = ("train", "test", "validation")
_NEEDED = ("train", "test")
_MOST_LETTERS = 20


@dataclass(frozen=True)
class Guess:
    """A guessed schema.

    Attributes:
        schema: The schema.
        reasons: Why, by column, in order of the file; for ignored columns, too.
        role_reasons: Why, by the key `label`, `group`, `timestamp` or `weight`.
        num_rows: Rows that were looked at.
        warnings: What is probably wrong with the draft or the file, a sentence each.
    """

    schema: Schema
    reasons: dict[str, str]
    role_reasons: dict[str, str]
    num_rows: int
    warnings: tuple[str, ...] = ()

    def to_toml(self) -> str:
        """The schema as TOML, with the warnings first and a comment on each column."""
        tree = self.schema.as_dict()
        tables = {name: tree.pop(name) for name in list(tree) if isinstance(tree[name], dict)}
        lines = [line for each in self.warnings for line in (*_as_comment(f"WARNING: {each}"), "")]
        lines += [
            f"# A draft, guessed from the first {self.num_rows:,} rows. Check it, edit it "
            "(docs/tables.md lists",
            "# the keys), and run `recsys prepare table FILES --schema THIS.toml --out STORE`.",
            "",
        ]
        for key, value in tree.items():
            why = self.role_reasons.get(key, "")
            lines.append(f"{_dump({key: value})}{'  # ' if why else ''}{why}")
        read = self.schema.columns
        ignored = [name for name in self.reasons if name not in read]
        if ignored:
            lines += ["", "# Not read:"]
            lines += [
                f"#   {f'{name!r}: ' if name else ''}{self.reasons[name]}" for name in ignored
            ]
        for kind, columns in tables.items():
            if kind in ("split", "negatives"):
                column = columns.get("column", "")
                why = self.reasons[column] if column else ""
                lines += ["", *([f"# {why}"] if why else []), _dump({kind: columns})]
                continue
            for name, keys in columns.items():
                comment = _as_comment(self.reasons.get(name, ""))
                lines += ["", *comment, _dump({kind: {name: keys}})]
        return "\n".join(lines) + "\n"


def guess_schema(
    paths: Sequence[str | Path],
    *,
    label: str = "",
    ignore: Collection[str] = (),
    quote: str = '"',
) -> Guess:
    """Guess what the columns of a table mean, from its first 100,000 rows.

    Args:
        paths: Files and folders, as for `TableFiles`. Those that hold the first 100,000 rows must
            have the columns of the first file.
        label: The column of labels; empty to guess it.
        ignore: Columns to leave out.
        quote: The key `quote` of the schema.

    Raises:
        FileNotFoundError: a file does not exist.
        ConfigError: `label` or `ignore` names no column; `quote` is not one character; or there is
            no label, and no group and item that negatives could be drawn for.
        DatasetFormatError: a file breaks its format, the files have no rows, or a column has
            different types in two files.
        MissingDependency: pyarrow is not installed.
    """
    check_delimiter("", quote)
    files = find_files(paths)
    file, delimiter = _open(files[0], quote)
    for name in (*([label] if label else []), *ignore):
        if name not in file.column_names:
            shown = ", ".join(map(repr, file.column_names[:30]))
            raise ConfigError(f"{file.path} has no column {name!r}; its columns are {shown}")
    table = _sample(file, files[1:], delimiter, quote)
    if not table.num_rows:
        raise DatasetFormatError(f"{file.path} must have at least one row of data, has none")

    from recsys.datasets.tabular.guessing.column_facts import measure_column

    draft = _Draft(table.num_rows)
    if _looks_like_data(file):
        draft.warnings.append(
            f"the first line of {file.path} looks like data rather than names of columns; if it "
            "is, add a line with the names above it"
        )
    if delimiter:
        draft.tree["delimiter"] = delimiter
    if quote != '"':
        draft.tree["quote"] = quote
    facts = {}
    for name in file.column_names:
        draft.reasons[name] = "named by --ignore"
        if not name:
            draft.reasons[name] = _UNNAMED
        elif not is_text(name):
            draft.reasons[name] = "its name is not printable text"
        elif name.startswith("/"):
            draft.reasons[name] = "its name begins with a slash"
        elif name not in ignore:
            draft.reasons[name] = ""
            facts[name] = measure_column(name, table.column(name))
    if label and label not in facts:
        why = f"{file.path}: label {label!r} is not read: {draft.reasons[label]}"
        raise ConfigError(f"{why}; rename the column, or name another")
    draft.give_roles(facts, label)
    for each in facts.values():
        if not draft.reasons[each.name]:
            draft.give_kind(each)
    draft.complete(str(file.path), table)
    for each in facts.values():
        if each.time_doubt and "timestamp" not in draft.tree:
            draft.warnings.append(f"column {each.name!r} {draft.reasons[each.name]}")
    return Guess(
        Schema.from_dict(draft.tree),
        draft.reasons,
        draft.role_reasons,
        table.num_rows,
        tuple(draft.warnings),
    )


def _open(path: Path, quote: str) -> tuple[TextFile | ParquetFile, str]:
    """Open a file; a text file with the delimiter that its first line holds most often."""
    file = open_file(path, quote=quote)
    if isinstance(file, TextFile):
        header = file.delimiter.join(file.column_names)
        best = max((file.delimiter, *DELIMITERS), key=header.count)
        if header.count(best) > header.count(file.delimiter):
            return TextFile(path, best, quote), best
    return file, ""


def _sample(
    first: TextFile | ParquetFile, others: Sequence[Path], delimiter: str, quote: str
) -> pa.Table:
    """The first rows of all files, with the columns of the first one."""
    arrow = import_pyarrow()
    table = first.sample(_SAMPLE_ROWS)
    for path in others:
        if table.num_rows >= _SAMPLE_ROWS:
            break
        file = open_file(path, delimiter, quote)
        for name in first.column_names:
            if name not in file.column_names:
                raise DatasetFormatError(
                    f"{path} must have column {name!r}, as {first.path} has; name one file"
                )
        rows = file.sample(_SAMPLE_ROWS - table.num_rows).select(list(first.column_names))
        try:
            table = arrow.concat_tables([table, rows], promote_options="permissive")
        except (arrow.ArrowInvalid, arrow.ArrowTypeError) as error:
            raise DatasetFormatError(
                f"{path}: columns must have types like those of {first.path}: {str(error)[:200]}; "
                "name one file"
            ) from error
    return table


def _looks_like_data(file: TextFile | ParquetFile) -> bool:
    """Whether half of the names are numbers; 0, 1, 2 and so on are names that pandas gives."""
    names = file.column_names
    if not isinstance(file, TextFile) or names == tuple(map(str, range(len(names)))):
        return False
    num_numbers = sum(bool(re.fullmatch(r"-?[0-9]+(\.[0-9]+)?", name)) for name in names)
    return 2 * num_numbers >= len(names)


class _Draft:
    """A schema's keys while they are guessed, and the reasons."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self._tables: set[str] = set()
        self.tree: dict[str, Any] = {}
        self.reasons: dict[str, str] = {}
        self.role_reasons: dict[str, str] = {}
        self.warnings: list[str] = []

    def give_roles(self, facts: dict[str, ColumnFacts], label: str) -> None:
        """Find label, column of the split, weight, timestamp and group."""
        chosen = facts.get(label) or _first(facts, _LABELS, _is_label)
        if chosen is not None:
            self._take_label(chosen, "named by --label" if label else "by its name")
        split = _first(facts, ("split",), lambda each: set(each.few_values) <= set(_PARTS))
        if split is not None and split.few_values:
            self.reasons[split.name] = f"by its name; {_shown_values(split)} in these rows"
            self.tree["split"] = _split_by(split)
        weight = _first(facts, ("weight",), lambda each: each.kind == "number" and each.least >= 0)
        if weight is not None:
            self._take("weight", weight, "by its name")
        self._take_timestamp([each for each in facts.values() if not self.reasons[each.name]])
        facts = {name: each for name, each in facts.items() if not self.reasons[name]}
        group = _first(facts, _SESSIONS, _is_id) or _first(facts, _USERS, _is_id)
        if group is not None:
            self._take("group", group, "by its name")
            if _plain_name(group.name) in _SESSIONS:
                self.reasons[group.name] = "sessions do not come again"  # no table for them

    def _take_timestamp(self, facts: Sequence[ColumnFacts]) -> None:
        """Take the column of times with the most different values, and name the others."""
        times = [
            each
            for each in facts
            if each.time_format is not None
            and (each.kind in ("time", "text") or _plain_name(each.name) in _TIMES)
        ]
        if not times:
            return
        chosen = max(times, key=lambda each: each.num_distinct)
        others = ", ".join(repr(each.name) for each in times if each is not chosen)
        form = chosen.time_format or ""
        why = f"times of the form {form}" if form else "times"
        why += f"; other columns of times: {others}" if others else ""
        self._take("timestamp", chosen, why)
        if form:
            self.tree["timestamp_format"] = form

    def give_kind(self, each: ColumnFacts) -> None:
        """Find the kind of a column that has no role but perhaps that of the group."""
        is_integer = each.kind == "bool" or "integer" in (each.kind, each.element_kind)
        values = "integer" if is_integer else "string"
        keys: dict[str, Any] = {"values": values} if values == "integer" else {}
        missing = f", {each.num_missing / self.num_rows:.1%} missing" if each.num_missing else ""
        facts = f"{each.num_distinct:,} different values in {self.num_rows:,} rows{missing}"
        if each.kind == "empty":
            self.reasons[each.name] = "empty in these rows"
        elif each.unread_type:
            self.reasons[each.name] = each.unread_type
        elif each.time_doubt:
            self.reasons[each.name] = (
                f'{each.time_doubt}; to split by it, set timestamp = "{each.name}" and '
                "timestamp_format, or write ISO text"
            )
        elif each.kind == "list" or (each.separator and each.name != self.tree.get("group")):
            self._add_bag(each, keys, missing)
        elif each.time_format is not None and each.kind in ("time", "text"):
            self.reasons[each.name] = "times; one column of times is read"
        elif each.num_distinct == 1 and self.num_rows > 1:
            self.reasons[each.name] = "one value in all these rows"
        elif each.kind == "number":
            transform = "log" if each.least >= 0 and each.most > 20 * each.median else "standardize"
            self._add("dense", each, {"transform": transform}, f"numbers from {each.least:g} to "
                      f"{each.most:g}, median {each.median:g}{missing}")  # fmt: skip
        elif each.num_distinct > 0.98 * self.num_rows > 100 and each.name != self.tree.get("group"):
            self.reasons[each.name] = f"a number or name of the row: {facts}"
        elif is_integer and each.kind == "integer":
            self._add("categorical", each, keys, f"integers, {facts}; dense if they are amounts")
        else:
            what = "true (1) or false (0)" if each.kind == "bool" else "text"
            self._add("categorical", each, keys, f"{what}, {facts}")

    def complete(self, path: str, table: pa.Table) -> None:
        """Add split, and for data without a label negatives and a history.

        Args:
            path: The file, for messages.
            table: The rows that were looked at.
        """
        tree, categorical = self.tree, self.tree.get("categorical", {})
        if not tree.keys() & {"dense", "categorical", "multi", "sequence"}:
            why = ", ".join(f"{name!r}: {reason}" for name, reason in self.reasons.items())
            raise ConfigError(f"{path}: no column can be a feature ({why}); add columns")
        if "label" not in tree:
            item = next((name for name in categorical if _plain_name(name) in _ITEMS), "")
            if "group" not in tree or not item:
                raise ConfigError(
                    f"{path}: no column is named {', '.join(_LABELS)}; name the label by --label "
                    "COLUMN, or, if every row is a positive, write a schema with [negatives]"
                    f"{''.join(f'; {each}' for each in self.warnings)}"
                )
            self.warnings.append(_NO_LABEL)
            tree["negatives"] = {"item": item, **self._take_item_columns(item, table)}
            if "timestamp" in tree or _plain_name(tree["group"]) in _SESSIONS:
                history = {"of": item, "max_length": _HISTORY_LENGTH}
                tree["history"] = {self._new_name("recent"): history}
                tree.setdefault("split", {"by": "last_one_out"})
        if "split" not in tree and "timestamp" in tree:
            tree["split"] = {"by": "timestamp", "test": "1/10", "validation": "1/10"}
        tree.setdefault("split", {"by": "fraction", "test": "1/10", "validation": "1/10"})

    def _take(self, role: str, each: ColumnFacts, why: str) -> None:
        self.tree[role], self.role_reasons[role] = each.name, why
        if role != "group":
            self.reasons[each.name] = why

    def _take_label(self, each: ColumnFacts, why: str) -> None:
        if not _is_binary(each):
            self.tree["positive"] = _guess_positive(each)
            why += "; the rule is a guess"
        self._take("label", each, f"{why}; {_shown_values(each)}" if each.few_values else why)

    def _add(self, kind: str, each: ColumnFacts, keys: dict[str, Any], why: str) -> None:
        if kind != "dense" and "." in each.name:  # which names of tables do not have
            keys["table"] = self._new_name(each.name.replace(".", "_"))
        self.tree.setdefault(kind, {})[each.name] = keys
        self.reasons[each.name] = why

    def _new_name(self, name: str) -> str:
        """This name, or one like it that no column, no table and no history has."""
        while name in self.reasons or name in self._tables:
            name += "_"
        self._tables.add(name)
        return name

    def _take_item_columns(self, item: str, table: pa.Table) -> dict[str, list[str]]:
        """Find columns with one value for each item: keys of the negatives for them.

        Categorical columns change with the item. Others cannot, and are left out.
        """
        tree = self.tree
        kinds = {
            name: kind for kind in ("dense", "categorical", "multi") for name in tree.get(kind, {})
        }
        others = [name for name in kinds if name not in (item, tree["group"])]
        found = columns_of_items(table, item, others)
        for name in found:
            if kinds[name] != "categorical":
                del tree[kinds[name]][name]
                self.reasons[name] = f"one value for each {item}, which negatives would keep"
        changing = [name for name in found if kinds[name] == "categorical"]
        return {"item_columns": changing} if changing else {}

    def _add_bag(self, each: ColumnFacts, keys: dict[str, Any], missing: str) -> None:
        if each.separator:
            keys["split"] = each.separator
        what = f"split by {each.separator!r}" if each.separator else "lists"
        why = f"{what}, {each.num_parts:.1f} values on average{missing}"
        self._add("multi", each, keys, f"{why}; a sequence if they are in order of time")


def _first(facts: dict[str, ColumnFacts], names: Sequence[str], fits: Any) -> ColumnFacts | None:
    """The column whose name is the earliest of `names`, and that fits."""
    by_name = {_plain_name(name): each for name, each in reversed(facts.items())}
    return next((by_name[name] for name in names if name in by_name and fits(by_name[name])), None)


def _is_binary(each: ColumnFacts) -> bool:
    """Whether a column holds 0 and 1, or true and false, or one of the two."""
    values = set(each.few_values)
    return bool(values) and (values <= {"0", "1", "0.0", "1.0"} or values <= {"false", "true"})


def _is_label(each: ColumnFacts) -> bool:
    return _is_binary(each) or each.kind in ("integer", "number")


def _is_id(each: ColumnFacts) -> bool:
    return each.kind in ("integer", "text") and each.num_missing == 0


def _plain_name(name: str) -> str:
    """A column's name as the lists of names have it: `user_id` for "User-ID"."""
    return re.sub(r"[\s_.-]+", "_", name.strip().lower())


def _guess_positive(each: ColumnFacts) -> str:
    """The key `positive` for a label that is not 0 and 1.

    Raises:
        ConfigError: its values are neither numbers nor two texts.
    """
    if each.kind in ("integer", "number") and isfinite(each.median):
        # With ">= MEDIAN", every row would be a positive where the median is the least value.
        comparison = ">" if each.least == each.median < each.most else ">="
        return f"{comparison} {each.median:.15g}"
    if each.kind == "text" and len(each.few_texts) == 2:
        rule = f"== {each.few_texts[1]}"
        with suppress(ConfigError):
            if PositiveRule.parse(rule).text == each.few_texts[1]:
                return rule
    raise ConfigError(
        f"label {each.name!r} must hold 0 and 1, true and false, numbers, or two texts; found "
        f"{_shown_values(each) if each.num_distinct > 0 else each.kind}; name another column, or "
        'write a schema with label and a rule for text, such as positive = "== yes"'
    )


def _shown_values(each: ColumnFacts) -> str:
    """The values of a column, or their number, on one line."""
    if not each.few_values:
        return f"{each.num_distinct:,} different values"
    shown = (value if value.isprintable() else repr(value) for value in each.few_values)
    return f"values {', '.join(value[:_MOST_LETTERS] for value in shown)}"


def _split_by(each: ColumnFacts) -> dict[str, Any]:
    """The key `split` for a column that names the parts; these rows may be of one part only."""
    found = {text.lower(): text for text in each.few_texts}
    parts = {part: [found.get(part, part)] for part in _PARTS if part in found or part in _NEEDED}
    return {"by": "column", "column": each.name, **parts}


def _as_comment(text: str) -> list[str]:
    """Lines of TOML comments."""
    return [f"# {line}" for line in textwrap.wrap(text, 98, break_long_words=False)]


def _dump(keys: dict[str, Any]) -> str:
    """TOML with each list on one line."""
    text = tomli_w.dumps(keys).strip("\n")
    return re.sub(
        r" = \[\n((?:    .*,\n)+)\]$",
        lambda found: " = [" + ", ".join(re.findall("    (.*),\n", found[1])) + "]",
        text,
        flags=re.MULTILINE,
    )
