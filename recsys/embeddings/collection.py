"""`HotColdEmbeddingBagCollection`: all tables of a model, looked up in one call, updated in one.

    features -> fused_lookup -> pooled vectors      one kernel per embedding_dim, pooling, dtype
    gradient -> ledger                              kept as backward hands it over
    update   <- ledger                              every row once; one kernel for each of them

Without an optimizer the ledger is not used: backward leaves a sparse gradient at each table, as
`nn.EmbeddingBag(sparse=True)` does, and any `torch.optim` optimizer that takes one steps it.
"""

from __future__ import annotations

from functools import partial
from itertools import repeat
from operator import is_
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from recsys._support.tracing import leaf_call
from recsys.batch import (
    JaggedIds,
    PooledEmbeddings,
    expand_to_one_batch_size,
    varies_in_batch_size,
)
from recsys.embeddings.lookup.abstract import AbstractEmbeddingBags, pooling_of
from recsys.embeddings.lookup.collection_input import id_error, require_bags, require_weights
from recsys.embeddings.lookup.collection_layout import Layout
from recsys.embeddings.lookup.device_tables import (
    AbstractTables,
    empty_tables,
    require_beside,
    require_rows,
    slot_device,
    table_device,
)
from recsys.embeddings.lookup.fused_lookup import Part, fused_lookup, prefetch_parts
from recsys.embeddings.lookup.table_group import TableGroup
from recsys.embeddings.rows.row_space import compute_dtype, require_device
from recsys.embeddings.rows.table_parameter import require_no_updater
from recsys.embeddings.table import DATA_TYPES, data_type_of
from recsys.embeddings.tiers.ahead import Prefetched
from recsys.embeddings.tiers.budget import NEEDS_OPTIMIZER
from recsys.embeddings.tiers.cold.cold_files import open_cold_files, require_memory
from recsys.embeddings.update.fused_optimizer import FusedOptimizer
from recsys.embeddings.update.in_backward import read_marks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from torchrec import EmbeddingBagCollection
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    from recsys.batch import Features, Pooled
    from recsys.embeddings.optimizer import RowOptimizer
    from recsys.embeddings.popularity.plan import HotPlan
    from recsys.embeddings.table import TableConfig
    from recsys.embeddings.tiers.cold.cold_files import ColdFiles
    from recsys.embeddings.update.row_updater import Places, RowUpdater
    from recsys.errors import IdOutOfRange

__all__ = ["HotColdEmbeddingBagCollection"]

_WEIGHT = repeat("weight")


