"""`TableConfig`: name, sizes, features, pooling and data type of a table."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from recsys._support.untrusted import is_whole
from recsys.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["DATA_TYPES", "POOLINGS", "TableConfig", "data_type_of", "output_names"]

POOLINGS = ("sum", "mean")
DATA_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class TableConfig:
    """One embedding table, with the field names of TorchRec's `EmbeddingBagConfig`.

    Attributes:
        name: Name of the table; its `state_dict` key is `embedding_bags.<name>.weight`.
        num_embeddings: E, rows.
        embedding_dim: D, columns.
        feature_names: The features that look rows up in it; by default one with the table's name.
        pooling: "sum" or "mean" of a bag's rows.
        data_type: Type of the rows: "fp32" or "bf16", or TorchRec's `DataType` with that value.

    Raises:
        ConfigError: a size is not a positive integer, or the names of features are not distinct
            strings in a tuple.
        ValueError: the pooling or the data type is unknown.
    """

    name: str
    num_embeddings: int
    embedding_dim: int
    feature_names: tuple[str, ...] = ()
    pooling: str = "sum"
    data_type: str = "fp32"

    def __post_init__(self) -> None:
        sizes = self.num_embeddings, self.embedding_dim
        if not all(is_whole(size, 1) for size in sizes):
            raise ConfigError(
                f"table {self.name!r}: num_embeddings and embedding_dim must be integers of at "
                f"least 1, got {self.num_embeddings!r} and {self.embedding_dim!r}"
            )
        features: object = self.feature_names
        are_names = isinstance(features, tuple | list) and all(
            isinstance(feature, str) for feature in features
        )
        if not are_names or len(set(self.feature_names)) != len(self.feature_names):
            raise ConfigError(
                f"table {self.name!r}: feature_names must be distinct names in a tuple, such as "
                f"('user',), got {features!r}"
            )
        if self.pooling not in POOLINGS:
            raise ValueError(
                f"table {self.name!r}: pooling must be one of {POOLINGS}, got {self.pooling!r}"
            )
        object.__setattr__(self, "data_type", data_type_of(self))
        if not self.feature_names:
            object.__setattr__(self, "feature_names", (self.name,))


def output_names(tables: Sequence[Any]) -> list[str]:
    """The names of pooled features: table by table, `feature@table` where tables share a feature.

    Args:
        tables: `TableConfig`s or TorchRec's `EmbeddingBagConfig`s.
    """
    uses = Counter(feature for table in tables for feature in table.feature_names)
    return [
        f"{feature}@{table.name}" if uses[feature] > 1 else feature
        for table in tables
        for feature in table.feature_names
    ]


def data_type_of(table: Any, known: Mapping[str, torch.dtype] = DATA_TYPES) -> str:
    """The data type of a table's config, "fp32" by default; TorchRec's `DataType` by value.

    Args:
        table: `TableConfig` or TorchRec's `EmbeddingBagConfig`.
        known: The supported types.

    Raises:
        ValueError: the type is not supported.
    """
    data_type = getattr(table, "data_type", "fp32")
    found = str(getattr(data_type, "value", data_type)).lower()
    if found not in known:
        raise ValueError(
            f"table {table.name!r}: data_type must be one of {tuple(known)}, got {found!r}"
        )
    return found
