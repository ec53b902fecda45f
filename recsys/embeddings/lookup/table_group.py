"""Tables of one dim that are looked up together, and the ledger of their gradients.

    backward  -> ledger            one entry per backward pass, as backward hands it over
    weight.grad <- ledger          when a caller reads it: a gradient per table
    update    <- weight.grad, ledger

A caller that reads `weight.grad` (gradient clipping, `GradScaler`, a debugger) finds what plain
PyTorch would have left there, and may change it. No such tensor is made before one is read.
"""

from __future__ import annotations

from itertools import repeat
from operator import is_
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, cast

import torch
from torch import nn

from recsys._support.torch_compat import plain_grad, plain_requires_grad, set_plain_grad, version_of
from recsys.embeddings.kernels.choice import kernels_on
from recsys.embeddings.lookup.bag_calls import BagCalls
from recsys.embeddings.lookup.sparse_gradients import (
    leave_grads,
    of_tables,
    require_grad_of,
    rows_and_values,
)
from recsys.embeddings.rows.ledger import LedgerEntry
from recsys.embeddings.rows.lookups import Lookups
from recsys.embeddings.rows.row_space import RowSpace, address_of, compute_dtype
from recsys.embeddings.rows.table_parameter import (
    LedgerParameter,
    bind_table,
    require_no_updater,
    unbind_table,
)
from recsys.embeddings.tiers.residency import NotEnoughSlots
from recsys.errors import BudgetTooSmall

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from recsys.embeddings.rows.lookups import Bags
    from recsys.embeddings.tiers.residency import Ticket
    from recsys.embeddings.tiers.table_tiers import Tiers
    from recsys.embeddings.update.row_updater import RowUpdater

__all__ = ["ResolvedLookup", "TableGroup"]

_NONES = repeat(None)


