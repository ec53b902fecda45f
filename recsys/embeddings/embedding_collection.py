"""`HotColdEmbeddingCollection`: several tables that are looked up without pooling.

features -> one HotColdEmbedding per table -> the rows of each feature, sample after sample
gradient -> ledger -> one update for all tables
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from recsys.batch import JaggedIds, require_all_in_bags
from recsys.embeddings.embedding import HotColdEmbedding
from recsys.embeddings.lookup.abstract import AbstractCollection
from recsys.embeddings.lookup.abstract_tables import AbstractTables
from recsys.embeddings.lookup.collection_input import id_error, require_bags, require_features
from recsys.embeddings.rows.bag_input import BagInput
from recsys.embeddings.rows.row_space import require_device
from recsys.embeddings.table import output_names
from recsys.embeddings.tier_arguments import TierArguments
from recsys.embeddings.tiers.ahead import Prefetched
from recsys.embeddings.updaters import NamedTable, choose_updaters, make_updater
from recsys.errors import IdOutOfRange

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from torchrec import EmbeddingCollection
    from torchrec.sparse.jagged_tensor import JaggedTensor

    from recsys.batch import Features
    from recsys.embeddings.lookup.fused_lookup import Part
    from recsys.embeddings.lookup.table_group import TableGroup
    from recsys.embeddings.optimizer import RowOptimizer
    from recsys.embeddings.popularity.plan import HotPlan
    from recsys.embeddings.table import TableConfig
    from recsys.embeddings.update.fused_optimizer import FusedOptimizer
    from recsys.embeddings.update.row_updater import Places, RowUpdater

__all__ = ["HotColdEmbeddingCollection", "JaggedEmbeddings"]


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


class HotColdEmbeddingCollection(AbstractTables, AbstractCollection):
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
        ColdTierError: the folder cannot be used, or the disk is full.
        TypeError: the optimizer is not a formula, or the plan no `HotPlan`.
        ValueError: names are not distinct, dims differ, a data type is unknown, or recsys kernels
            do not support the device.
    """

    row_optimizer: FusedOptimizer | None

    def __init__(
        self,
        tables: Sequence[TableConfig],
        device: torch.device | None = None,
        need_indices: bool = False,
        *,
        optimizer: RowOptimizer | None = None,
        auto_apply: bool = True,
        budget: int | str | None = None,
        plan: HotPlan | None = None,
        cold_tier: str = "host",
        cold_path: Path | str | None = None,
        _embeddings: Mapping[str, nn.Embedding] | None = None,
    ) -> None:
        super().__init__(tables)
        _require_one_dim(tables)
        tiers = TierArguments(budget, plan, cold_tier, cold_path, device)
        tiers = tiers.of_collection(tables, optimizer)
        self._need_indices = need_indices
        self.row_optimizer = None
        if _embeddings is None:
            require_device(device, "use TorchRec for tables on that device")
            made = [
                HotColdEmbedding(len(weight), weight.shape[1], sparse=True, _weight=weight)
                for weight in tiers.make_rows(tables)
            ]
        else:
            made = [HotColdEmbedding._on_weight_of(each) for each in _embeddings.values()]
        names = [table.name for table in tables]
        self.embeddings = nn.ModuleDict(dict(zip(names, made, strict=True)))
        if _embeddings is None:
            self.reset_parameters()
        if optimizer is not None:
            updater = self._optimize(optimizer, auto_apply)
            assert updater is not None
            tiers.begin(updater, list(zip(names, self.table_weights(), strict=True)))

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
        module = cls._on_embeddings_of(collection)
        module._optimize(optimizer, auto_apply)
        return module.train(collection.training)

    @classmethod
    def _on_embeddings_of(cls, collection: EmbeddingCollection) -> HotColdEmbeddingCollection:
        return cls(
            collection.embedding_configs(),
            need_indices=collection.need_indices(),
            _embeddings=dict(collection.embeddings.items()),
        )

    def forward(self, features: Features) -> dict[str, JaggedEmbeddings | JaggedTensor]:
        """Look up; a `KeyedJaggedTensor` gives `JaggedTensor`s, `JaggedIds` give
        `JaggedEmbeddings`, by feature.

        Args:
            features: `JaggedIds`, or a `KeyedJaggedTensor` of TorchRec.

        Shape:
            result: for each feature with N ids its rows, (N, D), always float32.

        Raises:
            IdOutOfRange: an id is not a row of its table; on CUDA this may be an earlier id.
            KeyError: a feature is missing.
            MalformedBags: tensors of a `KeyedJaggedTensor` do not fit, or it has a feature twice.
        """  # noqa: D205  # two kinds of input, one sentence
        self._require_tables()
        by_feature = self._by_feature(features)
        found: dict[str, Any] = {}
        for name, (position, feature) in zip(
            output_names(self._tables), self._lookups, strict=True
        ):
            ids, lengths = by_feature[feature]
            try:
                rows = self._embedding(position)(ids).float()
            except IdOutOfRange as error:
                raise self._id_error(features, feature, position) or error from None
            weights = ids if self._need_indices else None
            if isinstance(features, JaggedIds):
                found[name] = JaggedEmbeddings(rows, lengths, weights)
            else:
                from torchrec.sparse.jagged_tensor import JaggedTensor

                found[name] = JaggedTensor(rows, lengths=lengths, weights=weights)
        return found

    def prefetch(self, features: Features) -> Prefetched:
        """Start to fetch the rows of a later lookup; see `HotColdEmbeddingBag.prefetch`.

        Raises:
            IdOutOfRange: as for `forward`.
            KeyError: as for `forward`.
            MalformedBags: as for `forward`.
        """
        if not self.tiers():
            return Prefetched(())
        by_feature = self._by_feature(features)
        claims: list[Prefetched] = []
        try:
            for position, feature in self._lookups:
                ids, lengths = by_feature[feature]
                claims.append(self._embedding(position).prefetch(ids))
                if not claims[-1].has_room:
                    break
                claims[-1].make_samples(nn.functional.pad(lengths.cpu().long().cumsum(0), (1, 0)))
        except BaseException as error:
            for claim in claims:
                claim.cancel()
            if isinstance(error, IdOutOfRange):
                raise self._id_error(features, feature, position) or error from None
            raise
        return Prefetched.all_of(claims)

    def parts(self, features: Features) -> list[Part]:
        """The rows that `forward` looks up; see `AbstractTables.parts`."""
        by_feature = self._by_feature(features)
        found: list[Part] = []
        for position, feature in self._lookups:
            ids, lengths = by_feature[feature]
            bounds = nn.functional.pad(lengths.cumsum(0), (1, 0)).to(ids.dtype)
            bags = BagInput(ids, bounds, None, is_one_hot=False)
            found += self._embedding(position)._bag_lookup().parts(bags)
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

    @property
    def device(self) -> torch.device:
        """Device of ids and results: that of the tables, or with a budget of the slots."""
        groups = self._table_groups()
        return groups[0].device if groups else self._embedding(0).weight.device

    def table_weights(self) -> list[nn.Parameter]:
        """The rows of every table, (E, D)."""
        return [cast("nn.Parameter", holder.weight) for holder in self.holders()]

    def holders(self) -> list[nn.Module]:
        """The modules whose `weight`s are the tables."""
        return list(self.embeddings.values())

    @property
    def row_updater(self) -> RowUpdater | None:
        """Updates the rows; None if a torch optimizer gets the gradients."""
        return self._embedding(0).row_updater

    def attach(self, updater: RowUpdater, places: Places) -> None:
        """Pass gradients to an updater; see `AbstractTables.attach`."""
        for number, place in enumerate(places):
            self._embedding(number).attach(updater, [place])

    def detach(self) -> None:
        """Leave gradients to torch; see `AbstractTables.detach`."""
        for number in range(len(self._tables)):
            self._embedding(number).detach()

    def _require_tables(self) -> None:
        """Use Parameters that replaced tables on the "meta" device; see `AbstractTables`.

        Each lookup checks its own table. This checks all of them before the first lookup, because
        they share a row space.
        """
        if self.row_updater is not None:
            for number in range(len(self._tables)):
                self._embedding(number)._bag_lookup()

    def _table_groups(self) -> list[TableGroup]:
        embeddings = map(self._embedding, range(len(self._tables)))
        return list(dict.fromkeys(group for each in embeddings for group in each._table_groups()))

    def _embedding(self, position: int) -> HotColdEmbedding:
        return cast("HotColdEmbedding", self.embeddings[self._tables[position].name])

    def _by_feature(self, features: Features) -> dict[str, tuple[Tensor, Tensor]]:
        """The ids of each feature, and the number of ids of each sample.

        Raises:
            KeyError: a feature is missing.
            MalformedBags: tensors do not fit together, or a feature is there more than once.
        """
        keys = features.keys()
        if keys != self._known_keys:
            require_features((feature for _, feature in self._lookups), keys)
            self._known_keys = list(keys)
        values, offsets, size = features.values(), features.offsets(), features.stride()
        if not isinstance(features, JaggedIds):
            is_on_host = offsets.device.type == "cpu"
            require_bags(features, None, is_deferred=not is_on_host)
        ends = offsets[::size].tolist() if size else [0] * (len(keys) + 1)
        require_all_in_bags(len(values), ends[-1])  # on a device nothing has checked it
        lengths = offsets.diff().view(len(keys), size)
        return {
            feature: (values[ends[number] : ends[number + 1]], lengths[number])
            for number, feature in enumerate(keys)
        }

    def _id_error(self, features: Features, feature: str, position: int) -> IdOutOfRange | None:
        """An error that names the feature and sample; None if their position is unknown."""
        values, size = features.values(), features.stride()
        number = features.keys().index(feature)
        begin, end = features.offsets()[[number * size, (number + 1) * size]].tolist()
        num_rows = len(self._embedding(position).weight)
        is_bad = (values[begin:end] < 0) | (values[begin:end] >= num_rows)
        if not is_bad.any():
            return None
        sizes = [table.num_embeddings for table in self._tables]
        return id_error(features, self._lookups, sizes, begin + int(is_bad.nonzero()[0]))

    def _optimize(self, optimizer: RowOptimizer | None, auto_apply: bool) -> RowUpdater | None:
        """Update rows by `optimizer`, or by that of `apply_optimizer_in_backward`.

        Returns:
            The updater; None if there is no optimizer.
        """
        tables = [
            NamedTable(
                name,
                key=f"embeddings.{name}.weight",
                state_prefix=f"{name}.",
                weight=weight,
                collection="",
                planned_as=name,
                features=(),
                is_sparse=True,
            )
            for name, weight in zip(self.embeddings, self.table_weights(), strict=True)
        ]
        specs = choose_updaters(tables, optimizer, lazy_adam=False)
        if not specs:
            return None
        [spec] = specs
        link, _ = make_updater(spec, [self])
        if link.marks is not None:
            link.marks.remove_hooks()
        link.updater.auto_apply = auto_apply
        self.row_optimizer = link.row_optimizer
        return link.updater


def _require_one_dim(tables: Sequence[TableConfig]) -> None:
    dims = {table.name: table.embedding_dim for table in tables}
    if len(set(dims.values())) > 1:
        raise ValueError(f"tables of a collection must have one embedding_dim, got {dims}")
