"""Tables of one dim that are looked up together, and the ledger of their gradients.

    backward  -> ledger            one entry per backward pass, as backward hands it over
    weight.grad <- ledger          when somebody asks for it: a sparse gradient per table
    update    <- weight.grad, ledger

Who reads `weight.grad` (gradient clipping, `GradScaler`, a debugger) finds what plain PyTorch would
have left there, and what is done to it counts; as long as nobody does, no such tensor is made.
"""

from __future__ import annotations

import gc
import inspect
from typing import TYPE_CHECKING, Any, cast
from weakref import ref

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from recsys.embeddings.kernels.ledger import LedgerEntry
from recsys.embeddings.kernels.pooled_lookup import Bags, Lookups
from recsys.embeddings.row_space import RowSpace, compute_dtype

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = [
    "LedgerParameter",
    "TableGroup",
    "make_plain",
    "require_unmoved",
    "sparse_gradients",
]


class TableGroup:
    """The tables of one dim and dtype: a row space and a ledger.

    Args:
        holders: The modules whose `weight`s are the tables; asked anew each time, because a
            module's `weight` may be exchanged.
        twins: Further modules of the same tables, and the number of each one's table.

    Attributes:
        dim: D.
        ledger: What backward passes have left behind since the last update, in order.
    """

    def __init__(
        self, holders: Sequence[nn.Module], twins: Sequence[tuple[nn.Module, int]] = ()
    ) -> None:
        self._holders, self._twins = list(holders), list(twins)
        # Their dictionaries, not their attributes: those take nn.Module ten times as long to find,
        # and every step asks for all tables several times.
        self._parameters = [holder._parameters for holder in holders]
        self.dim = self.weights()[0].shape[1]
        self.ledger: list[LedgerEntry] = []
        self._space: RowSpace | None = None
        self._whole_tables: dict[int, Lookups] = {}
        self._stand_ins: list[nn.Module] = []
        self._is_watched = False

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: those of a part of a model have the part's tables alone.

        So a module brings its table itself, by `take_in`. A row space is a view of memory, which
        copies have elsewhere.
        """
        return self.__dict__ | {
            "_holders": list(self.stand_ins()),
            "_parameters": [each._parameters for each in self.stand_ins()],
            "_twins": [],
            "_space": None,
            "ledger": [],
            "_whole_tables": {},
        }

    def stand_ins(self) -> list[nn.Module]:
        """In copies: what holds the place of each table until its module takes it."""
        if not self._stand_ins:
            self._stand_ins = [_StandIn(weight) for weight in self.weights()]
        return self._stand_ins

    def take_in(self, holder: nn.Module, table: int) -> None:
        """Let a module that was copied along bring its table."""
        known = self._holders[table]
        if isinstance(known, _StandIn):
            self._holders[table], self._parameters[table] = holder, holder._parameters
        elif known._parameters is not holder._parameters:
            self._twins.append((holder, table))

    def weights(self) -> list[nn.Parameter]:
        """The tables, (E, D) each."""
        return [parameters["weight"] for parameters in self._parameters]  # type: ignore[misc]  # never None

    def weights_of(self, lookups: Lookups) -> list[nn.Parameter]:
        """The tables looked up in: one where bags of a group are looked up one by one."""
        return [self._parameters[table]["weight"] for table in lookups.distinct_tables]  # type: ignore[misc]

    def are_sparse(self) -> list[bool]:
        """Which tables' gradients are sparse where no updater keeps them."""
        return [bool(holder.sparse) for holder in self._holders]

    def space(self, lookups: Lookups | None = None) -> RowSpace:
        """The tables where they lie now: all of them, or at least those looked up in."""
        if self._space is not None:
            weights = self.weights() if lookups is None else self.weights_of(lookups)
            numbers = None if lookups is None else lookups.distinct_tables
            if self._space.holds(weights, numbers) and (
                # Tables that are watched say themselves that they are shorter.
                self._is_watched or self._space.has_sizes(weights, numbers)
            ):
                return self._space
        weights = self.weights()
        self._require_twins(weights)
        if self._is_watched:
            self.watch()
        self._space = RowSpace(weights)
        return self._space

    def forget_space(self) -> None:
        """Look anew where the tables lie: one of them has other memory, or less of it."""
        self._space = None

    def _require_twins(self, weights: Sequence[nn.Parameter]) -> None:
        for holder, table in self._twins:
            if holder.weight is not weights[table]:
                raise ValueError(
                    f"a table of shape {tuple(weights[table].shape)} was one Parameter of several "
                    "modules, which are looked up together, and is not any more; give the others "
                    "its Parameter too, or build the modules anew"
                )

    def watch(self) -> None:
        """Let `weight.grad` show the ledger, from now on.

        Raises:
            ValueError: another group has a table, and moves it.
        """
        for weight in self.weights():
            require_unmoved(f"a table of shape {tuple(weight.shape)}", weight, but_by=self)
        self._is_watched = True
        for weight in self.weights():
            if type(weight) is nn.Parameter:
                _set_class(weight, LedgerParameter)
            if isinstance(weight, LedgerParameter):
                _GROUPS[weight] = ref(self)

    def unwatch(self) -> None:
        """Make the tables plain parameters again; the ledger goes to their `grad`."""
        self.open_ledger()
        self._is_watched = False
        for weight in self.weights():
            if isinstance(weight, LedgerParameter):
                _GROUPS.pop(weight, None)
                _set_class(weight, nn.Parameter)

    def keep(self, entry: LedgerEntry) -> None:
        """Add to the ledger what one lookup's backward found."""
        self.ledger.append(entry)
        if self._is_watched and nn.Parameter in map(type, self.weights_of(entry.lookups)):
            self.watch()  # a parameter has taken a table's place

    def open_ledger(self) -> None:
        """Turn the ledger into a sparse `grad` of each table, added to what is there."""
        if not self.ledger:
            return
        ledger = self._closed_ledger()
        weights = self.weights()
        found = sparse_gradients(weights, ledger, [True] * len(weights))
        for weight, gradient in zip(weights, found, strict=True):
            if gradient is not None:
                known = _plain_grad(weight)
                _set_plain_grad(weight, gradient if known is None else _added(known, gradient))

    def take_ledger(self) -> list[LedgerEntry]:
        """Everything that has been collected, as entries of the ledger; nothing is left."""
        ledger = self._closed_ledger()
        weights = self.weights()
        gradients = list(map(_plain_grad, weights))
        shown = [table for table, gradient in enumerate(gradients) if gradient is not None]
        if not shown:
            return ledger
        entries = [self._entry(table, cast("Tensor", gradients[table])) for table in shown]
        for table in shown:
            _set_plain_grad(weights[table], None)
        return entries + ledger

    def _closed_ledger(self) -> list[LedgerEntry]:
        ledger, self.ledger = self.ledger, []
        for entry in ledger:
            entry.require_unchanged()
        return ledger

    def forget(self) -> None:
        """Empty the ledger and every `grad`; no row moves."""
        self.ledger.clear()
        weights = self.weights()
        for weight, gradient in zip(weights, map(_plain_grad, weights), strict=True):
            if gradient is not None:
                _set_plain_grad(weight, None)

    def asking(self, lookups: Lookups) -> Lookups:
        """The lookups in tables that ask for a gradient."""
        if all(map(_requires_grad, self.weights_of(lookups))):
            return lookups
        asks = list(map(_requires_grad, self.weights()))
        kept = np.array(asks)[lookups.tables.astype(np.int64)]
        return Lookups(
            tables=lookups.tables[kept],
            positions=lookups.positions[kept],
            columns=lookups.columns[kept],
            width=lookups.width,
        )

    def _entry(self, table: int, gradient: Tensor) -> LedgerEntry:
        """A table's gradient as if each of its rows had been looked up alone."""
        gradient = gradient.detach()
        if gradient.is_sparse:
            rows, values = gradient._indices()[0], gradient._values()
        else:
            rows, values = torch.arange(len(gradient)), gradient
        if table not in self._whole_tables:
            self._whole_tables[table] = Lookups(
                tables=np.array([table], np.uint64),
                positions=np.zeros(1, np.uint64),
                columns=np.zeros(1, np.uint64),
                width=self.dim,
            )
        bags = Bags(rows.numpy(), None, None, len(rows), is_mean=False)
        values = values.to(compute_dtype(values.dtype)).contiguous()
        return LedgerEntry(self._whole_tables[table], bags, values)


