"""TorchRec's sharded collections, with rows in two tiers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.types import ShardingType

from recsys.distributed.local_tables import AbstractLocalTables, LocalBags, LocalEmbeddings
from recsys.distributed.row_wise import RowWiseSharding
from recsys.distributed.sharded_tables import AbstractShardedTables

if TYPE_CHECKING:
    from torch import Tensor
    from torchrec.distributed.embedding_sharding import EmbeddingShardingInfo
    from torchrec.distributed.embedding_types import GroupedEmbeddingConfig

__all__ = ["ShardedHotColdEmbeddingBagCollection", "ShardedHotColdEmbeddingCollection"]

_Groups = tuple[type[AbstractLocalTables], list[list["GroupedEmbeddingConfig"]]]


class ShardedHotColdEmbeddingBagCollection(AbstractShardedTables, ShardedEmbeddingBagCollection):  # type: ignore[misc]
    """Pooled lookups. `HotColdEmbeddingBagCollectionSharder` makes it.

    Shape:
        input: features of this rank's B samples; result (B, sum of dims), columns in the order of
        the plan, not of the tables. Use the names of the result.
    """

    @classmethod
    def create_embedding_bag_sharding(
        cls, sharding_infos: list[EmbeddingShardingInfo], *args: Any, **kwargs: Any
    ) -> Any:
        """The sharding of tables of one type; arguments as in TorchRec."""
        if sharding_infos[0].param_sharding.sharding_type != ShardingType.ROW_WISE.value:
            return super().create_embedding_bag_sharding(sharding_infos, *args, **kwargs)
        kwargs.pop("permute_embeddings", None)  # only of column-wise sharding
        return RowWiseSharding(sharding_infos, *args, **kwargs)

    def compute(self, ctx: Any, dist_input: Any) -> list[Tensor]:
        """Look up this rank's rows, and pool them."""
        pooled: list[Tensor] = self.local_tables(dist_input)
        return pooled

    def _local_groups(self) -> _Groups:
        return LocalBags, [each._grouped_embedding_configs for each in self._embedding_shardings]


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
        return LocalEmbeddings, [each._grouped_embedding_configs for each in shardings]
