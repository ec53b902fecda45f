"""The tables that a model needs for a source."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from recsys.batch import features_by_table
from recsys.embeddings.table import TableConfig
from recsys.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from recsys.batch import SampleSource
    from recsys.config import ModelConfig

__all__ = ["table_configs", "tables_of"]


def table_configs(
    table_sizes: Mapping[str, int],
    embedding_dim: int,
    features: Mapping[str, Sequence[str]] | None = None,
    *,
    table_dims: Mapping[str, int] = MappingProxyType({}),
    pooling: Mapping[str, str] = MappingProxyType({}),
) -> list[TableConfig]:
    """The tables of a model, named `t_<table>` as in TorchRec's DLRM.

    Args:
        table_sizes: Rows of each table.
        embedding_dim: D, the columns of a table that `table_dims` does not name.
        features: The features of each table; by default one with the name of the table.
        table_dims: Columns of tables that have others.
        pooling: "sum" or "mean", by table; by default "sum".

    Raises:
        ConfigError: `table_dims` or `pooling` names an unknown table.
    """
    for key, named in (("table_dims", table_dims), ("pooling", pooling)):
        unknown = [table for table in named if table not in table_sizes]
        if unknown:
            raise ConfigError(
                f"model.{key}.{unknown[0]}: the data has no table of that name; its tables are "
                f"{list(table_sizes)}"
            )
    return [
        TableConfig(
            name=f"t_{table}",
            num_embeddings=size,
            embedding_dim=table_dims.get(table, embedding_dim),
            feature_names=(table,) if features is None else tuple(features[table]),
            pooling=pooling.get(table, "sum"),
        )
        for table, size in table_sizes.items()
    ]


def tables_of(source: SampleSource, model: ModelConfig) -> list[TableConfig]:
    """The tables that a model needs for a source."""
    return table_configs(
        source.table_sizes,
        model.embedding_dim,
        features_by_table(source),
        table_dims=model.table_dims,
        pooling=model.pooling,
    )
