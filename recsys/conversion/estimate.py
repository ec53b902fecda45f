"""`estimate`: what a model's tables will take of fast memory, host memory and disk.

The sizes come from the functions by which `accelerate` and the modules allocate. Only shapes,
dtypes and counts are read, so tables may be on the "meta" device, and nothing is allocated in
proportion to them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import nn

from recsys._support.machine import memory_bytes
from recsys._support.sizes import counted, format_bytes, round_up_as_written
from recsys._support.untrusted import is_whole
from recsys.conversion.choice import choose_tables
from recsys.conversion.exchange import find_recsys, named_tables_in
from recsys.conversion.model_plan import configs_of, plan_of_model, require_arguments
from recsys.embeddings.optimizer import SGD
from recsys.embeddings.staleness.followed_rows import tracked_bytes
from recsys.embeddings.tables_module import TableSettings, device_of
from recsys.embeddings.tiers.budget import SpaceSize, divide_budget, map_bytes
from recsys.embeddings.tiers.file_store import require_disk
from recsys.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from recsys.embeddings.optimizer import RowOptimizer
    from recsys.embeddings.popularity.counts import PopularityProfile
    from recsys.embeddings.popularity.plan import HotPlan
    from recsys.embeddings.staleness.settings import Staleness
    from recsys.embeddings.tables_module import Table, TableModule

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
        fast_bytes: Fast memory: rows, their state, marks of slots, the row map, and a tracker,
            which comes on top of a budget.
        budget_bytes: The budget; None without one.
        num_slots: Slots of fast memory; 0 if every row is resident.
        floor_bytes: The least budget.
        batch_size: Samples of the mini-batch of `batch_bytes`.
        batch_bytes: A budget with which each row of such a mini-batch has a slot. With less, some
            are used in the cold store. With the cold tier "host" at most what all rows take.
        host_bytes: Host memory for the cold tier; on the CPU also for fast memory and dense
            parameters.
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
    floor_bytes: int
    batch_size: int
    batch_bytes: int
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
        floor, enough = map(round_up_as_written, (self.floor_bytes, self.batch_bytes))
        samples = f"holds the rows of mini-batches of {counted(self.batch_size, 'sample')}"
        return "\n".join(
            [
                f"{tables} take {everything} {state} optimizer state",
                format_line(f"fast memory ({self.device})", self.fast_bytes, fast),
                format_line("least budget", floor, "the row map and a slot"),
                format_line("budget of a mini-batch", enough, samples),
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
        batch_size: Samples of a mini-batch.
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
        BudgetTooSmall: the budget is below the least one, which the message names.
        ColdTierError: the disk of `cold_path` has no room, or may not be written to.
        ConfigError: host memory is too small, or an argument cannot be read.
        ProfileError, TypeError, ValueError: as for `accelerate`.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
    require_arguments(budget, plan, profile)
    if not is_whole(batch_size, 1):
        raise ValueError(f"batch_size must be a whole number of at least 1, got {batch_size!r}")
    ours = find_recsys(model)
    if ours:
        if optimizer is not None or lazy_adam:
            raise ValueError(
                "optimizer: the tables are in modules of recsys already, whose optimizer is "
                "known; leave it out"
            )
        tables = list(chain.from_iterable(named_tables_in(ours).values()))
        groups = _groups_of_recsys([cast("TableModule", module) for module in ours], tables)
        formulas = list({group.owner: group.formula for group in groups}.values())
        budgeted = plan_of_model(tables, formulas, budget, plan, profile)
    else:
        chosen = choose_tables(model, optimizer, lazy_adam=lazy_adam, always=True, may_be_meta=True)
        tables, formulas = chosen.tables, [updater.formula for updater in chosen.updaters]
        budgeted = plan_of_model(chosen.updated, formulas, budget, plan, profile)
        groups = [
            group
            for updater in chosen.updaters
            for group in _groups_of(tables, updater.numbers, updater.formula)
        ] or _groups_of(tables)
    if budgeted is not None or not any(group.num_slots for group in groups):
        folder = "." if cold_tier == "file" and cold_path is None else cold_path
        budget_bytes = None if budgeted is None else budgeted[0]
        settings = TableSettings(
            SGD(lr=0.0), budget=budget_bytes, cold_tier=cold_tier, cold_path=folder
        )
        settings.require()
        groups = [group._replace(is_in_files=cold_tier == "file") for group in groups]
    tracker = 0
    if staleness is not None:
        tracker = sum(tracked_bytes(group.tables, staleness) for group in groups)
    if budgeted is not None:
        groups = _give_slots(groups, *budgeted)
    place = device_of(model) if ours else tables[0].weight.device
    place = place if device is None else torch.device(device)
    rows = _rows_of_mini_batch(tables, batch_size, lookups_per_bag)
    found = _estimate(groups, model, tracker, rows, batch_size, place)
    found = found if budgeted is None else replace(found, budget_bytes=budgeted[0])
    if not any(table.weight.is_meta for table in tables):
        require_machine(found)
    if cold_path is not None:
        require_disk(Path(cold_path), found.disk_bytes)
    return found


class _Group(NamedTuple):
    """Tables of one dim, dtype and optimizer.

    Attributes:
        tables: The tables.
        formula: The update rule of their rows; None if it is not known.
        owner: Names the optimizer.
        num_slots: Slots; 0 if all rows are resident.
        is_in_files: Whether the cold store is in files.
    """

    tables: Sequence[nn.Parameter]
    formula: RowOptimizer | None
    owner: int = 0
    num_slots: int = 0
    is_in_files: bool = False

    @property
    def size(self) -> SpaceSize:
        """The size of the tables and their state."""
        sizes = {} if self.formula is None else self.formula.state_sizes(self.tables[0].shape[1])
        return SpaceSize.of(self.tables, sizes)


def _groups_of(
    tables: Sequence[Table],
    numbers: Mapping[nn.Parameter, int] | None = None,
    formula: RowOptimizer | None = None,
    owner: int = 0,
) -> list[_Group]:
    """The groups that `group_tables` makes, of tables that may have no memory.

    Args:
        tables: The tables; a shared table occurs several times.
        numbers: Of the param groups; tables that are missing are left out. None for all tables and
            one group.
        formula: As for `_Group`.
        owner: As for `_Group`.
    """
    found: dict[Any, list[nn.Parameter]] = {}
    for weight in dict.fromkeys(table.weight for table in tables):
        if numbers is None or weight in numbers:
            number = 0 if numbers is None else numbers[weight]
            kind = number, weight.shape[1], weight.dtype, weight.device
            found.setdefault(kind, []).append(weight)
    return [_Group(own, formula, owner) for own in found.values()]


def _groups_of_recsys(modules: Sequence[TableModule], tables: Sequence[Table]) -> list[_Group]:
    """The groups of modules of recsys, as they are; those on "meta" have none yet."""
    updates = dict.fromkeys(update for module in modules for update in module.updates())
    groups = [
        _Group(
            update.group.tables,
            update.formula(),
            id(update.optimizer),
            update.group.num_slots,
            update.group.files is not None,
        )
        for update in updates
    ]
    known = {table for group in groups for table in group.tables}
    left = [table for table in tables if table.weight not in known]
    for module in modules:
        own = {table.weight: 0 for table in module.tables() if table.weight not in known}
        formula = None if module.row_optimizer is None else module.row_optimizer.formula
        owner = 0 if formula is None else id(module.row_optimizer)
        groups += _groups_of(left, own, formula, owner)
        known |= set(own)
    return groups


def _give_slots(
    groups: Sequence[_Group], budget: int, pinned: Mapping[nn.Parameter, Any]
) -> list[_Group]:
    """Divide a budget as `accelerate` does.

    Raises:
        BudgetTooSmall: it does not hold the row maps and a slot of each group.
    """
    sizes = [group.size for group in groups]
    if not groups[0].is_in_files and sum(size.resident_bytes for size in sizes) <= budget:
        return [group._replace(num_slots=0) for group in groups]
    planned = [
        sum(len(pinned[table][0]) for table in group.tables if table in pinned) for group in groups
    ]
    slots = divide_budget(budget, sizes, planned)
    return [group._replace(num_slots=count) for group, count in zip(groups, slots, strict=True)]


def _estimate(
    groups: Sequence[_Group],
    model: nn.Module,
    tracker: int,
    rows: Mapping[int, int],
    batch_size: int,
    device: torch.device,
) -> Estimate:
    """The formula.

    Args:
        groups: The tables.
        model: The model.
        tracker: Bytes of a tracker.
        rows: The most distinct rows of a mini-batch, by the `id()` of the table; 0 for others.
        batch_size: As for `estimate`.
        device: Device of the fast memory; "meta" stands for the CPU.
    """
    fast = tracker
    floor = enough = disk = host = everything = 0
    for group in groups:
        size = group.size
        needed = sum(rows.get(id(table), 0) for table in group.tables)
        maps = map_bytes(size.num_rows)
        floor += maps + size.slot_bytes
        enough += maps + max(1, needed) * size.slot_bytes
        everything += size.resident_bytes
        if not group.num_slots:
            fast += size.resident_bytes
            continue
        fast += maps + group.num_slots * size.slot_bytes
        host += 0 if group.is_in_files else size.resident_bytes
        disk += size.resident_bytes if group.is_in_files else 0
    if not any(group.is_in_files for group in groups):  # resident rows need no row map
        floor, enough = min(floor, everything), min(enough, everything)
    own = {id(table) for group in groups for table in group.tables}
    dense = sum(parameter.nbytes for parameter in model.parameters() if id(parameter) not in own)
    on_cpu = device.type in ("cpu", "meta")
    num_slots = sum(group.num_slots for group in groups)
    return Estimate(
        num_tables=len(own),
        num_rows=sum(group.size.num_rows for group in groups),
        everything_bytes=everything,
        has_optimizer=all(group.formula is not None for group in groups),
        device="cpu" if on_cpu else str(device),
        fast_bytes=fast,
        budget_bytes=fast - tracker if num_slots else None,
        num_slots=num_slots,
        floor_bytes=floor,
        batch_size=batch_size,
        batch_bytes=enough,
        host_bytes=host + (fast + dense if on_cpu else 0),
        disk_bytes=disk,
        dense_bytes=dense,
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
    tables: Sequence[Table], batch_size: int, lookups_per_bag: float | Mapping[str, float]
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
