"""TorchRec's sharded collections, with rows in two tiers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.types import ShardingType

from recsys.distributed.exchange.distinct_rows import DistinctIdsDist
from recsys.distributed.exchange.row_wise import RowWiseSharding
from recsys.distributed.local_tables import AbstractLocalTables, LocalBags, LocalEmbeddings
from recsys.distributed.sharded_tables import AbstractShardedTables

if TYPE_CHECKING:
    from torch import Tensor
    from torchrec.distributed.embedding_sharding import EmbeddingShardingInfo
    from torchrec.distributed.embedding_types import GroupedEmbeddingConfig

__all__ = [
    "EXCHANGES",
    "ROWS",
    "ShardedHotColdEmbeddingBagCollection",
    "ShardedHotColdEmbeddingCollection",
]

# Of row-wise tables: distinct rows travel, and are pooled on the rank of the samples; or each rank
# pools its rows of every bag, and these parts travel.
EXCHANGES = ROWS, _ = "rows", "pooled"

_Groups = tuple[type[AbstractLocalTables], list[list["GroupedEmbeddingConfig"]]]


class ShardedHotColdEmbeddingBagCollection(AbstractShardedTables, ShardedEmbeddingBagCollection):  # type: ignore[misc]
    """Pooled lookups. `HotColdEmbeddingBagCollectionSharder` makes it.

    Args:
        arguments: As for `AbstractShardedTables`.
        row_wise_exchange: As for the sharder.
        options: As for `AbstractShardedTables`.

    Attributes:
        row_wise_exchange: "rows" or "pooled".

    Shape:
        input: features of this rank's B samples; result (B, sum of dims), columns in the order of
        the plan, not of the tables. Use the names of the result.

    Raises:
        Exception: of `AbstractShardedTables`.
    """

    def __init__(self, *arguments: Any, row_wise_exchange: str, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._row_wise_positions = [
            position
            for position, sharding in enumerate(self._embedding_shardings)
            if isinstance(sharding, RowWiseSharding)
        ]
        # TorchRec would divide the columns of all tables.
        self._has_mean_pooling_callback = False
        self.row_wise_exchange = row_wise_exchange
        # Removing duplicates waits for the device, and would make an invalid id another row's.
        self._checks.waits_for_device = bool(self._row_wise_positions) and row_wise_exchange == ROWS
        if row_wise_exchange == ROWS:
            self._exchange_rows()

    @classmethod
    def create_embedding_bag_sharding(
        cls, sharding_infos: list[EmbeddingShardingInfo], *args: Any, **kwargs: Any
    ) -> Any:
        """The sharding of tables of one type; arguments as in TorchRec."""
        if sharding_infos[0].param_sharding.sharding_type != ShardingType.ROW_WISE.value:
            return super().create_embedding_bag_sharding(sharding_infos, *args, **kwargs)
        kwargs.pop("permute_embeddings", None)  # only of column-wise sharding
        return RowWiseSharding(sharding_infos, *args, **kwargs)

    def input_dist(self, ctx: Any, features: Any) -> Any:
        """Send ids to the ranks that have their rows; see `AbstractShardedTables.input_dist`."""
        requests = super().input_dist(ctx, features)
        # TorchRec has made contexts of its own.
        for position, input_dist in enumerate(self._input_dists):
            if isinstance(input_dist, DistinctIdsDist):
                ctx.sharding_contexts[position] = input_dist.context
        return requests

    def compute(self, ctx: Any, dist_input: Any) -> list[Tensor]:
        """Look up this rank's rows, and pool them or prepare to send them."""
        if self.row_wise_exchange == ROWS:
            for position in self._row_wise_positions:
                ids = dist_input[position]
                if ids.weights_or_none() is not None:  # weights have stayed at the samples
                    raise ValueError(
                        "row_wise_exchange='rows' sends ids without their bags, so no feature "
                        "processor can give them weights on their way; set "
                        "row_wise_exchange='pooled' in fused_params of the sharder"
                    )
                sent = ids.lengths().view(len(ids.keys()), -1)
                ctx.sharding_contexts[position].num_sent = sent.long()
        found: list[Tensor] = self.local_tables(dist_input)
        return found

    def _exchange_rows(self) -> None:
        """Exchange distinct rows."""
        tables = self.local_tables
        assert isinstance(tables, LocalBags)
        for position in self._row_wise_positions:
            sharding = self._embedding_shardings[position]
            sharding.exchanges_rows = True
            self._output_dists[position] = sharding.create_output_dist(self._device)
            tables.look_up_rows_of(position)

    def _local_groups(self) -> _Groups:
        return LocalBags, [
            sharding._grouped_embedding_configs for sharding in self._embedding_shardings
        ]


class ShardedHotColdEmbeddingCollection(AbstractShardedTables, ShardedEmbeddingCollection):  # type: ignore[misc]
    """Lookups without pooling. `HotColdEmbeddingCollectionSharder` makes it.

    Shape:
        input: features of this rank's B samples; result: by feature, a `JaggedTensor` of the rows
        (N, D) of its N ids, sample after sample. B must be at least 1.
    """

    _NEEDS_SAMPLES = True

    def compute(self, ctx: Any, dist_input: Any) -> list[Tensor]:
        """Look up this rank's rows; the context keeps how many there are of each bag."""
        for context, features in zip(ctx.sharding_contexts, dist_input, strict=True):
            context.lengths_after_input_dist = features.lengths().view(-1, features.stride())
        return [rows.view(-1, self._embedding_dim) for rows in self.local_tables(dist_input)]

    def _local_groups(self) -> _Groups:
        shardings = self._sharding_type_to_sharding.values()
        return LocalEmbeddings, [sharding._grouped_embedding_configs for sharding in shardings]
