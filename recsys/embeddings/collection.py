"""`HotColdEmbeddingBagCollection` and `HotColdEmbeddingCollection`: many tables, one call.

features -> look_up -> pooled vectors     one kernel call for each embedding_dim, dtype and pooling;
                                          without pooling one for each feature
gradient -> ledger -> update              one for each embedding_dim and dtype

They take TorchRec's inputs and give its outputs, and need no TorchRec themselves.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from recsys._support.torch_compat import not_compiled
from recsys.batch import JaggedIds, PooledEmbeddings, require_all_in_bags
from recsys.embeddings.embedding import HotColdEmbedding
from recsys.embeddings.lookup.abstract import (
    AbstractCollection,
    AbstractEmbeddingBags,
    make_bags,
    pooling_of,
)
from recsys.embeddings.lookup.inputs import explain, read_features, require_features
from recsys.embeddings.lookup.leave_to_torch import look_up_for_torch
from recsys.embeddings.lookup.lookup import look_up
from recsys.embeddings.rows.bags import Lookups
from recsys.embeddings.rows.grads import require_no_optimizer
from recsys.embeddings.table import DATA_TYPES, data_type_of, output_names
from recsys.embeddings.tables_module import Table, TableModule, TableSettings
from recsys.errors import IdOutOfRange, MalformedBags

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torchrec import EmbeddingBagCollection, EmbeddingCollection
    from torchrec.sparse.jagged_tensor import JaggedTensor

    from recsys.batch import Features, Pooled
    from recsys.embeddings.lookup.lookup import Nodes, Part
    from recsys.embeddings.optimizer import RowOptimizer
    from recsys.embeddings.popularity.plan import HotPlan
    from recsys.embeddings.rows.bags import Bags
    from recsys.embeddings.table import TableConfig
    from recsys.embeddings.tables_module import Member

__all__ = ["HotColdEmbeddingBagCollection", "HotColdEmbeddingCollection", "JaggedEmbeddings"]


class HotColdEmbeddingBagCollection(TableModule, AbstractEmbeddingBags):
    """A drop-in for `torchrec.EmbeddingBagCollection`.

    Args:
        tables: `TableConfig`s or TorchRec's `EmbeddingBagConfig`s, sum- or mean-pooled.
        is_weighted: Whether every lookup has a weight.
        device: Device of the tables; with a budget, of the rows in fast memory: the CPU, CUDA, or
            "meta" until the tables are loaded.
        optimizer: The update rule of the rows; None leaves sparse gradients to a torch optimizer.
        auto_apply: As for `HotColdEmbeddingBag`.
        stochastic_rounding: As for `HotColdEmbeddingBag`.
        rounding_seed: As for `HotColdEmbeddingBag`.
        budget: As for `HotColdEmbeddingBag`. Write to rows only through each table's `weight`.
        plan: Rows that do not leave fast memory, as a plan of these tables by name; see
            `plan_hot_rows`. Without a plan, rows in frequent use stay in fast memory.
        cold_tier: As for `HotColdEmbeddingBag`.
        cold_path: As for `HotColdEmbeddingBag`.

    Attributes:
        embedding_bags: The tables by name, as `nn.EmbeddingBag`s that hold the weights.
        row_optimizer: `optimizer` as a torch optimizer, with `param_groups`; None without one.

    Shape:
        result (B, sum of dims), columns in table order, then feature order; float32 for rows of
        bfloat16.

    Raises:
        BudgetTooSmall, ColdTierError, ConfigError, ProfileError, TypeError: as for
            `HotColdEmbeddingBag`.
        ValueError: names are not distinct, a pooling or data type is unknown, or a recsys optimizer
            does not support the device.
    """

    def __init__(
        self,
        tables: Sequence[TableConfig],
        is_weighted: bool = False,
        device: torch.device | str | None = None,
        *,
        optimizer: RowOptimizer | None = None,
        auto_apply: bool = True,
        stochastic_rounding: bool = True,
        rounding_seed: int = 0,
        budget: int | str | None = None,
        plan: HotPlan | None = None,
        cold_tier: str = "host",
        cold_path: Path | str | None = None,
        _bags: nn.ModuleDict | None = None,
    ) -> None:
        super().__init__(tables, poolings=("sum", "mean"), data_types=tuple(DATA_TYPES))
        settings = TableSettings(
            optimizer,
            auto_apply,
            stochastic_rounding,
            rounding_seed,
            budget,
            cold_tier,
            cold_path,
            plan,
        )
        self._is_weighted, files = is_weighted, None
        if _bags is None:
            rows, files = settings.allocate(_shapes(self._tables), device)
            self.embedding_bags = make_bags(self._tables, rows)
            self.reset_parameters()
        else:
            settings.require()
            self.embedding_bags = _bags
        self._optimize(settings, files)

    @classmethod
    def from_torchrec(
        cls,
        collection: EmbeddingBagCollection,
        *,
        optimizer: RowOptimizer | None = None,
        auto_apply: bool = True,
    ) -> HotColdEmbeddingBagCollection:
        """Make a collection with the configs and the same Parameters as one of TorchRec's.

        If `apply_optimizer_in_backward` gave the tables an optimizer, this collection reads its
        settings and state once, and removes its hooks; see `HotColdEmbeddingBag.from_torch`.

        Args:
            collection: TorchRec's, not sharded. It remains usable and shares its rows.
            optimizer: The update rule of the rows. None takes the optimizer that
                `apply_optimizer_in_backward` gave the tables; without one, dense gradients are left
                to torch.
            auto_apply: As for the class.

        Raises:
            ValueError: rows are not float32 or bfloat16, or a recsys optimizer already
                updates them; or `apply_optimizer_in_backward` gave the tables optimizers that
                differ or cannot be translated, or one in addition to `optimizer`.
        """
        return cls._on(collection)._take_over(collection, optimizer, auto_apply=auto_apply)

    @classmethod
    def _on(cls, collection: EmbeddingBagCollection) -> HotColdEmbeddingBagCollection:
        """A collection without an optimizer on the same Parameters."""
        for name, bag in collection.embedding_bags.items():
            require_no_optimizer(name, bag.weight)
        configs, is_weighted = collection.embedding_bag_configs(), collection.is_weighted()
        return cls(configs, is_weighted, _bags=collection.embedding_bags)

    def tables(self) -> list[Table]:
        """Its tables, in order."""
        bags = cast("dict[str, nn.EmbeddingBag]", self.embedding_bags)
        return [
            Table(name, f"embedding_bags.{name}.weight", f"{name}.", bag, bag.sparse)
            for name, bag in bags.items()
        ]

    def is_weighted(self) -> bool:
        """Whether every lookup has a weight."""
        return self._is_weighted

    def forward(self, features: Features, *, stacked: bool = False) -> Pooled | Tensor:
        """Look up and pool; a `KeyedJaggedTensor` gives a `KeyedTensor`, `JaggedIds` give
        `PooledEmbeddings`.

        Args:
            features: What is looked up.
            stacked: For tables with one dim D: return the pooled vectors as one tensor, (B, F, D).

        Raises:
            IdOutOfRange: an id is not a row of its table.
            KeyError: a feature is missing.
            MalformedBags: tensors of a `KeyedJaggedTensor` do not fit, it has a feature twice, or
                weights are missing or nan.
            ValueError: features have different batch sizes; or with `stacked`, tables have
                different dims.
        """  # noqa: D205  # two kinds of input, one sentence
        run = self._break_graph if torch.compiler.is_compiling() else self._look_up
        found: Pooled | Tensor = run(features, stacked)
        return found

    def lookups(self, features: Features) -> list[tuple[Part, Bags]]:
        """What `forward` looks up; the argument and errors are its."""
        parts, bags = self._read(features)
        return [(part, bags) for part in parts]

    def _lay_out(self) -> None:
        super()._lay_out()
        self._known_keys, self._parts = None, []

    @not_compiled
    def _break_graph(self, features: Features, stacked: bool) -> Pooled | Tensor:
        return self._look_up(features, stacked)

    def _look_up(self, features: Features, stacked: bool) -> Pooled | Tensor:
        num_stacked = self.num_stacked() if stacked else 0
        parts, bags = self._read(features)
        if self._nodes is None:
            pooled = look_up_for_torch(parts, bags, self._width, self._are_sparse)
        else:
            pooled = look_up(self._nodes, parts, bags, self._width)
        if stacked:
            return pooled.view(bags.num_samples, num_stacked, self._output_dims[0])
        if isinstance(features, JaggedIds):
            return PooledEmbeddings._unchecked(self._output_keys, self._output_dims, pooled)
        from torchrec.sparse.jagged_tensor import KeyedTensor

        return cast("Pooled", KeyedTensor(self._output_keys, self._output_dims, pooled))

    def _read(self, features: Features) -> tuple[Sequence[Part], Bags]:
        self._require_tables()
        if features.keys() != self._known_keys:
            self._make_parts(self._positions(features))
        first = self._parts[0][0]
        bags = read_features(
            features, is_weighted=self._is_weighted, dtype=first.dtype, device=first.device
        )
        return self._parts, bags

    def _make_parts(self, positions: Sequence[int]) -> None:
        """Lay out the lookups by group and pooling, each of which is a kernel call.

        Args:
            positions: The position of each lookup's feature in the input.
        """
        *columns, self._width = accumulate(self._output_dims, initial=0)
        members: dict[tuple[Any, bool], list[tuple[int, int, int]]] = {}
        for (table, _), position, column in zip(self._lookups, positions, columns, strict=True):
            group, number = self._members[table]
            kind = group, pooling_of(self._tables[table]) == "mean"
            members.setdefault(kind, []).append((number, position, column))
        self._parts = [
            (group, Lookups(locations, is_mean=is_mean))
            for (group, is_mean), locations in members.items()
        ]
        sparse = {table.weight: table.is_sparse for table in reversed(self.tables())}
        # With an optimizer, tables of other modules may be in a group.
        self._are_sparse = [
            [sparse.get(table, True) for table in group.tables] for group, _ in self._parts
        ]


class JaggedEmbeddings:
    """The rows of one feature, sample after sample; a part of TorchRec's `JaggedTensor`.

    Args:
        values: The rows.
        lengths: Number of rows of each sample.
        weights: The id of each row, with `need_indices=True`; else None.

    Shape:
        values (N, D); lengths (B,); weights (N,).
    """

    def __init__(self, values: Tensor, lengths: Tensor, weights: Tensor | None = None) -> None:
        self._values, self._lengths, self._weights = values, lengths, weights

    def values(self) -> Tensor:
        """The rows, (N, D)."""
        return self._values

    def lengths(self) -> Tensor:
        """Number of rows of each sample, (B,)."""
        return self._lengths

    def offsets(self) -> Tensor:
        """Where each sample's rows begin, and the end of the last, (B + 1,)."""
        return nn.functional.pad(self._lengths.cumsum(0), (1, 0))

    def weights_or_none(self) -> Tensor | None:
        """The id of each row, (N,), with `need_indices=True`; else None."""
        return self._weights

    def to_dense(self) -> list[Tensor]:
        """The rows of each sample, (L, D) each; views, not copies."""
        return list(torch.split(self._values, self._lengths.tolist()))


