"""Hints about the label for the person who edits a draft of a schema."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from recsys.datasets.tabular.guessing.column_facts import ColumnFacts

__all__ = ["LABEL_NAMES", "is_binary", "likely_labels", "no_label_note", "shown_values"]

LABEL_NAMES = ("label", "click", "clicked", "is_click", "is_clicked", "target", "y", "converted")
_MOST_NAMED = 5
_MOST_LETTERS = 20
_YES_OR_NO = ({"yes", "no"}, {"y", "n"}, {"t", "f"})
_TWO_VALUES = ({"0", "1"}, {"0.0", "1.0"}, {"false", "true"}, *_YES_OR_NO)


def is_binary(each: ColumnFacts) -> bool:
    """Whether a column holds 0 and 1, or true and false, or one of the two."""
    values = set(each.few_values)
    return bool(values) and (values <= {"0", "1", "0.0", "1.0"} or values <= {"true", "false"})


def likely_labels(facts: Iterable[ColumnFacts]) -> dict[str, str]:
    """Columns that may be the label, and their values for a message; the likeliest first.

    A column may be the label by its name, or because it has the two values 0 and 1, or yes and no.
    """
    columns = [each for each in facts if each.kind not in ("empty", "list", "time", "other")]
    by_name = [each for each in columns if each.name.lower() in LABEL_NAMES]
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
