"""`HotColdEmbeddingBagCollection`: all tables of a model, looked up in one call, updated in one.

    features -> fused_lookup -> pooled vectors      one kernel per embedding_dim, pooling, dtype
    gradient -> ledger                              kept as backward hands it over
    update   <- ledger                              every row once; one kernel for each of them

Without an optimizer the ledger is not used: backward leaves a sparse gradient at each table, as
`nn.EmbeddingBag(sparse=True)` does, and any `torch.optim` optimizer that takes one steps it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch import Tensor, nn

from recsys.batch import (
    JaggedIds,
    PooledEmbeddings,
    expand_to_one_batch_size,
    varies_in_batch_size,
)
from recsys.embeddings.abstract import AbstractEmbeddingBags, pooling_of
from recsys.embeddings.fused_lookup import Part, fused_lookup
from recsys.embeddings.kernels.pooled_lookup import Bags, Lookups
from recsys.embeddings.memory import empty_rows
from recsys.embeddings.row_space import compute_dtype
from recsys.embeddings.row_updater import FusedOptimizer
from recsys.embeddings.table import DATA_TYPES, data_type_of
from recsys.embeddings.table_group import TableGroup
from recsys.errors import IdOutOfRange

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    from recsys.batch import Features, Pooled
    from recsys.embeddings.optimizer import RowOptimizer
    from recsys.embeddings.table import TableConfig

__all__ = ["HotColdEmbeddingBagCollection"]


class HotColdEmbeddingBagCollection(AbstractEmbeddingBags):
    """A drop-in for `torchrec.EmbeddingBagCollection`, everything resident.

    Args:
        tables: `TableConfig`s or TorchRec's `EmbeddingBagConfig`s, sum- or mean-pooled.
        is_weighted: Whether every lookup carries a weight.
        device: Where the tables live; the CPU.
        optimizer: How rows are updated; None leaves sparse gradients to an optimizer of torch's.
        auto_apply: With an optimizer: update at the end of each backward. Where False,
            `row_optimizer.step()` updates, once for all backward passes since the last.
        stochastic_rounding: Of tables of bfloat16 or float16 that `optimizer` moves: up or down
            with the probabilities that make a row right on average, as in FBGEMM; where False, to
            nearest, which loses steps that are small beside the row.
        rounding_seed: Of that chance. Rows depend on it, the step and their place alone, so the
            same seed gives the same bits.

    Attributes:
        embedding_bags: The tables by name, as `nn.EmbeddingBag`s that hold the weights.
        row_optimizer: `torch.optim`'s face of `optimizer`, for its `param_groups`; None without.

    Shape:
        result (B, sum of dims), columns in table order, then feature order; float32, of tables of
        16 bits too.

    Raises:
        ValueError: names are not distinct, or a pooling or data type is unknown.
    """

    def __init__(
        self,
        tables: Sequence[TableConfig],
        is_weighted: bool = False,
        device: torch.device | None = None,
        *,
        optimizer: RowOptimizer | None = None,
        auto_apply: bool = True,
        stochastic_rounding: bool = True,
        rounding_seed: int = 0,
    ) -> None:
        super().__init__(tables, poolings=("sum", "mean"), data_types=tuple(DATA_TYPES))
        self._is_weighted = is_weighted
        self.embedding_bags = nn.ModuleDict(
            {
                table.name: nn.EmbeddingBag(
                    table.num_embeddings,
                    table.embedding_dim,
                    mode=pooling_of(table),
                    sparse=True,
                    # Rows are drawn below; nn.EmbeddingBag would first draw normal ones.
                    _weight=empty_rows(
                        table.num_embeddings,
                        table.embedding_dim,
                        dtype=DATA_TYPES[data_type_of(table)],
                        device=device,
                    ),
                )
                for table in self._tables
            }
        )
        self.reset_parameters()
        kinds = dict.fromkeys(map(_kind_of, self._tables))
        self._layouts = [_Layout(self, kind) for kind in kinds]
        self._means = {layout.is_mean for layout in self._layouts}
        self.row_optimizer = None
        if optimizer is not None:
            self.row_optimizer = FusedOptimizer(
                {
                    f"embedding_bags.{table.name}.weight": (weight, f"{table.name}.")
                    for table, weight in zip(self._tables, self.table_weights(), strict=True)
                },
                [layout.group for layout in self._layouts],
                optimizer,
                auto_apply=auto_apply,
                stochastic_rounding=stochastic_rounding,
                rounding_seed=rounding_seed,
            )

    def table_weights(self) -> list[nn.Parameter]:
        """The rows of every table, (E, D)."""
        return [cast("nn.Parameter", bag.weight) for bag in self.embedding_bags.values()]

    def is_weighted(self) -> bool:
        """Whether every lookup carries a weight."""
        return self._is_weighted

    @property
    def device(self) -> torch.device:
        """Where the tables live."""
        return self.table_weights()[0].device

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, features: Features) -> Pooled:
        """Look up and pool; a `KeyedJaggedTensor` gives a `KeyedTensor`, `JaggedIds` give
        `PooledEmbeddings`.

        Raises:
            IdOutOfRange: a value is no row of its table.
            KeyError: a feature is missing.
            ValueError: weights are missing or not numbers, or features have batch sizes of their
                own and no `inverse_indices`.
        """  # noqa: D205  # two kinds of input, one sentence
        is_light = isinstance(features, JaggedIds)
        if varies_in_batch_size(features):
            features = expand_to_one_batch_size(cast("KeyedJaggedTensor", features))
        weights = self._lookup_weights(features) if self._is_weighted else None
        positions = self._positions(features)
        values, offsets, batch_size = features.values(), features.offsets(), features.stride()
        is_one_hot = (
            True if isinstance(features, JaggedIds) and features.is_known_one_hot() else None
        )
        bags = {
            is_mean: Bags.from_tensors(
                values, offsets, weights, batch_size, is_mean=is_mean, is_one_hot=is_one_hot
            )
            for is_mean in self._means
        }
        parts = [
            Part(layout.group, layout.lookups(positions), bags[layout.is_mean])
            for layout in self._layouts
        ]
        pooled = fused_lookup(
            parts,
            weights,
            ids=(values, offsets),
            updater=None if self.row_optimizer is None else self.row_optimizer.updater,
            explain=lambda value: self._lookup_error(features, value),
        )
        if is_light:
            return PooledEmbeddings(self._output_keys, self._output_dims, pooled)
        from torchrec.sparse.jagged_tensor import KeyedTensor

        return cast("Pooled", KeyedTensor(self._output_keys, self._output_dims, pooled))

    def _lookup_weights(self, features: Features) -> Tensor:
        weights = features.weights_or_none()
        if weights is None:
            raise ValueError("is_weighted asks for one weight per lookup, the features have none")
        if weights.isnan().any():
            value = int(weights.isnan().nonzero()[0])
            raise ValueError(
                f"{self._place(features, value)}: the weight of id {int(features.values()[value])} "
                "is nan; every lookup needs a number"
            )
        return weights.to(compute_dtype(self.table_weights()[0].dtype))

    def _place(self, features: Features, value: int) -> str:
        bag = int(torch.searchsorted(features.offsets(), value, right=True)) - 1
        batch_size = features.stride()
        return f"feature {features.keys()[bag // batch_size]!r}, sample {bag % batch_size}"

    def _lookup_error(self, features: Features, value: int) -> IdOutOfRange:
        bag = int(torch.searchsorted(features.offsets(), value, right=True)) - 1
        feature = features.keys()[bag // features.stride()]
        sizes = [
            self._tables[table].num_embeddings for table, name in self._lookups if name == feature
        ]
        return IdOutOfRange(
            f"{self._place(features, value)}: id {int(features.values()[value])} is not in "
            f"[0, {min(sizes)}); raise num_embeddings or hash the ids"
        )


def _kind_of(table: TableConfig) -> tuple[int, str, str]:
    """Tables of one kind share a kernel call: dim, pooling and data type."""
    return table.embedding_dim, pooling_of(table), data_type_of(table)


class _Layout:
    """The tables of one kind, and where their results go."""

    def __init__(
        self, collection: HotColdEmbeddingBagCollection, kind: tuple[int, str, str]
    ) -> None:
        configs = collection.embedding_bag_configs()
        members = [number for number, config in enumerate(configs) if _kind_of(config) == kind]
        self.is_mean = kind[1] == "mean"
        bags = list(collection.embedding_bags.values())
        self.group = TableGroup([bags[table] for table in members])
        starts = np.cumsum([0, *collection._output_dims])
        chosen = [
            (members.index(table), lookup)
            for lookup, (table, _) in enumerate(collection._lookups)
            if table in members
        ]
        self._numbers = [lookup for _, lookup in chosen]
        self._positions: Sequence[int] = ()
        self._lookups = Lookups(
            tables=np.array([table for table, _ in chosen], np.uint64),
            positions=np.zeros(len(chosen), np.uint64),
            columns=np.array([starts[lookup] for _, lookup in chosen], np.uint64),
            width=int(starts[-1]),
        )

    def lookups(self, positions: Sequence[int]) -> Lookups:
        """The lookups, for features that stand at these positions of the input."""
        if positions is not self._positions:
            known = self._lookups
            self._positions = positions
            self._lookups = Lookups(
                tables=known.tables,
                positions=np.array([positions[lookup] for lookup in self._numbers], np.uint64),
                columns=known.columns,
                width=known.width,
            )
        return self._lookups
