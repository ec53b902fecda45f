"""Hints about the label for the person who edits a draft of a schema."""

from __future__ import annotations

import re
from math import isfinite
from typing import TYPE_CHECKING

from recsys.datasets.tabular.guessing.refused_values import missing_values
from recsys.datasets.tabular.schemas.schema_parts import PositiveRule
from recsys.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from recsys.datasets.tabular.guessing.column_facts import ColumnFacts

__all__ = [
    "LABEL_NAMES",
    "guess_positive",
    "is_binary",
    "label_warnings",
    "likely_labels",
    "no_label_note",
    "plain_name",
    "shown_values",
]

LABEL_NAMES = ("label", "click", "clicked", "is_click", "is_clicked", "target", "y", "converted")
_MOST_NAMED = 5
_MOST_LETTERS = 20
_YES_OR_NO = ({"yes", "no"}, {"y", "n"}, {"t", "f"})
_YES = {"yes", "y", "t", "true", "pos", "positive", "click", "clicked", "converted"}
_TWO_VALUES = ({"0", "1"}, {"0.0", "1.0"}, {"false", "true"}, *_YES_OR_NO)


def plain_name(name: str) -> str:
    """A column's name as the lists of known names have it: `user_id` for "User-ID"."""
    return re.sub(r"[\s_.-]+", "_", name.strip().lower())


def is_binary(each: ColumnFacts) -> bool:
    """Whether a column holds 0 and 1, or true and false, or one of the two."""
    values = set(each.few_values)
    return bool(values) and (values <= {"0", "1", "0.0", "1.0"} or values <= {"true", "false"})


def guess_positive(each: ColumnFacts) -> tuple[str, str]:
    """The key `positive` for a label that is not 0 and 1, and a word on how sure the guess is.

    Raises:
        ConfigError: its values are neither numbers nor two texts.
    """
    if each.kind in ("integer", "number") and isfinite(each.median):
        # With ">= MEDIAN", every row would be a positive where the median is the least value.
        comparison = ">" if each.least == each.median < each.most else ">="
        return f"{comparison} {each.median:.15g}", "the median is a guess of the rule"
    rules = [f"== {text}" for text in each.few_texts]
    if each.kind == "text" and len(rules) == 2 and all(map(_is_text_rule, rules, each.few_texts)):
        for rule, text in zip(rules, each.few_texts, strict=True):
            if text.lower() in _YES:
                return rule, "the rule is a guess"
        return rules[1], "the rule is a guess: either text may be the positive one"
    raise ConfigError(
        f"label {each.name!r} must hold 0 and 1, true and false, numbers, or two texts; found "
        f"{shown_values(each) if each.num_distinct > 0 else each.kind}; name another column, or "
        'write a schema with label and a rule for text, such as positive = "== yes"'
    )


def _is_text_rule(rule: str, text: str) -> bool:
    try:
        return PositiveRule.parse(rule).text == text
    except ConfigError:
        return False


def label_warnings(each: ColumnFacts, num_rows: int) -> list[str]:
    """What is wrong with a column as the label.

    Args:
        each: The column.
        num_rows: Rows that were read.
    """
    found = []
    if each.num_distinct == 1 and num_rows > 1:
        found.append(
            f"label {each.name!r} has one value in the first {num_rows:,} rows, "
            f"{each.few_texts[0]}, and a model cannot learn from one value; check the column, "
            "or name another by --label COLUMN"
        )
    if each.num_missing:
        found.append(missing_values("label", each, "name another column by --label COLUMN"))
    return found


def likely_labels(facts: Iterable[ColumnFacts]) -> dict[str, str]:
    """Columns that may be the label, and their values for a message; the likeliest first.

    A column may be the label by its name, or because it has the two values 0 and 1, or yes and no.
    """
    columns = [each for each in facts if each.kind not in ("empty", "list", "time", "other")]
    by_name = [each for each in columns if plain_name(each.name) in LABEL_NAMES]
    by_values = [each for each in columns if set(each.few_values) in _TWO_VALUES]
    return {each.name: shown_values(each) for each in [*by_name, *by_values]}


def no_label_note(likely: Mapping[str, str]) -> str:
    """A sentence for a draft without a label.

    Args:
        likely: Columns that may be the label, from `likely_labels`.
    """
    if not likely:
        named = "if a column is the label, name it"
    else:
        columns = [f"{name!r} ({values})" for name, values in likely.items()][:_MOST_NAMED]
        verb = "this column may be" if len(columns) == 1 else "one of these columns may be"
        named = f"{verb} the label: {', '.join(columns)}; if so, name it"
    return (
        "no column is known to be the label, and without a label every row counts as a positive; "
        f"{named} by --label COLUMN"
    )


def shown_values(each: ColumnFacts) -> str:
    """The values of a column, or their number, on one line."""
    if not each.few_values:
        return f"{each.num_distinct:,} different values"
    shown = (value if value.isprintable() else repr(value) for value in each.few_values)
    values = ", ".join(value[:_MOST_LETTERS] for value in shown)
    return f"{'value' if len(each.few_values) == 1 else 'values'} {values}"
