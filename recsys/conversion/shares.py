"""Tables that share a budget, and what they take.

The sizes come from the functions by which modules allocate. Only shapes, dtypes and counts are
read, so tables may be on the "meta" device.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from recsys.conversion.choice import choose_budget, planned_budget
from recsys.embeddings.staleness.followed_rows import tracked_bytes
from recsys.embeddings.tiers.budget import (
    NEEDS_OPTIMIZER,
    FastMemory,
    SpaceSize,
    divide_for_pinned,
    order_pinned,
    require_room_beside_rows,
)
from recsys.embeddings.tiers.cold.staging import num_staged
from recsys.embeddings.tiers.slot_costs import floor_bytes, require_numbers, row_bytes
from recsys.embeddings.updaters import tables_by_kind

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import nn

    from recsys.conversion.choice import ChosenTables
    from recsys.embeddings.lookup.abstract_tables import AbstractTables
    from recsys.embeddings.popularity.plan import HotPlan
    from recsys.embeddings.popularity.profile import PopularityProfile
    from recsys.embeddings.staleness.settings import Staleness
    from recsys.embeddings.update.row_updater import RowUpdater
    from recsys.embeddings.updaters import NamedTable

__all__ = ["Group", "Share", "Sized", "share_of_chosen", "shares_of_recsys"]


class Group(NamedTuple):
    """Tables of one dim and dtype.

    Attributes:
        space: Their size.
        tables: The Parameters, each once.
    """

    space: SpaceSize
    tables: Sequence[nn.Parameter]


class Sized(NamedTuple):
    """The part of an `Estimate` for tables that share a budget; attributes as there."""

    fast: FastMemory
    num_slots: int
    num_pinned: int
    floor_bytes: int
    cold_bytes: int
    staging_bytes: int
    disk_bytes: int


class Share(NamedTuple):
    """Tables that share a budget.

    Attributes:
        groups: Their groups.
        has_optimizer: Whether the optimizer of their rows is known.
        budget_bytes: The budget; None if all rows are resident.
        pinned: For each table, the pinned rows and their counts.
        cold_tier: "host" or "file".
        built: The numbers of slots and of pinned rows that each group has already; None if the
            budget is to be divided.
        reserved_bytes: The part of the budget that a tracker has already.
    """

    groups: Sequence[Group]
    has_optimizer: bool
    budget_bytes: int | None = None
    pinned: Mapping[nn.Parameter, Any] = MappingProxyType({})
    cold_tier: str = "host"
    built: Sequence[tuple[int, int]] | None = None
    reserved_bytes: int = 0

    def sized(
        self, rows: Mapping[int, int], staleness: Staleness | None, *, has_staging: bool
    ) -> Sized:
        """What the tables take.

        Args:
            rows: The most distinct rows of a mini-batch, by the `id()` of the table; 0 for others.
            staleness: Settings of a tracker.
            has_staging: Whether rows pass through host memory to the slots.

        Raises:
            BudgetTooSmall: the budget is smaller than the row maps.
            ValueError: there are more rows, or slots, than 32 bits can number.
        """
        spaces = [group.space for group in self.groups]
        of_tracker = self.reserved_bytes
        if staleness is not None:
            of_tracker = sum(tracked_bytes(group.tables, staleness) for group in self.groups)
        needed = [
            max(1, sum(rows.get(id(each), 0) for each in group.tables)) for group in self.groups
        ]
        of_slots = [space.slot_bytes for space in spaces]
        num_rows = sum(space.num_rows for space in spaces)
        floor = of_tracker + floor_bytes(num_rows, zip(needed, of_slots, strict=True))
        everything = sum(space.resident_bytes for space in spaces)
        if self.cold_tier == "host":
            floor = min(floor, everything)  # where every row is resident there is no row map
        divided = self.built if staleness is None else None
        if divided is None:
            divided = self._divided(spaces, of_tracker)
        slots = None if divided is None else [num_slots for num_slots, _ in divided]
        fast = FastMemory.of(spaces, slots)._replace(tracker_bytes=of_tracker)
        if divided is None or slots is None:
            if self.budget_bytes is not None:
                require_room_beside_rows(self.budget_bytes, everything, of_tracker)
            return Sized(fast, 0, 0, floor, 0, 0, 0)
        staging = 0
        for space, num_slots in zip(spaces, slots, strict=True):
            require_numbers(space.num_rows, num_slots)
            of_row = row_bytes(space.dim, space.dtype, space.state_sizes)
            staging += num_staged(num_slots, of_row) * of_row if has_staging else 0
        is_file = self.cold_tier == "file"
        places = (0, staging, everything) if is_file else (everything, staging, 0)
        return Sized(fast, sum(slots), sum(pinned for _, pinned in divided), floor, *places)

    def _divided(
        self, spaces: Sequence[SpaceSize], of_tracker: int
    ) -> Sequence[tuple[int, int]] | None:
        """The numbers of slots and of pinned rows of each group; None if all rows are resident."""
        if self.budget_bytes is None:
            return None
        pinned = [order_pinned(group.tables, self.pinned) for group in self.groups]
        may_stay = self.cold_tier == "host"
        divided = divide_for_pinned(self.budget_bytes, spaces, pinned, may_stay=may_stay)
        if divided is None:
            return None
        if of_tracker:  # a tracker takes its part when the tiers are there
            rest = self.budget_bytes - of_tracker
            divided = divide_for_pinned(rest, spaces, pinned, may_stay=False)
            assert divided is not None
        return [(num_slots, len(rows)) for num_slots, rows in divided]


def share_of_chosen(
    chosen: ChosenTables,
    budget: int | str | None,
    plan: HotPlan | None,
    profile: PopularityProfile | None,
    cold_tier: str,
) -> Share:
    """The tables that `accelerate` would take over; arguments as there.

    Raises:
        Exception: as for `choose_budget`.
    """
    groups, budgeted = _groups_of(chosen), choose_budget(chosen, budget, plan, profile)
    if budgeted is None:
        return Share(groups, bool(chosen.specs))
    return Share(groups, True, *budgeted, cold_tier)


def _groups_of(chosen: ChosenTables) -> list[Group]:
    """The groups that `make_updater` makes; without an optimizer, rows without state."""
    weights = [table.weight for table in chosen.tables]
    updates = [(spec.param_groups, spec.formula) for spec in chosen.specs]
    if not updates:
        groups = tables_by_kind(dict.fromkeys(map(id, weights), 0), weights)
        return [Group(SpaceSize.of(tables, {}), tables) for tables in groups.values()]
    return [
        Group(SpaceSize.of(tables, formula.state_sizes(kind[1])), tables)
        for numbers, formula in updates
        for kind, tables in tables_by_kind(numbers, weights).items()
    ]


def shares_of_recsys(
    modules: Sequence[AbstractTables],
    tables: Sequence[NamedTable],
    budget: int | str | None,
    plan: HotPlan | None,
    profile: PopularityProfile | None,
    cold_tier: str,
) -> list[Share]:
    """The tables of each updater of recsys modules.

    Raises:
        BudgetTooSmall, ProfileError: as for `plan_of_model`.
        ValueError: there is a budget, and not one optimizer for all tables.
    """
    updaters = dict.fromkeys(module.row_updater for module in modules)
    is_new = budget is not None or plan is not None
    if is_new and None in updaters:
        raise ValueError(NEEDS_OPTIMIZER)
    if is_new and len(updaters) > 1:
        raise ValueError(
            f"budget: the tables have {len(updaters)} optimizers, each with a budget of its own; "
            "leave out budget=, or estimate one module at a time"
        )
    shares = []
    for updater in updaters:
        if updater is None:
            own = {id(x.weight) for each in modules for x in each.holders() if not each.row_updater}
            weights = [table.weight for table in tables]
            groups = tables_by_kind(dict.fromkeys(own, 0), weights)
            found = [Group(SpaceSize.of(each, {}), each) for each in groups.values()]
            shares.append(Share(found, False))
            continue
        groups_of = [Group(each.space_size(), each.group.tables) for each in updater.groups]
        if is_new:
            formula = updater.groups[0].settings.formula
            budgeted = planned_budget(tables, formula, budget, plan, profile)
            shares.append(Share(groups_of, True, *budgeted, cold_tier))
        else:
            shares.append(_as_built(updater, groups_of))
    return shares


def _as_built(updater: RowUpdater, groups: Sequence[Group]) -> Share:
    """The tables of an updater with the fast memory that they have now."""
    tiers = updater.tiers()
    cold_tier = "file" if any(each.files is not None for each in tiers) else "host"
    return Share(
        groups,
        True,
        updater.budget_bytes or None,
        cold_tier=cold_tier,
        built=[(each.hot.num_slots, len(each.pinned)) for each in tiers] or None,
        reserved_bytes=updater.reserved_bytes,
    )