class HotColdEmbeddingBagCollection(AbstractTables, AbstractEmbeddingBags):
    """A drop-in for `torchrec.EmbeddingBagCollection`.

    Args:
        tables: `TableConfig`s or TorchRec's `EmbeddingBagConfig`s, sum- or mean-pooled.
        is_weighted: Whether every lookup carries a weight.
        device: Where the tables live, or with a budget their rows in fast memory; the CPU, CUDA, or
            "meta" until `to_empty`. On CUDA, invalid ids raise on a later call or in `check_input`.
        optimizer: How rows are updated; None leaves sparse gradients to an optimizer of torch's.
        auto_apply: With an optimizer: update at the end of each backward. Where False,
            `row_optimizer.step()` updates, once for all backward passes since the last.
        stochastic_rounding: Of tables of bfloat16 or float16 that `optimizer` updates: up or down
            with the probabilities that make a row right on average, as in FBGEMM; where False, to
            nearest, which loses steps that are small beside the row.
        rounding_seed: Of that chance. Rows depend on it, the step and their place alone, so the
            same seed gives the same bits.
        budget: Bytes that rows in fast memory may take, with their state and what it takes to find
            them, as a number or like "256MiB". Rows that do not fit wait in the tables, which are
            then the cold store; what is computed is the same to the last bit. It needs an
            optimizer. Write to rows through each table's `weight`; see `HotColdEmbeddingBag`. None
            keeps all rows in fast memory, or has that of `plan`.
        cold_tier: Where rows wait that do not fit: "host", in memory, or "file", in a folder on
            disk, for tables that are larger than memory.
        cold_path: That folder. Made where there is none; one that an earlier module has left whole
            brings its rows and their state, but no settings of the optimizer. `sync`, or the end of
            the process, leaves it whole.
        plan: Which rows are never to leave fast memory, of these tables, by name; see
            `plan_hot_rows`. Without one, rows that are used often stay by being used.

    Attributes:
        embedding_bags: The tables by name, as `nn.EmbeddingBag`s that hold the weights.
        row_optimizer: `optimizer` as an optimizer of torch's, for its `param_groups`; None without.

    Shape:
        result (B, sum of dims), columns in table order, then feature order; float32, of tables of
        16 bits too.

    Raises:
        ColdTierError: the folder cannot be used, has other tables, or there is no room.
        ValueError: names are not distinct, a pooling or data type is unknown, or the device is one
            that kernels of recsys cannot work on.
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
        if optimizer is None and (budget is not None or plan is not None):
            raise ValueError(NEEDS_OPTIMIZER)
        if plan is not None:
            plan = plan.of_tables(tables, budget)
        has_budget = budget is not None or plan is not None
        if cold_tier == "file":
            require_memory(device)
        files = open_cold_files(
            cold_tier,
            cold_path,
            {
                table.name: (
                    (table.num_embeddings, table.embedding_dim),
                    DATA_TYPES[data_type_of(table)],
                )
                for table in tables
            },
            has_budget=has_budget,
        )
        if _bags is None:
            require_device(device, "leave tables that are to be there to TorchRec")
        self._is_weighted = is_weighted
        self.row_optimizer: FusedOptimizer | None = None
        self.embedding_bags = (
            self._make_bags(table_device(device, has_budget=has_budget), files)
            if _bags is None
            else _bags
        )
        if _bags is None and (files is None or files.is_new):
            self.reset_parameters()
        self.detach()
        if optimizer is not None:
            self._optimize(
                optimizer,
                auto_apply=auto_apply,
                stochastic_rounding=stochastic_rounding,
                rounding_seed=rounding_seed,
                budget=budget,
                plan=plan,
                files=files,
                device=device,
            )

    @classmethod
    def from_torchrec(
        cls,
        collection: EmbeddingBagCollection,
        *,
        optimizer: RowOptimizer | None = None,
        auto_apply: bool = True,
    ) -> HotColdEmbeddingBagCollection:
        """Take over TorchRec's collection: its configs and its very Parameters.

        Where `apply_optimizer_in_backward` has marked the tables, their optimizers do not step any
        more: their hooks are taken away, their state goes on here. What reaches a table otherwise,
        a lookup by `collection` too, is part of the update after the next backward of this one.
        Only `recsys.accelerate` has a way back, `recsys.restore`.

        Args:
            collection: On the CPU or on CUDA, not sharded. It may be used on, on the same rows.
            optimizer: How rows are updated. None takes what `apply_optimizer_in_backward` has
                marked the tables with, its state too; where it has not, gradients are left to an
                optimizer of torch's, dense as TorchRec's are.
            auto_apply: As for the class.

        Raises:
            ValueError: rows are not float32, bfloat16 or float16 on the CPU or on CUDA, or an
                recsys optimizer updates them already; or tables are marked, and with an optimizer
                that has no formula here, or not all alike, or although `optimizer` is given.
        """
        for name, bag in collection.embedding_bags.items():
            require_no_updater(name, bag.weight)
            require_rows(name, bag.weight)
        module = cls._on_bags_of(collection)
        marks = read_marks(
            list(zip(module.embedding_bags, module.table_weights(), strict=True)), optimizer
        )
        if marks is not None:
            module._optimize(marks.formula, auto_apply=auto_apply)
            assert module.row_optimizer is not None
            marks.hand_over(module.row_optimizer)
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
        """Hand gradients over from now on; see `AbstractTables`."""
        super().attach(updater, places)
        self._lay_out()

    def detach(self) -> None:
        """Leave gradients at the tables again."""
        super().detach()
        self._lay_out_alone()

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
        """Whether every lookup carries a weight."""
        return self._is_weighted

    @property
    def device(self) -> torch.device:
        """Where the tables live, or their rows in fast memory: where ids go and pooled rows are."""
        return self._layouts[0].group.device

    def forward(self, features: Features, *, stacked: bool = False) -> Pooled | Tensor:
        """Look up and pool; a `KeyedJaggedTensor` gives a `KeyedTensor`, `JaggedIds` give
        `PooledEmbeddings`.

        Args:
            features: What is looked up.
            stacked: Of tables of one dim D: give the pooled vectors as one tensor, (B, F, D). It is
                what `values()` has, but autograd need not know of a view.

        Raises:
            IdOutOfRange: a value is no row of its table; on CUDA, of features before.
            KeyError: a feature is missing.
            MalformedBags: a `KeyedJaggedTensor`'s tensors do not fit together.
            ValueError: weights are missing or not numbers, or features have batch sizes of their
                own and no `inverse_indices`; or `stacked` asks for tables of one dim.
        """  # noqa: D205  # two kinds of input, one sentence
        if type(features) is not JaggedIds:
            traced = leaf_call(self, features, stacked=stacked)
            if traced is not None:
                return cast("Pooled", traced)
        if self._is_part:
            self._warn_of_part()
        look_up = self._break_graph if torch.compiler.is_compiling() else self._look_up
        pooled: Pooled | Tensor = look_up(features, stacked)
        return pooled

    def prefetch(self, features: Features) -> Prefetched:
        """Have the rows of a lookup to come fetched in the background.

        The next forward of the very same ids that backward may come back to has them claimed then;
        any other forward is right, too, and where slots are scarce, the claim made last goes first.
        `TrainPipeline` calls it. Where every row is resident, it does nothing.

        Raises:
            IdOutOfRange: as for `forward`.
            KeyError: as for `forward`.
            MalformedBags: as for `forward`.
            ValueError: as for `forward`.
        """
        if not self.tiers():
            return Prefetched(())
        is_light = isinstance(features, JaggedIds)
        if not is_light and varies_in_batch_size(features):
            features = expand_to_one_batch_size(cast("KeyedJaggedTensor", features))
        parts, _, _ = self._read(features, features.values(), is_light=is_light, has_weights=False)
        return prefetch_parts(parts, partial(self._lookup_error, features))

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _break_graph(self, features: Features, stacked: bool) -> Pooled | Tensor:
        return self._look_up(features, stacked)

    def _look_up(self, features: Features, stacked: bool) -> Pooled | Tensor:
        is_light = isinstance(features, JaggedIds)
        if not is_light and varies_in_batch_size(features):
            features = expand_to_one_batch_size(cast("KeyedJaggedTensor", features))
        num_stacked = self.num_stacked() if stacked else 0
        values = features.values()
        if values.is_meta:
            pooled = self._pool_nothing(features, num_stacked)
        else:
            parts, weights, ids = self._read(features, values, is_light=is_light)
            explain: Callable[[int], Exception] = partial(self._lookup_error, features)
            if self._layouts[0].group.kernels.errors is not None:
                sizes = list(map(len, self.table_weights()))
                # Kept until the device has been heard of: without the module, which may go earlier.
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

    def _pool_nothing(self, features: Features, num_stacked: int) -> Tensor:
        """The shape of the pooled rows, on the meta device."""
        self._positions(features)
        [dtype] = {compute_dtype(weight.dtype) for weight in self.table_weights()}
        width, size = sum(self._output_dims), features.stride()
        shape = (size, num_stacked, width // num_stacked) if num_stacked else (size, width)
        return torch.empty(shape, dtype=dtype, device="meta")

    def _read(
        self, features: Features, values: Tensor, *, is_light: bool, has_weights: bool = True
    ) -> tuple[list[Part], Tensor | None, Sequence[Tensor]]:
        """What the kernels look up, the weights of what is in bags, and what bags are views of."""
        if not all(map(is_, map(dict.get, self._parameters_of_tables, _WEIGHT), self._tables_then)):
            self._find_tables()
        kernels = self._layouts[0].group.kernels
        is_deferred = kernels.errors is not None
        if features.keys() != self._known_keys:
            self._positions(features)
        batch_size = features.stride()
        weights: Tensor | None = None
        if self._is_weighted and has_weights:
            dtype = compute_dtype(self._tables_then[0].dtype)
            weights = require_weights(features, is_deferred).to(dtype)
        if not is_light:
            values, weights = require_bags(features, weights, is_deferred)
        if is_deferred:
            require_beside(values, self.device)
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

    def _find_tables(self) -> None:
        """Find Parameters that have replaced the tables; refuse them where an updater has those."""
        if self._updater is None:
            self._lay_out_alone()
        else:
            self._require_tables()

    def _make_bags(self, device: torch.device | None, files: ColdFiles | None) -> nn.ModuleDict:
        if files is None:
            rows = empty_tables(self._tables, device)
        else:
            rows = [files.begin_with(table.name, None) for table in self._tables]
        return nn.ModuleDict(
            {
                table.name: nn.EmbeddingBag(
                    table.num_embeddings,
                    table.embedding_dim,
                    mode=pooling_of(table),
                    sparse=True,
                    # reset_parameters draws; nn.EmbeddingBag would first draw normal ones.
                    _weight=of_table,
                )
                for table, of_table in zip(self._tables, rows, strict=True)
            }
        )

    def _own_groups(self, *, are_tied_once: bool) -> list[tuple[TableGroup, int]]:
        """A group for each dim, pooling and dtype; the place of each table.

        Args:
            are_tied_once: Whether two tables that are one Parameter are in one group once, as they
                must be where an updater has them.
        """
        numbers: dict[tuple[int, str, torch.dtype], list[int]] = {}  # of the tables of each group
        places: dict[int, tuple[tuple[int, str, torch.dtype], int]] = {}
        keys = []
        weights = self.table_weights()
        for number, (table, weight) in enumerate(zip(self._tables, weights, strict=True)):
            keys.append(id(weight) if are_tied_once else number)
            if keys[-1] not in places:
                kind = table.embedding_dim, pooling_of(table), weight.dtype
                members = numbers.setdefault(kind, [])
                places[keys[-1]] = kind, len(members)
                members.append(number)
        bags = self.holders()
        groups = {
            kind: TableGroup(
                [weights[number] for number in members],
                [bool(bags[number].sparse) for number in members],
                [self._tables[number].name for number in members],
                dim=kind[0],
            )
            for kind, members in numbers.items()
        }
        return [(groups[places[key][0]], places[key][1]) for key in keys]

    def _lay_out_alone(self) -> None:
        """Look the tables up where they are now; no updater has them."""
        self._places = self._own_groups(are_tied_once=False)
        self._tables_then = self.table_weights()
        self._lay_out()

    def _lay_out(self) -> None:
        """One kernel call for the tables of one group and pooling."""
        members: dict[tuple[TableGroup, str], list[int]] = {}
        for table, (group, _) in enumerate(self._places):
            members.setdefault((group, pooling_of(self._tables[table])), []).append(table)
        numbers = [number for _, number in self._places]
        self._layouts = [
            Layout(self._lookups, self._output_dims, group, pooling == "mean", tables, numbers)
            for (group, pooling), tables in members.items()
        ]
        # Their dictionaries, not the modules' attributes, which take nn.Module ten times as long to
        # find: every lookup compares all tables.
        self._parameters_of_tables = [holder._parameters for holder in self.holders()]

    def _optimize(
        self,
        optimizer: RowOptimizer,
        *,
        auto_apply: bool,
        stochastic_rounding: bool = True,
        rounding_seed: int = 0,
        budget: int | str | None = None,
        plan: HotPlan | None = None,
        files: ColdFiles | None = None,
        device: torch.device | None = None,
    ) -> None:
        places = self._own_groups(are_tied_once=True)
        groups = list(dict.fromkeys(group for group, _ in places))
        tables: dict[nn.Parameter, str] = {}  # by the first of its names
        for name, weight in zip(self.embedding_bags, self.table_weights(), strict=True):
            tables.setdefault(weight, name)
        self.row_optimizer = FusedOptimizer(
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
        updater = self.row_optimizer.updater
        self.attach(updater, places)
        pinned = None
        if plan is not None:
            pinned = dict(zip(self.table_weights(), plan.pinned_by_table(), strict=True))
            budget = plan.budget_bytes
        if budget is not None:
            updater.tier(budget, pinned, files=files, names=tables, device=slot_device(device))

    def _lookup_error(self, features: Features, value: int) -> IdOutOfRange:
        return id_error(features, self._lookups, list(map(len, self.table_weights())), value)
