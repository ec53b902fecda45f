"""A plan: which rows are pinned hot under a budget, and how the rest of the budget is used.

    budget = row map                                4 bytes for every row of every table
           + shared slots                           for rows that are fetched and evicted
           + pinned slots                           one for each pinned row

A slot holds a row, the row's optimizer state, and 8 bytes of bookkeeping. The row map and the
shared slots are the floor: with less, no mini-batch could run. Tables of one dim and data type
share slots.

Rows are pinned in this order:

1. Complete small tables: those whose slots take 1/1024 of the budget or less. Their lookups never
   miss, for very little memory.
2. Rows that were looked up, by lookups saved per byte.
3. After all of these, the rest of each table that fits completely, the smallest first. Pinning only
   some of the rows that were never looked up is no better than fetching them.

A plan keeps the counts of its profile, so it can be made again for another budget, or measured on
other lookups, without counting again. Letters: R rows of all tables.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, final

import numpy as np
import torch

from recsys._support.arguments import is_number, is_whole
from recsys._support.files import as_argument
from recsys._support.sizes import format_bytes, parse_bytes
from recsys._support.untrusted import is_count, is_finite_number, is_int
from recsys.embeddings.optimizer import require_formula
from recsys.embeddings.popularity.plan_table import format_budgets
from recsys.embeddings.popularity.profile import PopularityProfile
from recsys.embeddings.popularity.profile_file import read_profile, write_profile
from recsys.embeddings.table import DATA_TYPES, TableConfig, data_type_of
from recsys.embeddings.tiers.slot_costs import floor_bytes, map_bytes, slot_bytes
from recsys.errors import BudgetTooSmall, ConfigError, ProfileError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from recsys.batch import Batch, Features, SampleSource
    from recsys.embeddings.optimizer import RowOptimizer
    from recsys.embeddings.popularity.coverage import Coverage

__all__ = ["HotPlan", "PlannedTable", "plan_hot_rows", "require_plan"]

_SMALL_SHARE = 1 / 1024
_DATA_TYPES = DATA_TYPES | {"fp64": torch.float64}  # only in models; `TableConfig` refuses it
# The arguments of a plan, in the order of the constructor, and what each must be in a file.
_RULES: dict[str, Callable[[Any], bool]] = {
    "budget_bytes": is_count,
    "window_lookups": is_count,
    "small_share": is_finite_number,
}
_ARGUMENTS = tuple(_RULES)
# What a file may hold: more than any model has, and far from where 64-bit products overflow.
_MOST_DIM, _MOST_SLOT_BYTES = 2**20, 2**26


class PlannedTable(NamedTuple):
    """A table of a plan.

    Attributes:
        embedding_dim: D.
        data_type: Of its rows, for example "fp32".
        num_features: How many features look it up.
        slot_bytes: Bytes of one slot.
    """

    embedding_dim: int
    data_type: str
    num_features: int
    slot_bytes: int


def _argument(plan: Mapping[str, Any], key: str) -> Any:
    """An argument of a plan from its file.

    Raises:
        ConfigError: it is of another type.
    """
    if not _RULES[key](plan[key]):
        raise ConfigError(f"{key} must not be {plan[key]!r}")
    return plan[key]


def _planned_table(tables: Any, name: str) -> PlannedTable:
    """A table of a plan from its file.

    Raises:
        ConfigError: the file does not describe it.
    """
    found = tables.get(name) if isinstance(tables, dict) else None
    if isinstance(found, list) and len(found) == len(PlannedTable._fields):
        dim, data_type, num_features, num_bytes = found
        if (
            is_int(dim, 1, _MOST_DIM)
            and isinstance(data_type, str)
            and data_type in _DATA_TYPES
            and is_count(num_features, 1)
            and is_int(num_bytes, dim, _MOST_SLOT_BYTES)
        ):
            return PlannedTable(dim, data_type, num_features, num_bytes)
    raise ConfigError(f"table {name!r} must be a dim, a data type, features and bytes per slot")


def plan_hot_rows(
    profile: PopularityProfile,
    tables: Sequence[TableConfig],
    budget: int | str,
    optimizer: RowOptimizer | None = None,
    *,
    window_lookups: int = 2048,
    small_share: float = _SMALL_SHARE,
) -> HotPlan:
    """A plan of the rows to be pinned.

    Args:
        profile: Counts of these tables, or of their features.
        tables: `TableConfig`s, or TorchRec's `EmbeddingBagConfig`s.
        budget: Bytes of fast memory, or a string such as "256MiB".
        optimizer: A recsys optimizer, whose state is stored beside the rows; None for no state.
        window_lookups: The most rows that one feature looks up in the mini-batches in the window
            together: mini-batch size * largest bag * look-ahead window.
        small_share: The largest share of the budget for a small table. FAE has no small tables: 0.

    Raises:
        BudgetTooSmall: the budget is below the floor. The message names the floor.
        ProfileError: the profile has other tables.
        ConfigError: an argument is out of range.
        TypeError: the optimizer is not a formula.
    """
    require_formula(optimizer)
    counted = profile.for_tables(tables)
    planned = {}
    for table in tables:
        data_type = data_type_of(table, _DATA_TYPES)
        dtype = _DATA_TYPES[data_type]
        sizes = {} if optimizer is None else optimizer.state_sizes(table.embedding_dim)
        planned[table.name] = PlannedTable(
            table.embedding_dim,
            data_type,
            len(counted.features[table.name]),
            slot_bytes(table.embedding_dim, dtype, sizes),
        )
    budget_bytes = parse_bytes(budget, "budget")
    return HotPlan(counted, planned, budget_bytes, window_lookups, small_share)


def require_plan(plan: object) -> None:
    """Check that the `plan=` of a module is a plan or None.

    Raises:
        TypeError: it is something else, such as the name of a file.
    """
    if plan is not None and not isinstance(plan, HotPlan):
        raise TypeError(
            f"plan must be a HotPlan, got {type(plan).__name__}; HotPlan.load reads a file"
        )


@final
class HotPlan:
    """Which rows are pinned; made by `plan_hot_rows`, `retarget` or `load`.

    Attributes:
        profile: Lookups of these tables' rows; do not add to it.
        tables: The tables, by name.
        budget_bytes: Fast memory for everything together.
        map_bytes: Bytes of the row map.
        floor_bytes: The least budget: the row map, and slots for the mini-batches in the window.
        num_shared_slots: Slots that are not pinned, by embedding_dim and data type.
        shared_bytes: Bytes of the shared slots.
        pinned_bytes: Bytes of the pinned slots.
        window_lookups, small_share: See `plan_hot_rows`.
    """

    def __init__(
        self,
        profile: PopularityProfile,
        tables: Mapping[str, PlannedTable],
        budget_bytes: int,
        window_lookups: int,
        small_share: float,
    ) -> None:
        is_share = is_number(small_share) and 0 <= small_share <= 1
        if not (is_whole(window_lookups, 1) and is_share):
            raise ConfigError(
                "plan: window_lookups must be at least 1 and an integer, and small_share in "
                f"[0, 1], got {window_lookups!r} and {small_share!r}"
            )
        self.tables, self.budget_bytes = dict(tables), budget_bytes
        # Files hold no numbers of numpy.
        self.window_lookups, self.small_share = int(window_lookups), float(small_share)
        self.profile = profile
        self._sizes = np.array(list(profile.table_sizes.values()), np.int64)
        self._slot_bytes = np.array([table.slot_bytes for table in self.tables.values()], np.int64)
        self._is_pinned = np.zeros(int(self._sizes.sum()), np.bool_)
        self.map_bytes = map_bytes(len(self._is_pinned))
        self.num_shared_slots, of_slot = self._shared()
        slots = [(num, of_slot[space]) for space, num in self.num_shared_slots.items()]
        self.floor_bytes = floor_bytes(len(self._is_pinned), slots)
        self.shared_bytes = self.floor_bytes - self.map_bytes
        if self.everything_bytes <= budget_bytes:
            self._is_pinned[:] = True
            self.num_shared_slots, self.shared_bytes = dict.fromkeys(self.num_shared_slots, 0), 0
        else:
            self._require_floor()
            self._pin(budget_bytes - self.floor_bytes)
        self.pinned_bytes = int(self._num_pinned() @ self._slot_bytes)

    @property
    def everything_bytes(self) -> int:
        """The budget with which every row is hot."""
        return self.map_bytes + int(self._sizes @ self._slot_bytes)

    @property
    def num_pinned(self) -> int:
        """Pinned rows of all tables."""
        return int(np.count_nonzero(self._is_pinned))

    def pinned_rows(self, table: str) -> NDArray[np.int64]:
        """The pinned rows of `table`, ascending, (P,) int64.

        Raises:
            KeyError: there is no such table.
        """
        if table not in self.tables:
            raise KeyError(f"the plan has no table {table!r}; it has {list(self.tables)}")
        return np.flatnonzero(self._is_pinned[self._rows_of(list(self.tables).index(table))])

    def pinned_by_table(self) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """For each table, its pinned rows, ascending, and their counts, (P,) int64 both."""
        counts = self.profile.counts()
        found = []
        for table in range(len(self.tables)):
            rows = self._rows_of(table)
            pinned = np.flatnonzero(self._is_pinned[rows])
            found.append((pinned, counts[rows][pinned].astype(np.int64)))
        return found

    def of_tables(self, tables: Sequence[TableConfig], budget: int | str | None = None) -> HotPlan:
        """The plan itself, after checking that it was made for these tables.

        Args:
            tables: In the order of the plan's tables.
            budget: If given, plan again for this budget.

        Raises:
            ProfileError: the plan has other tables; the message names one.
            BudgetTooSmall, ConfigError: see `plan_hot_rows`.
        """
        wanted = {table.name: (table.num_embeddings, table.embedding_dim) for table in tables}
        sizes = self.profile.table_sizes
        known = {name: (sizes[name], table.embedding_dim) for name, table in self.tables.items()}
        if list(wanted.items()) != list(known.items()):
            missing = [name for name in wanted if name not in known]
            added = [name for name in known if name not in wanted]
            differing = [name for name in wanted if name in known and wanted[name] != known[name]]
            if missing:
                rule = f"{missing[0]!r} is not in the plan, which has {list(known)}"
            elif added:
                rule = f"{added[0]!r} of the plan is not among the tables here, {list(wanted)}"
            elif differing:
                name = differing[0]
                rule = (
                    f"(num_embeddings, embedding_dim) of {name!r} are {known[name]} in the plan "
                    f"and {wanted[name]} here"
                )
            else:
                rule = f"their order is {list(known)} in the plan and {list(wanted)} here"
            raise ProfileError(
                f"the plan has other tables: {rule}; plan again for these tables, in their order"
            )
        return self if budget is None else self.retarget(budget)

    def of_rows(
        self, rows: Mapping[str, tuple[int, int]], budget: int | str | None = None
    ) -> HotPlan:
        """The plan for some rows of some tables, as one process of several has them.

        Args:
            rows: By table: the first row, and the number of rows. Rows that the plan does not know
                count as never looked up.
            budget: For these rows; by default the plan's.

        Raises:
            BudgetTooSmall, ConfigError: see `plan_hot_rows`.
        """
        tables = {name: self.tables[name] for name in rows}
        wanted = self.budget_bytes if budget is None else budget
        return self._again(self.profile.of_rows(rows), tables, wanted)

    def of_bag(
        self, num_embeddings: int, embedding_dim: int, budget: int | str | None = None
    ) -> HotPlan:
        """The plan itself, after checking that it has one table, of this size and any name.

        Args:
            num_embeddings: E.
            embedding_dim: D.
            budget: If given, plan again for this budget.

        Raises:
            ProfileError: the plan has several tables, or a table of another size.
            BudgetTooSmall, ConfigError: see `plan_hot_rows`.
        """
        if len(self.tables) != 1:
            raise ProfileError(
                "the plan of a bag must have one table, got "
                f"{list(self.tables)}; plan for the bag's table alone"
            )
        table = TableConfig(
            name=next(iter(self.tables)),
            num_embeddings=num_embeddings,
            embedding_dim=embedding_dim,
        )
        return self.of_tables([table], budget)

    def coverage(
        self,
        on: SampleSource | Iterable[Batch | Features] | PopularityProfile | None = None,
        samples: range | None = None,
    ) -> Coverage:
        """The coverage of the pinned rows; see `PopularityProfile.coverage`."""
        levels = np.where(self._is_pinned, np.uint8(0), np.uint8(1))
        return self.profile.coverages_of(levels, 1, on, samples)[0]

    def retarget(self, budget: int | str) -> HotPlan:
        """The plan of the same profile for another `budget`, in bytes or as "256MiB".

        Raises:
            BudgetTooSmall, ConfigError: see `plan_hot_rows`.
        """
        return self._again(self.profile, self.tables, budget)

    def save(self, file: str | Path) -> None:
        """Write `file`, which appears when it is complete; it can be loaded as a profile, too."""
        tables = {name: list(table) for name, table in self.tables.items()}
        plan = {"tables": tables} | {key: getattr(self, key) for key in _ARGUMENTS}
        write_profile(Path(file), self.profile.about() | {"plan": plan}, self.profile.counts())

    @classmethod
    def load(cls, file: str | Path) -> HotPlan:
        """Read a `file` written by `save`.

        Raises:
            FileNotFoundError: there is no such file.
            ProfileError: it is damaged, or not a plan.
        """
        about, counts = read_profile(Path(file))
        plan = about.get("plan")
        if plan is None:
            raise ProfileError(
                f"{file} is a profile, not a plan; make one with "
                f"`recsys plan {as_argument(file)} --budget ...`"
            )
        if not isinstance(plan, dict) or set(plan) != {"tables", *_ARGUMENTS}:
            raise ProfileError(
                f"{file}: its plan must have tables, {', '.join(_ARGUMENTS)}; plan again with "
                "`recsys plan`"
            )
        try:
            tables = {name: _planned_table(plan["tables"], name) for name in about["tables"]}
            arguments = [_argument(plan, key) for key in _ARGUMENTS]
            profile = PopularityProfile.from_about(about, counts)
            return cls(profile, tables, *arguments)
        except (ConfigError, BudgetTooSmall) as error:
            raise ProfileError(
                f"{file}: its plan is invalid ({error}); plan again with `recsys plan`"
            ) from error

    def __str__(self) -> str:
        """A table of the coverage of the counted lookups under this and other budgets."""
        if not self.profile.num_lookups:
            return "no lookups were counted"
        return format_budgets(self)

    def __repr__(self) -> str:
        return (
            f"HotPlan(budget_bytes={self.budget_bytes}, num_pinned={self.num_pinned}, "
            f"num_rows={len(self._is_pinned)})"
        )

    def _again(
        self, profile: PopularityProfile, tables: Mapping[str, PlannedTable], budget: int | str
    ) -> HotPlan:
        """A plan with the other arguments of this one."""
        budget_bytes = parse_bytes(budget, "budget")
        return HotPlan(profile, tables, budget_bytes, self.window_lookups, self.small_share)

    def _shared(self) -> tuple[dict[tuple[int, str], int], dict[tuple[int, str], int]]:
        """How many slots the window needs in each row space, and the bytes of each slot."""
        num_slots: dict[tuple[int, str], int] = {}
        of_slot: dict[tuple[int, str], int] = {}
        for table, size in zip(self.tables.values(), self._sizes.tolist(), strict=True):
            space = table.embedding_dim, table.data_type
            # Features cannot look up more rows than their table has.
            most = min(self.window_lookups * table.num_features, size)
            num_slots[space] = num_slots.get(space, 0) + most
            of_slot[space] = table.slot_bytes
        return num_slots, of_slot

    def _require_floor(self) -> None:
        if self.budget_bytes < self.floor_bytes:
            raise BudgetTooSmall(
                f"budget must be at least {self.floor_bytes} bytes "
                f"({format_bytes(self.floor_bytes)}), got {self.budget_bytes} "
                f"({format_bytes(self.budget_bytes)}): {format_bytes(self.map_bytes)} for the row "
                f"map of {len(self._is_pinned):,} rows, {format_bytes(self.shared_bytes)} for the "
                "rows that mini-batches look up; raise it, or make the mini-batches smaller"
            )

    def _pin(self, room: int) -> None:
        table_bytes = self._sizes * self._slot_bytes
        # Small tables, the smallest first.
        for table in np.argsort(table_bytes, kind="stable").tolist():
            num_bytes = int(table_bytes[table])
            if num_bytes > min(room, self.small_share * self.budget_bytes):
                break
            self._is_pinned[self._rows_of(table)] = True
            room -= num_bytes
        # Rows that were looked up. Ranked rows of small tables are pinned already, so rank more.
        num_small = self.num_pinned
        at_most = room // int(self._slot_bytes.min()) + num_small
        weights = {name: 1 / table.slot_bytes for name, table in self.tables.items()}
        ranked = self.profile.ranked_rows(at_most, weights)
        ranked = ranked[~self._is_pinned[ranked]]
        tables = np.searchsorted(self.profile.bases, ranked, side="right") - 1
        taken = np.cumsum(self._slot_bytes[tables])
        num = int(np.searchsorted(taken, room, side="right"))
        self._is_pinned[ranked[:num]] = True
        room -= int(taken[num - 1]) if num else 0
        if bool((self._is_pinned | (self.profile.counts() == 0)).all()):
            self._complete(room)

    def _complete(self, room: int) -> None:
        """Pin the remaining rows of tables that then fit completely, the fewest bytes first."""
        left = (self._sizes - self._num_pinned()) * self._slot_bytes
        for table in np.argsort(left, kind="stable").tolist():
            if left[table] > room:
                return
            self._is_pinned[self._rows_of(table)] = True
            room -= int(left[table])

    def _rows_of(self, table: int) -> slice:
        begin = int(self.profile.bases[table])
        return slice(begin, begin + int(self._sizes[table]))

    def _num_pinned(self) -> NDArray[np.int64]:
        """Pinned rows of each table."""
        return np.add.reduceat(self._is_pinned, self.profile.bases, dtype=np.int64)
