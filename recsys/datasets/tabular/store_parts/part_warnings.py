"""What is wrong with the parts of a table: without samples, or with labels of one value."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from recsys.datasets.splits import SPLITS
from recsys.datasets.tabular.encoding.row_encoder import LABEL
from recsys.datasets.tabular.schemas.schema_parts import (
    ColumnSplit,
    FractionSplit,
    TimestampSplit,
)
from recsys.datasets.tabular.store_parts.splits import TRAIN

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sized

    from recsys.datasets.tabular.store_parts.spooled_rows import SpooledRows

__all__ = ["only_label", "warnings_of_parts"]


def warnings_of_parts(rows: SpooledRows, parts: Mapping[str, Sized]) -> Iterator[str]:
    """Sentences about parts that training refuses, and about parts that cannot judge a model.

    Args:
        rows: The rows of the table.
        parts: The samples of each part.
    """
    split, label = rows.schema.split, rows.schema.label
    if label and only_label(rows, TRAIN) is not None:
        label = ""  # a fault of the column rather than of a part
    for part, samples in parts.items():
        if not len(samples):
            yield (
                f"the {part} part has no sample, and training needs samples in each part; [split] "
                f"has {_key_of(split, part)}; change it, and prepare the table again"
            )
        code = SPLITS.index(part)
        value = only_label(rows, code) if label and code != TRAIN else None
        if value is not None:
            yield (
                f"label {label!r} is {value} in all {len(samples):,} rows of the {part} part, and "
                f"one value cannot judge a model; [split] has {_key_of(split, part)}; change it, "
                "or check the column and the key positive"
            )


def only_label(rows: SpooledRows, code: int) -> int | None:
    """The label of all rows of a part; None if labels differ, or there are less than two rows."""
    num_rows = num_positives = 0
    for block in rows.blocks(code, [LABEL]):
        num_rows += len(block.rows)
        num_positives += int(np.count_nonzero(np.asarray(block.columns[LABEL])))
        if 0 < num_positives < num_rows:
            return None
    return int(num_positives > 0) if num_rows > 1 else None


def _key_of(split: Any, part: str) -> str:
    """The key of a split that decides on a part, and its value."""
    if isinstance(split, ColumnSplit):
        key = part if getattr(split, part) else "test"  # the validation part is half of it
        return f"{key} = {list(getattr(split, key))}"
    if isinstance(split, TimestampSplit) and split.test_from is not None:
        key = "test_from" if split.validation_from is None else f"{part}_from"
        return f"{key} = {getattr(split, key)}"
    if isinstance(split, FractionSplit):
        return f"{part} = {getattr(split, part)!r}"
    return "by = 'last_one_out', for groups of three rows and more"
