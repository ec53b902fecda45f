"""Tables of one dim that are looked up together, and the ledger of their gradients.

    backward  -> ledger            one entry per backward pass, as backward hands it over
    weight.grad <- ledger          when somebody asks for it: a gradient per table
    update    <- weight.grad, ledger

Who reads `weight.grad` (gradient clipping, `GradScaler`, a debugger) finds what plain PyTorch would
have left there, and what is done to it counts; as long as nobody does, no such tensor is made.
"""

from __future__ import annotations

from itertools import repeat
from operator import is_, itemgetter
from typing import TYPE_CHECKING, Any, cast

from recsys.embeddings.bag_calls import BagCalls
from recsys.embeddings.exchanged_tables import (
    gone,
    require_dim,
    require_grad_of,
    require_own,
    require_tiered,
    require_twins,
)
from recsys.embeddings.found import Found
from recsys.embeddings.kernel_choice import kernels_on
from recsys.embeddings.kernels.ledger import LedgerEntry
from recsys.embeddings.kernels.pooled_lookup import Lookups
from recsys.embeddings.residency import NotEnoughSlots
from recsys.embeddings.row_space import RowSpace, compute_dtype
from recsys.embeddings.sparse_gradients import leave_grads, of_tables, rows_and_values
from recsys.embeddings.stand_in import StandIn
from recsys.embeddings.table_parameter import (
    plain_grad,
    requires_grad,
    set_plain_grad,
    unwatch,
    watch,
)
from recsys.errors import BudgetTooSmall

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch
    from torch import Tensor, nn

    from recsys.embeddings.kernels.pooled_lookup import Bags
    from recsys.embeddings.row_updater import RowUpdater
    from recsys.embeddings.tiers import Tiers

__all__ = ["TableGroup"]


# Of a module's parameters, whose tables are never None.
_weight_of: Callable[[Mapping[str, Any]], nn.Parameter] = itemgetter("weight")


