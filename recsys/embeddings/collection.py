"""`HotColdEmbeddingBagCollection`: pooled lookups in several tables, by one call.

    features -> fused_lookup -> pooled vectors     one kernel per embedding_dim, pooling and dtype
    gradient -> ledger                             no copy
    ledger -> update                               every row once; one kernel per embedding_dim etc.

Without an optimizer there is no ledger: backward leaves a sparse gradient at each table, as
`nn.EmbeddingBag(sparse=True)` does, for any `torch.optim` optimizer that supports one.
"""

from __future__ import annotations

from functools import partial
from itertools import repeat
from operator import is_
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from recsys._support.torch_compat import not_compiled
from recsys.batch import JaggedIds, PooledEmbeddings
from recsys.embeddings.lookup.abstract import AbstractEmbeddingBags, make_bags, pooling_of
from recsys.embeddings.lookup.abstract_tables import AbstractTables
from recsys.embeddings.lookup.collection_input import (
    id_error,
    require_bags,
    require_weights,
)
from recsys.embeddings.lookup.collection_layout import Layout
from recsys.embeddings.lookup.fused_lookup import Part, fused_lookup, prefetch_parts
from recsys.embeddings.lookup.table_group import TableGroup
from recsys.embeddings.rows.bag_input import require_same_device
from recsys.embeddings.rows.row_space import compute_dtype, require_aligned, require_device
from recsys.embeddings.rows.table_parameter import require_no_updater
from recsys.embeddings.table import DATA_TYPES
from recsys.embeddings.tier_arguments import TierArguments
from recsys.embeddings.tiers.ahead import Prefetched
from recsys.embeddings.update.fused_optimizer import FusedOptimizer
from recsys.embeddings.update.in_backward import read_marks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from torchrec import EmbeddingBagCollection

    from recsys.batch import Features, Pooled
    from recsys.embeddings.optimizer import RowOptimizer
    from recsys.embeddings.popularity.plan import HotPlan
    from recsys.embeddings.table import TableConfig
    from recsys.embeddings.update.row_updater import Places, RowUpdater
    from recsys.errors import IdOutOfRange

__all__ = ["HotColdEmbeddingBagCollection"]

_WEIGHT = repeat("weight")