class ResolvedLookup(NamedTuple):
    """What one kernel call looks up, and where.

    Attributes:
        group: Has the tables.
        kernels: Those that look up.
        lookups: What is looked up where.
        rows: The input.
        space: The rows: those of the tables, or slots that hold them.
        bags: The input as numbers of `space`.
        tables: All of the group, as views of the memory that they have now.
        ticket: Has the slots, in two tiers.
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
        are_sparse: Whether torch would leave a sparse gradient, of each table.
        names: Of the tables, for errors.
        dim: D; None for that of the tables.

    Attributes:
        tables: As given; they do not change while an updater has the group.
        are_sparse: As given, and so are `names`.
        dim: D.
        ledger: What backward passes have left since the last update, in order.
        tiers: Where rows are kept if not all are resident.
        kernels: Those for the device of the tables.
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
        self._begin()
        self.kernels = kernels_on(self.device)

    def _begin(self) -> None:
        """Begin without gradients, and without an updater."""
        self.ledger: list[LedgerEntry] = []
        self._has_updater = False
        self._space: RowSpace | None = None
        self._whole_tables: dict[int, Lookups] = {}
        self._calls: BagCalls | None = None

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles, to which modules bring the tables; see `RowUpdater.join`."""
        return {name: self.__dict__[name] for name in ("are_sparse", "names", "dim", "tiers")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.tables = []
        self._begin()

    def space(self) -> RowSpace:
        """The tables where they lie now.

        Raises:
            ValueError: kernels cannot work on the memory that they have been given since.
        """
        space, tables = self._space, self.tables
        # A table that has an updater tells when it gets other memory (`LedgerParameter`), but not
        # when its storage moves.
        if (
            space is not None
            and space.addresses == list(map(address_of, tables))
            and (self._has_updater or space.are_alike(tables))
        ):
            return space
        space = self.make_space(tables)
        if space.dim != self.dim:
            raise ValueError(
                f"tables of embedding_dim {self.dim} were exchanged for some of {space.dim}, and "
                "pooled vectors are made for the former; build the module anew, for the latter"
            )
        if self.tiers is not None:
            for table, num_rows in zip(space.tables, self.tiers.sizes, strict=True):
                if (len(table), table.dtype) != (num_rows, self.tiers.dtype):
                    raise ValueError(
                        f"a table of {num_rows} rows of {self.tiers.dtype} in two tiers was "
                        f"exchanged for one of {len(table)} rows of {table.dtype}; build the "
                        "module anew, for that one"
                    )
        self._space = space
        return space

    def known_space(self) -> RowSpace | None:
        """The tables where they lay last, for `BagCalls`; None if those may not look up there."""
        space = self._space
        if space is None or self.tiers is not None or self.kernels.errors is not None:
            return None
        return None if space.is_narrow else space

    def resolve(self, lookups: Lookups, rows: Bags) -> Sequence[ResolvedLookup]:
        """Find the rows of a lookup that may be updated after it, as kernel calls.

        Args:
            lookups: What is looked up where.
            rows: The input.

        Raises:
            NoSuchRow: tiered, a value is no row of its table.
            NotEnoughSlots: tiered, there is no room for the rows.
        """
        space, tiers, kernels = self.space(), self.tiers, self.kernels
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

    def forget_space(self) -> None:
        """Look anew where the tables lie: one of them has other memory, or less of it."""
        self._space = None
        self.kernels = kernels_on(self.device)

    def keep_in(self, tiers: Tiers | None) -> None:
        """Keep rows in these slots from now on; None for all rows in the tables."""
        self.tiers = tiers
        self.forget_space()

    @property
    def device(self) -> torch.device:
        """Where rows are looked up: that of the slots, of tables that wait in slower memory."""
        return self.tables[0].device if self.tiers is None else self.tiers.device

    def make_space(self, tables: Sequence[Tensor]) -> RowSpace:
        """Tables, or their state, as kernels take them; those of a cold store are the CPU's."""
        space = self.kernels.make_space(tables) if self.tiers is None else RowSpace(tables)
        return cast("RowSpace", space)

    def calls(self, updater: RowUpdater) -> BagCalls:
        """The calls of its tables one by one."""
        if self._calls is None:
            self._calls = BagCalls(updater, self)
        return self._calls

    def bind(self) -> None:
        """Let an updater have the tables: `weight.grad` shows the ledger from now on.

        Raises:
            ValueError: another updater has one, or it is no plain Parameter.
        """
        for name, table in zip(self.names, self.tables, strict=True):
            require_no_updater(name, table, but_by=self)
            if type(table) is not nn.Parameter and not isinstance(table, LedgerParameter):
                raise ValueError(
                    f"table {name!r}: weight must be a plain Parameter where a recsys optimizer "
                    f"updates it, got {type(table).__name__}; give the module "
                    "torch.nn.Parameter(weight.data)"
                )
        for table in self.tables:
            bind_table(table, self, is_tiered=self.tiers is not None)
        self._has_updater, self._space = True, None

    def give_memory(self, number: int, table: nn.Parameter) -> None:
        """Replace a table of the "meta" device by one that has memory.

        Raises:
            ValueError: as `bind`.
        """
        before = self.tables
        self.tables = [*before[:number], table, *before[number + 1 :]]
        try:
            self.bind()
        except ValueError:
            self.tables = before
            raise
        unbind_table(before[number], self)
        self.kernels = kernels_on(self.device)

    def release(self) -> None:
        """Make the tables plain Parameters again; the ledger goes to their `grad`."""
        self.open_ledger()
        if self.tiers is not None:
            self.tiers.flush()
            self.keep_in(None)
        for table in self.tables:
            unbind_table(table, self)
        self._has_updater = False

    def number_of(self, table: Tensor) -> int:
        """Which of the tables it is."""
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
        """Add to the ledger what the backward of one lookup found.

        Raises:
            ValueError: the updater has been released since the lookup, and a table has fewer rows
                by now, or a `grad` of others.
        """
        if self._has_updater:
            self.ledger.append(entry)
        else:
            leave_grads([entry], self.tables, self.are_sparse)

    def forget_lookups_in(self, table: Tensor) -> None:
        """Forget what lookups have left for one table; its `grad` is set to something else."""
        if self.ledger:
            others = {number for number, each in enumerate(self.tables) if each is not table}
            self.ledger = of_tables(self.ledger, others)

    def open_ledger(self) -> None:
        """Turn the ledger into a `grad` of each table, added to what is there.

        Raises:
            RuntimeError: gradients were overwritten since; they are forgotten.
            ValueError: a table has other rows than were looked up, or than its `grad` is of;
                everything is left.
        """
        if self.ledger:
            for entry in self.ledger:
                if entry.version is not None and version_of(entry.gradient) != entry.version:
                    self._refuse_overwritten()
            leave_grads(self.ledger, self.tables, self.are_sparse)
            self.ledger = []

    def take_ledger(self) -> list[LedgerEntry]:
        """Everything that has been collected, as entries of the ledger; nothing is left.

        Raises:
            BudgetTooSmall: tiered, there are too few slots for the rows; everything is left.
            RuntimeError: gradients were overwritten since; they are forgotten.
            ValueError: a `grad` is of other rows than its table has; everything is left.
        """
        if self._calls is not None:
            self._calls.close()
        for entry in self.ledger:
            if entry.version is not None and version_of(entry.gradient) != entry.version:
                self._refuse_overwritten()
        # Nothing but the ledger holds gradients, mostly.
        has_grads = not all(map(is_, map(plain_grad, self.tables), _NONES))
        entries = self._entries_of_grads() if has_grads else []
        entries += self.ledger
        self.ledger = []
        return entries

    def forget(self) -> None:
        """Empty the ledger and every `grad`; no row is updated."""
        self.ledger.clear()
        if not all(map(is_, map(plain_grad, self.tables), _NONES)):
            for table in self.tables:
                set_plain_grad(table, None)

    def _refuse_overwritten(self) -> NoReturn:
        """Forget the ledger, and say why."""
        self.ledger = []
        raise RuntimeError(
            "the gradient of a lookup was overwritten after its backward, before its rows were "
            "updated; step first, or overwrite a clone of it"
        )

    def _entries_of_grads(self) -> list[LedgerEntry]:
        """The `grad` of every table that has one, as entries; it is None afterwards."""
        entries = []
        try:
            for number, table in enumerate(self.tables):
                gradient = plain_grad(table)
                if gradient is not None:
                    entries.append(self._entry(number, gradient))
        except NotEnoughSlots as error:
            num_needed = error.num_needed
            entries.clear()  # or the error below would keep their slots
        else:
            for table in self.tables:
                set_plain_grad(table, None)
            return entries
        raise BudgetTooSmall(
            f"budget: gradients left at tables of embedding_dim {self.dim}, not by a lookup, "
            f"and those of lookups need {num_needed} rows or more in fast memory at once; give a "
            "larger budget, or leave sparse gradients of fewer rows"
        )

    def _entry(self, number: int, gradient: Tensor) -> LedgerEntry:
        """A table's gradient as if each of its rows had been looked up alone."""
        require_grad_of(self.tables[number])
        if number not in self._whole_tables:
            self._whole_tables[number] = Lookups.one(number, self.dim)
        rows, values = rows_and_values(gradient)
        rows = rows.to(self.device)
        bags = self.kernels.make_bags(rows, rows, None, len(rows), is_mean=False, is_one_hot=True)
        values = values.to(self.device, compute_dtype(values.dtype)).contiguous()
        [found] = self.resolve(self._whole_tables[number], bags)
        return LedgerEntry(
            found.lookups,
            found.bags,
            values,
            tables=found.tables,
            rows=found.rows,
            ticket=found.ticket,
            claimed=found.lookups,
        )
