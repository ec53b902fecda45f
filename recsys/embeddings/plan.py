"""A plan: which rows are pinned hot under a budget, and what the rest of the budget is for.

    budget = row map                                4 bytes for every row of every table
           + slots that mini-batches share          rows that are not pinned come and go in them
           + pinned slots                           one for each pinned row

A slot takes its row, the row's optimizer state, and 8 bytes that say what it holds. The first two
lines are the floor: below it no mini-batch could run. Tables of one dim and data type share slots.

Rows are pinned in this order:

1. Small tables whole: those whose slots take a thousandth of the budget or less. No lookup of them
   ever misses, for next to nothing.
2. Rows that were looked up, by lookups saved per byte.
3. Only where all of these are pinned, what is left of the tables, whole ones, the smallest first. A
   part of the rows that nobody has looked up would serve no better pinned than come and go.

A plan keeps the counts that it was made from: it is made anew for another budget, and measured on
other lookups, without counting again. Letters: R rows of all tables.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, final

import numpy as np
import torch

from recsys.embeddings.popularity import PopularityProfile
from recsys.embeddings.profile_file import read_profile, write_profile
from recsys.embeddings.slots import floor_bytes, map_bytes, slot_bytes
from recsys.embeddings.table import DATA_TYPES, TableConfig, data_type_of
from recsys.errors import BudgetTooSmall, ConfigError, ProfileError
from recsys.sizes import format_bytes, parse_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from recsys.batch import Batch, Features
    from recsys.datasets.source import SampleSource
    from recsys.embeddings.coverage import Coverage
    from recsys.embeddings.optimizer import RowOptimizer

__all__ = ["RANKINGS", "HotPlan", "PlannedTable", "plan_hot_rows"]

# What a lookup counts for, by the name of the ranking.
RANKINGS = ("lookups_per_byte", "global_topk", "per_table_threshold")
_SMALL_SHARE = 1 / 1024
_PRINTED = (0.25, 0.5, 1.0, 2.0, 4.0)
_DATA_TYPES = DATA_TYPES | {"fp64": torch.float64}  # which no config has, but a model's bag may
_ARGUMENTS = ("budget_bytes", "ranking", "window_lookups", "small_share")


class PlannedTable(NamedTuple):
    """What a plan knows of a table.

    Attributes:
        embedding_dim: D.
        data_type: Of its rows.
        num_features: How many features look it up.
        slot_bytes: What one of its rows takes hot.
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
    ranking: str = "lookups_per_byte",
    window_lookups: int = 2048,
    small_share: float | None = None,
) -> HotPlan:
    """Choose the rows to be pinned.

    Args:
        profile: Counts of these tables, or of their features.
        tables: `TableConfig`s, or TorchRec's `EmbeddingBagConfig`s.
        budget: Bytes of fast memory, or text as "256MiB".
        optimizer: One of ours, whose state lies beside the rows; None for none.
        ranking: "lookups_per_byte"; or FAE's, at the same memory: "global_topk", by lookups
            wherever they are, or "per_table_threshold", by a row's share of its table's lookups
            (the budget decides where the threshold lies). FAE's know no small tables.
        window_lookups: How many rows one feature looks up, at most, in the mini-batches that are in
            the window at once: the mini-batch's size, times the largest bag, times the window.
        small_share: Share of the budget up to which a table is small; by default 1/1024, or 0 in
            FAE's rankings.

    Raises:
        BudgetTooSmall: the budget is below the floor, which the message names.
        ProfileError: the profile is of other tables.
        ConfigError: an argument is out of range.
    """
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
    if small_share is None:
        small_share = _SMALL_SHARE if ranking == RANKINGS[0] else 0.0
    budget_bytes = parse_bytes(budget, "budget")
    return HotPlan(counted, planned, budget_bytes, ranking, window_lookups, small_share)


