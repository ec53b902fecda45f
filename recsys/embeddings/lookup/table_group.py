"""Tables of one dim that are looked up together, and the ledger of their gradients.

    backward -> ledger             one entry per lookup, with the gradient of the pooled vectors
    ledger -> weight.grad          only if a caller reads `weight.grad`: a gradient per table
    ledger, weight.grad -> update

A caller that reads `weight.grad` (gradient clipping, `GradScaler`, a debugger) gets the gradient of
plain PyTorch, and may change it.
"""

from __future__ import annotations

from itertools import repeat
from operator import is_
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import torch
from torch import nn

from recsys._support.memory import lasting_tensors
from recsys._support.torch_compat import (
    DisableTorchFunctionSubclass,
    plain_grad,
    plain_requires_grad,
    set_plain_grad,
    version_of,
)
from recsys.embeddings.kernels.choice import kernels_on
from recsys.embeddings.lookup.backward_streams import BackwardStreams
from recsys.embeddings.lookup.one_table.bag_calls import BagCalls
from recsys.embeddings.lookup.one_table.device_calls import DeviceCalls
from recsys.embeddings.lookup.sparse_gradients import (
    leave_grads,
    of_tables,
    require_grad_of,
    rows_and_values,
)
from recsys.embeddings.rows.ledger import LedgerEntry, add_in_order
from recsys.embeddings.rows.lookups import Lookups
from recsys.embeddings.rows.row_space import RowSpace, compute_dtype
from recsys.embeddings.rows.table_parameter import (
    LedgerParameter,
    bind_table,
    move_to_own_pages,
    require_no_updater,
    unbind_table,
)
from recsys.embeddings.tiers.ticket import NotEnoughSlots
from recsys.errors import BudgetTooSmall

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from recsys.embeddings.rows.lookups import Bags
    from recsys.embeddings.staleness.row_marks import RowMarks
    from recsys.embeddings.tiers.table_tiers import Tiers
    from recsys.embeddings.tiers.ticket import Ticket
    from recsys.embeddings.update.changed_rows import ChangedRows
    from recsys.embeddings.update.row_updater import RowUpdater

__all__ = ["ResolvedLookup", "TableGroup"]

_NONES = repeat(None)


class ResolvedLookup(NamedTuple):
    """The arguments of one lookup kernel, with rows resolved to memory.

    Attributes:
        group: Has the tables.
        kernels: Kernels for the device of the rows.
        lookups: Tables, positions in the input, and columns of the result.
        rows: The input, by rows of the tables.
        space: Memory of the rows: the tables, or the slots.
        bags: The input, by rows of `space`.
        tables: Views of the memory of all tables of the group.
        ticket: With tiers, the claim of the slots.
    """

    group: TableGroup
    kernels: Any
    lookups: Lookups
    rows: Bags
    space: RowSpace
    bags: Bags
    tables: Sequence[Tensor]
    ticket: Ticket | None