class HotColdEmbeddingCollection(TableModule, AbstractCollection):
    """A drop-in for `torchrec.EmbeddingCollection`.

    Args:
        tables: `TableConfig`s, whose pooling is ignored, or TorchRec's `EmbeddingConfig`s; all with
            the same embedding_dim.
        device: As for `HotColdEmbeddingBagCollection`.
        need_indices: Whether the result has the ids of the rows, as its weights.
        optimizer: As for `HotColdEmbeddingBagCollection`.
        auto_apply: As for `HotColdEmbeddingBagCollection`.
        budget: As for `HotColdEmbeddingBagCollection`.
        plan: As for `HotColdEmbeddingBagCollection`.
        cold_tier: As for `HotColdEmbeddingBagCollection`.
        cold_path: As for `HotColdEmbeddingBagCollection`.

    Attributes:
        embeddings: The tables by name, as `HotColdEmbedding`s.
        row_optimizer: `optimizer` as a torch optimizer, with `param_groups`; None without one.

    Raises:
        BudgetTooSmall, ColdTierError, ConfigError, ProfileError, TypeError: as for
            `HotColdEmbeddingBag`.
        ValueError: names are not distinct, dims differ, a data type is unknown, or a recsys
            optimizer does not support the device.
    """

    def __init__(
        self,
        tables: Sequence[TableConfig],
        device: torch.device | str | None = None,
        need_indices: bool = False,
        *,
        optimizer: RowOptimizer | None = None,
        auto_apply: bool = True,
        budget: int | str | None = None,
        plan: HotPlan | None = None,
        cold_tier: str = "host",
        cold_path: Path | str | None = None,
        _embeddings: nn.ModuleDict | None = None,
    ) -> None:
        super().__init__(tables)
        dims = {table.name: table.embedding_dim for table in tables}
        if len(set(dims.values())) > 1:
            raise ValueError(f"tables of a collection must have one embedding_dim, got {dims}")
        settings = TableSettings(
            optimizer,
            auto_apply,
            budget=budget,
            cold_tier=cold_tier,
            cold_path=cold_path,
            plan=plan,
        )
        self._need_indices, files = need_indices, None
        if _embeddings is None:
            rows, files = settings.allocate(_shapes(tables), device)
            made: list[tuple[Tensor, bool]] = [(weight, True) for weight in rows]
        else:
            settings.require()
            held = cast("dict[str, nn.Embedding]", _embeddings)
            made = [(module.weight, module.sparse) for module in held.values()]
        self.embeddings = nn.ModuleDict()
        for table, (weight, is_sparse) in zip(tables, made, strict=True):
            num_rows, dim = weight.shape
            holder = HotColdEmbedding(num_rows, dim, sparse=is_sparse, _weight=weight)
            if isinstance(weight, nn.Parameter):
                holder.weight = weight  # torch made another one of the same memory
            self.embeddings[table.name] = holder
        if _embeddings is None:
            self.reset_parameters()
        self._optimize(settings, files)

    @classmethod
    def from_torchrec(
        cls,
        collection: EmbeddingCollection,
        *,
        optimizer: RowOptimizer | None = None,
        auto_apply: bool = True,
    ) -> HotColdEmbeddingCollection:
        """Make a collection on the same Parameters as one of TorchRec's.

        Args:
            collection: As for `HotColdEmbeddingBagCollection.from_torchrec`.
            optimizer: As for `HotColdEmbeddingBagCollection.from_torchrec`.
            auto_apply: As for the class.

        Raises:
            ValueError: as for `HotColdEmbeddingBagCollection.from_torchrec`.
        """
        return cls._on(collection)._take_over(collection, optimizer, auto_apply=auto_apply)

    @classmethod
    def _on(cls, collection: EmbeddingCollection) -> HotColdEmbeddingCollection:
        """A collection without an optimizer on the same Parameters."""
        for name, table in collection.embeddings.items():
            require_no_optimizer(name, table.weight)
        return cls(
            collection.embedding_configs(),
            need_indices=collection.need_indices(),
            _embeddings=collection.embeddings,
        )

    def tables(self) -> list[Table]:
        """Its tables, in order."""
        held = cast("dict[str, HotColdEmbedding]", self.embeddings)
        return [
            Table(name, f"embeddings.{name}.weight", f"{name}.", holder, holder.sparse)
            for name, holder in held.items()
        ]

    def attach(self, members: Sequence[Member], nodes: Nodes) -> None:
        """Pass gradients to an optimizer of recsys; see `TableModule.attach`."""
        super().attach(members, nodes)
        for number, member in enumerate(members):
            self._embedding(number).attach([member], nodes)

    def detach(self) -> None:
        """Leave gradients to torch; see `TableModule.detach`."""
        super().detach()
        for number in range(len(self._tables)):
            self._embedding(number).detach()

    def forward(self, features: Features) -> dict[str, JaggedEmbeddings | JaggedTensor]:
        """Look up; a `KeyedJaggedTensor` gives `JaggedTensor`s, `JaggedIds` give
        `JaggedEmbeddings`, by feature.

        Args:
            features: `JaggedIds`, or a `KeyedJaggedTensor` of TorchRec.

        Shape:
            result: for each feature with N ids its rows, (N, D); float32 for rows of bfloat16.

        Raises:
            IdOutOfRange: an id is not a row of its table.
            KeyError: a feature is missing.
            MalformedBags: tensors of a `KeyedJaggedTensor` do not fit, or it has a feature twice.
        """  # noqa: D205  # two kinds of input, one sentence
        if self._nodes is not None or self._pending is not None:
            self._require_tables()  # of all, before the first lookup: they share a group
        by_feature = self._by_feature(features)
        found: dict[str, Any] = {}
        for name, (table, feature) in zip(output_names(self._tables), self._lookups, strict=True):
            ids, lengths = by_feature[feature]
            try:
                rows = self._embedding(table)(ids)
            except IdOutOfRange:
                if self._members[table].group.is_on_device:
                    raise  # of an earlier lookup
                raise self._id_error(features, table, feature) from None
            rows = rows.float() if rows.dtype is torch.bfloat16 else rows
            weights = ids if self._need_indices else None
            if isinstance(features, JaggedIds):
                found[name] = JaggedEmbeddings(rows, lengths, weights)
            else:
                from torchrec.sparse.jagged_tensor import JaggedTensor

                found[name] = JaggedTensor(rows, lengths=lengths, weights=weights)
        return found

    def lookups(self, features: Features) -> list[tuple[Part, Bags]]:
        """What `forward` looks up, as one bag a sample; the argument and errors are its."""
        self._require_tables()
        by_feature, found = self._by_feature(features), []
        for table, feature in self._lookups:
            ids, lengths = by_feature[feature]
            [(part, bags)] = self._embedding(table).lookups(ids)
            offsets, size = (lengths.cumsum(0) - lengths).to(ids.dtype), len(lengths)
            found.append((part, bags._replace(offsets=offsets, num_samples=size, num_bags=size)))
        return found

    def embedding_configs(self) -> list[TableConfig]:
        """The tables, in order."""
        return self._tables

    def embedding_names_by_table(self) -> list[list[str]]:
        """The names of each table's features in the result."""
        names = iter(output_names(self._tables))
        return [[next(names) for _ in table.feature_names] for table in self._tables]

    def embedding_dim(self) -> int:
        """D."""
        return self._tables[0].embedding_dim

    def need_indices(self) -> bool:
        """Whether the result has the ids of the rows."""
        return self._need_indices

    def _embedding(self, number: int) -> HotColdEmbedding:
        return cast("HotColdEmbedding", self.embeddings[self._tables[number].name])

    def _by_feature(self, features: Features) -> dict[str, tuple[Tensor, Tensor]]:
        """The ids of each feature, and the number of ids of each sample."""
        keys, size = features.keys(), features.stride()
        if keys != self._known_keys:
            require_features((feature for _, feature in self._lookups), keys)
            self._known_keys = list(keys)
        read_features(features, is_weighted=False, dtype=torch.float32, device=self.device)
        values, offsets = features.values(), features.offsets()
        ends = offsets[::size].tolist() if size else [0] * (len(keys) + 1)
        require_all_in_bags(len(values), ends[-1])
        lengths = offsets.diff().view(len(keys), size)
        is_checked = isinstance(features, JaggedIds) or not lengths.is_cpu
        if not is_checked and (ends[0] or ends[-1] > len(values) or bool((lengths < 0).any())):
            raise MalformedBags(
                f"offsets must ascend from 0 to the number of values, {len(values)}, got "
                f"{offsets.tolist()}"
            )
        return {
            feature: (values[ends[number] : ends[number + 1]], lengths[number])
            for number, feature in enumerate(keys)
        }

    def _id_error(self, features: Features, table: int, feature: str) -> Exception:
        """An error that names the feature and the sample."""
        group, number = self._members[table]
        bags = read_features(features, is_weighted=False, dtype=group.dtype, device=self.device)
        position, values = features.keys().index(feature), features.values()
        begin = int(features.offsets()[position * features.stride()])
        is_bad = (values[begin:] < 0) | (values[begin:] >= int(group.sizes[number]))
        code = begin + int(is_bad.int().argmax())
        return explain(group, Lookups([(number, position, 0)], is_mean=False), bags, code)


def _shapes(tables: Sequence[TableConfig]) -> dict[str, tuple[tuple[int, int], torch.dtype]]:
    """The shape and dtype of each table."""
    return {
        table.name: (
            (table.num_embeddings, table.embedding_dim),
            DATA_TYPES[data_type_of(table)],
        )
        for table in tables
    }
