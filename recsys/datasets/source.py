"""Where samples come from, and how they are split into train, test and validation.

A source is a fixed sequence of samples, and a split is a range of sample numbers. The loader alone
shuffles and resumes, in the same way for a store on disk and for synthetic data.
"""

from __future__ import annotations

from recsys.batch import SampleSource, feature_tables, features_by_table, has_bags
from recsys.datasets.splits import SPLITS, classic_splits, day_splits

__all__ = [
    "SPLITS",
    "SampleSource",
    "classic_splits",
    "day_splits",
    "feature_tables",
    "features_by_table",
    "has_bags",
]
