"""`HotColdEmbeddingBagCollection`: all tables of a model, looked up in one call, updated in one.

    features -> fused_lookup -> pooled vectors      one kernel per embedding_dim, pooling, dtype
    gradient -> ledger                              kept as backward hands it over
    update   <- ledger                              every row once; one kernel for each of them

Without an optimizer the ledger is not used: backward leaves a sparse gradient at each table, as
`nn.EmbeddingBag(sparse=True)` does, and any `torch.optim` optimizer that takes one steps it.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from recsys.batch import (
    JaggedIds,
    PooledEmbeddings,
    expand_to_one_batch_size,
    varies_in_batch_size,
)
from recsys.embeddings.abstract import AbstractEmbeddingBags, pooling_of
from recsys.embeddings.ahead import Prefetched
from recsys.embeddings.budget import NEEDS_OPTIMIZER
from recsys.embeddings.cold_files import open_cold_files, require_memory
from recsys.embeddings.collection_input import id_error, require_bags, require_weights
from recsys.embeddings.collection_layout import Layout
from recsys.embeddings.device_tables import (
    AbstractTables,
    empty_tables,
    require_beside,
    require_rows,
    slot_device,
    table_device,
)
from recsys.embeddings.fused_lookup import Part, fused_lookup, prefetch_parts
from recsys.embeddings.fused_optimizer import FusedOptimizer
from recsys.embeddings.in_backward import read_marks
from recsys.embeddings.row_space import compute_dtype, require_device
from recsys.embeddings.table import DATA_TYPES, data_type_of
from recsys.embeddings.table_group import TableGroup
from recsys.embeddings.table_parameter import make_plain, require_unmoved
from recsys.embeddings.tracing import leaf_call

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from torchrec import EmbeddingBagCollection
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    from recsys.batch import Features, Pooled
    from recsys.embeddings.cold_files import ColdFiles
    from recsys.embeddings.optimizer import RowOptimizer
    from recsys.embeddings.plan import HotPlan
    from recsys.embeddings.row_updater import RowUpdater
    from recsys.embeddings.table import TableConfig
    from recsys.errors import IdOutOfRange

__all__ = ["HotColdEmbeddingBagCollection"]

_STATES = "_optimizer_states"  # in a pickle: by table


class HotColdEmbeddingBagCollection(AbstractTables, AbstractEmbeddingBags):
    """A drop-in for `torchrec.EmbeddingBagCollection`.

    Args:
        tables: `TableConfig`s or TorchRec's `EmbeddingBagConfig`s, sum- or mean-pooled.
        is_weighted: Whether every lookup carries a weight.
        device: Where the tables live, or with a budget their rows in fast memory; the CPU, CUDA, or
            "meta" until `to_empty`. On CUDA what is wrong with an input is said by a later call;
            see `check_input`.
        optimizer: How rows are updated; None leaves sparse gradients to an optimizer of torch's.
        auto_apply: With an optimizer: update at the end of each backward. Where False,
            `row_optimizer.step()` updates, once for all backward passes since the last.
        stochastic_rounding: Of tables of bfloat16 or float16 that `optimizer` moves: up or down
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
        row_optimizer: `torch.optim`'s face of `optimizer`, for its `param_groups`; None without.

    Shape:
        result (B, sum of dims), columns in table order, then feature order; float32, of tables of
        16 bits too.

    Raises:
        ColdTierError: the folder cannot be used, has other tables, or there is no room.
        ValueError: names are not distinct, a pooling or data type is unknown, or the device is one
            that kernels of ours cannot work on.
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
        self._updater: RowUpdater | None = None
        self.row_optimizer: FusedOptimizer | None = None
        self.embedding_bags = (
            self._make_bags(table_device(device, has_budget=has_budget), files)
            if _bags is None
            else _bags
        )
        if _bags is None and (files is None or files.is_new):
            self.reset_parameters()
        self._lay_out(self._own_places())
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
        a lookup by `collection` too, is part of the update behind the next backward of ours. Only
        `recsys.accelerate` has a way back, `recsys.restore`.

        Args:
            collection: On the CPU or on CUDA, not sharded. It may be used on, on the same rows.
            optimizer: How rows are updated. None takes what `apply_optimizer_in_backward` has
                marked the tables with, its state too; where it has not, gradients are left to an
                optimizer of torch's, dense as TorchRec's are.
            auto_apply: As for the class.

        Raises:
            ValueError: rows are not float32, bfloat16 or float16 on the CPU or on CUDA, or an
                optimizer of ours moves them already; or tables are marked, and with an optimizer
                that has no formula here, or not all alike, or although `optimizer` is given.
        """
        for name, bag in collection.embedding_bags.items():
            require_unmoved(f"table {name!r}", bag.weight)
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

    def attach(self, updater: RowUpdater, places: Sequence[tuple[TableGroup, int]]) -> None:
        """Hand gradients over from now on; see `AbstractTables`."""
        self._updater = updater
        self._lay_out(places)

    def holders(self) -> list[nn.Module]:
        """The modules whose `weight`s are the tables."""
        return list(self.embedding_bags.values())

    def _table_groups(self) -> list[TableGroup]:
        return list(dict.fromkeys(group for group, _ in self._places))

    def detach(self) -> None:
        """Leave gradients at the tables again."""
        self._updater = None
        self._lay_out(self._own_places())

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: the tables, their state and what moves them, nothing else."""
        if self._updater is None:
            return self.__dict__.copy()
        if not self._updater.goes_along:
            return self.__dict__ | {"_updater": None, "_layouts": [], "_places": []}
        states = [self._updater.state_of(group, number) for group, number in self._places]
        return self.__dict__ | {_STATES: states}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Give the copy's updater the copy's tables."""
        super().__setstate__({name: value for name, value in state.items() if name != _STATES})  # type: ignore[no-untyped-call]
        if self._updater is None:
            for weight in self.table_weights():
                make_plain(weight)
            self._lay_out(self._own_places())
            return
        for bag, (group, number), known in zip(
            self.embedding_bags.values(), self._places, state[_STATES], strict=True
        ):
            self._updater.take_in(bag, group, number, known)

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
        traced = leaf_call(self, features, stacked=stacked)
        if traced is not None:
            return cast("Pooled", traced)
        look_up = self._break_graph if torch.compiler.is_compiling() else self._look_up
        pooled: Pooled | Tensor = look_up(features, stacked)
        return pooled

    def prefetch(self, features: Features) -> Prefetched:
        """Have the rows of a lookup to come fetched in the background.

        The next forward of the very same ids that backward may come back to has them claimed then;
        any other is right all the same, and where slots are scarce, the claim made last goes first.
        `TrainPipeline` calls it. Where every row is resident, it does nothing.

        Raises:
            IdOutOfRange: as for `forward`, and so are the others.
            KeyError: likewise.
            MalformedBags: likewise.
            ValueError: likewise.
        """
        if not self.tiers():
            return Prefetched(())
        is_light = isinstance(features, JaggedIds)
        if not is_light and varies_in_batch_size(features):
            features = expand_to_one_batch_size(cast("KeyedJaggedTensor", features))
        parts, _, _ = self._read(features, None, is_light=is_light)
        return prefetch_parts(parts, partial(self._lookup_error, features))

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _break_graph(self, features: Features, stacked: bool) -> Pooled | Tensor:
        return self._look_up(features, stacked)

    def _look_up(self, features: Features, stacked: bool) -> Pooled | Tensor:
        is_light = isinstance(features, JaggedIds)
        if not is_light and varies_in_batch_size(features):
            features = expand_to_one_batch_size(cast("KeyedJaggedTensor", features))
        num_stacked = self.num_stacked() if stacked else 0
        if features.values().is_meta:
            pooled = self._pool_nothing(features, num_stacked)
        else:
            pooled = self._pool(features, num_stacked, is_light=is_light)
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

    def _pool(self, features: Features, num_stacked: int, *, is_light: bool) -> Tensor:
        is_deferred = self._layouts[0].group.kernels.errors is not None
        weights = None
        if self._is_weighted:
            dtype = compute_dtype(self.table_weights()[0].dtype)
            weights = require_weights(features, is_deferred).to(dtype)
        parts, weights, ids = self._read(features, weights, is_light=is_light)
        explain: Callable[[int], Exception] = partial(self._lookup_error, features)
        if is_deferred:
            weights_T = self.table_weights()
            # Kept until the device has been heard of: without the module, which may go earlier.
            explain = partial(id_error, features, self._lookups, list(map(len, weights_T)))
        return fused_lookup(
            parts,
            weights,
            ids=ids,
            updater=self._updater,
            explain=explain,
            num_stacked=num_stacked,
        )

    def _read(
        self, features: Features, weights: Tensor | None, *, is_light: bool
    ) -> tuple[list[Part], Tensor | None, Sequence[Tensor]]:
        """What the kernels look up, the weights of what is in bags, and what bags are views of."""
        kernels = self._layouts[0].group.kernels
        is_deferred = kernels.errors is not None
        positions = self._positions(features)
        values, offsets, batch_size = features.values(), features.offsets(), features.stride()
        if not is_light:
            values, weights = require_bags(features, weights, is_deferred)
        if is_deferred:
            require_beside(values, self.device)
        is_one_hot = (
            True if isinstance(features, JaggedIds) and features.is_known_one_hot() else None
        )
        parts: list[Part] = []
        bags_of: dict[bool, Any] = {}
        for layout in self._layouts:
            is_mean = layout.is_mean
            if is_mean not in bags_of:
                bags_of[is_mean] = kernels.make_bags(
                    values, offsets, weights, batch_size, is_mean=is_mean, is_one_hot=is_one_hot
                )
            parts.append(Part(layout.group, layout.lookups(positions), bags_of[is_mean]))
        return parts, weights, (values,) if is_one_hot else (values, offsets)

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

    def _own_places(self, *, are_moved: bool = False) -> list[tuple[TableGroup, int]]:
        """A group for each dim, pooling and dtype.

        Args:
            are_moved: Whether an optimizer of ours moves the rows: two tables that are one
                Parameter are then in one group once.
        """
        kinds = [
            (table.embedding_dim, pooling_of(table), weight.dtype)
            for table, weight in zip(self._tables, self.table_weights(), strict=True)
        ]
        members: dict[tuple[int, str, torch.dtype], list[nn.Module]] = {}
        twins: dict[tuple[int, str, torch.dtype], list[tuple[nn.Module, int]]] = {}
        names: dict[tuple[int, str, torch.dtype], list[str]] = {}
        places: dict[int, tuple[tuple[int, str, torch.dtype], int]] = {}
        keys = []
        for kind, (name, bag) in zip(kinds, self.embedding_bags.items(), strict=True):
            keys.append(id(bag.weight if are_moved else bag))
            if keys[-1] in places:
                first, number = places[keys[-1]]
                twins.setdefault(first, []).append((bag, number))
            else:
                places[keys[-1]] = kind, len(members.setdefault(kind, []))
                members[kind].append(bag)
                names.setdefault(kind, []).append(name)
        groups = {
            kind: TableGroup(bags, twins.get(kind, ()), names[kind])
            for kind, bags in members.items()
        }
        return [(groups[places[key][0]], places[key][1]) for key in keys]

    def _lay_out(self, places: Sequence[tuple[TableGroup, int]]) -> None:
        """One kernel call for the tables of one group and pooling."""
        members: dict[tuple[TableGroup, str], list[int]] = {}
        for table, (group, _) in enumerate(places):
            members.setdefault((group, pooling_of(self._tables[table])), []).append(table)
        self._places = list(places)
        numbers = [number for _, number in places]
        self._layouts = [
            Layout(self._lookups, self._output_dims, group, pooling == "mean", tables, numbers)
            for (group, pooling), tables in members.items()
        ]

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
        self._lay_out(self._own_places(are_moved=True))
        groups = list(dict.fromkeys(layout.group for layout in self._layouts))
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
        self._updater = self.row_optimizer.updater
        pinned = None
        if plan is not None:
            pinned = dict(zip(self.table_weights(), plan.pinned_by_table(), strict=True))
            budget = plan.budget_bytes
        if budget is not None:
            self._updater.tier(
                budget, pinned, files=files, names=tables, device=slot_device(device)
            )

    def _lookup_error(self, features: Features, value: int) -> IdOutOfRange:
        return id_error(features, self._lookups, list(map(len, self.table_weights())), value)
