"""Embedding collections of PyTorch's own operations, which `torch.export` can trace.

    HotColdEmbeddingBagCollection  -> PlainEmbeddingBagCollection   pooled vectors
    HotColdEmbeddingCollection     -> PlainEmbeddingCollection      rows of each feature

They have the state_dict keys of the collections that they replace, but for the names of tables that
`torch.export.load` cannot read. They serve only: their rows have no gradient. Rows are float32, or
int8 with a float32 scale for each row, which are converted after they are gathered:

    scale of a row    max |number| / 127; 0 for a row of zeros
    int8 value        round(number / scale), in [-127, 127]

A number differs from its original by half a scale at most. A row of D columns takes D + 4 bytes in
place of 4 * D: 0.31 of the bytes at D=16, 0.26 at D=128.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from recsys.batch import PooledEmbeddings
from recsys.embeddings.collection import (
    HotColdEmbeddingBagCollection,
    HotColdEmbeddingCollection,
    JaggedEmbeddings,
)
from recsys.embeddings.lookup.abstract import pooling_of
from recsys.embeddings.table import output_names
from recsys.errors import WeightsError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from recsys.batch import JaggedIds
    from recsys.embeddings.table import TableConfig

__all__ = [
    "PlainEmbeddingBagCollection",
    "PlainEmbeddingCollection",
    "TableRows",
    "dequantize",
    "quantize_rows",
    "quantize_tables",
    "table_bytes",
    "use_plain_tables",
]

_LARGEST = 127  # -128 is not used, so that a row and its negative have negative values
_BLOCK_BYTES = 16 * 2**20  # of float32 rows that are quantized at a time
_UNREADABLE = r'["\\;,()\[\]%]'  # in names of modules; "%" begins what takes their place


class TableRows(nn.Module):
    """The rows of one table.

    Args:
        weight: The rows, not copied.

    Attributes:
        weight: The rows, (E, D) float32, or int8 after `quantize`.
        scale: The scale of each row, (E,) float32; None for float32 rows.
    """

    weight: nn.Parameter
    scale: nn.Parameter | None

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.detach(), requires_grad=False)
        self.scale = None

    def quantize(self) -> None:
        """Round the rows to int8.

        Raises:
            WeightsError: a row has nan or inf.
        """
        rows, scales = quantize_rows(self.weight)
        self.weight = nn.Parameter(rows, requires_grad=False)
        self.scale = nn.Parameter(scales, requires_grad=False)

    @property
    def num_bytes(self) -> int:
        """Bytes of the rows and their scales."""
        return self.weight.nbytes + (0 if self.scale is None else self.scale.nbytes)

    def forward(self, ids: Tensor) -> Tensor:
        """Gather rows; an id that is not a row raises.

        Shape:
            ids (N,); result (N, D) float32.
        """
        # Not `weight[ids]`, which counts negative ids from the end.
        rows = self.weight.index_select(0, ids)
        if self.scale is None:
            return rows
        return dequantize(rows, self.scale.index_select(0, ids))

    def pool(self, ids: Tensor, lengths: Tensor, pooling: str) -> Tensor:
        """Gather and pool the rows of bags; an empty bag gives zeros.

        Args:
            ids: The rows, bag after bag.
            lengths: Number of rows of each bag.
            pooling: "sum" or "mean".

        Shape:
            ids (N,); lengths (B,), dtype of ids; result (B, D) float32.
        """
        offsets = functional.pad(lengths.cumsum(0), (1, 0))
        table: Tensor = self.weight
        if self.scale is not None:  # pool gathered rows by their places
            table = self(ids)
            ids = torch.arange(ids.shape[0], dtype=ids.dtype, device=ids.device)
        return functional.embedding_bag(ids, table, offsets, mode=pooling, include_last_offset=True)


class PlainEmbeddingBagCollection(nn.Module):
    """Pooled lookups in several tables.

    Args:
        tables: The tables.
        rows: The rows of each table, (E, D) float32, by its name; not copied.

    Shape:
        result (B, sum of dims), columns in table order, then feature order.
    """

    def __init__(self, tables: Sequence[TableConfig], rows: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._tables = list(tables)
        self.embedding_bags = _modules_of(tables, rows)

    def embedding_bag_configs(self) -> list[TableConfig]:
        """The tables, in order."""
        return self._tables

    def output_keys(self) -> list[str]:
        """The feature of each pooled vector, in column order."""
        return output_names(self._tables)

    def forward(self, features: JaggedIds) -> PooledEmbeddings:
        """Look up and pool."""
        is_one_hot = features.is_known_one_hot()
        bags = _bags_by_feature(features)
        pooled: list[Tensor] = []
        for table in self._tables:
            rows = cast("TableRows", self.embedding_bags[table.name])
            for feature in table.feature_names:
                ids, lengths = bags[feature]
                pooled.append(
                    rows(ids) if is_one_hot else rows.pool(ids, lengths, pooling_of(table))
                )
        dims = [table.embedding_dim for table in self._tables for _ in table.feature_names]
        return PooledEmbeddings(self.output_keys(), dims, torch.cat(pooled, dim=1))


class PlainEmbeddingCollection(nn.Module):
    """Lookups in several tables without pooling.

    Args:
        tables: The tables.
        rows: The rows of each table, (E, D) float32, by its name; not copied.
    """

    def __init__(self, tables: Sequence[TableConfig], rows: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._tables = list(tables)
        self.embeddings = _modules_of(tables, rows)

    def embedding_configs(self) -> list[TableConfig]:
        """The tables, in order."""
        return self._tables

    def embedding_dim(self) -> int:
        """D of the first table."""
        return self._tables[0].embedding_dim

    def forward(self, features: JaggedIds) -> dict[str, JaggedEmbeddings]:
        """The rows of each feature, sample after sample."""
        bags = _bags_by_feature(features)
        names = iter(output_names(self._tables))
        found: dict[str, JaggedEmbeddings] = {}
        for table in self._tables:
            for feature in table.feature_names:
                ids, lengths = bags[feature]
                rows = self.embeddings[table.name](ids)
                found[next(names)] = JaggedEmbeddings(rows, lengths)
        return found


def quantize_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round the rows of a table to int8, block by block.

    Args:
        weight: The rows. They may be mapped from a file.

    Shape:
        weight (E, D) floating point; results: rows (E, D) int8 and scales (E,) float32.

    Raises:
        WeightsError: a row has nan or inf.
    """
    num_rows, dim = weight.shape
    rows = torch.empty(num_rows, dim, dtype=torch.int8)
    scales = torch.empty(num_rows)
    step = max(1, _BLOCK_BYTES // (4 * dim))
    for begin in range(0, num_rows, step):
        part = slice(begin, begin + step)
        block = weight[part].float()
        scale = block.abs().amax(1) / _LARGEST
        if not bool(scale.isfinite().all()):
            row = begin + int((~scale.isfinite()).nonzero()[0])
            raise WeightsError(f"row {row} must be finite to be rounded to int8, got nan or inf")
        divisor = torch.where(scale > 0, scale, 1)
        # Numbers so small that their scale has few bits left may be more than 127 scales.
        block = (block / divisor.unsqueeze(1)).round_().clamp_(-_LARGEST, _LARGEST)
        rows[part], scales[part] = block, scale
    return rows, scales


def dequantize(rows: Tensor, scales: Tensor) -> Tensor:
    """The numbers that int8 rows stand for.

    Shape:
        rows (N, D) int8; scales (N,) float32; result (N, D) float32.
    """
    return rows.float() * scales.unsqueeze(1)


def use_plain_tables(model: nn.Module) -> None:
    """Replace every collection of recsys in a model by a plain one, on the same rows.

    Args:
        model: The model; changed in place. No row is copied.
    """
    made: dict[nn.Module, nn.Module] = {}
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if isinstance(child, HotColdEmbeddingBagCollection | HotColdEmbeddingCollection):
                if child not in made:
                    made[child] = _plain(child)
                setattr(parent, name, made[child])
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if isinstance(child, nn.ModuleDict) and re.search(_UNREADABLE, "".join(child)):
                setattr(parent, name, _ReadableDict(child))


class _ReadableDict(nn.ModuleDict):
    """A `ModuleDict` under whose names `torch.export.load` finds its modules.

    Brackets, commas and the like in a name, such as "t_genre (main)", make a file that cannot be
    loaded. They are written as %28 and so on.

    Args:
        modules: A `ModuleDict` of any names, by which its modules are found here, too.
    """

    def __init__(self, modules: nn.ModuleDict) -> None:
        super().__init__({_readable(name): module for name, module in modules.items()})

    def __getitem__(self, name: str) -> nn.Module:
        return super().__getitem__(_readable(name))

    def __contains__(self, name: str) -> bool:
        return super().__contains__(_readable(name))


def _readable(name: str) -> str:
    return re.sub(_UNREADABLE, lambda found: f"%{ord(found[0]):02x}", name)


def quantize_tables(model: nn.Module) -> None:
    """Round the rows of all plain tables of a model to int8.

    Raises:
        WeightsError: a row has nan or inf.
    """
    for module in model.modules():
        if isinstance(module, TableRows):
            module.quantize()


def table_bytes(model: nn.Module) -> int:
    """Bytes of all plain tables of a model."""
    return sum(each.num_bytes for each in model.modules() if isinstance(each, TableRows))


def _plain(
    collection: HotColdEmbeddingBagCollection | HotColdEmbeddingCollection,
) -> PlainEmbeddingBagCollection | PlainEmbeddingCollection:
    state = collection.state_dict()
    if isinstance(collection, HotColdEmbeddingBagCollection):
        tables = collection.embedding_bag_configs()
        rows = {table.name: state[f"embedding_bags.{table.name}.weight"] for table in tables}
        return PlainEmbeddingBagCollection(tables, rows)
    tables = collection.embedding_configs()
    rows = {table.name: state[f"embeddings.{table.name}.weight"] for table in tables}
    return PlainEmbeddingCollection(tables, rows)


def _modules_of(tables: Sequence[TableConfig], rows: Mapping[str, Tensor]) -> nn.ModuleDict:
    return nn.ModuleDict({table.name: TableRows(rows[table.name]) for table in tables})


def _bags_by_feature(features: JaggedIds) -> dict[str, tuple[Tensor, Tensor]]:
    """The ids of each feature, (N,), and the number of ids of each sample, (B,)."""
    keys = features.keys()
    if features.is_known_one_hot():
        rows_of_features = features.values().view(len(keys), -1)
        ones = torch.ones_like(rows_of_features[0])
        return {key: (rows_of_features[number], ones) for number, key in enumerate(keys)}
    lengths_of_bags = features.lengths().view(len(keys), -1)
    # Not slices: torch.export traces sizes that depend on values only for a split.
    ids = torch.split(features.values(), lengths_of_bags.sum(1).tolist())
    return dict(zip(keys, zip(ids, lengths_of_bags, strict=True), strict=True))
