"""`estimate`: what a model's tables will take of fast memory, host memory and disk.

One formula, of the shapes and dtypes of tables: they may be on the "meta" device, and nothing is
allocated in proportion to them.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from operator import mul
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from recsys._support.sizes import counted, format_bytes, round_up_as_written
from recsys.conversion.choice import (
    choose_tables,
    find_recsys,
    named_tables_in,
    plan_of_model,
    require_module,
)
from recsys.embeddings.optimizer import SGD
from recsys.embeddings.popularity.plan import require_plan
from recsys.embeddings.tables_module import TableSettings
from recsys.embeddings.tiers.budget import SpaceSize, divide_budget, map_bytes
from recsys.embeddings.tiers.file_store import require_disk

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from recsys.embeddings.optimizer import RowOptimizer
    from recsys.embeddings.popularity.plan import HotPlan
    from recsys.embeddings.tables_module import Table, TableModule

__all__ = ["Estimate", "estimate"]

# Tables of one dim, dtype and optimizer, and the update rule of their rows; None if it is unknown.
_Group = tuple["Sequence[nn.Parameter]", "RowOptimizer | None"]


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
        fast_bytes: Fast memory: rows, their state, marks of slots, and the row map.
        budget_bytes: The budget; None without one.
        num_slots: Slots of fast memory; 0 if every row is resident.
        floor_bytes: The least budget.
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
        lines = (
            (f"fast memory ({self.device})", self.fast_bytes, fast),
            ("least budget", round_up_as_written(self.floor_bytes), "the row map and a slot"),
            ("host memory", self.host_bytes, ""),
            ("disk", self.disk_bytes, ""),
            ("dense parameters", self.dense_bytes, ""),
        )
        shown = [
            f"{name:<24}{format_bytes(size):>9}  {note}".rstrip() for name, size, note in lines
        ]
        return "\n".join([f"{tables} take {everything} {state} optimizer state", *shown])


def estimate(
    model: nn.Module,
    budget: int | str | None = None,
    *,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | RowOptimizer | None = None,
    lazy_adam: bool = False,
    plan: HotPlan | None = None,
    cold_tier: str = "host",
    cold_path: Path | str | None = None,
    device: torch.device | str | None = None,
) -> Estimate:
    """Tell what the tables of a model will take, before anything is allocated for them.

    The model is one that `accelerate` would take, or one that is made of modules of
    `recsys.embeddings`, whatever budget these have. One that `accelerate` has taken must be
    restored before. It is not changed. Its tables may be on the "meta" device: build it under
    `torch.device("meta")`, and a model of any size is estimated on any machine.

    A budget and a disk that are too small are refused. Compare `host_bytes` with the machine's
    memory.

    Args:
        model: The model.
        budget: As for `accelerate`.
        optimizer: As for `accelerate`, like the arguments after it. Of modules of recsys it is
            known, and must be left out.
        lazy_adam: As for `accelerate`.
        plan: As for `accelerate`.
        cold_tier: As for `accelerate`.
        cold_path: If given, it must be writable, and its disk must have room for the files.
        device: Device of the fast memory; by default that of the tables, and the CPU for tables on
            the "meta" device.

    Returns:
        The sizes; print it.

    Raises:
        BudgetTooSmall: the budget is below the least one, which the message names.
        ColdTierError: the disk of `cold_path` has no room, or may not be written to.
        ConfigError: an argument cannot be read.
        ProfileError, TypeError, ValueError: as for `accelerate`.
    """
    require_module(model)
    require_plan(plan)
    tables, updated, groups = _groups_in(model, optimizer, lazy_adam=lazy_adam)
    formulas = list({id(rule): rule for _, rule in groups}.values())
    budgeted = plan_of_model(updated, formulas, budget, plan)
    folder = "." if cold_tier == "file" and cold_path is None else cold_path
    of_budget = None if budgeted is None else budgeted[0]
    TableSettings(SGD(lr=0.0), budget=of_budget, cold_tier=cold_tier, cold_path=folder).require()

    sizes = [
        SpaceSize.of(tables, {} if rule is None else rule.state_sizes(tables[0].shape[1]))
        for tables, rule in groups
    ]
    everything = sum(size.resident_bytes for size in sizes)
    slots = [0] * len(groups)
    if budgeted is not None and (cold_tier == "file" or everything > budgeted[0]):
        pinned = {table: len(rows) for table, (rows, _) in budgeted[1].items()}
        planned = [sum(pinned.get(table, 0) for table in tables) for tables, _ in groups]
        slots = divide_budget(budgeted[0], sizes, planned)
    costs = [size.slot_bytes for size in sizes]
    maps = map_bytes(sum(size.num_rows for size in sizes))
    floor = maps + sum(costs)
    if cold_tier == "host":  # resident rows need no row map
        floor = min(floor, everything)
    is_tiered = any(slots)
    fast = maps + sum(map(mul, slots, costs)) if is_tiered else everything
    cold = everything if is_tiered else 0
    own = {id(table) for tables, _ in groups for table in tables}
    dense = sum(parameter.nbytes for parameter in model.parameters() if id(parameter) not in own)
    target_device = tables[0].weight.device if device is None else torch.device(device)
    on_cpu = target_device.type in ("cpu", "meta")
    found = Estimate(
        num_tables=len(own),
        num_rows=sum(size.num_rows for size in sizes),
        everything_bytes=everything,
        has_optimizer=None not in formulas,
        device="cpu" if on_cpu else str(target_device),
        fast_bytes=fast,
        budget_bytes=of_budget,
        num_slots=sum(slots),
        floor_bytes=floor,
        host_bytes=(cold if cold_tier == "host" else 0) + (fast + dense if on_cpu else 0),
        disk_bytes=cold if cold_tier == "file" else 0,
        dense_bytes=dense,
    )
    if cold_path is not None:
        require_disk(Path(cold_path), found.disk_bytes)
    return found


def _groups_in(
    model: nn.Module, optimizer: Any, *, lazy_adam: bool
) -> tuple[list[Table], list[Table], list[_Group]]:
    """All tables of a model, those that share a budget, and the groups that they will be in.

    Raises:
        Exception: as for `accelerate`.
    """
    ours = find_recsys(model)
    if not ours:
        chosen = choose_tables(model, optimizer, lazy_adam=lazy_adam, always=True, may_be_meta=True)
        groups = [
            group
            for updater in chosen.updaters
            for group in _groups_of(updater.numbers, updater.formula)
        ]
        everything = dict.fromkeys((table.weight for table in chosen.tables), 0)
        return chosen.tables, chosen.updated, groups or _groups_of(everything)
    if optimizer is not None or lazy_adam:
        raise ValueError(
            "optimizer: the tables are in modules of recsys already, whose optimizer is known; "
            "leave it out"
        )
    groups, tables = [], named_tables_in(ours)
    for module, own in tables.items():
        row_optimizer = cast("TableModule", module).row_optimizer
        formula = None if row_optimizer is None else row_optimizer.formula
        groups += _groups_of(dict.fromkeys((table.weight for table in own), 0), formula)
    found = list(chain.from_iterable(tables.values()))
    return found, found, groups


def _groups_of(
    numbers: Mapping[nn.Parameter, int], formula: RowOptimizer | None = None
) -> list[_Group]:
    """The groups that `group_tables` makes of tables in param groups of these numbers."""
    found: dict[Any, list[nn.Parameter]] = {}
    for weight, number in numbers.items():
        kind = number, weight.shape[1], weight.dtype, weight.device
        found.setdefault(kind, []).append(weight)
    return [(own, formula) for own in found.values()]
