"""`estimate`: what a model's tables will take of fast memory, host memory and disk.

The sizes come from the functions by which `accelerate` and the modules allocate. Only shapes,
dtypes and counts are read, so tables may be on the "meta" device, and nothing is allocated in
proportion to them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from recsys._support.machine import memory_bytes
from recsys._support.sizes import format_bytes, round_up_bytes
from recsys.conversion.choice import choose_tables
from recsys.conversion.estimated import Estimate
from recsys.conversion.exchange import find_recsys, named_tables_in
from recsys.conversion.model_plan import configs_of, require_arguments
from recsys.conversion.shares import share_of_chosen, shares_of_recsys
from recsys.embeddings.kernels.choice import has_own_kernels
from recsys.embeddings.tiers.budget import FastMemory
from recsys.embeddings.tiers.cold.cold_files import require_disk
from recsys.embeddings.tiers.cold.cold_tier import require_budget_of_files, require_cold_tier
from recsys.errors import BudgetTooSmall, ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from recsys.conversion.accelerated import LeftAlone
    from recsys.conversion.shares import Share, Sized
    from recsys.embeddings.lookup.abstract_tables import AbstractTables
    from recsys.embeddings.optimizer import RowOptimizer
    from recsys.embeddings.popularity.plan import HotPlan
    from recsys.embeddings.popularity.profile import PopularityProfile
    from recsys.embeddings.staleness.settings import Staleness
    from recsys.embeddings.updaters import NamedTable

__all__ = ["estimate", "require_machine"]


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
    modules = find_recsys(model)
    left: tuple[LeftAlone, ...] = ()
    if modules:
        if optimizer is not None or lazy_adam:
            raise ValueError(
                "optimizer: the tables are in modules of recsys already, whose optimizer is "
                "known; leave it out"
            )
        tables = named_tables_in(modules)
        ours = [cast("AbstractTables", module) for module in modules]
        shares = shares_of_recsys(ours, tables, budget, plan, profile, cold_tier)
    else:
        chosen = choose_tables(model, optimizer, lazy_adam=lazy_adam, always=True, may_be_meta=True)
        tables = chosen.tables
        left = (*chosen.unfit.values(), *chosen.not_updated.values())
        shares = [share_of_chosen(chosen, budget, plan, profile, cold_tier)]
    if cold_tier == "file":
        require_budget_of_files(has_budget=any(each.budget_bytes is not None for each in shares))
    rows = _rows_of_mini_batch(tables, batch_size, lookups_per_bag)
    place = _device_of(modules, tables) if device is None else torch.device(device)
    has_staging = has_own_kernels(place)
    sized = [share.sized(rows, staleness, has_staging=has_staging) for share in shares]
    found = _added_up(model, shares, sized, place, batch_size, left)
    _require_floor(found)
    if not any(table.weight.is_meta for table in tables):
        require_machine(found)
    if cold_path is not None:
        require_disk(Path(cold_path), found.disk_bytes)
    return found


def _device_of(modules: Iterable[nn.Module], tables: Sequence[NamedTable]) -> torch.device:
    """The device of fast memory: of the slots, if a recsys module has any, or of the tables."""
    tiers = [each for module in modules for each in cast("AbstractTables", module).tiers()]
    return tiers[0].device if tiers else tables[0].weight.device


def _added_up(
    model: nn.Module,
    shares: Sequence[Share],
    sized: Sequence[Sized],
    device: torch.device,
    batch_size: int,
    left_alone: tuple[LeftAlone, ...],
) -> Estimate:
    """The estimate of a model.

    Args:
        model: The model.
        shares: Its tables.
        sized: What the tables of each share take.
        device: Device of the fast memory; "meta" stands for the CPU.
        batch_size: As for `estimate`.
        left_alone: As in `Estimate`.
    """
    groups = [group for share in shares for group in share.groups]
    spaces = [group.space for group in groups]
    tables = {id(table) for group in groups for table in group.tables}
    dense = [each for each in model.parameters() if id(each) not in tables]
    budgets = [share.budget_bytes for share in shares if share.budget_bytes is not None]
    return Estimate(
        num_tables=len(tables),
        num_rows=sum(space.num_rows for space in spaces),
        everything_bytes=sum(space.resident_bytes for space in spaces),
        device="cpu" if device.type == "meta" else str(device),
        fast=FastMemory(*map(sum, zip(*(each.fast for each in sized), strict=True))),
        budget_bytes=sum(budgets) if budgets else None,
        num_slots=sum(each.num_slots for each in sized),
        num_pinned=sum(each.num_pinned for each in sized),
        batch_size=batch_size,
        floor_bytes=sum(each.floor_bytes for each in sized),
        cold_bytes=sum(each.cold_bytes for each in sized),
        staging_bytes=sum(each.staging_bytes for each in sized),
        disk_bytes=sum(each.disk_bytes for each in sized),
        num_dense=sum(each.numel() for each in dense),
        dense_bytes=sum(each.numel() * each.dtype.itemsize for each in dense),
        has_optimizer=all(share.has_optimizer for share in shares),
        left_alone=left_alone,
    )


def require_machine(found: Estimate) -> None:
    """Check that this machine has the memory that tables and dense parameters will take.

    Raises:
        ConfigError: it has less.
    """
    memory = memory_bytes()
    if memory is not None and found.host_bytes > memory:
        raise ConfigError(
            f"host memory: tables and dense parameters take {format_bytes(found.host_bytes)}, and "
            f"this machine has {format_bytes(memory)}; keep rows in files by a budget and "
            "cold_tier 'file', or use a machine with more memory"
        )
    if not found.device.startswith("cuda") or not torch.cuda.is_available():
        return
    memory = torch.cuda.get_device_properties(found.device).total_memory
    if found.fast_bytes + found.dense_bytes > memory:
        raise ConfigError(
            f"device {found.device!r}: fast memory and dense parameters take "
            f"{format_bytes(found.fast_bytes + found.dense_bytes)}, and it has "
            f"{format_bytes(memory)}; set a smaller budget"
        )


def _require_floor(found: Estimate) -> None:
    """Check that a budget holds the rows of a mini-batch.

    Raises:
        BudgetTooSmall: it does not.
    """
    if found.all_fits or found.budget_bytes is None or found.floor_bytes <= found.budget_bytes:
        return
    held = f"the row map of {found.num_rows:,} rows and the rows of a mini-batch of "
    held += f"{found.batch_size:,} samples"
    if found.floor_bytes == found.everything_bytes:
        held = "everything, without a row map"
    raise BudgetTooSmall(
        f"budget must be at least {found.floor_bytes} bytes ({round_up_bytes(found.floor_bytes)}), "
        f"got {found.budget_bytes} ({format_bytes(found.budget_bytes)}): that much holds {held}; "
        "raise it, or make mini-batches smaller (batch_size; or lookups_per_bag, where bags have "
        "rows in common)"
    )


def _rows_of_mini_batch(
    tables: Sequence[NamedTable], batch_size: int, lookups_per_bag: float | Mapping[str, float]
) -> dict[int, int]:
    """The most distinct rows that a mini-batch looks up, by the `id()` of the table.

    Raises:
        ValueError: a number of lookups is negative, or is for no table.
    """
    weights, configs = configs_of(tables)
    given = lookups_per_bag if isinstance(lookups_per_bag, Mapping) else {}
    unknown = [name for name in given if name not in weights]
    if unknown:
        raise ValueError(
            f"lookups_per_bag: there is no table {unknown[0]!r}; the tables are {list(weights)}"
        )
    rows = {}
    for config in configs:
        found: Any = lookups_per_bag
        if isinstance(lookups_per_bag, Mapping):
            found = lookups_per_bag.get(config.name, 1)
        if not isinstance(found, int | float) or not found >= 0:
            raise ValueError(f"lookups_per_bag must be a number of at least 0, got {found!r}")
        most = batch_size * len(config.feature_names) * found
        rows[id(weights[config.name])] = round(min(config.num_embeddings, most))
    return rows