class TableGroup:
    """The tables of one dim and dtype: a row space and a ledger.

    Args:
        holders: The modules whose `weight`s are the tables; asked anew each time, because a
            module's `weight` may be exchanged.
        twins: Further modules of the same tables, and the number of each one's table.
        names: Of the tables, for errors.

    Attributes:
        dim: D.
        names: As given.
        ledger: What backward passes have left behind since the last update, in order; of the
            tables that are watched, and of none that went.
        tiers: Where rows are kept if not all are resident.
        kernels: What works on them, on the device where they are.
    """

    def __init__(
        self,
        holders: Sequence[nn.Module],
        twins: Sequence[tuple[nn.Module, int]] = (),
        names: Sequence[str] = (),
    ) -> None:
        self._holders, self._twins = list(holders), list(twins)
        self.names = list(names) or ["weight"] * len(self._holders)
        # Their dictionaries, not their attributes: those take nn.Module ten times as long to find,
        # and every step asks for all tables several times.
        self._parameters = [holder._parameters for holder in holders]
        self.dim = self.weights()[0].shape[1]
        self.ledger: list[LedgerEntry] = []
        self.tiers: Tiers | None = None
        self._space: RowSpace | None = None
        self._whole_tables: dict[int, Lookups] = {}
        self._stand_ins: list[nn.Module] = []
        self._watched: list[nn.Parameter] = []
        # Of those: whether they tell what becomes of them; what they were, until they tell.
        self._all_tell = self._all_ask = self._none_has_grad = False
        self._calls: BagCalls | None = None
        self.kernels = kernels_on(self.device)

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
            "_watched": [each.weight for each in self.stand_ins()] if self._watched else [],
            "_all_tell": False,
            "_all_ask": False,
            "_none_has_grad": False,
            "_calls": None,
            "kernels": None,
            "ledger": [],
            "_whole_tables": {},
        }

    def stand_ins(self) -> list[nn.Module]:
        """In copies: what holds the place of each table until its module takes it."""
        if not self._stand_ins:
            self._stand_ins = [StandIn(weight) for weight in self.weights()]
        return self._stand_ins

    def take_in(self, holder: nn.Module, table: int) -> None:
        """Let a module that was copied along bring its table."""
        known = self._holders[table]
        if isinstance(known, StandIn):
            self._holders[table], self._parameters[table] = holder, holder._parameters
        elif known._parameters is not holder._parameters:
            self._twins.append((holder, table))
        self.kernels = kernels_on(self.device)

    def weights(self) -> list[nn.Parameter]:
        """The tables, (E, D) each."""
        return list(map(_weight_of, self._parameters))

    def weights_of(self, lookups: Lookups) -> list[nn.Parameter]:
        """The tables looked up in: one where bags of a group are looked up one by one."""
        numbers = lookups.distinct_tables
        if len(numbers) == len(self._parameters):
            return self.weights()
        return [_weight_of(self._parameters[table]) for table in numbers]

    def are_sparse(self) -> list[bool]:
        """Which tables' gradients torch would leave sparse: of all modules of each."""
        found = [bool(holder.sparse) for holder in self._holders]
        for twin, table in self._twins:
            found[table] = found[table] and bool(twin.sparse)
        return found

    def space(
        self, lookups: Lookups | None = None, weights: Sequence[nn.Parameter] | None = None
    ) -> RowSpace:
        """The tables where they lie now: all of them, or at least those looked up in.

        Args:
            lookups: Those.
            weights: What `follow` has just said of them.

        Raises:
            ValueError: others have come in their places, which kernels of these cannot work on.
        """
        if weights is None:
            weights = self.follow(lookups)
        if self._space is not None:
            numbers = None if lookups is None else lookups.distinct_tables
            if self._space.holds(weights, numbers) and (
                self._all_tell or self._space.are_alike(weights, numbers)
            ):
                return self._space
        space = self.make_space(self.follow())
        require_dim(space, self.dim)
        if self.tiers is not None:
            sizes = self.tiers.sizes
            for holder, table, size in zip(self._holders, space.tables, sizes, strict=True):
                if not isinstance(holder, StandIn):
                    require_tiered(table, size, self.tiers.dtype)
        self._space = space
        return space

    def find(
        self, lookups: Lookups, rows: Bags, weights: Sequence[nn.Parameter] | None = None
    ) -> Sequence[Found]:
        """Where the rows of a lookup are that may be moved on its account, as kernel calls.

        Args:
            lookups: What is looked up where.
            rows: The input.
            weights: What `follow` has just said of its tables.

        Raises:
            NoSuchRow: tiered, a value is no row of its table.
            NotEnoughSlots: tiered, there is no room for the rows.
        """
        if self.tiers is not None:
            space = self.space()
            return [
                Found(
                    self,
                    self.kernels,
                    ticket.lookups,
                    rows,
                    self.tiers.hot.space,
                    ticket.bags,
                    space.tables,
                    self._watched,
                    ticket,
                )
                for ticket in self.tiers.claim(space, lookups, rows)
            ]
        space = self.space(lookups, weights)
        watched = self._watched
        return (Found(self, self.kernels, lookups, rows, space, rows, space.tables, watched, None),)

    def forget_space(self) -> None:
        """Look anew where the tables lie: one of them has other memory, or less of it."""
        self._space = None
        self.kernels = kernels_on(self.device)

    def keep_in(self, tiers: Tiers | None) -> None:
        """Keep rows in slots from now on, or in others; None for all where the tables are."""
        self.tiers = tiers
        self.forget_space()

    @property
    def device(self) -> torch.device:
        """Where rows are looked up: that of the slots, of tables that wait in slower memory."""
        return self.weights()[0].device if self.tiers is None else self.tiers.device

    def known_space(self, table: int, weight: nn.Parameter | None) -> RowSpace | None:
        """Where the tables lie, if they are known to be unchanged.

        Args:
            table: The number of one.
            weight: What the caller has for it.

        Returns:
            None of tiered or narrow tables, those on a device, or if they may be others by now.
        """
        space = self._space
        if (
            space is None
            or not self._all_tell
            or self.tiers is not None
            or self._watched[table] is not weight
            or self.kernels.errors is not None
            or space.is_narrow
        ):
            return None
        for twin, number in self._twins:
            if twin._parameters["weight"] is not self._watched[number]:
                return None
        return space

    def known_tables(self) -> tuple[Sequence[Tensor], Sequence[nn.Parameter]]:
        """The tables as they were found last, as views of their memory and as Parameters."""
        assert self._space is not None
        return self._space.tables, self._watched

    def asks(self, table: int) -> bool:
        """Whether a watched table asks for a gradient."""
        return self._all_ask or requires_grad(self._watched[table])

    def calls(self, updater: RowUpdater) -> BagCalls:
        """The calls of its tables one by one."""
        if self._calls is None:
            self._calls = BagCalls(updater, self)
        return self._calls

    def close_calls(self) -> None:
        """Expect the calls of another step."""
        if self._calls is not None:
            self._calls.close()

    def make_space(self, tables: Sequence[Tensor]) -> RowSpace:
        """Tables, or their state, as kernels take them; those of a cold store are the CPU's."""
        space = self.kernels.make_space(tables) if self.tiers is None else RowSpace(tables)
        return cast("RowSpace", space)

    def watch(self) -> None:
        """Let `weight.grad` show the ledger, from now on.

        Raises:
            ValueError: a table is another group's, or has come in two places.
        """
        weights = self.weights()
        require_own(weights, self)
        self._let_go()
        self._watched, self._space = weights, None
        is_tiered = self.tiers is not None
        tell = [watch(weight, self, is_tiered=is_tiered) for weight in weights]
        self._all_tell = all(tell)

    def unwatch(self) -> None:
        """Make the tables plain parameters again; the ledger goes to their `grad`."""
        self.open_ledger()
        if self.tiers is not None:
            self.tiers.flush()
            self.keep_in(None)
        self._let_go()
        for weight in self.weights():  # a copy's own, which it has not looked up in yet
            unwatch(weight, self)

    def _let_go(self) -> None:
        """Watch no table any more."""
        for weight in self._watched:
            unwatch(weight, self)
        self._watched, self._all_tell = [], False
        self.ask_again()

    def ask_again(self) -> None:
        """Forget what tables were found to be: the `grad` or `requires_grad` of one was set."""
        self._all_ask = self._none_has_grad = False

    def follow(self, lookups: Lookups | None = None) -> Sequence[nn.Parameter]:
        """The tables, or those looked up in; watched, if others have come in their places.

        Returns:
            They; of all of them, watched, the same list until one is exchanged.

        Raises:
            RuntimeError: one went, and gradients were overwritten since; they are forgotten.
            ValueError: what has come in the place of one is another's, or a gradient that waits
                for one that went is of rows which that has no more.
        """
        if self._twins:
            require_twins(self._twins, self.weights())
        watched = self._watched
        if lookups is None or len(lookups.distinct_tables) == len(self._parameters):
            weights = self.weights()
        else:
            weights = self.weights_of(lookups)
            watched = watched and [watched[table] for table in lookups.distinct_tables]
        if not watched:
            return weights
        if all(map(is_, weights, watched)):
            return watched
        if self.tiers is not None:
            self.tiers.flush()  # whoever has a table that was exchanged has its rows
        now = self.weights()
        require_own(now, self)
        self.ledger = self._closed_ledger()
        went = gone(self._watched, now)
        self.ledger = leave_grads(self.ledger, self._watched, went, self.are_sparse())
        self.watch()
        return self._watched if len(weights) == len(now) else weights

    def number_of(self, weight: Tensor) -> int:
        """Which of the tables that are watched it is."""
        return next(number for number, each in enumerate(self._watched) if each is weight)

    def forget_lookups_in(self, weight: Tensor) -> None:
        """Forget what lookups have left for one table; its `grad` is set to something else."""
        if self.ledger:
            tables = {table for table, each in enumerate(self._watched) if each is not weight}
            self.ledger = of_tables(self.ledger, tables)

    def keep(self, entry: LedgerEntry, parameters: Sequence[nn.Parameter]) -> None:
        """Add to the ledger what one lookup's backward found.

        Args:
            entry: That.
            parameters: The tables that were looked up in, all of the group's. Gradients of those
                that have gone since are left at them, as torch does.

        Raises:
            ValueError: such a one has fewer rows by now, or a `grad` of others.
        """
        if parameters is not self._watched:
            went = gone(parameters, self._watched)
            self.ledger += leave_grads([entry], parameters, went, self.are_sparse())
            return
        self.ledger.append(entry)

    def open_ledger(self) -> None:
        """Turn the ledger into a `grad` of each table, added to what is there.

        Raises:
            RuntimeError: gradients were overwritten since; they are forgotten.
            ValueError: a table has other rows than were looked up, or than its `grad` is of;
                everything is left.
        """
        if not self.ledger:
            return
        weights = self.follow()
        self.ledger = self._closed_ledger()
        self.ledger = leave_grads(self.ledger, weights, range(len(weights)), self.are_sparse())

    def take_ledger(self, weights: Sequence[nn.Parameter]) -> list[LedgerEntry]:
        """Everything that has been collected, as entries of the ledger; nothing is left.

        Args:
            weights: What `follow` has just said of all tables.

        Raises:
            BudgetTooSmall: tiered, there are too few slots for the rows; everything is left.
            RuntimeError: gradients were overwritten since; they are forgotten.
            ValueError: a `grad` is of other rows than its table has; everything is left.
        """
        has_none = self._has_no_grad(weights)
        ledger = self._closed_ledger()
        if has_none:
            return ledger
        gradients = list(map(plain_grad, weights))
        shown = [table for table, gradient in enumerate(gradients) if gradient is not None]
        try:
            entries = [
                self._entry(table, weights[table], cast("Tensor", gradients[table]))
                for table in shown
            ]
        except BaseException as error:
            self.ledger = ledger
            if not isinstance(error, NotEnoughSlots):
                raise
            raise BudgetTooSmall(
                f"budget: gradients left at tables of embedding_dim {self.dim}, not by a lookup, "
                f"and those of lookups need {error.num_needed} rows or more in fast memory at "
                "once; give a larger budget, or leave sparse gradients of fewer rows"
            ) from None
        for table in shown:
            set_plain_grad(weights[table], None)
        return entries + ledger

    def _closed_ledger(self) -> list[LedgerEntry]:
        ledger, self.ledger = self.ledger, []
        for entry in ledger:
            entry.require_unchanged()
        return ledger

    def forget(self) -> None:
        """Empty the ledger and every `grad`; no row moves."""
        self.ledger.clear()
        weights = self.follow()
        if not self._has_no_grad(weights):
            for weight in weights:
                set_plain_grad(weight, None)

    def _has_no_grad(self, weights: Sequence[nn.Parameter]) -> bool:
        """Whether nothing but the ledger holds gradients of the tables; asked twice a step."""
        if self._none_has_grad:
            return True
        has_none = all(map(is_, map(plain_grad, weights), repeat(None)))
        self._none_has_grad = has_none and self._all_tell
        return has_none

    def asking(self, lookups: Lookups, weights: Sequence[nn.Parameter] | None = None) -> Lookups:
        """The lookups in tables that ask for a gradient.

        Args:
            lookups: All.
            weights: What `follow` has just said of their tables.
        """
        if weights is None:
            weights = self.follow(lookups)
        if self._all_ask:
            return lookups
        asked = list(map(requires_grad, weights))
        if all(asked):
            self._all_ask = self._all_tell and len(asked) == len(self._parameters)
            return lookups
        asks = map(requires_grad, self.weights())
        return lookups.of_tables({table for table, is_asked in enumerate(asks) if is_asked})

    def still_asking(self, lookups: Lookups, parameters: Sequence[nn.Parameter]) -> Lookups:
        """In backward: those in tables that have not been frozen since; torch leaves these none.

        Args:
            lookups: Asked for a gradient.
            parameters: The tables that were looked up in, all of the group's.
        """
        if self._all_ask and parameters is self._watched:
            return lookups
        tables = lookups.distinct_tables
        left = {table for table in tables if requires_grad(parameters[table])}
        return lookups if len(left) == len(tables) else lookups.of_tables(left)

    def _entry(self, table: int, weight: Tensor, gradient: Tensor) -> LedgerEntry:
        """A table's gradient as if each of its rows had been looked up alone."""
        require_grad_of(weight)
        if table not in self._whole_tables:
            self._whole_tables[table] = Lookups.one(table, self.dim)
        rows, values = rows_and_values(gradient)
        rows = rows.to(self.device)
        bags = self.kernels.make_bags(rows, rows, None, len(rows), is_mean=False, is_one_hot=True)
        values = values.to(self.device, compute_dtype(values.dtype)).contiguous()
        [found] = self.find(self._whole_tables[table], bags)
        return LedgerEntry(
            found.lookups,
            found.bags,
            values,
            tables=found.tables,
            rows=found.rows,
            ticket=found.ticket,
            claimed=found.lookups,
        )