class _StandIn(nn.Module):
    """A table without rows."""

    sparse = True

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(0, weight.shape[1], dtype=weight.dtype))


class LedgerParameter(nn.Parameter):
    """A table whose `grad` is what the ledger of its group holds.

    A `Parameter` becomes one by a change of class, so it stays the object that it was; pickles and
    state dicts have plain ones.
    """

    @property
    def grad(self) -> Tensor | None:
        """The sparse gradient, (E, D); None where nothing was collected."""
        _open_ledger_of(self)
        return _plain_grad(self)

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        _open_ledger_of(self)
        _set_plain_grad(self, gradient)

    @property
    def data(self) -> Tensor:
        """The rows, (E, D), as autograd does not see them."""
        rows: Tensor = _DATA.__get__(self)
        return rows

    @data.setter
    def data(self, rows: Tensor) -> None:
        _DATA.__set__(self, rows)
        _forget_space_of(self)

    def set_(self, *source: Any) -> Any:
        """As `torch.Tensor.set_`."""
        super().set_(*source)
        _forget_space_of(self)
        return self


# By the tables' identity. No attribute of theirs: torch.save would take the group along.
_GROUPS: Any = WeakIdKeyDictionary()


def require_unmoved(place: str, weight: nn.Parameter, but_by: TableGroup | None = None) -> None:
    """Refuse a table whose rows an optimizer of ours moves; two would move them twice.

    What one that is gone has left behind is a plain parameter again.

    Raises:
        ValueError: it is moved, and not by the group `but_by`.
    """
    if _group_of(weight) not in (None, but_by):
        gc.collect()  # modules and their optimizers refer to each other
    if _group_of(weight) not in (None, but_by):
        raise ValueError(
            f"{place}: an optimizer of recsys moves its rows already, and a second one would move "
            "them twice; call recsys.accelerate on a model that has all modules of the table, or "
            "let go of the module whose optimizer it is (recsys.restore, or del)"
        )
    make_plain(weight)


