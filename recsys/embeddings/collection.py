"""`HotColdEmbeddingBagCollection`: all tables of a model, looked up in one call, updated in one.

    features -> pooled_lookup -> pooled vectors     one kernel per embedding_dim
    gradient -> ledger                              kept as backward hands it over
    update   <- ledger                              every row once; one kernel per embedding_dim

Without an optimizer the ledger is not used: backward leaves a sparse gradient at each table, as
`nn.EmbeddingBag(sparse=True)` does, and any `torch.optim` optimizer that takes one steps it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.function import once_differentiable

from recsys.batch import JaggedIds, PooledEmbeddings
from recsys.embeddings.abstract import AbstractEmbeddingBags, pooling_of
from recsys.embeddings.kernels.pooled_lookup import Bags, Lookups, pooled_lookup, row_gradient_dots
from recsys.embeddings.kernels.row_update import LedgerEntry, row_update
from recsys.embeddings.row_space import RowSpace
from recsys.errors import IdOutOfRange

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

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

    Attributes:
        embedding_bags: The tables by name, as `nn.EmbeddingBag`s that hold the weights.
        row_optimizer: `torch.optim`'s face of `optimizer`, for its `param_groups`; None without.

    Shape:
        result (B, sum of dims), columns in table order, then feature order.

    Raises:
        ValueError: names are not distinct, or a pooling is unknown.
    """

    def __init__(
        self,
        tables: Sequence[TableConfig],
        is_weighted: bool = False,
        device: torch.device | None = None,
        *,
        optimizer: RowOptimizer | None = None,
        auto_apply: bool = True,
    ) -> None:
        super().__init__(tables, poolings=("sum", "mean"))
        self._is_weighted = is_weighted
        self.embedding_bags = nn.ModuleDict(
            {
                table.name: nn.EmbeddingBag(
                    table.num_embeddings,
                    table.embedding_dim,
                    mode=pooling_of(table),
                    sparse=True,
                    # Rows are drawn below; nn.EmbeddingBag would first draw normal ones.
                    _weight=torch.empty(table.num_embeddings, table.embedding_dim, device=device),
                )
                for table in self._tables
            }
        )
        self.reset_parameters()
        kinds = dict.fromkeys((table.embedding_dim, pooling_of(table)) for table in self._tables)
        self._groups = [_Group(self, dim, pooling, optimizer) for dim, pooling in kinds]
        self._auto_apply = auto_apply
        self._queued_for: int | None = None
        # With an optimizer, tables are no inputs of autograd's: a pooled vector asks for a gradient
        # on behalf of all of them by this one.
        self._asks_gradient = torch.empty(0, requires_grad=True)
        self.row_optimizer = None if optimizer is None else _RowOptimizer(self, optimizer)

    def table_weights(self) -> list[Tensor]:
        """The rows of every table, (E, D)."""
        return [bag.weight for bag in self.embedding_bags.values()]  # type: ignore[misc]  # Module.__getattr__

    def is_weighted(self) -> bool:
        """Whether every lookup carries a weight."""
        return self._is_weighted

    @property
    def device(self) -> torch.device:
        """Where the tables live."""
        return self.table_weights()[0].device

    def forward(self, features: Features) -> Pooled:
        """Look up and pool; a `KeyedJaggedTensor` gives a `KeyedTensor`, `JaggedIds` give
        `PooledEmbeddings`.

        Raises:
            IdOutOfRange: a value is no row of its table.
            KeyError: a feature is missing.
            ValueError: features have batch sizes of their own, or weights are missing.
        """  # noqa: D205  # two kinds of input, one sentence
        weights = features.weights_or_none() if self._is_weighted else None
        if self._is_weighted and weights is None:
            raise ValueError("is_weighted asks for one weight per lookup, the features have none")
        positions = self._positions(features)
        if self.row_optimizer is None:
            parameters = tuple(self.table_weights())
        else:
            parameters = (self._asks_gradient,)
        pooled = cast(
            "Tensor",
            _PooledLookupFunction.apply(self, features, positions, weights, *parameters),  # type: ignore[no-untyped-call]
        )
        if isinstance(features, JaggedIds):
            return PooledEmbeddings(self._output_keys, self._output_dims, pooled)
        from torchrec.sparse.jagged_tensor import KeyedTensor

        return cast("Pooled", KeyedTensor(self._output_keys, self._output_dims, pooled))

    def update_rows(self) -> None:
        """Move every row that the ledger holds gradients of, once; empties the ledger."""
        self._queued_for = None
        assert self.row_optimizer is not None
        lr = self.row_optimizer.param_groups[0]["lr"]
        for group in self._groups:
            group.update_rows(lr)

    def forget_gradients(self) -> None:
        """Empty the ledger; no row moves."""
        for group in self._groups:
            group.ledger.clear()

    def _keep(self, entries: Sequence[tuple[_Group, LedgerEntry]]) -> None:
        """Add to the ledger what one lookup's backward found."""
        backward_pass: int = torch._C._current_graph_task_id()
        if self._auto_apply and self._queued_for != backward_pass:
            # What an earlier pass has left behind, ended by an error, is no part of this one.
            self.forget_gradients()
            self._queued_for = backward_pass
            # Behind the whole pass: another lookup of it may add to the ledger.
            Variable._execution_engine.queue_callback(self.update_rows)
        for group, entry in entries:
            group.ledger.append(entry)

    def _lookup_error(self, features: Features, value: int) -> IdOutOfRange:
        batch_size = features.stride()
        bag = int(torch.searchsorted(features.offsets(), value, right=True)) - 1
        feature = features.keys()[bag // batch_size]
        sizes = [
            self._tables[table].num_embeddings for table, name in self._lookups if name == feature
        ]
        return IdOutOfRange(
            f"feature {feature!r}, sample {bag % batch_size}: id {int(features.values()[value])} "
            f"is not in [0, {min(sizes)}); raise num_embeddings or hash the ids"
        )


class _Group:
    """The tables of one dim and pooling: a row space, its state, its part of the ledger."""

    def __init__(
        self,
        collection: HotColdEmbeddingBagCollection,
        dim: int,
        pooling: str,
        optimizer: RowOptimizer | None,
    ) -> None:
        configs = collection.embedding_bag_configs()
        members = [
            number
            for number, config in enumerate(configs)
            if (config.embedding_dim, pooling_of(config)) == (dim, pooling)
        ]
        self.is_mean = pooling == "mean"
        self.optimizer = optimizer
        self.ledger: list[LedgerEntry] = []
        # In a tuple, so that nothing takes the collection for a part of its part.
        self._collection = (collection,)
        self._tables = members
        self._dim = dim
        starts = np.cumsum([0, *collection._output_dims])
        chosen = [
            (members.index(table), lookup)
            for lookup, (table, _) in enumerate(collection._lookups)
            if table in members
        ]
        self.lookup_numbers = [lookup for _, lookup in chosen]
        self._lookups = Lookups(
            tables=np.array([table for table, _ in chosen], np.uint64),
            positions=np.zeros(len(chosen), np.uint64),
            columns=np.array([starts[lookup] for _, lookup in chosen], np.uint64),
            width=int(starts[-1]),
        )
        self._space: RowSpace | None = None
        self._states: dict[str, list[Tensor]] = {}
        self._state_spaces: list[RowSpace] = []
        self._num_steps = 0

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: a row space is a view of memory, which they have elsewhere."""
        return self.__dict__ | {"_space": None, "_state_spaces": [], "ledger": []}

    def space(self) -> RowSpace:
        """The tables where they lie now."""
        weights = self._collection[0].table_weights()
        members = [weights[table] for table in self._tables]
        if self._space is None or not self._space.holds(members):
            self._space = RowSpace(members)
        return self._space

    def lookups(self, positions: Sequence[int]) -> Lookups:
        """The lookups, for features that stand at these positions of the input."""
        wanted = np.array([positions[lookup] for lookup in self.lookup_numbers], np.uint64)
        if not np.array_equal(wanted, self._lookups.positions):
            known = self._lookups
            self._lookups = Lookups(
                tables=known.tables, positions=wanted, columns=known.columns, width=known.width
            )
        return self._lookups

    def update_rows(self, lr: float) -> None:
        """Move rows by what the ledger holds, and empty it."""
        if not self.ledger:
            return
        assert self.optimizer is not None
        space = self.space()
        sizes = self.optimizer.state_sizes(self._dim)
        if sizes and not self._states:
            weights = self._collection[0].table_weights()
            members = [weights[table] for table in self._tables]
            self._states = {
                name: [weight.new_zeros(len(weight), size) for weight in members]
                for name, size in sizes.items()
            }
        if not self._state_spaces:
            self._state_spaces = [RowSpace(state) for state in self._states.values()]
        ledger, self.ledger = self.ledger, []
        self._num_steps += 1
        rates_T2 = np.empty((len(self._tables), 2))
        rates_T2[:] = self.optimizer.rate_and_eps(lr, self._num_steps)
        row_update(space, self._state_spaces, self.optimizer, rates_T2, ledger)


class _RowOptimizer(torch.optim.Optimizer):
    """A collection's optimizer as `torch.optim` knows them: `param_groups`, `step`, `zero_grad`."""

    def __init__(self, collection: HotColdEmbeddingBagCollection, optimizer: RowOptimizer) -> None:
        super().__init__(collection.table_weights(), {"lr": optimizer.lr})
        self._collection = collection

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles; the base class names what it keeps."""
        return super().__getstate__() | {"_collection": self._collection}

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Move the rows looked up since the last step."""
        self._collection.update_rows()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients collected since the last step."""
        self._collection.forget_gradients()


class _PooledLookupFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        collection: HotColdEmbeddingBagCollection,
        features: Features,
        positions: Sequence[int],
        weights: Tensor | None,
        *parameters: Tensor,
    ) -> Tensor:
        tables = collection.table_weights()
        result = tables[0].new_empty(features.stride(), sum(collection._output_dims))
        ctx.collection, ctx.inputs = collection, []
        for group in collection._groups:
            bags = Bags.from_tensors(
                features.values(),
                features.offsets(),
                None if weights is None else weights.to(result.dtype),
                features.stride(),
                is_mean=group.is_mean,
            )
            lookups = group.lookups(positions)
            bad = pooled_lookup(group.space(), lookups, bags, result)
            if bad >= 0:
                raise collection._lookup_error(features, bad)
            ctx.inputs.append((group, lookups, bags))
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        collection: HotColdEmbeddingBagCollection = ctx.collection
        gradient = gradient.contiguous()
        of_weights = None
        if ctx.needs_input_grad[3]:
            of_weights = gradient.new_zeros(len(ctx.inputs[0][2].values))
            for group, lookups, bags in ctx.inputs:
                row_gradient_dots(group.space(), lookups, bags, gradient, of_weights)
        if collection.row_optimizer is None:
            tables = _sparse_gradients(collection, ctx.inputs, gradient, ctx.needs_input_grad[4:])
            return None, None, None, of_weights, *tables
        if ctx.needs_input_grad[4]:
            collection._keep(
                [
                    (group, LedgerEntry(lookups, bags, gradient))
                    for group, lookups, bags in ctx.inputs
                ]
            )
        return None, None, None, of_weights, None


def _sparse_gradients(
    collection: HotColdEmbeddingBagCollection,
    inputs: Sequence[tuple[_Group, Lookups, Bags]],
    gradient: Tensor,
    is_asked: Sequence[bool],
) -> list[Tensor | None]:
    """By table: the rows looked up in lookup order, and the gradient of each."""
    found: list[Tensor | None] = []
    for number, weight in enumerate(collection.table_weights()):
        rows, gradients = [], []
        for group, lookups, bags in inputs:
            if not is_asked[number] or number not in group._tables:
                continue
            for lookup in np.flatnonzero(lookups.tables == group._tables.index(number)):
                first = int(lookups.positions[lookup]) * bags.batch_size
                column = int(lookups.columns[lookup])
                of_bags = gradient[:, column : column + weight.shape[1]]
                rows_n, gradients_nD = _by_value(bags, first, of_bags)
                rows.append(rows_n)
                gradients.append(gradients_nD)
        found.append(
            torch.sparse_coo_tensor(
                torch.cat(rows).unsqueeze(0),
                torch.cat(gradients),
                weight.shape,
                check_invariants=False,
            )
            if rows
            else None
        )
    return found


def _by_value(bags: Bags, first_bag: int, of_bags: Tensor) -> tuple[Tensor, Tensor]:
    """The rows of one feature's bags and the gradient of each."""
    end = first_bag + bags.batch_size
    if bags.offsets is None:
        rows, gradients = torch.from_numpy(bags.values[first_bag:end]), of_bags
        values = slice(first_bag, end)
    else:
        bounds = torch.from_numpy(bags.offsets[first_bag : end + 1])
        values = slice(int(bounds[0]), int(bounds[-1]))
        rows = torch.from_numpy(bags.values[values])
        lengths = bounds.diff()
        of_bags = of_bags / lengths.clamp(min=1).unsqueeze(1) if bags.is_mean else of_bags
        gradients = of_bags.repeat_interleave(lengths, dim=0)
    if bags.weights is not None:
        gradients = gradients * torch.from_numpy(bags.weights[values]).unsqueeze(1)
    return rows.long(), gradients