@final
class HotPlan:
    """Which rows are pinned; made by `plan_hot_rows`, `retarget` or `load`.

    Attributes:
        profile: Lookups of these tables' rows; not to be added to.
        tables: What is known of each table.
        budget_bytes: What everything together may take.
        map_bytes: What the row map takes.
        floor_bytes: The least budget: the row map, and the rows of the mini-batches in the window.
        num_shared_slots: Slots that are not pinned, by embedding_dim and data type.
        shared_bytes: What they take.
        pinned_bytes: What pinned slots take.
        ranking, window_lookups, small_share: As of `plan_hot_rows`.
    """

    def __init__(
        self,
        profile: PopularityProfile,
        tables: Mapping[str, PlannedTable],
        budget_bytes: int,
        ranking: str,
        window_lookups: int,
        small_share: float,
    ) -> None:
        if ranking not in RANKINGS:
            raise ConfigError(f"plan: ranking must be one of {RANKINGS}, got {ranking!r}")
        if window_lookups < 1 or not 0 <= small_share <= 1:
            raise ConfigError(
                "plan: window_lookups must be at least 1 and small_share in [0, 1], got "
                f"{window_lookups} and {small_share}"
            )
        self.tables, self.budget_bytes, self.ranking = dict(tables), budget_bytes, ranking
        self.window_lookups, self.small_share = window_lookups, small_share
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
        """What it would take to have every row hot."""
        return self.map_bytes + int(self._sizes @ self._slot_bytes)

    @property
    def num_pinned(self) -> int:
        """Pinned rows of all tables."""
        return int(np.count_nonzero(self._is_pinned))

    def pinned_rows(self, table: str) -> NDArray[np.int64]:
        """The pinned rows of a table, rising.

        Raises:
            KeyError: there is no such table.
        """
        if table not in self.tables:
            raise KeyError(f"the plan has no table {table!r}; it has {list(self.tables)}")
        return np.flatnonzero(self._is_pinned[self._rows_of(list(self.tables).index(table))])

    def pinned_by_table(self) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Of each table: its pinned rows, rising, and how often each was looked up."""
        counts = self.profile.counts()
        found = []
        for table in range(len(self.tables)):
            rows = self._rows_of(table)
            pinned = np.flatnonzero(self._is_pinned[rows])
            found.append((pinned, counts[rows][pinned].astype(np.int64)))
        return found

    def of_tables(self, tables: Sequence[TableConfig], budget: int | str | None = None) -> HotPlan:
        """The plan, if it is one of these tables.

        Args:
            tables: In the order of the plan's.
            budget: Another one than the plan's; None for that.

        Raises:
            ProfileError: it is of others; the message names one.
        """
        wanted = {table.name: (table.num_embeddings, table.embedding_dim) for table in tables}
        sizes = self.profile.table_sizes
        known = {name: (sizes[name], table.embedding_dim) for name, table in self.tables.items()}
        if list(wanted.items()) != list(known.items()):
            lacking = [name for name in wanted if name not in known]
            added = [name for name in known if name not in wanted]
            differing = [name for name in wanted if name in known and wanted[name] != known[name]]
            if lacking:
                rule = f"{lacking[0]!r} is not in it, which has {list(known)}"
            elif added:
                rule = f"its {added[0]!r} is not among those here, {list(wanted)}"
            elif differing:
                name = differing[0]
                rule = (
                    f"(num_embeddings, embedding_dim) of {name!r} are {known[name]} in the plan "
                    f"and {wanted[name]} here"
                )
            else:
                rule = f"it has them in the order {list(known)}, and here it is {list(wanted)}"
            raise ProfileError(
                f"the plan is of other tables: {rule}; plan again for these tables, in their order"
            )
        return self if budget is None else self.retarget(budget)

    def of_bag(
        self, num_embeddings: int, embedding_dim: int, budget: int | str | None = None
    ) -> HotPlan:
        """The plan, if it is one of a single table of this size, whatever its name.

        Args:
            num_embeddings: E.
            embedding_dim: D.
            budget: Another one than the plan's; None for that.

        Raises:
            ProfileError: it is of several tables, or of one of another size.
        """
        if len(self.tables) != 1:
            raise ProfileError(
                "a bag is one table, and the plan is of several: "
                f"{list(self.tables)}; plan for its table alone"
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
        """What the pinned rows serve; arguments and errors as of `PopularityProfile.coverage`."""
        levels = np.where(self._is_pinned, np.uint8(0), np.uint8(1))
        return self.profile.coverages_of(levels, 1, on, samples)[0]

    def retarget(self, budget: int | str) -> HotPlan:
        """The same for another budget.

        Raises:
            BudgetTooSmall, ConfigError: as `plan_hot_rows`.
        """
        return HotPlan(
            self.profile,
            self.tables,
            parse_bytes(budget, "budget"),
            self.ranking,
            self.window_lookups,
            self.small_share,
        )

    def save(self, file: str | Path) -> None:
        """Write it; the file appears when whole, and can be loaded as a profile, too."""
        tables = {name: list(table) for name, table in self.tables.items()}
        plan = {"tables": tables} | {key: getattr(self, key) for key in _ARGUMENTS}
        write_profile(Path(file), self.profile.about() | {"plan": plan}, self.profile.counts())

    @classmethod
    def load(cls, file: str | Path) -> HotPlan:
        """What `save` wrote.

        Raises:
            FileNotFoundError: there is no such file.
            ProfileError: it is damaged, or no plan.
        """
        about, counts = read_profile(Path(file))
        plan = about.get("plan")
        if plan is None:
            raise ProfileError(
                f"{file} is a profile and no plan; make one with `recsys plan {file} --budget ...`"
            )
        if not isinstance(plan, dict) or set(plan) != {"tables", *_ARGUMENTS}:
            raise ProfileError(f"{file}: its plan lacks something; plan again with `recsys plan`")
        try:
            tables = {name: PlannedTable(*plan["tables"][name]) for name in about["tables"]}
            profile = PopularityProfile.from_about(about, counts)
            return cls(profile, tables, *(plan[key] for key in _ARGUMENTS))
        except (TypeError, KeyError, ConfigError, BudgetTooSmall) as error:
            raise ProfileError(
                f"{file}: its plan cannot be followed ({error}); plan again with `recsys plan`"
            ) from error

    def __str__(self) -> str:
        """What this and other budgets would serve of the lookups that were counted."""
        if not self.profile.num_lookups:
            return "no lookups were counted"
        header = ("budget", "of everything", "pinned rows", "lookups", "distinct rows")
        lines = [header]
        for factor in _PRINTED:
            budget = int(self.budget_bytes * factor)
            if budget < self.floor_bytes:
                lines.append((format_bytes(budget), "-", "-", "-", "-"))
                continue
            plan = self if factor == 1 else self.retarget(budget)
            found = plan.coverage()
            lines.append(
                (
                    format_bytes(budget),
                    f"{min(budget / self.everything_bytes, 1):.1%}",
                    f"{plan.num_pinned:,}",
                    f"{found.lookup_hit_rate:.1%}",
                    f"{found.num_distinct_hot_rows / found.num_distinct_rows:.1%}",
                )
            )
            if plan.num_pinned == len(self._is_pinned):
                break
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        rows = (
            "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
            for line in lines
        )
        return "\n".join(rows)

    def __repr__(self) -> str:
        return (
            f"HotPlan(budget_bytes={self.budget_bytes}, num_pinned={self.num_pinned}, "
            f"num_rows={len(self._is_pinned)}, ranking={self.ranking!r})"
        )

    def _shared(self) -> tuple[dict[tuple[int, str], int], dict[tuple[int, str], int]]:
        """How many slots mini-batches need in each row space, and what one takes."""
        wanted: dict[tuple[int, str], int] = {}
        there: dict[tuple[int, str], int] = {}
        of_slot: dict[tuple[int, str], int] = {}
        for table, size in zip(self.tables.values(), self._sizes.tolist(), strict=True):
            space = table.embedding_dim, table.data_type
            # A feature cannot look up more rows than its table has.
            most = min(self.window_lookups * table.num_features, size)
            wanted[space] = wanted.get(space, 0) + most
            there[space] = there.get(space, 0) + size
            of_slot[space] = table.slot_bytes
        return {space: min(num, there[space]) for space, num in wanted.items()}, of_slot

    def _require_floor(self) -> None:
        if self.budget_bytes < self.floor_bytes:
            raise BudgetTooSmall(
                f"budget must be at least {self.floor_bytes} bytes "
                f"({format_bytes(self.floor_bytes)}), got {self.budget_bytes} "
                f"({format_bytes(self.budget_bytes)}): {format_bytes(self.map_bytes)} are the row "
                f"map of {len(self._is_pinned):,} rows, {format_bytes(self.shared_bytes)} the rows "
                "that mini-batches look up; raise it, or make the mini-batches smaller"
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
        # Rows that were looked up; those of small tables are among the ranked ones, and are paid.
        num_small = self.num_pinned
        at_most = room // int(self._slot_bytes.min()) + num_small
        ranked = self.profile.ranked_rows(at_most, self._weights())
        ranked = ranked[~self._is_pinned[ranked]]
        tables = np.searchsorted(self.profile.bases, ranked, side="right") - 1
        taken = np.cumsum(self._slot_bytes[tables])
        num = int(np.searchsorted(taken, room, side="right"))
        self._is_pinned[ranked[:num]] = True
        room -= int(taken[num - 1]) if num else 0
        if bool((self._is_pinned | (self.profile.counts() == 0)).all()):
            self._complete(room)

    def _complete(self, room: int) -> None:
        """Pin what is left of tables where it fits, the least first."""
        left = (self._sizes - self._num_pinned()) * self._slot_bytes
        for table in np.argsort(left, kind="stable").tolist():
            if left[table] > room:
                return
            self._is_pinned[self._rows_of(table)] = True
            room -= int(left[table])

    def _weights(self) -> dict[str, float]:
        """What a lookup counts for in each table."""
        if self.ranking == "lookups_per_byte":
            return {name: 1 / table.slot_bytes for name, table in self.tables.items()}
        if self.ranking == "global_topk":
            return dict.fromkeys(self.tables, 1.0)
        totals = {name: int(self.profile.counts(name).sum(dtype=np.int64)) for name in self.tables}
        return {name: 1 / max(total, 1) for name, total in totals.items()}

    def _rows_of(self, table: int) -> slice:
        begin = int(self.profile.bases[table])
        return slice(begin, begin + int(self._sizes[table]))

    def _num_pinned(self) -> NDArray[np.int64]:
        """Pinned rows of each table."""
        return np.add.reduceat(self._is_pinned, self.profile.bases, dtype=np.int64)
