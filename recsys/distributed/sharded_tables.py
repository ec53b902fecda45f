"""What the sharded collections of recsys have in common."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torchrec.distributed.embedding_types import ShardedEmbeddingModule

from recsys.distributed.input_checks import InputChecks
from recsys.distributed.local_tables import AbstractLocalTables
from recsys.embeddings.tiers.fetch import HitRates

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import nn
    from torchrec.distributed.embedding_types import GroupedEmbeddingConfig
    from torchrec.distributed.types import ParameterSharding, ShardingEnv

    from recsys.embeddings.tiers.fetch import Fetcher


__all__ = ["AbstractShardedTables"]


class AbstractShardedTables(ShardedEmbeddingModule):  # type: ignore[misc]  # TorchRec has no types
    """A collection whose tables are divided among ranks, and each rank's rows among two tiers.

    TorchRec's class, which comes after this one among the bases, moves ids to the ranks that have
    their rows, and vectors back. In between, `AbstractLocalTables` look up the rows of this rank.

    Every rank must make and call it, in the same order as the other ranks: both contain
    collectives.

    Args:
        module: TorchRec's collection. Each rank copies its rows; those on the meta device are drawn
            by each table's `init_fn`, on each rank from its own random numbers.
        params: The plan of its tables, by name.
        env: The ranks.
        tiers: As for `AbstractLocalTables`.
        device: The device of lookups and results.
        options: More arguments of TorchRec's class.

    Raises:
        Exception: of `AbstractLocalTables`, when it is made; of `InputChecks`, in `forward`.
    """

    _NEEDS_SAMPLES = False  # whether every rank must have samples
    _sent_keys: Sequence[str] = ()  # features in the order of the first input; empty before that

    def __init__(
        self,
        module: nn.Module,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        tiers: Mapping[str, Any],
        device: torch.device | None = None,
        **options: Any,
    ) -> None:
        # TorchRec's constructor calls `_create_lookups`, which needs these.
        self._tier_settings = tiers
        weights = {name.split(".")[-2]: weight for name, weight in module.named_parameters()}
        self._given = {
            name: weight.detach() for name, weight in weights.items() if not weight.is_meta
        }
        super().__init__(module, params, env, device=device, **options)
        self._given = {}  # do not keep the module's memory
        self._checks = InputChecks(
            list(self._table_name_to_config.values()),
            is_weighted=getattr(self, "_is_weighted", False),
            needs_samples=self._NEEDS_SAMPLES,
        )

    @property
    def local_tables(self) -> AbstractLocalTables:
        """The rows of this rank."""
        [tables] = self._lookups
        assert isinstance(tables, AbstractLocalTables)
        return tables

    @property
    def hit_rates(self) -> HitRates | None:
        """How often this rank's rows were in fast memory; None if all are."""
        fetchers = self.fetchers()
        return HitRates.of(fetchers) if fetchers else None

    def fetchers(self) -> list[Fetcher]:
        """What moves this rank's rows; empty if all are in fast memory."""
        return self.local_tables.fetchers()

    def sync(self) -> None:
        """Write this rank's updated rows and state to the cold tier.

        Raises:
            TiersFailed: a transfer has failed.
        """
        if self.local_tables.collection is not None:
            self.local_tables.collection.sync()

    def input_dist(self, ctx: Any, features: Any) -> Any:
        """Send ids to the ranks that have their rows. A collective.

        Returns:
            As TorchRec: an awaitable of an awaitable of the ids.

        Raises:
            Exception: of `InputChecks`: this rank's input is invalid.
        """
        self._checks.check(features)
        self._sent_keys = self._sent_keys or features.keys()
        return super().input_dist(ctx, self._checks.as_sent(features, self._sent_keys))

    def compute_and_output_dist(self, ctx: Any, input: Any) -> Any:
        """Look up rows, and send vectors to the ranks of their samples. A collective."""
        for fetcher, claim in getattr(ctx, "claims", ()):
            fetcher.begin(claim)
        return self.output_dist(ctx, self.compute(ctx, input))

    def prefetch(self, dist_input: Any, forward_stream: Any = None, ctx: Any = None) -> None:
        """Start to fetch the rows of a later mini-batch. TorchRec's pipelines call it.

        It is no collective. The lookup fetches what has no slot by then.

        Args:
            dist_input: The ids of all ranks for this rank's rows.
            forward_stream: Ignored: the tiers order their own transfers.
            ctx: The mini-batch, for its `compute_and_output_dist`.
        """
        if self.training and torch.is_grad_enabled():
            claims = self.local_tables.prefetch(dist_input)
            if ctx is not None:
                ctx.claims = claims

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As in TorchRec. Updated rows are written back first; they stay in fast memory.

        Writes to DTensors are not noticed, so after these were given out rows are fetched again.
        """
        found = super().state_dict(*args, **kwargs)
        if self._env.output_dtensor:
            self.local_tables.purge()
        return found

    def reset_parameters(self) -> None:
        """Do nothing. TorchRec calls it after the rows were drawn or copied."""

    def update_shards(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse to move tables between ranks.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            "recsys cannot move tables between ranks while it trains; save a checkpoint, make the "
            "model with the new plan, and load the checkpoint"
        )

    def register_post_lookup_tracker_fn(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse TorchRec's trackers of looked up rows, which `compute` does not call.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            "recsys does not call TorchRec's ModelDeltaTracker, which would find no rows; name "
            "this collection in its fqns_to_skip, or leave the tracker out"
        )

    @abstractmethod
    def _local_groups(
        self,
    ) -> tuple[type[AbstractLocalTables], Sequence[Sequence[GroupedEmbeddingConfig]]]:
        """The class of the local tables, and this rank's groups of them by sharding type."""

    def _create_lookups(self) -> None:
        kind, groups = self._local_groups()
        tables = kind(
            groups,
            self._table_name_to_config,
            self._given,
            self._tier_settings,
            device=self._device,
            group=self._env.process_group,
        )
        self._lookups.append(tables)  # of all sharding types: TorchRec only loops over lookups