def make_plain(weight: nn.Parameter) -> None:
    """Make a plain parameter of a table that no group has (any more)."""
    if isinstance(weight, LedgerParameter) and _group_of(weight) is None:
        _set_class(weight, nn.Parameter)


def _group_of(weight: Tensor) -> TableGroup | None:
    group: TableGroup | None = _GROUPS.get(weight, _nobody)()
    return group


def _set_class(weight: nn.Parameter, kind: type[nn.Parameter]) -> None:
    weight.__class__ = kind


def _open_ledger_of(weight: LedgerParameter) -> None:
    group = _group_of(weight)
    if group is not None:
        group.open_ledger()


def _forget_space_of(weight: LedgerParameter) -> None:
    group = _group_of(weight)
    if group is not None:
        group.forget_space()


def _nobody() -> None:
    """A reference to nothing, as that to a group that is gone."""


_requires_grad: Callable[[Tensor], bool] = inspect.getattr_static(
    torch.Tensor, "requires_grad"
).__get__
# What autograd and users have left at a table, the ledger aside.
_GRAD: Any = inspect.getattr_static(torch.Tensor, "grad")
_DATA: Any = inspect.getattr_static(torch.Tensor, "data")
_plain_grad: Callable[[Tensor], Tensor | None] = _GRAD.__get__
_set_plain_grad: Callable[[Tensor, Tensor | None], None] = _GRAD.__set__


def sparse_gradients(
    weights: Sequence[Tensor], ledger: Sequence[LedgerEntry], is_asked: Sequence[bool]
) -> list[Tensor | None]:
    """By table: the rows looked up in lookup order and the gradient of each; None of no lookup.

    Shape:
        weights (E, D) each; results sparse (E, D), not coalesced, each of its weight's dtype.
    """
    found: list[Tensor | None] = []
    for number, weight in enumerate(weights):
        rows, gradients = [], []
        for entry in ledger if is_asked[number] else ():
            for lookup in np.flatnonzero(entry.lookups.tables == number):
                first = int(entry.lookups.positions[lookup]) * entry.bags.batch_size
                column = int(entry.lookups.columns[lookup])
                of_bags = entry.gradient[:, column : column + weight.shape[1]]
                rows_n, gradients_nD = _by_value(entry.bags, first, of_bags)
                rows.append(rows_n)
                gradients.append(gradients_nD)
        found.append(
            torch.sparse_coo_tensor(
                torch.cat(rows).unsqueeze(0),
                torch.cat(gradients).to(weight.dtype),
                weight.shape,
                check_invariants=False,
            )
            if rows
            else None
        )
    return found


def _added(known: Tensor, more: Tensor) -> Tensor:
    """In the dtype that is computed in: torch cannot add sparse tensors of float16."""
    dtype = compute_dtype(known.dtype)
    return (known.to(dtype) + more.to(dtype)).to(known.dtype)


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
