"""The rows of one collection that one rank holds: `LocalBags`, pooled, and `LocalEmbeddings`.

    ids from all ranks -> HotColdEmbeddingBagCollection -> pooled vectors for all ranks
                          HotColdEmbeddingCollection    -> rows for all ranks
                          RowLookups                    -> rows of row-wise tables, not pooled
    their gradient -> ledger -> rows, at the end of backward

TorchRec makes a lookup for each sharding type, and in it a kernel for each pooling. Here, one
collection looks up all of the rank's tables, so that they share one budget.

A rank without tables has no collection. A rank with no row of a row-wise table (5 rows on 4 ranks
are 2, 2, 1 and 0) has one row that no id leads to, and an empty Parameter for it.

TorchRec's settings of an optimizer (`fused_params`) are read as a recsys formula:

    EmbOptimType.SGD, EXACT_SGD                           SGD
    EmbOptimType.EXACT_ADAGRAD                            Adagrad
    EmbOptimType.EXACT_ROWWISE_ADAGRAD, ROWWISE_ADAGRAD   RowWiseAdagrad

TorchRec stores there what `apply_optimizer_in_backward` was called with. Settings that are left out
have FBGEMM's defaults, as they do with TorchRec's own sharders: lr=0.01 and eps=1e-8. The defaults
of `torch.optim` differ (eps=1e-10 for Adagrad).
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torchrec.distributed.embedding_kernel import get_state_dict
from torchrec.optim.fused import EmptyFusedOptimizer, FusedOptimizerModule

from recsys.batch import JaggedIds
from recsys.distributed.exchange.row_lookups import RowLookups, without_tables
from recsys.distributed.row_state import RowStateOptimizer, make_state
from recsys.embeddings import HotColdEmbeddingBagCollection, HotColdEmbeddingCollection
from recsys.embeddings.optimizer import SGD, Adagrad, RowWiseAdagrad
from recsys.embeddings.tiers.fetch import claim_together

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import torch.distributed as dist
    from torch import Tensor
    from torchrec import EmbeddingBagConfig, KeyedJaggedTensor
    from torchrec.distributed.embedding_types import GroupedEmbeddingConfig, ShardedEmbeddingTable
    from torchrec.optim.fused import FusedOptimizer

    from recsys.embeddings.optimizer import RowOptimizer
    from recsys.embeddings.tiers.fetch import Claims, Fetcher

__all__ = ["AbstractLocalTables", "LocalBags", "LocalEmbeddings"]

_FORMULAS: dict[str, type[SGD | Adagrad | RowWiseAdagrad]] = {
    "sgd": SGD,
    "exact_sgd": SGD,
    "exact_adagrad": Adagrad,
    "exact_row_wise_adagrad": RowWiseAdagrad,
    "row_wise_adagrad": RowWiseAdagrad,
}
# FBGEMM's cache has the first. Rows of 32 bits are never rounded. The others are read below.
_ALLOWED = {"prefetch_pipeline", "stochastic_rounding", "optimizer", "learning_rate", "eps"}
_PRECISIONS = {"cache_precision", "output_dtype", "weights_precision"}


class AbstractLocalTables(nn.Module, FusedOptimizerModule):  # type: ignore[misc]  # untyped
    """A rank's rows, in the place of TorchRec's lookups of a sharded collection.

    Args:
        shardings: For each sharding type of the collection, this rank's groups of tables.
        configs: The configs of the whole tables, by name.
        given: The rows of whole tables, to copy; other tables are drawn by their `init_fn`.
        tiers: `budget`, `plan`, `cold_tier` and `cold_path`, as for the recsys collection.
            The plan is of the whole tables.
        device: The device of lookups and results.
        group: The ranks among which the tables are divided.

    Attributes:
        tables: The rank's tables as TorchRec describes them.
        collection: Looks them up; None if there are none.

    Raises:
        ColdTierError: the folder cannot be used.
        ValueError: the optimizer is missing or not supported, or tables have different ones.
        Exception: of the recsys collection.
    """

    def __init__(
        self,
        shardings: Sequence[Sequence[GroupedEmbeddingConfig]],
        configs: Mapping[str, EmbeddingBagConfig],
        given: Mapping[str, Tensor],
        tiers: Mapping[str, Any],
        *,
        device: torch.device | None,
        group: dist.ProcessGroup | None,
    ) -> None:
        super().__init__()
        groups = [config for of_sharding in shardings for config in of_sharding]
        self.tables: list[ShardedEmbeddingTable] = [
            table for config in groups for table in config.embedding_tables
        ]
        self._shardings = shardings
        self._group, self._device = group, device
        self.collection: HotColdEmbeddingBagCollection | HotColdEmbeddingCollection | None = None
        self._weights: dict[str, nn.Parameter] = {}
        self._optimizer: FusedOptimizer = EmptyFusedOptimizer()
        if self.tables:
            self._make(configs, given, dict(tiers))
            self._optimizer = RowStateOptimizer(self, group)

    def _make(
        self,
        configs: Mapping[str, EmbeddingBagConfig],
        given: Mapping[str, Tensor],
        tiers: dict[str, Any],
    ) -> None:
        if tiers.get("plan") is not None:
            rows = {table.name: (_first_row(table), _num_rows(table)) for table in self.tables}
            tiers["plan"] = tiers["plan"].of_rows(rows, tiers.get("budget"))
        self.collection = self._collection_of(
            [_local(table, configs[table.name], given.get(table.name)) for table in self.tables],
            optimizer=_common_formula(
                {table.name: table.fused_params or {} for table in self.tables}
            ),
            **tiers,
        )
        assert self.collection.row_optimizer is not None
        # Each rank updates rows of its own, so DistributedDataParallel has nothing to share.
        assert self.collection.nodes is not None
        self.collection.nodes.is_sharded = True
        make_state(self.collection.row_optimizer)
        for table, weight in zip(self.tables, self._whole_weights(), strict=True):
            own = weight if table.local_rows else nn.Parameter(weight.new_empty(0, weight.shape[1]))
            # Users leave parameters with this attribute out of their own optimizers.
            own._in_backward_optimizers = [EmptyFusedOptimizer()]  # type: ignore[attr-defined]
            self._weights[table.name] = own

    @abstractmethod
    def _collection_of(
        self, tables: list[EmbeddingBagConfig], **settings: Any
    ) -> HotColdEmbeddingBagCollection | HotColdEmbeddingCollection:
        """Make the collection of the local rows."""

    @abstractmethod
    def forward(self, inputs: Sequence[KeyedJaggedTensor]) -> list[Tensor]:
        """Look up this rank's rows for the samples of all ranks.

        Args:
            inputs: For each sharding type, the features that this rank looks up.

        Returns:
            What TorchRec's exchange takes, for each sharding type.

        Raises:
            IdOutOfRange: an id is not a row.
        """

    def prefetch(self, inputs: Sequence[KeyedJaggedTensor]) -> Claims:
        """Start to fetch the rows for a later `forward` of the same input."""
        if self.collection is None or not self.fetchers():
            return []
        return self.collection.prefetch(self._joined(inputs, self._shardings))

    def _joined(
        self,
        inputs: Sequence[KeyedJaggedTensor],
        shardings: Sequence[Sequence[GroupedEmbeddingConfig]],
    ) -> JaggedIds:
        """The features of some sharding types as one input, with a name for each lookup.

        A feature of two tables is in it twice. Row-wise, the two have different ids, because a rank
        has other rows of one table than of the other.
        """
        names = [
            name for groups in shardings for config in groups for name in config.embedding_names()
        ]
        values = torch.cat([features.values() for features in inputs])
        lengths = torch.cat([features.lengths() for features in inputs])
        offsets = nn.functional.pad(lengths.cumsum(0), (1, 0)).to(values.dtype)
        weights = None
        if self.tables[0].is_weighted:
            weights = torch.cat([features.weights() for features in inputs])
        return JaggedIds(names, values, offsets, weights)

    def _whole_weights(self) -> list[nn.Parameter]:
        """The memory of each table, with the row of a table that has none."""
        assert self.collection is not None
        return self.collection.table_weights()

    def fetchers(self) -> list[Fetcher]:
        """What moves the rows; empty if all are in fast memory."""
        groups = [] if self.collection is None else self.collection.groups()
        return [group.fetcher for group in groups if group.fetcher is not None]

    def __getattr__(self, name: str) -> Any:
        """Say which parts of TorchRec need what these tables lack: FBGEMM's kernels.

        Raises:
            AttributeError: there is no such attribute.
        """
        if name == "_emb_modules":
            raise AttributeError(
                "TorchRec's managed collisions, pruning of tables (ITEP) and trackers of optimizer "
                "state read FBGEMM's kernels, and recsys tables have none; use TorchRec's own "
                "sharder for these tables"
            )
        return super().__getattr__(name)

    # What TorchRec calls its lookups for: optimizers and checkpoints.

    @property
    def fused_optimizer(self) -> FusedOptimizer:
        """The optimizer of the rows, as TorchRec's checkpoints and schedules see it."""
        return self._optimizer

    def state_dict(  # type: ignore[override]
        self, destination: dict[str, Any] | None = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        """The rows as ShardedTensors or DTensors; views of the cold tier, not copies."""
        self.flush()
        found: dict[str, Any] = get_state_dict(
            self.tables, self.split_embedding_weights(), self._group, destination, prefix
        )
        return found

    def named_parameters_by_table(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The rows of each table, by name."""
        yield from self._weights.items()

    def flush(self) -> None:
        """Write updated rows and state back to the cold tier, before it is read."""
        if self.collection is not None:
            self.collection.sync()

    def purge(self) -> None:
        """Let the next lookup fetch rows again, because the cold tier is written to."""
        for fetcher in self.fetchers():
            fetcher.empty_slots(is_written_back=True)

    # What TorchRec's `EmbeddingFusedOptimizer` calls FBGEMM's module for.

    def split_embedding_weights(self) -> list[Tensor]:
        """The rows of each table; views."""
        return [self._weights[table.name].detach() for table in self.tables]

    def get_optimizer_state(self) -> list[dict[str, Tensor]]:
        """The state arrays of each table by FBGEMM's names; views."""
        assert self.collection is not None
        assert self.collection.row_optimizer is not None
        state, formula = self.collection.row_optimizer.state, self.collection.row_optimizer.formula
        return [
            {
                name: state[weight][name][: table.local_rows]
                for name in formula.state_sizes(table.local_cols)
            }
            for table, weight in zip(self.tables, self._whole_weights(), strict=True)
        ]

    def get_learning_rate(self) -> float:
        """The learning rate of the rows."""
        return float(self._settings()["lr"])

    def set_learning_rate(self, lr: float) -> None:
        """Change the learning rate from the next backward on."""
        if lr != self.get_learning_rate():
            self._settings()["lr"] = float(lr)

    def _settings(self) -> dict[str, Any]:
        assert self.collection is not None
        assert self.collection.row_optimizer is not None
        return self.collection.row_optimizer.param_groups[0]


class LocalBags(AbstractLocalTables):
    """A rank's rows of a collection with pooling.

    Shape:
        each result (B of all ranks, sum of dims) float32; after `look_up_rows_of`, the rows of that
        sharding type as one array of numbers, see `RowLookups`.
    """

    # Position of the sharding type whose tables are looked up without pooling.
    _unpooled_position: int | None = None

    def look_up_rows_of(self, position: int) -> None:
        """From now on, look up the tables of one sharding type without pooling.

        Args:
            position: The position of the sharding type.
        """
        assert isinstance(self.collection, HotColdEmbeddingBagCollection)
        tables = [
            table.name for config in self._shardings[position] for table in config.embedding_tables
        ]
        self._unpooled_position = position
        # In tuples, so that torch does not find the tables twice.
        self._row_lookups = (RowLookups(self.collection, tables),)
        self._pooled = (without_tables(self.collection, tables),)

    def forward(self, inputs: Sequence[KeyedJaggedTensor]) -> list[Tensor]:
        """Look up; see `AbstractLocalTables.forward`."""
        if self._unpooled_position is None:
            return self._pool(self.collection, inputs, self._shardings)
        [pooled], [row_lookups], position = self._pooled, self._row_lookups, self._unpooled_position
        others = _all_but(inputs, position), _all_but(self._shardings, position)
        rows = row_lookups(inputs[position])
        _require_gradient(rows)
        found = self._pool(pooled, *others)
        return [*found[:position], rows, *found[position:]]

    def prefetch(self, inputs: Sequence[KeyedJaggedTensor]) -> Claims:
        """Start to fetch rows; see `AbstractLocalTables.prefetch`."""
        if self._unpooled_position is None or not self.fetchers():
            return super().prefetch(inputs)
        [pooled], [rows], position = self._pooled, self._row_lookups, self._unpooled_position
        lookups = rows.lookups(inputs[position])
        if pooled is not None:
            others = _all_but(inputs, position), _all_but(self._shardings, position)
            lookups += pooled.lookups(self._joined(*others))
        return claim_together(lookups)

    def _collection_of(
        self, tables: list[EmbeddingBagConfig], **settings: Any
    ) -> HotColdEmbeddingBagCollection:
        is_weighted = bool(self.tables[0].is_weighted)
        return HotColdEmbeddingBagCollection(tables, is_weighted, self._device, **settings)

    def _pool(
        self,
        collection: Any,
        inputs: Sequence[KeyedJaggedTensor],
        shardings: Sequence[Sequence[GroupedEmbeddingConfig]],
    ) -> list[Tensor]:
        """The pooled vectors of some sharding types, whose tables `collection` has."""
        if not inputs:
            return []
        pooled = torch.zeros(inputs[0].stride(), 0, device=self._device)
        if collection is not None:
            pooled = collection(self._joined(inputs, shardings)).values()
        _require_gradient(pooled)
        if len(inputs) == 1:
            return [pooled]
        widths = [sum(config.dim_sum() for config in groups) for groups in shardings]
        # TorchRec's exchange needs each sharding type's vectors side by side in memory.
        return [vectors.contiguous() for vectors in torch.split(pooled, widths, 1)]


class LocalEmbeddings(AbstractLocalTables):
    """A rank's rows of a collection without pooling.

    Shape:
        each result (N of all ranks, D) float32, in the order of the ids; (0,) without tables.
    """

    def _collection_of(
        self, tables: list[EmbeddingBagConfig], **settings: Any
    ) -> HotColdEmbeddingCollection:
        return HotColdEmbeddingCollection(tables, self._device, **settings)

    def forward(self, inputs: Sequence[KeyedJaggedTensor]) -> list[Tensor]:
        """Look up without pooling; see `AbstractLocalTables.forward`."""
        rows = torch.zeros(0, device=self._device)
        if self.collection is not None:
            found: Any = self.collection(self._joined(inputs, self._shardings))
            rows = torch.cat([embeddings.values() for embeddings in found.values()])
        _require_gradient(rows)
        return list(torch.split(rows, [len(features.values()) for features in inputs]))


def _require_gradient(result: Tensor) -> None:
    """Let a result without rows, or with frozen ones, have a gradient, too.

    The backward of the exchange of vectors is a collective. Without a gradient, this rank would
    leave it out, and the others would wait.
    """
    if torch.is_grad_enabled() and not result.requires_grad:
        result.requires_grad_()


def _all_but(items: Sequence[Any], position: int) -> list[Any]:
    return [*items[:position], *items[position + 1 :]]


def _first_row(table: ShardedEmbeddingTable) -> int:
    """The number of the first local row in the whole table."""
    return int(table.local_metadata.shard_offsets[0])


def _num_rows(table: ShardedEmbeddingTable) -> int:
    """The number of rows in memory, at least one."""
    return max(1, int(table.local_rows))


def _local(
    table: ShardedEmbeddingTable, config: EmbeddingBagConfig, given: Tensor | None
) -> EmbeddingBagConfig:
    """The config of a table's local rows."""
    init_fn = config.init_fn
    if given is not None:
        first = _first_row(table)
        init_fn = partial(_copy_rows, given.detach()[first : first + table.local_rows])
    return replace(
        config,
        num_embeddings=_num_rows(table),
        feature_names=list(table.embedding_names),
        init_fn=init_fn,
    )


def _copy_rows(rows: Tensor, weight: Tensor) -> None:
    weight[: len(rows)].copy_(rows)


def _common_formula(fused_params: Mapping[str, Mapping[str, Any]]) -> RowOptimizer:
    """The update rule of all tables.

    Args:
        fused_params: TorchRec's settings of each table, by name; at least one table.

    Raises:
        ValueError: there is no optimizer, it or one of its settings is not supported, or tables
            have different ones.
    """
    formulas = {table: _formula_of(table, settings) for table, settings in fused_params.items()}
    first, formula = next(iter(formulas.items()))
    for table, other in formulas.items():
        if other != formula:
            raise ValueError(
                f"tables {first!r} and {table!r}: all tables of a collection must have the same "
                f"optimizer, got {formula} and {other}; apply one to both, or put the tables into "
                "two collections"
            )
    return formula


def _formula_of(table: str, settings: Mapping[str, Any]) -> RowOptimizer:
    optimizer = settings.get("optimizer")
    if optimizer is None:
        raise ValueError(
            f"table {table!r}: rows need an optimizer, got none; call "
            "torchrec.optim.apply_optimizer_in_backward before DistributedModelParallel, or set "
            "fused_params={'optimizer': EmbOptimType...., 'learning_rate': ...} of the sharder"
        )
    kind = str(getattr(optimizer, "value", optimizer))
    formula = _FORMULAS.get(kind)
    if formula is None:
        raise ValueError(
            f"table {table!r}: the optimizer must be one of {sorted(_FORMULAS)}, got {kind!r}; use "
            "SGD, Adagrad or RowWiseAdagrad, or TorchRec's own sharder"
        )
    for name, value in settings.items():
        is_fp32 = str(getattr(value, "value", value)).lower() == "fp32"
        if name not in _ALLOWED and value and not (name in _PRECISIONS and is_fp32):
            raise ValueError(
                f"table {table!r}: fused_params has {name}={value!r}, which recsys does not "
                "support; leave it out, or use TorchRec's own sharder"
            )
    read = {"lr": float(settings.get("learning_rate", 0.01))}
    if formula is not SGD:
        read["eps"] = float(settings.get("eps", 1e-8))
    return formula(**read)
