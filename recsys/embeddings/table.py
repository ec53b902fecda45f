"""What a table is."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["POOLINGS", "TableConfig", "output_names"]

POOLINGS = ("sum", "mean")


@dataclass(frozen=True, kw_only=True)
class TableConfig:
    """One embedding table, with the field names of TorchRec's `EmbeddingBagConfig`.

    Attributes:
        name: Of the table; `state_dict` keys are `embedding_bags.<name>.weight`.
        num_embeddings: E, rows.
        embedding_dim: D, columns.
        feature_names: The features that look rows up in it; the table's name where none is given.
        pooling: "sum" or "mean" of a bag's rows.

    Raises:
        ValueError: a size is not positive, or the pooling is unknown.
    """

    name: str
    num_embeddings: int
    embedding_dim: int
    feature_names: tuple[str, ...] = ()
    pooling: str = "sum"

    def __post_init__(self) -> None:
        if self.num_embeddings < 1 or self.embedding_dim < 1:
            raise ValueError(
                f"table {self.name!r}: num_embeddings and embedding_dim must be at least 1, "
                f"got {self.num_embeddings} and {self.embedding_dim}"
            )
        if self.pooling not in POOLINGS:
            raise ValueError(
                f"table {self.name!r}: pooling must be one of {POOLINGS}, got {self.pooling!r}"
            )
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
