"""`estimate`: what a model's tables will take of fast memory, host memory and disk.

The sizes come from the functions by which `accelerate` and the modules allocate. Only shapes,
dtypes and counts are read, so tables may be on the "meta" device, and nothing is allocated in
proportion to them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import nn

from recsys._support.machine import memory_bytes
from recsys._support.sizes import counted, format_bytes, round_up_as_written, round_up_bytes
from recsys.conversion.choice import choose_tables
from recsys.conversion.exchange import find_recsys, named_tables_in
from recsys.conversion.model_plan import configs_of, plan_of_model, require_arguments
from recsys.embeddings.kernels.choice import has_own_kernels
from recsys.embeddings.staleness.followed_rows import tracked_bytes
from recsys.embeddings.tiers.budget import (
    SpaceSize,
    divide_for_pinned,
    order_pinned,
    require_room_beside_rows,
)
from recsys.embeddings.tiers.cold.cold_files import require_disk
from recsys.embeddings.tiers.cold.cold_tier import require_budget_of_files, require_cold_tier
from recsys.embeddings.tiers.cold.staging import num_staged
from recsys.embeddings.tiers.slot_costs import floor_bytes, map_bytes, row_bytes
from recsys.embeddings.updaters import tables_by_kind
from recsys.errors import BudgetTooSmall, ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from recsys.embeddings.lookup.abstract_tables import AbstractTables
    from recsys.embeddings.optimizer import RowOptimizer
    from recsys.embeddings.popularity.counts import PopularityProfile
    from recsys.embeddings.popularity.plan import HotPlan
    from recsys.embeddings.staleness.settings import Staleness
    from recsys.embeddings.updaters import NamedTable

__all__ = ["Estimate", "estimate", "format_line", "require_machine"]


def format_line(name: str, num_bytes: int, note: str) -> str:
    """A line of an estimate: what takes the bytes, their number, and a note."""
    return f"{name:<24}{format_bytes(num_bytes):>9}  {note}".rstrip()


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What the tables of a model take; `str` of it is a table in words.

    Optimizer state is counted for every row, as it is once every table has been updated. Memory in
    proportion to a mini-batch is not counted, nor are gradients and optimizer state of dense
    parameters, nor gradients of tables that recsys does not update.

    Attributes:
        num_tables: Number of tables.
        num_rows: Rows of all tables.
        everything_bytes: All rows and their optimizer state.
        has_optimizer: Whether the optimizer of the rows is known; if not, no state is counted.
        device: Device of the fast memory.
        fast_bytes: Fast memory: rows, their state, records of slots, the row map and a tracker.
        budget_bytes: The budget; None without one.
        num_slots: Slots of fast memory; 0 if every row is resident.
        batch_size: Samples of the mini-batch of `floor_bytes`.
        floor_bytes: The least budget for mini-batches of this size; with the cold tier "host" at
            most what all rows take.
        host_bytes: Host memory for the cold tier and for what passes to a GPU; on the CPU also for
            fast memory and dense parameters.
        disk_bytes: Files of the cold tier "file".
        dense_bytes: All other parameters: of dense layers, and of tables that recsys leaves to
            PyTorch.
    """

    num_tables: int
    num_rows: int
    everything_bytes: int
    has_optimizer: bool
    device: str
    fast_bytes: int
    budget_bytes: int | None
    num_slots: int
    batch_size: int
    floor_bytes: int
    host_bytes: int
    disk_bytes: int
    dense_bytes: int

    @property
    def all_fits(self) -> bool:
        """Whether every row is resident, so that no cold tier is needed."""
        return not self.num_slots

    def __str__(self) -> str:
        everything = format_bytes(self.everything_bytes)
        state = "with" if self.has_optimizer else "without"
        if self.budget_bytes is None:
            fast = "every row is resident"
        elif self.all_fits:
            fast = f"all {everything} fit; no cold tier is needed"
        else:
            budget = format_bytes(self.budget_bytes)
            fast = f"{self.num_slots:,} slots and the row map, of a budget of {budget}"
        tables = f"{counted(self.num_tables, 'table')} of {self.num_rows:,} rows"
        floor = round_up_as_written(self.floor_bytes)
        samples = f"for mini-batches of {counted(self.batch_size, 'sample')}"
        return "\n".join(
            [
                f"{tables} take {everything} {state} optimizer state",
                format_line(f"fast memory ({self.device})", self.fast_bytes, fast),
                format_line("least budget", floor, samples),
                format_line("host memory", self.host_bytes, ""),
                format_line("disk", self.disk_bytes, ""),
                format_line("dense parameters", self.dense_bytes, ""),
            ]
        )


