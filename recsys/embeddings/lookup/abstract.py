"""Base classes of the modules with several tables, of all providers: map features to tables."""

from __future__ import annotations

from abc import ABC, abstractmethod
from math import sqrt
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from recsys.batch import JaggedIds, require_one_batch_size
from recsys.embeddings.lookup.inputs import require_features
from recsys.embeddings.table import data_type_of, output_names

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from recsys.batch import Features
    from recsys.embeddings.table import TableConfig

__all__ = ["AbstractCollection", "AbstractEmbeddingBags", "draw_rows", "make_bags", "pooling_of"]


class AbstractCollection(nn.Module, ABC):
    """Lookups in several tables.

    Args:
        tables: `TableConfig`s or TorchRec's configs.

    Raises:
        ValueError: there is no table, or names are not distinct.
    """

    def __init__(self, tables: Sequence[TableConfig]) -> None:
        super().__init__()
        self._tables = list(tables)
        if not self._tables:
            raise ValueError(f"{type(self).__name__} must have at least one table, got none")
        names = [table.name for table in self._tables]
        if len(set(names)) != len(names):
            raise ValueError(f"table names must be distinct, got {names}")
        # One lookup per feature of a table: the table's position, and the feature.
        self._lookups = [
            (position, feature)
            for position, table in enumerate(self._tables)
            for feature in table.feature_names
        ]
        # Those of the last input, which were checked; the next almost always has the same.
        self._known_keys: list[str] | None = None

    @abstractmethod
    def table_weights(self) -> Sequence[Tensor]:
        """The rows of every table, (E, D), in table order; views, not copies."""

    def reset_parameters(self) -> None:
        """Initialize all rows, table by table; see `draw_rows`."""
        with torch.no_grad():
            for table, weight in zip(self._tables, self.table_weights(), strict=True):
                draw_rows(table, weight)

    def extra_repr(self) -> str:
        """Number of tables and rows, for `repr`."""
        num_rows = sum(table.num_embeddings for table in self._tables)
        return f"num_tables={len(self._tables)}, num_rows={num_rows}"


class AbstractEmbeddingBags(AbstractCollection):
    """Pooled lookups in several tables; output columns in table order, then feature order.

    Args:
        tables: `TableConfig`s or TorchRec's `EmbeddingBagConfig`s.
        poolings: The poolings that the provider supports.
        data_types: The data types of rows that it supports.

    Raises:
        ValueError: names are not distinct, or a table's pooling or data type is not supported.
    """

    def __init__(
        self,
        tables: Sequence[TableConfig],
        poolings: Sequence[str] = ("sum",),
        data_types: Sequence[str] = ("fp32",),
    ) -> None:
        super().__init__(tables)
        for table in self._tables:
            if pooling_of(table) not in poolings:
                raise ValueError(
                    f"table {table.name!r}: pooling must be one of {list(poolings)} with "
                    f"{type(self).__name__}, got {pooling_of(table)!r}"
                )
            if data_type_of(table) not in data_types:
                raise ValueError(
                    f"table {table.name!r}: data_type must be one of {list(data_types)} with "
                    f"{type(self).__name__}, got {data_type_of(table)!r}"
                )
        self._known_positions: list[int] = []  # of the features in the last input
        self._output_keys = output_names(self._tables)
        self._output_dims = [self._tables[position].embedding_dim for position, _ in self._lookups]
        self._num_stacked = len(self._output_dims) if len(set(self._output_dims)) == 1 else 0

    def embedding_bag_configs(self) -> list[TableConfig]:
        """The tables, in order."""
        return self._tables

    def output_keys(self) -> list[str]:
        """The feature of each pooled vector, in column order."""
        return self._output_keys

    def num_stacked(self) -> int:
        """F, the number of pooled vectors per sample, which fit in one tensor.

        Raises:
            ValueError: tables have different dims.
        """
        if not self._num_stacked:
            raise ValueError(
                f"stacked=True: tables must have one embedding_dim, got {self._output_dims}; use "
                "values(), or the vectors by their names"
            )
        return self._num_stacked

    def _positions(self, features: Features) -> list[int]:
        """The position of each lookup's feature in the input.

        Raises:
            KeyError: a feature is missing.
            MalformedBags: a feature is there more than once.
            ValueError: features have different batch sizes.
        """
        if not isinstance(features, JaggedIds):
            require_one_batch_size(features)
        keys = features.keys()
        if keys == self._known_keys:
            return self._known_positions
        require_features((feature for _, feature in self._lookups), keys)
        self._known_keys = list(keys)
        self._known_positions = [keys.index(feature) for _, feature in self._lookups]
        return self._known_positions

    def _bags(self, features: Features) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        """Values, offsets (B + 1, from 0) and weights of each lookup."""
        positions = self._positions(features)
        values, offsets, weights = features.values(), features.offsets(), features.weights_or_none()
        batch_size, num_features = features.stride(), len(features.keys())
        is_one_hot = isinstance(features, JaggedIds) and features.is_known_one_hot()
        begins: Sequence[int]
        if is_one_hot or not batch_size:
            begins = [batch_size * feature for feature in range(num_features + 1)]
        else:
            # Those of all features, read at once: on a GPU every read waits for the device.
            begins = offsets[::batch_size].tolist()
        for position in positions:
            begin, end = begins[position], begins[position + 1]
            if is_one_hot:
                bounds = offsets[: batch_size + 1]  # as of the first feature: nothing to subtract
            else:
                bounds = offsets[position * batch_size : (position + 1) * batch_size + 1] - begin
            bag_weights = None if weights is None else weights[begin:end]
            yield values[begin:end], bounds, bag_weights


def make_bags(tables: Sequence[TableConfig], rows: Sequence[Tensor]) -> nn.ModuleDict:
    """An `nn.EmbeddingBag` with a sparse gradient for each table, on these rows, by name."""
    return nn.ModuleDict(
        {
            table.name: nn.EmbeddingBag(
                table.num_embeddings,
                table.embedding_dim,
                mode=pooling_of(table),
                sparse=True,
                _weight=of_table,  # without it, nn.EmbeddingBag would draw from N(0, 1)
            )
            for table, of_table in zip(tables, rows, strict=True)
        }
    )


def draw_rows(table: Any, weight: Tensor) -> None:
    """Initialize a table's rows.

    Uses `init_fn` of the config if there is one, as TorchRec does; else a uniform distribution
    between -sqrt(1/E) and +sqrt(1/E).

    Uniform rows on CUDA are drawn on the CPU, as they are where a budget keeps them in host memory:
    a budget does not change initial values.

    Args:
        table: The config.
        weight: The rows, (E, D).
    """
    init_fn = getattr(table, "init_fn", None)
    if init_fn is not None:
        init_fn(weight)
    else:
        bound = sqrt(1 / len(weight))
        drawn = torch.empty_like(weight, device="cpu") if weight.is_cuda else weight
        drawn.uniform_(-bound, bound)
        if drawn is not weight:
            weight.copy_(drawn)


def pooling_of(table: Any) -> str:
    """The pooling of a table's config, "sum" by default; TorchRec's `PoolingType` by name."""
    pooling = getattr(table, "pooling", "sum")
    return str(getattr(pooling, "name", pooling)).lower()