class TableGroup:
    """The tables of one dim and dtype: a row space and a ledger.

    Args:
        tables: The Parameters, each once.
        are_sparse: For each table, whether torch would make a sparse gradient.
        names: Names of the tables, for errors.
        dim: D; by default that of the tables.

    Attributes:
        tables: As given; they do not change while an updater has the group.
        are_sparse: As given.
        names: As given.
        dim: D.
        ledger: Gradients since the last update, in the order of the lookups.
        backward_streams: The streams on which backward has filled the ledger.
        tiers: The tiers; None if all rows are resident.
        changed_rows: Records which rows are changed; None if no record is wanted.
        staleness: Which rows are stale, and counts of updates; None without a tracker.
        kernels: Kernels for the device of the tables.
    """

    def __init__(
        self,
        tables: Sequence[nn.Parameter],
        are_sparse: Sequence[bool],
        names: Sequence[str] = (),
        dim: int | None = None,
    ) -> None:
        self.tables = list(tables)
        self.are_sparse = list(are_sparse)
        self.names = list(names) or ["weight"] * len(tables)
        self.dim = tables[0].shape[1] if dim is None else dim
        self.tiers: Tiers | None = None
        self.ledger: list[LedgerEntry] = []
        self.changed_rows: ChangedRows | None = None
        self.staleness: RowMarks | None = None
        self._has_updater = False
        self._space: RowSpace | None = None
        self._whole_tables: dict[int, Lookups] = {}
        self._calls: BagCalls | DeviceCalls | None = None
        self.backward_streams = BackwardStreams()
        self.kernels = kernels_on(self.device)

    def space(self, used: Sequence[int] | None = None) -> RowSpace:
        """The current memory of the tables.

        Args:
            used: Numbers of the tables that are used now; None for all. With hundreds of tables,
                looking at each of them would take longer than a lookup in one.

        Raises:
            ValueError: kernels cannot work on it, or a table has changed its shape or dtype.
        """
        space, tables = self._space, self.tables
        # A `LedgerParameter` reports that it got other memory, but not that its storage has moved.
        if (
            space is not None
            and space.holds(tables, used)
            and (self._has_updater or space.are_alike(tables, used))
        ):
            return space
        with lasting_tensors():
            if self.tiers is not None and self.tiers.are_reached:
                for weight in tables:
                    move_to_own_pages(weight)
            space = self.make_space(tables)
        if space.dim != self.dim:
            raise ValueError(
                f"tables of embedding_dim {self.dim} were replaced by tables of embedding_dim "
                f"{space.dim}; build a new module for these"
            )
        if self.tiers is not None:
            for table, num_rows in zip(space.tables, self.tiers.sizes, strict=True):
                if (len(table), table.dtype) != (num_rows, self.tiers.dtype):
                    raise ValueError(
                        f"a table of {num_rows} rows of {self.tiers.dtype} in two tiers was "
                        f"replaced by one of {len(table)} rows of {table.dtype}; build a new "
                        "module for this one"
                    )
        self._space = space
        return space

    def sizes(self) -> list[int]:
        """E of every table as last seen, without an operation on the tables: that may be slow.

        Raises:
            ValueError: as for `space`.
        """
        if self.tiers is not None:
            return list(self.tiers.sizes)
        return list(map(int, (self._space or self.space()).sizes))

    def known_space(self) -> RowSpace | None:
        """The memory as last seen, for `BagCalls`; None if these need `fused_lookup`."""
        space = self._space
        if space is None or self.tiers is not None:
            return None
        return None if space.is_narrow else space

    def resolve(self, lookups: Lookups, rows: Bags) -> Sequence[ResolvedLookup]:
        """Resolve rows to memory, as kernel calls; with tiers, claim slots for them.

        Args:
            lookups: Tables, positions in the input, and columns of the result.
            rows: The input.

        Raises:
            NoSuchRow: with tiers, an id is not a row of its table.
            NotEnoughSlots: with tiers, there are too few slots for the rows.
        """
        space, tiers, kernels = self.space(lookups.distinct_tables), self.tiers, self.kernels
        if tiers is None:
            return (ResolvedLookup(self, kernels, lookups, rows, space, rows, space.tables, None),)
        return [
            ResolvedLookup(
                self,
                kernels,
                ticket.lookups,
                rows,
                tiers.hot.space,
                ticket.bags,
                space.tables,
                ticket,
            )
            for ticket in tiers.claim(space, lookups, rows)
        ]

    def read_rows(self, rows: NDArray[np.int64]) -> Tensor:
        """Copy rows from where they are, (M, D), in their dtype and to `device`; no row moves.

        Args:
            rows: Row numbers, counted over all tables, (M,) ascending.

        Raises:
            ConflictingWrite: with tiers, tables were written to while slots held updated rows.
            TiersFailed: with tiers, a transfer has failed.
        """
        with DisableTorchFunctionSubclass():  # internal read of tables
            if self.tiers is None:
                return _read_rows(self.space().tables, rows)
            return self.tiers.read_rows(self.space(), rows)

    def forget_space(self) -> None:
        """Drop the cached memory of the tables, because it has changed."""
        self._space = None
        self._choose_kernels()

    def _choose_kernels(self) -> None:
        """Take the kernels for the device of the rows, which may be another one."""
        kernels = kernels_on(self.device)
        if self._calls is not None and self._calls.errors is not kernels.errors:
            self._calls.close()
            self._calls = None
        self.kernels = kernels

    def set_tiers(self, tiers: Tiers | None) -> None:
        """Keep rows in these tiers; None makes all rows resident."""
        self.tiers = tiers
        self.forget_space()

    def record_changes(self, changed_rows: ChangedRows | None) -> None:
        """Record from now on which rows are changed; None ends the record."""
        self.changed_rows = changed_rows
        if self.tiers is not None:
            self.tiers.residency.changed_rows = changed_rows

    @property
    def device(self) -> torch.device:
        """The device where rows are looked up: with tiers, that of the slots."""
        return self.tables[0].device if self.tiers is None else self.tiers.device

    def make_space(self, tables: Sequence[Tensor]) -> RowSpace:
        """A row space of tables or their state; a cold store is always on the CPU."""
        space = self.kernels.make_space(tables) if self.tiers is None else RowSpace(tables)
        return cast("RowSpace", space)

    def calls(self, updater: RowUpdater) -> BagCalls | DeviceCalls:
        """The lookups in single tables of this group."""
        if self._calls is None:
            by_host = self.kernels.errors is None
            self._calls = (BagCalls if by_host else DeviceCalls)(updater, self)
        return self._calls

    def bind(self) -> None:
        """Bind the tables to an updater, so that `weight.grad` shows the ledger.

        Raises:
            ValueError: another updater has a table, or a table is not a plain Parameter.
        """
        for name, table in zip(self.names, self.tables, strict=True):
            require_no_updater(name, table, but_by=self)
            if type(table) is not nn.Parameter and not isinstance(table, LedgerParameter):
                raise ValueError(
                    f"table {name!r}: weight must be a plain Parameter if a recsys optimizer "
                    f"updates it, got {type(table).__name__}; set the module's weight to "
                    "torch.nn.Parameter(weight.data)"
                )
        for number, table in enumerate(self.tables):
            bind_table(table, self, number, self.tiers)
        self._has_updater, self._space = True, None

    def give_memory(self, number: int, table: nn.Parameter) -> None:
        """Replace a table on the "meta" device by one with memory.

        Raises:
            ValueError: as for `bind`.
        """
        before = self.tables
        self.tables = [*before[:number], table, *before[number + 1 :]]
        try:
            self.bind()
        except ValueError:
            self.tables = before
            raise
        unbind_table(before[number], self)
        self._choose_kernels()

    def release(self) -> None:
        """Make the tables plain Parameters again; the ledger becomes their `grad`."""
        self.ledger_to_grads()
        if self.tiers is not None:
            self.tiers.flush()
            self.set_tiers(None)
        for table in self.tables:
            unbind_table(table, self)
        self._has_updater = False

    def number_of(self, table: Tensor) -> int:
        """The number of a table in this group."""
        return next(number for number, each in enumerate(self.tables) if each is table)

    def lookups_requiring_grad(self, lookups: Lookups) -> Lookups:
        """The lookups in tables that require a gradient now."""
        numbers, tables = lookups.distinct_tables, self.tables
        if len(numbers) < len(tables):
            tables = [tables[number] for number in numbers]
        if all(map(plain_requires_grad, tables)):
            return lookups
        pairs = zip(numbers, tables, strict=True)
        return lookups.of_tables({number for number, table in pairs if plain_requires_grad(table)})

    def keep(self, entry: LedgerEntry) -> None:
        """Add the gradient of one lookup to the ledger; after `release`, to `grad` instead.

        Raises:
            RuntimeError: the tables were moved to another device after the lookup.
            ValueError: after `release`, a table has lost rows that were looked up, or its `grad`
                has another shape.
        """
        if self._has_updater:
            entry.require_on(self.device, self.names)
            add_in_order(self.ledger, entry)
            if entry.gradient.is_cuda:
                self.backward_streams.note(entry.gradient.device)
        else:
            leave_grads([entry], self.tables, self.are_sparse)

    def forget_lookups_in(self, table: Tensor) -> None:
        """Drop one table from the ledger, because the caller sets its `grad`."""
        if self.ledger:
            others = {number for number, each in enumerate(self.tables) if each is not table}
            self.ledger = of_tables(self.ledger, others)

    def ledger_to_grads(self) -> None:
        """Add the ledger to the `grad` of each table, and empty it.

        Raises:
            RuntimeError: a gradient was overwritten after its backward; the ledger is emptied.
            ValueError: a table has lost rows that were looked up, or its `grad` has another shape;
                the ledger is kept.
        """
        if self.ledger:
            self._require_unwritten()
            self.backward_streams.wait()
            leave_grads(self.ledger, self.tables, self.are_sparse)
            self.ledger = []

    def take_ledger(self) -> list[LedgerEntry]:
        """Take all gradients, from ledger and `grad`, as ledger entries.

        Raises:
            BudgetTooSmall: with tiers, there are too few slots for the rows; nothing is taken.
            RuntimeError: a gradient was overwritten after its backward; the ledger is emptied.
            ValueError: a `grad` has another shape than its table, or an index that is not in it;
                nothing is taken.
        """
        if self._calls is not None:
            self._calls.close()
        self._require_unwritten()
        self.backward_streams.wait()
        # Usually only the ledger has gradients.
        entries = self._entries_of_grads() if self.has_grads() else []
        entries += self.ledger
        self.ledger = []
        return entries

    def forget(self) -> None:
        """Empty the ledger and set every `grad` to None; no row is updated."""
        self.ledger.clear()
        if self.has_grads():
            for table in self.tables:
                set_plain_grad(table, None)

    def has_grads(self) -> bool:
        """Whether a table has a `grad`, besides the ledger."""
        return not all(map(is_, map(plain_grad, self.tables), _NONES))

    def _require_unwritten(self) -> None:
        """Check that no gradient was overwritten after its backward; if one was, drop all.

        Raises:
            RuntimeError: one was.
        """
        for entry in self.ledger:
            if entry.version is not None and version_of(entry.gradient) != entry.version:
                self.ledger = []
                raise RuntimeError(
                    "the gradient of a lookup was overwritten after its backward, before its rows "
                    "were updated; overwrite a clone of it, or step first"
                )

    def _entries_of_grads(self) -> list[LedgerEntry]:
        """Turn the `grad` of every table into ledger entries; every `grad` is None afterwards."""
        entries = []
        for table in self.tables:
            require_grad_of(table)
        try:
            for number, table in enumerate(self.tables):
                gradient = plain_grad(table)
                if gradient is not None:
                    entries.append(self._entry(number, gradient))
        except NotEnoughSlots as error:
            num_needed = error.num_needed
            entries.clear()  # otherwise the error below keeps their slots
        else:
            for table in self.tables:
                set_plain_grad(table, None)
            return entries
        raise BudgetTooSmall(
            f"budget: weight.grad of tables of embedding_dim {self.dim}, with the gradients of "
            f"lookups, needs at least {num_needed} rows in fast memory at once. A weight that is "
            "read as a matrix (scores = hidden @ weight.T) has a gradient for every row: leave the "
            "budget out, look up the rows of sampled items instead, or read weight.detach(). A "
            "weight.grad of your own needs a larger budget, or to be sparse with fewer rows"
        )

    def inputs_of_grads(self) -> list[tuple[Lookups, Bags]]:
        """Every `grad` as lookups and their input: each row counts as one lookup."""
        grads = enumerate(map(plain_grad, self.tables))
        return [self._as_lookup(number, grad)[:2] for number, grad in grads if grad is not None]

    def _as_lookup(self, number: int, gradient: Tensor) -> tuple[Lookups, Bags, Tensor]:
        """A table's `grad` as a lookup, its input, and the gradient of each row."""
        if number not in self._whole_tables:
            self._whole_tables[number] = Lookups.one(number, self.dim)
        rows, values = rows_and_values(gradient)
        rows = rows.to(self.device)
        bags = self.kernels.make_bags(rows, rows, None, len(rows), is_mean=False, is_one_hot=True)
        values = values.to(self.device, compute_dtype(values.dtype)).contiguous()
        return self._whole_tables[number], bags, values

    def _entry(self, number: int, gradient: Tensor) -> LedgerEntry:
        """The ledger entry for a table's `grad`."""
        lookups, bags, values = self._as_lookup(number, gradient)
        [found] = self.resolve(lookups, bags)
        return LedgerEntry(
            found.lookups,
            found.bags,
            values,
            tables=found.tables,
            rows=found.rows,
            ticket=found.ticket,
            claimed=found.lookups,
        )


def _read_rows(tables: Sequence[Tensor], rows: NDArray[np.int64]) -> Tensor:
    """Copy rows of resident tables; see `TableGroup.read_rows`."""
    first_rows = np.cumsum([0, *map(len, tables)])
    bounds = np.searchsorted(rows, first_rows).tolist()
    found = tables[0].new_empty(len(rows), tables[0].shape[1])
    for number, table in enumerate(tables):
        begin, end = bounds[number : number + 2]
        if begin < end:
            ids = torch.from_numpy(rows[begin:end] - first_rows[number]).to(table.device)
            torch.index_select(table, 0, ids, out=found[begin:end])
    return found