def estimate(
    model: nn.Module,
    budget: int | str | None = None,
    batch_size: int = 1,
    *,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | RowOptimizer | None = None,
    lazy_adam: bool = False,
    plan: HotPlan | None = None,
    profile: PopularityProfile | None = None,
    cold_tier: str = "host",
    cold_path: Path | str | None = None,
    lookups_per_bag: float | Mapping[str, float] = 1,
    staleness: Staleness | None = None,
    device: torch.device | str | None = None,
) -> Estimate:
    """Tell what the tables of a model will take, before anything is allocated for them.

    The model is one that `accelerate` would take, one that it has taken, or one that is made of
    modules of `recsys.embeddings`. It is not changed. Its tables may be on the "meta" device: build
    it under `torch.device("meta")`, and a model of any size is estimated on any machine.

    What cannot fit is refused. Host memory is compared with that of this machine, unless the tables
    are on the "meta" device, and are meant for another machine perhaps.

    Args:
        model: The model.
        budget: As for `accelerate`. None for tables that have a budget already takes theirs.
        batch_size: Samples of a mini-batch; its rows must fit the budget.
        optimizer: As for `accelerate`, like the arguments after it. Of modules of recsys it is
            known, and must be left out.
        lazy_adam: As for `accelerate`.
        plan: As for `accelerate`.
        profile: As for `accelerate`.
        cold_tier: As for `accelerate`.
        cold_path: If given, it must be writable, and its disk must have room for the files.
        lookups_per_bag: Distinct rows that a bag of a mini-batch adds, on average; by the table's
            name in a plan if tables differ, and 1 for tables without an entry. The length of bags
            is the safe choice. Where bags repeat rows, fewer are enough.
        staleness: Settings of a `StalenessTracker` that will follow the rows.
        device: Device of the fast memory; by default that of the tables, and the CPU for tables on
            the "meta" device.

    Returns:
        The sizes; print it.

    Raises:
        BudgetTooSmall: the budget cannot hold the rows of such a mini-batch. The message names the
            least budget.
        ColdTierError: the disk of `cold_path` has no room, or may not be written to.
        ConfigError: host memory is too small, or an argument cannot be read.
        ProfileError, TypeError, ValueError: as for `accelerate`.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
    require_arguments(budget, plan, profile)
    require_cold_tier(cold_tier, cold_path)
    if type(batch_size) is not int or batch_size < 1:
        raise ValueError(f"batch_size must be a whole number of at least 1, got {batch_size!r}")
    ours = find_recsys(model)
    modules = [cast("AbstractTables", module) for module in ours]
    if modules:
        if optimizer is not None or lazy_adam:
            raise ValueError(
                "optimizer: the tables are in modules of recsys already, whose optimizer is "
                "known; leave it out"
            )
        tables = list(chain.from_iterable(named_tables_in(ours).values()))
        sized = _sized_recsys(modules, tables, budget, plan, profile, cold_tier)
    else:
        chosen = choose_tables(model, optimizer, lazy_adam=lazy_adam, always=True, may_be_meta=True)
        tables, formulas = chosen.tables, [spec.formula for spec in chosen.specs]
        budgeted = plan_of_model(chosen.updated, formulas, budget, plan, profile)
        groups = _groups_of(tables, [(spec.param_groups, spec.formula) for spec in chosen.specs])
        sized = _Sized(groups, bool(formulas), cold_tier, *budgeted or (None, {}))
    if cold_tier == "file":
        require_budget_of_files(has_budget=sized.budget_bytes is not None)
    tiers = [each for module in modules for each in module.tiers()]
    place = tiers[0].device if tiers else tables[0].weight.device
    place = place if device is None else torch.device(device)
    rows = _rows_of_mini_batch(tables, batch_size, lookups_per_bag)
    found = _estimate(sized, model, rows, batch_size, staleness, place)
    if not any(table.weight.is_meta for table in tables):
        require_machine(found)
    if cold_path is not None:
        require_disk(Path(cold_path), found.disk_bytes)
    return found


class _Sized(NamedTuple):
    """Tables that are sized together.

    Attributes:
        groups: Tables of one dim and dtype, and their size.
        has_optimizer: Whether the optimizer of their rows is known.
        cold_tier: "host" or "file".
        budget_bytes: The budget; None if all rows are resident.
        pinned: For each table, the pinned rows and their counts.
        slots: The numbers of slots that the groups have already; empty to divide the budget.
        reserved_bytes: The part of the budget that a tracker has already.
    """

    groups: Sequence[tuple[SpaceSize, Sequence[nn.Parameter]]]
    has_optimizer: bool
    cold_tier: str
    budget_bytes: int | None = None
    pinned: Mapping[nn.Parameter, Any] = {}
    slots: Sequence[int] = ()
    reserved_bytes: int = 0


def _estimate(
    sized: _Sized,
    model: nn.Module,
    rows: Mapping[int, int],
    batch_size: int,
    staleness: Staleness | None,
    device: torch.device,
) -> Estimate:
    """The formula.

    Args:
        sized: The tables.
        model: The model.
        rows: The most distinct rows of a mini-batch, by the `id()` of the table; 0 for others.
        batch_size: As for `estimate`.
        staleness: As for `estimate`.
        device: Device of the fast memory; "meta" stands for the CPU.

    Raises:
        BudgetTooSmall: the budget does not hold the row maps, or a mini-batch.
    """
    spaces = [space for space, _ in sized.groups]
    num_rows = sum(space.num_rows for space in spaces)
    everything = sum(space.resident_bytes for space in spaces)
    budget, is_on_host = sized.budget_bytes, sized.cold_tier == "host"
    tracker, slots = sized.reserved_bytes, sized.slots
    if staleness is not None:
        tracker, slots = sum(tracked_bytes(tables, staleness) for _, tables in sized.groups), ()
    if budget is not None and not slots:
        if is_on_host and everything <= budget:
            require_room_beside_rows(budget, everything, tracker)
        else:
            pinned = [order_pinned(tables, sized.pinned) for _, tables in sized.groups]
            divided = divide_for_pinned(budget - tracker, spaces, pinned, may_stay=False)
            slots = [num_slots for num_slots, _ in divided or ()]
    needed = [
        (max(1, sum(rows.get(id(table), 0) for table in tables)), space.slot_bytes)
        for space, tables in sized.groups
    ]
    floor = tracker + floor_bytes(num_rows, needed)
    if is_on_host:
        floor = min(floor, everything)  # where every row is resident there is no row map
    fast, host, disk = tracker + everything, 0, 0
    if slots:
        fast = tracker + map_bytes(num_rows)
        host, disk = (everything, 0) if is_on_host else (0, everything)
    for space, count in zip(spaces, slots, strict=False):
        fast += count * space.slot_bytes
        of_row = row_bytes(space.dim, space.dtype, space.state_sizes)
        host += num_staged(count, of_row) * of_row if has_own_kernels(device) else 0
    own = {id(table) for _, tables in sized.groups for table in tables}
    dense = sum(each.nbytes for each in model.parameters() if id(each) not in own)
    on_cpu = device.type in ("cpu", "meta")
    if slots and budget is not None and floor > budget:
        raise BudgetTooSmall(
            f"budget must be at least {floor} bytes ({round_up_bytes(floor)}), got {budget} "
            f"({format_bytes(budget)}): a mini-batch of {batch_size:,} samples needs that much; "
            "raise it, or make mini-batches smaller (batch_size; or lookups_per_bag, where bags "
            "have rows in common)"
        )
    return Estimate(
        num_tables=len(own),
        num_rows=num_rows,
        everything_bytes=everything,
        has_optimizer=sized.has_optimizer,
        device="cpu" if on_cpu else str(device),
        fast_bytes=fast,
        budget_bytes=budget,
        num_slots=sum(slots),
        batch_size=batch_size,
        floor_bytes=floor,
        host_bytes=host + (fast + dense if on_cpu else 0),
        disk_bytes=disk,
        dense_bytes=dense,
    )


def _groups_of(
    tables: Sequence[NamedTable],
    updates: Sequence[tuple[Mapping[int, int], RowOptimizer | None]] = (),
) -> list[tuple[SpaceSize, Sequence[nn.Parameter]]]:
    """The groups that `make_updater` makes; without an optimizer, rows without state."""
    weights = [table.weight for table in tables]
    return [
        (SpaceSize.of(each, {} if formula is None else formula.state_sizes(kind[1])), each)
        for numbers, formula in updates or [(dict.fromkeys(map(id, weights), 0), None)]
        for kind, each in tables_by_kind(numbers, weights).items()
    ]


def _sized_recsys(
    modules: Sequence[AbstractTables],
    tables: Sequence[NamedTable],
    budget: int | str | None,
    plan: HotPlan | None,
    profile: PopularityProfile | None,
    cold_tier: str,
) -> _Sized:
    """The tables of modules of recsys; arguments as for `estimate`.

    Raises:
        BudgetTooSmall, ProfileError: as for `plan_of_model`.
        ValueError: there is a budget, and not one optimizer for all tables.
    """
    updaters = list(dict.fromkeys(module.row_updater for module in modules))
    known = [each for each in updaters if each is not None]
    formulas = [None if each is None else each.groups[0].settings.formula for each in updaters]
    groups = [(each.space_size(), each.group.tables) for one in known for each in one.groups]
    alone = {id(x.weight) for each in modules for x in each.holders() if not each.row_updater}
    without = [table for table in tables if id(table.weight) in alone]
    sized = _Sized([*groups, *_groups_of(without)], not without, cold_tier)
    if len(updaters) > 1 and (
        any(each.budget_bytes for each in known)
        if budget is None and plan is None
        else None not in updaters
    ):
        raise ValueError(
            f"budget: tables that share it must have one optimizer, got {len(updaters)} (none "
            "counts as one); estimate one module at a time"
        )
    budgeted = plan_of_model(tables, formulas, budget, plan, profile)
    if budgeted is not None:
        return sized._replace(budget_bytes=budgeted[0], pinned=budgeted[1])
    if len(known) != 1:
        return sized
    tiers = known[0].tiers()
    return sized._replace(
        budget_bytes=known[0].budget_bytes or None,
        cold_tier="file" if any(each.files is not None for each in tiers) else "host",
        slots=[each.hot.num_slots for each in tiers],
        reserved_bytes=known[0].reserved_bytes,
    )


def require_machine(found: Estimate) -> None:
    """Check that this machine has the memory that tables and dense parameters will take.

    Raises:
        ConfigError: it has less.
    """
    memory = memory_bytes()
    if found.host_bytes > memory:
        raise ConfigError(
            f"host memory: tables and dense parameters take {format_bytes(found.host_bytes)}, and "
            f"this machine has {format_bytes(memory)}; keep rows in files by a budget and "
            "cold_tier 'file', or use a machine with more memory"
        )


def _rows_of_mini_batch(
    tables: Sequence[NamedTable], batch_size: int, lookups_per_bag: float | Mapping[str, float]
) -> dict[int, int]:
    """The most distinct rows that a mini-batch looks up, by the `id()` of the table.

    Raises:
        ValueError: a number of lookups is negative, or is for no table.
    """
    weights, configs = configs_of(tables)
    given: Mapping[str, Any] = (
        lookups_per_bag
        if isinstance(lookups_per_bag, Mapping)
        else dict.fromkeys(weights, lookups_per_bag)
    )
    unknown = [name for name in given if name not in weights]
    if unknown:
        raise ValueError(
            f"lookups_per_bag: there is no table {unknown[0]!r}; the tables are {list(weights)}"
        )
    rows = {}
    for config in configs:
        found = given.get(config.name, 1)
        if not isinstance(found, int | float) or not found >= 0:
            raise ValueError(f"lookups_per_bag must be a number of at least 0, got {found!r}")
        most = batch_size * len(config.feature_names) * found
        rows[id(weights[config.name])] = round(min(config.num_embeddings, most))
    return rows
