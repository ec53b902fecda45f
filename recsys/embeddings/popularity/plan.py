"""A plan: which rows are pinned hot under a budget, and how the rest of the budget is used.

    budget = row map                                4 bytes for every row of every table
           + shared slots                           for rows that are fetched and evicted
           + pinned slots                           one for each pinned row

A slot holds a row, the row's optimizer state, and 11 bytes of marks. The row map and the shared
slots are the floor of a plan: with less, rows that are not pinned would be used in the cold tier.
Tables of one dim and data type share slots.

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
from typing import TYPE_CHECKING, NamedTuple, final

import numpy as np
import torch

from recsys._support.files import as_argument
from recsys._support.sizes import format_bytes, parse_bytes, round_up_as_written
from recsys._support.untrusted import is_number, is_whole
from recsys.embeddings.optimizer import require_formula
from recsys.embeddings.popularity.counts import PopularityProfile, text_table
from recsys.embeddings.popularity.files import read_profile, write_profile
from recsys.embeddings.table import DATA_TYPES, TableConfig, data_type_of
from recsys.embeddings.tiers.budget import floor_bytes, map_bytes, slot_bytes
from recsys.errors import BudgetTooSmall, ConfigError, ProfileError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from recsys.batch import Batch, Features, SampleSource
    from recsys.embeddings.optimizer import RowOptimizer
    from recsys.embeddings.popularity.counts import Coverage

__all__ = ["HotPlan", "PlannedTable", "plan_hot_rows", "require_plan"]

_SMALL_SHARE = 1 / 1024
_DATA_TYPES = DATA_TYPES | {"fp64": torch.float64}  # only in models; `TableConfig` refuses it
_ARGUMENTS = ("budget_bytes", "window_lookups", "small_share")  # in the constructor's order
_NUM_OTHER_BUDGETS = 5  # in the printed table


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
    return HotPlan(counted, planned, parse_bytes(budget, "budget"), window_lookups, small_share)


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
        self.num_shared_slots = self._shared()
        of_slot = {
            (table.embedding_dim, table.data_type): table.slot_bytes
            for table in self.tables.values()
        }
        slots = [(num, of_slot[space]) for space, num in self.num_shared_slots.items()]
        self.floor_bytes = floor_bytes(len(self._is_pinned), slots)
        self.shared_bytes = self.floor_bytes - self.map_bytes
        if self.everything_bytes <= budget_bytes:
            self._is_pinned[:] = True
            self.num_shared_slots, self.shared_bytes = dict.fromkeys(self.num_shared_slots, 0), 0
        elif budget_bytes < self.floor_bytes:
            raise BudgetTooSmall(
                f"budget must be at least {self.floor_bytes} bytes "
                f"({format_bytes(round_up_as_written(self.floor_bytes))}), got {budget_bytes} "
                f"({format_bytes(budget_bytes)}): {format_bytes(self.map_bytes)} for the row "
                f"map of {len(self._is_pinned):,} rows, {format_bytes(self.shared_bytes)} for the "
                "rows that mini-batches look up; raise it, or make the mini-batches smaller"
            )
        else:
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
        pinned = {name: self.pinned_rows(name) for name in self.tables}
        counts = self.profile.counts
        return [(rows, counts(name)[rows].astype(np.int64)) for name, rows in pinned.items()]

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
            differing = [name for name in wanted | known if wanted.get(name) != known.get(name)]
            name = differing[0] if differing else next(iter(wanted))
            raise ProfileError(
                f"the plan has other tables: (num_embeddings, embedding_dim) of {name!r} are "
                f"{known.get(name)} in the plan and {wanted.get(name)} here; the plan has "
                f"{list(known)}, and here are {list(wanted)}; plan again for these tables, in "
                "their order"
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

    def coverage(
        self,
        on: SampleSource | Iterable[Batch | Features] | None = None,
        samples: range | None = None,
    ) -> Coverage:
        """The coverage of the pinned rows; see `PopularityProfile.coverage`."""
        return self.profile.coverages_of(self._levels, 1, on, samples)[0]

    def find_hot_samples(self, source: SampleSource, samples: range) -> NDArray[np.bool_]:
        """Which samples look up only pinned rows, by a pass over the data.

        Args:
            source: Where samples come from; its features look up the plan's tables.
            samples: A contiguous range of samples.

        Shape:
            result (N,), one value for each sample.

        Raises:
            ConfigError: the source has no such samples.
            ProfileError: the source lacks a feature.
            IdOutOfRange: an id is no row of its table.
        """
        found = self.profile.levels_of_samples(self._levels, source, samples)
        return np.concatenate([np.empty(0, np.bool_), *(levels == 0 for levels in found)])

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
        tables = {name: PlannedTable(*plan["tables"][name]) for name in about["tables"]}
        profile = PopularityProfile.from_about(about, counts)
        return cls(profile, tables, *(plan[key] for key in _ARGUMENTS))

    def __str__(self) -> str:
        """A table of the coverage of the counted lookups under this and other budgets."""
        if not self.profile.num_lookups:
            return "no lookups were counted"
        lines = [("budget", "of everything", "pinned rows", "lookups", "distinct rows")]
        for budget in self._printed_budgets():
            planned = self.retarget(budget)
            found = planned.coverage()
            is_exact = round_up_as_written(budget) == budget
            lines.append(
                (
                    format_bytes(budget) if is_exact else f"{budget} B",
                    f"{min(budget / self.everything_bytes, 1):.1%}",
                    f"{planned.num_pinned:,}",
                    f"{found.lookup_hit_rate:.1%}",
                    f"{found.num_distinct_hot_rows / found.num_distinct_rows:.1%}",
                )
            )
        return text_table(lines)

    def __repr__(self) -> str:
        return (
            f"HotPlan(budget_bytes={self.budget_bytes}, num_pinned={self.num_pinned}, "
            f"num_rows={len(self._is_pinned)})"
        )

    @property
    def _levels(self) -> NDArray[np.uint8]:
        """0 for pinned rows and 1 for others, (R,)."""
        return np.where(self._is_pinned, np.uint8(0), np.uint8(1))

    def _printed_budgets(self) -> list[int]:
        """The plan's budget, and others whose room above the floor doubles.

        The largest has room for as many bytes as all counted rows take. Small tables are pinned
        whole first, so it may not hold all of these.

        Doublings of the budget itself would say nothing where the row map is most of it.
        """
        seen = np.add.reduceat(self.profile.counts() > 0, self.profile.bases, dtype=np.int64)
        room = min(int(seen @ self._slot_bytes), self.everything_bytes - self.floor_bytes)
        others = [self.floor_bytes + (room >> halvings) for halvings in range(_NUM_OTHER_BUDGETS)]
        return sorted({*map(round_up_as_written, others), self.budget_bytes})

    def _again(
        self, profile: PopularityProfile, tables: Mapping[str, PlannedTable], budget: int | str
    ) -> HotPlan:
        """A plan with the other arguments of this one."""
        return HotPlan(
            profile, tables, parse_bytes(budget, "budget"), self.window_lookups, self.small_share
        )

    def _shared(self) -> dict[tuple[int, str], int]:
        """How many slots the window needs in each table group."""
        num_slots: dict[tuple[int, str], int] = {}
        for table, size in zip(self.tables.values(), self._sizes.tolist(), strict=True):
            space = table.embedding_dim, table.data_type
            # Features cannot look up more rows than their table has.
            most = min(self.window_lookups * table.num_features, size)
            num_slots[space] = num_slots.get(space, 0) + most
        return num_slots

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

    def _rows_of(self, table: int) -> slice:
        begin = int(self.profile.bases[table])
        return slice(begin, begin + int(self._sizes[table]))

    def _num_pinned(self) -> NDArray[np.int64]:
        """Pinned rows of each table."""
        return np.add.reduceat(self._is_pinned, self.profile.bases, dtype=np.int64)
