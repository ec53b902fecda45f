"""`recsys train --dry-run`: checks a run and tells what it will take, without starting it.

The data is opened, the plan is read or made, and the model is built with its tables on the "meta"
device. No table is allocated, and nothing is written.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from recsys._support.sizes import round_up_as_written
from recsys.config import replace
from recsys.conversion.estimate import Estimate, estimate, format_line
from recsys.train.callbacks import callbacks_of, require_metric
from recsys.train.parts.budget import enough_bytes, tracker_bytes
from recsys.train.parts.build import (
    INIT_FROM_NEEDS,
    build_model,
    choose_plan,
    cold_folder,
    open_first_model,
    open_source,
    tables_budget,
)
from recsys.train.run_files.run_folder import RunFolder

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from recsys.batch import SampleSource
    from recsys.config import TrainConfig

__all__ = ["DryRun", "dry_run"]


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """What a run will take; `str` of it is a table in words.

    Attributes:
        run_dir: The folder that the run would make.
        data: The data, in words.
        tables: What the tables take.
        tracker_bytes: What following the drift of rows takes, on top of the tables.
        enough_bytes: A budget with which every row of any mini-batch has a slot; at most what
            everything takes, with the cold tier "host". None without a budget or with a plan.
    """

    run_dir: Path
    data: str
    tables: Estimate
    tracker_bytes: int
    enough_bytes: int | None

    def __str__(self) -> str:
        lines = [self.data, str(self.tables)]
        if self.tracker_bytes:
            lines.append(format_line("followed rows", self.tracker_bytes, "in fast memory, too"))
        if self.enough_bytes is not None:
            enough = round_up_as_written(self.enough_bytes)
            lines.append(format_line("enough budget", enough, "holds every mini-batch"))
        lines.append(f"the run would be in {self.run_dir}; nothing was written")
        return "\n".join(lines)


def dry_run(config: TrainConfig, run_dir: str | Path) -> DryRun:
    """Check a run and size it, up to the allocation of its tables.

    Args:
        config: The configuration.
        run_dir: The folder that the run would make.

    Raises:
        AlreadyExists: `run_dir` is not empty.
        BudgetTooSmall: the budget is below the least one.
        ColdTierError: the disk has no room for rows in files.
        ConfigError, ProfileError, StoreError: the configuration does not fit the data or the
            machine.
        MissingDependency: a package that a callback logs to is not installed.
    """
    run_dir = Path(run_dir)
    callbacks_of(config)
    source = open_source(config)
    if config.early_stopping.patience:
        require_metric(config, source)
    first_model = open_first_model(config, source)
    RunFolder.require_place(run_dir)
    tables, model = _size_tables(config, source, cold_folder(config, run_dir))
    if first_model is not None:
        first_model.require_fitting_model(model, INIT_FROM_NEEDS)
    has_plan = bool(config.plan) or config.schedule.fae is not None
    return DryRun(
        run_dir=run_dir,
        data=f"{config.data}: {source.num_samples:,} samples, {len(source.splits['train']):,} of "
        "them to train on",
        tables=tables,
        tracker_bytes=tracker_bytes(config, source) if config.embeddings == "recsys" else 0,
        enough_bytes=enough_bytes(config, source) if config.budget and not has_plan else None,
    )


def _size_tables(
    config: TrainConfig, source: SampleSource, cold_path: str
) -> tuple[Estimate, nn.Module]:
    """What the tables take, and the model with tables on the "meta" device.

    Raises:
        Exception: as for `dry_run`.
    """
    plan = choose_plan(config, source)
    resident = replace(config, budget="", plan="", cold_tier="host", cold_path="")
    train_model, optimizers = build_model(resident, source, table_device="meta")
    model: nn.Module = train_model.model
    if config.embeddings != "recsys":
        of_rows: Optimizer = optimizers[-1]
        return estimate(model, optimizer=of_rows), model
    tables = estimate(
        model,
        tables_budget(config, source) or None,
        plan=plan,
        cold_tier=config.cold_tier,
        cold_path=cold_path or None,
        device=config.device,
    )
    return tables, model
