"""Prepare raw files as stores, read mini-batches from stores, and generate synthetic data."""

from typing import TYPE_CHECKING

from recsys._support.lazy_names import lazy_names

if TYPE_CHECKING:
    from recsys.batch import SampleSource
    from recsys.datasets.criteo import prepare_criteo_1tb, prepare_criteo_kaggle
    from recsys.datasets.loader import BatchLoader
    from recsys.datasets.store import Store
    from recsys.datasets.synthetic import SyntheticCriteo
    from recsys.datasets.tabular.prepare import prepare_table, write_store
    from recsys.datasets.tabular.schema import Schema

__all__ = [
    "BatchLoader",
    "SampleSource",
    "Schema",
    "Store",
    "SyntheticCriteo",
    "prepare_criteo_1tb",
    "prepare_criteo_kaggle",
    "prepare_table",
    "write_store",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "BatchLoader": "loader",
            "SampleSource": ".batch",
            "Schema": "tabular.schema",
            "Store": "store",
            "SyntheticCriteo": "synthetic",
            "prepare_criteo_1tb": "criteo",
            "prepare_criteo_kaggle": "criteo",
            "prepare_table": "tabular.prepare",
            "write_store": "tabular.prepare",
        },
    )
