"""Which features of a source look up which tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from recsys.batch.protocols import SampleSource

__all__ = ["feature_tables", "features_by_table", "has_bags", "histories_of"]


def feature_tables(source: SampleSource) -> dict[str, str]:
    """The table that each feature looks up, in the order of a batch.

    A source without `feature_tables` has one feature for each table, with the table's name.
    """
    found: dict[str, str] | None = getattr(source, "feature_tables", None)
    return {name: name for name in source.table_sizes} if found is None else dict(found)


def features_by_table(source: SampleSource) -> dict[str, tuple[str, ...]]:
    """The features that look up each table, table by table."""
    tables = feature_tables(source)
    return {
        table: tuple(feature for feature, own in tables.items() if own == table)
        for table in source.table_sizes
    }


def histories_of(source: SampleSource) -> dict[str, str]:
    """The candidate's feature of each history: of each ordered bag that shares its table.

    A source without `histories` has none.
    """
    return dict(getattr(source, "histories", {}))


def has_bags(source: SampleSource) -> bool:
    """Whether samples may look up any number of rows of a feature; reads one sample."""
    return not source.read(np.arange(1)).sparse_features.is_known_one_hot()