class HotColdEmbeddingBagCollection(AbstractTables, AbstractEmbeddingBags):
    """A drop-in for `torchrec.EmbeddingBagCollection`.

    Args:
        tables: `TableConfig`s or TorchRec's `EmbeddingBagConfig`s, sum- or mean-pooled.
        is_weighted: Whether every lookup has a weight.
        device: Device of the tables; with a budget, of the rows in fast memory. The CPU, CUDA, or
            "meta" until `to_empty`. On CUDA, invalid ids raise on a later call, or in
            `check_input`.
        optimizer: The update rule of the rows; None leaves sparse gradients to a torch optimizer.
        auto_apply: As for `HotColdEmbeddingBag`.
        stochastic_rounding: As for `HotColdEmbeddingBag`.
        rounding_seed: As for `HotColdEmbeddingBag`.
        budget: Fast memory in bytes or as "256MiB", for rows, their state and row maps. Rows that
            do not fit stay in the tables, the cold store. Results are the same to the last bit. A
            budget needs an optimizer. Write to rows only through each table's `weight`; see
            `HotColdEmbeddingBag`. None takes the budget of `plan`, or keeps all rows in fast
            memory.
        plan: Rows that never leave fast memory, as a plan of these tables by name; see
            `plan_hot_rows`. Without a plan, rows in frequent use stay in fast memory.
        cold_tier: As for `HotColdEmbeddingBag`.
        cold_path: As for `HotColdEmbeddingBag`.

    Attributes:
        embedding_bags: The tables by name, as `nn.EmbeddingBag`s that hold the weights.
        row_optimizer: `optimizer` as a torch optimizer, with `param_groups`; None without one.

    Shape:
        result (B, sum of dims), columns in table order, then feature order; always float32.

    Raises:
        ColdTierError: the folder cannot be used, or the disk is full.
        TypeError: the optimizer is not a formula, or the plan no `HotPlan`.
        ValueError: names are not distinct, a pooling or data type is unknown, or recsys kernels do
            not support the device.
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
        budget: int | str | None = None,
        plan: HotPlan | None = None,
        cold_tier: str = "host",
        cold_path: Path | str | None = None,
        _bags: nn.ModuleDict | None = None,
    ) -> None:
        super().__init__(tables, poolings=("sum", "mean"), data_types=tuple(DATA_TYPES))
        tables = self._tables
        tiers = TierArguments(budget, plan, cold_tier, cold_path, device)
        tiers = tiers.of_collection(tables, optimizer)
        if _bags is None:
            require_device(device, "use TorchRec for tables on that device")
        self._is_weighted = is_weighted
        self.row_optimizer: FusedOptimizer | None = None
        self.embedding_bags = make_bags(tables, tiers.make_rows(tables)) if _bags is None else _bags
        if _bags is None:
            self.reset_parameters()
        self.detach()
        if optimizer is not None:
            updater = self._optimize(
                optimizer,
                auto_apply=auto_apply,
                stochastic_rounding=stochastic_rounding,
                rounding_seed=rounding_seed,
            )
            names = self.embedding_bags
            tiers.begin(updater, list(zip(names, self.table_weights(), strict=True)))

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
        settings and state once, and removes its hooks. Gradients from other uses of a table,
        such as a lookup by `collection`, join the update after the next backward of this one.

        Args:
            collection: TorchRec's, on the CPU or on CUDA, not sharded. It remains usable and shares
                its rows.
            optimizer: The update rule of the rows. None takes the optimizer that
                `apply_optimizer_in_backward` gave the tables; without one, dense gradients are left
                to torch.
            auto_apply: As for the class.

        Raises:
            ValueError: rows are not float32 or bfloat16 on the CPU or on CUDA, or a recsys
                optimizer already updates them; or `apply_optimizer_in_backward` gave the tables
                optimizers that differ or cannot be translated, or one in addition to `optimizer`.
        """
        for name, bag in collection.embedding_bags.items():
            require_no_updater(name, bag.weight)
            _require_rows(name, bag.weight)
        module = cls._on_bags_of(collection)
        marks = read_marks(
            list(zip(module.embedding_bags, module.table_weights(), strict=True)), optimizer
        )
        if marks is not None:
            module._optimize(marks.formula, auto_apply=auto_apply)
            assert module.row_optimizer is not None
            marks.give_state(module.row_optimizer)
            marks.remove_hooks()
        elif optimizer is not None:
            module._optimize(optimizer, auto_apply=auto_apply)
        return module.train(collection.training)

    @classmethod
    def _on_bags_of(cls, collection: EmbeddingBagCollection) -> HotColdEmbeddingBagCollection:
        return cls(
            collection.embedding_bag_configs(),
            collection.is_weighted(),
            _bags=collection.embedding_bags,
        )

    def attach(self, updater: RowUpdater, places: Places) -> None:
        """Pass gradients to an updater; see `AbstractTables.attach`."""
        super().attach(updater, places)
        self._lay_out()

    def detach(self) -> None:
        """Leave gradients to torch; see `AbstractTables.detach`."""
        super().detach()
        self._lay_out_own()

    def holders(self) -> list[nn.Module]:
        """The modules whose `weight`s are the tables."""
        return list(self.embedding_bags.values())

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles; see `AbstractTables`."""
        return super().__getstate__() | {"_layouts": [], "_parameters_of_tables": []}

    def table_weights(self) -> list[nn.Parameter]:
        """The rows of every table, (E, D)."""
        return [cast("nn.Parameter", bag.weight) for bag in self.embedding_bags.values()]

    def is_weighted(self) -> bool:
        """Whether every lookup has a weight."""
        return self._is_weighted

    @property
    def device(self) -> torch.device:
        """Device of ids and results: that of the tables, or with a budget of the slots."""
        return self._layouts[0].group.device

    def forward(self, features: Features, *, stacked: bool = False) -> Pooled | Tensor:
        """Look up and pool; a `KeyedJaggedTensor` gives a `KeyedTensor`, `JaggedIds` give
        `PooledEmbeddings`.

        Args:
            features: What is looked up.
            stacked: For tables with one dim D: return the pooled vectors as one tensor, (B, F, D).
                This is `values()` in another shape, without a view in the autograd graph.

        Raises:
            IdOutOfRange: an id is not a row of its table; on CUDA this may be an earlier id.
            KeyError: a feature is missing.
            MalformedBags: tensors of a `KeyedJaggedTensor` do not fit, or it has a feature twice.
            ValueError: weights are missing or nan; or features have different batch sizes; or
                with `stacked`, tables have different dims.
        """  # noqa: D205  # two kinds of input, one sentence
        look_up = self._break_graph if torch.compiler.is_compiling() else self._look_up
        pooled: Pooled | Tensor = look_up(features, stacked)
        return pooled

    def prefetch(self, features: Features) -> Prefetched:
        """Start to fetch the rows of a later lookup; see `HotColdEmbeddingBag.prefetch`.

        Raises:
            IdOutOfRange: as for `forward`.
            KeyError: as for `forward`.
            MalformedBags: as for `forward`.
            ValueError: as for `forward`.
        """
        if not self.tiers():
            return Prefetched(())
        return prefetch_parts(self.parts(features), partial(self._lookup_error, features))

    def parts(self, features: Features) -> list[Part]:
        """The rows that `forward` looks up; see `AbstractTables.parts`."""
        is_light = isinstance(features, JaggedIds)
        return self._read(features, features.values(), is_light=is_light, has_weights=False)[0]

    @not_compiled
    def _break_graph(self, features: Features, stacked: bool) -> Pooled | Tensor:
        return self._look_up(features, stacked)

    def _look_up(self, features: Features, stacked: bool) -> Pooled | Tensor:
        is_light = isinstance(features, JaggedIds)
        num_stacked = self.num_stacked() if stacked else 0
        parts, weights, ids = self._read(features, features.values(), is_light=is_light)
        explain: Callable[[int], Exception] = partial(self._lookup_error, features)
        if self._layouts[0].group.kernels.errors is not None:
            of_groups = {layout.group: layout.group.sizes() for layout in self._layouts}
            sizes = [of_groups[group][number] for group, number in self._places]
            # A device may report an error later, so this must not keep the module alive.
            explain = partial(id_error, features, self._lookups, sizes)
        pooled = fused_lookup(
            parts,
            weights,
            ids=ids,
            updater=self._updater,
            explain=explain,
            num_stacked=num_stacked,
        )
        if stacked:
            return pooled
        if is_light:
            return PooledEmbeddings(self._output_keys, self._output_dims, pooled)
        from torchrec.sparse.jagged_tensor import KeyedTensor

        return cast("Pooled", KeyedTensor(self._output_keys, self._output_dims, pooled))

    def _read(
        self, features: Features, values: Tensor, *, is_light: bool, has_weights: bool = True
    ) -> tuple[list[Part], Tensor | None, Sequence[Tensor]]:
        """The parts for the kernels, the weights, and the tensors that the bags are views of."""
        if not all(
            map(is_, map(dict.get, self._parameters_of_tables, _WEIGHT), self._known_tables)
        ):
            if self._updater is None:
                self._lay_out_own()
            else:
                self._require_tables()
        kernels = self._layouts[0].group.kernels
        is_deferred = kernels.errors is not None
        if features.keys() != self._known_keys:
            self._positions(features)
        batch_size = features.stride()
        weights: Tensor | None = None
        if self._is_weighted and has_weights:
            dtype = compute_dtype(self._known_tables[0].dtype)
            weights = require_weights(features, is_deferred).to(dtype)
        if not is_light:
            require_bags(features, weights, is_deferred)
        if is_deferred:
            require_same_device(values, self.device)
        is_one_hot = isinstance(features, JaggedIds) and features.is_known_one_hot()
        offsets = values if is_one_hot else features.offsets()
        parts: list[Part] = []
        bags_of: dict[bool, Any] = {}
        for layout in self._layouts:
            is_mean = layout.is_mean
            if is_mean not in bags_of:
                bags_of[is_mean] = kernels.make_bags(
                    values,
                    offsets,
                    weights,
                    batch_size,
                    is_mean=is_mean,
                    is_one_hot=is_one_hot or None,
                )
            if layout.positions is not self._known_positions:
                layout.place(self._known_positions)
            parts.append(Part(layout.group, layout.lookups, bags_of[is_mean]))
        return parts, weights, (values,) if is_one_hot else (values, offsets)

    def _own_groups(self, *, are_tied_once: bool) -> list[tuple[TableGroup, int]]:
        """Make a group for each dim, pooling and dtype; return each table's group and number there.

        Args:
            are_tied_once: Whether a Parameter that is two tables is in its group once, as an
                updater needs it.
        """
        numbers: dict[tuple[int, str, torch.dtype], list[int]] = {}  # the tables of each group
        known: dict[int, tuple[tuple[int, str, torch.dtype], int]] = {}
        places = []  # the kind of each table's group, and its number there
        weights, bags = self.table_weights(), self.holders()
        for number, (table, weight) in enumerate(zip(self._tables, weights, strict=True)):
            place = known.get(id(weight)) if are_tied_once else None
            if place is None:
                kind = table.embedding_dim, pooling_of(table), weight.dtype
                members = numbers.setdefault(kind, [])
                place = known[id(weight)] = kind, len(members)
                members.append(number)
            places.append(place)
        groups = {
            kind: TableGroup(
                [weights[number] for number in members],
                [bool(bags[number].sparse) for number in members],
                [self._tables[number].name for number in members],
                dim=kind[0],
            )
            for kind, members in numbers.items()
        }
        return [(groups[kind], number) for kind, number in places]

    def _lay_out_own(self) -> None:
        """Make the layouts for tables without an updater."""
        self._places = self._own_groups(are_tied_once=False)
        self._known_tables = self.table_weights()
        self._lay_out()

    def _lay_out(self) -> None:
        """Make the layouts: one for each group and pooling, and so one kernel call."""
        members: dict[tuple[TableGroup, str], list[int]] = {}
        for table, (group, _) in enumerate(self._places):
            members.setdefault((group, pooling_of(self._tables[table])), []).append(table)
        numbers = [number for _, number in self._places]
        self._layouts = [
            Layout(self._lookups, self._output_dims, group, pooling == "mean", tables, numbers)
            for (group, pooling), tables in members.items()
        ]
        # Every lookup compares all tables. Reading these dictionaries takes a tenth of the time of
        # reading the modules' attributes.
        self._parameters_of_tables = [holder._parameters for holder in self.holders()]

    def _optimize(
        self,
        optimizer: RowOptimizer,
        *,
        auto_apply: bool,
        stochastic_rounding: bool = True,
        rounding_seed: int = 0,
    ) -> RowUpdater:
        places = self._own_groups(are_tied_once=True)
        groups = list(dict.fromkeys(group for group, _ in places))
        tables: dict[nn.Parameter, str] = {}  # each with the first of its names
        for name, weight in zip(self.embedding_bags, self.table_weights(), strict=True):
            tables.setdefault(weight, name)
        self.row_optimizer, updater = FusedOptimizer.with_updater(
            {
                f"embedding_bags.{name}.weight": (weight, f"{name}.")
                for weight, name in tables.items()
            },
            groups,
            optimizer,
            auto_apply=auto_apply,
            stochastic_rounding=stochastic_rounding,
            rounding_seed=rounding_seed,
        )
        self.attach(updater, places)
        return updater

    def _lookup_error(self, features: Features, value: int) -> IdOutOfRange:
        return id_error(features, self._lookups, list(map(len, self.table_weights())), value)


def _require_rows(name: str, weight: Tensor) -> None:
    """Check that recsys kernels support the rows of a table.

    Raises:
        ValueError: they do not.
    """
    if weight.dtype not in DATA_TYPES.values() or weight.device.type not in ("cpu", "cuda"):
        raise ValueError(
            f"table {name!r}: rows must be float32 or bfloat16 on the CPU or on CUDA, got "
            f"{weight.dtype} on {weight.device}; convert them by .float() and .cpu(), or leave the "
            "table to TorchRec"
        )
    require_aligned(f"table {name!r}: ", weight)
